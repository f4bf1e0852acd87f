"""When a text ends, and where it is cut."""

from typing import Any

import pytest
from jobs_support import EOS, PAD, letters_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from zinfer.requests.prompt_end import find_prompt_end
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.stop_criteria import StopCriteria

TOKENIZER = letters_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text).input_ids
    return found


def ended(text: str, ending: StopCriteria) -> tuple[int, str | None, str]:
    """After how many of the text's tokens it ends, why, and what it says then."""
    tokens = ids(text)
    for count in range(1, len(tokens) + 1):
        if (reason := ending.reason(tokens[:count])) is not None:
            return count, reason, ending.text(tokens[:count])
    return len(tokens), None, ending.text(tokens)


@pytest.mark.parametrize(
    ("stop", "least", "wanted"),
    [
        (("bc",), 0, (3, "stop", "a")),
        (("bc",), 2, (3, "stop", "a")),  # complete with the third token only
        (("bc",), 3, (6, "stop", "abca")),  # the first one does not count
        (("bc", "x"), 3, (6, "stop", "abca")),
        (("abcabc",), 5, (6, "stop", "")),
        (("never",), 3, (8, "length", "abcabcxx")),
        ((), 3, (8, "length", "abcabcxx")),
    ],
)
def test_stop_strings_count_once_the_least_tokens_are_there(
    stop: tuple[str, ...], least: int, wanted: tuple[int, str, str]
) -> None:
    params = SamplingParams(stop=stop, max_new_tokens=8, min_new_tokens=least)
    assert ended("abcabcxxabc", StopCriteria(TOKENIZER, params, ())) == wanted


def test_a_stop_string_is_seen_across_any_number_of_special_tokens() -> None:
    tokens = [*ids("ab"), *[TOKENIZER.eos_token_id] * 40, *ids("c")]
    ending = StopCriteria(TOKENIZER, SamplingParams(stop="bc"), ())
    assert [ending.reason(tokens[:count]) for count in range(1, len(tokens))] == [None] * (len(tokens) - 1)
    assert (ending.reason(tokens), ending.text(tokens)) == ("stop", "a")


def test_a_stop_string_may_begin_with_the_space_behind_the_prompt() -> None:
    """The decoder drops the first space of a text, but the output is none of its own."""
    spaced = Tokenizer(models.WordLevel({"<s>": 0, "▁a": 1, "b": 2}, "<s>"))
    spaced.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spaced, bos_token="<s>")
    params, found = SamplingParams(stop=" a"), []
    for prompt in ([0, 1], [0]):
        end = find_prompt_end(tokenizer, prompt, skips_special=True)
        ending = StopCriteria(tokenizer, params, (), end)
        found.append((ending.reason([1]), ending.reason([1, 2]), ending.text([1, 2])))
    assert found == [("stop", "stop", ""), (None, None, "ab")]


def test_an_end_token_ends_whatever_the_stops_are() -> None:
    assert ended("ab", StopCriteria(TOKENIZER, SamplingParams(stop="q"), ids("b"))) == (2, "stop", "a")


def test_stop_strings_that_are_special_tokens_are_known_by_their_ids() -> None:
    assert StopCriteria(TOKENIZER, SamplingParams(stop=("a", EOS)), ()).last_ids == {2}
    assert StopCriteria(TOKENIZER, SamplingParams(), ()).last_ids == StopCriteria(None, SamplingParams(), ()).last_ids


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"stop": ("q", "bc")}, "bc"),
        ({"stop": ("bcab", "bc")}, "bc"),
        ({"stop_token_ids": ids("c")}, ids("c")[0]),
        ({"stop": (EOS, PAD)}, PAD),
        ({"stop": (EOS,)}, None),  # the model's own end
        ({"max_new_tokens": 2}, None),
    ],
)
def test_what_ended_a_text_is_told(fields: dict[str, Any], wanted: int | str | None) -> None:
    tokens = [*ids("abc"), 1, TOKENIZER.eos_token_id]
    ending = StopCriteria(TOKENIZER, SamplingParams(**fields), [TOKENIZER.eos_token_id])
    count = next(count for count in range(1, 6) if ending.reason(tokens[:count]) is not None)
    assert ending.stop_reason(tokens[:count]) == wanted


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, "abc"),
        ({"include_stop_str_in_output": True}, "abc"),
        ({"skip_special_tokens": False}, "abc<pad>"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "abc<pad></s>"),
        ({"stop": ("bc",), "include_stop_str_in_output": True}, "abc"),
        ({"stop": ("b", "c"), "include_stop_str_in_output": True}, "ab"),
        ({"stop": ("c", "bc"), "min_new_tokens": 2, "include_stop_str_in_output": True}, "abc"),
        ({"stop": (PAD,), "include_stop_str_in_output": True}, "abc<pad>"),
        ({"stop": (PAD,), "skip_special_tokens": False}, "abc"),
        ({"stop": ("c<p",), "skip_special_tokens": False}, "ab"),
        ({"stop": ("c<p",), "skip_special_tokens": False, "include_stop_str_in_output": True}, "abc<p"),
        ({"stop_token_ids": ids("c"), "include_stop_str_in_output": True}, "abc"),
        ({"stop_token_ids": ids("c")}, "ab"),
    ],
)
def test_what_a_text_keeps(fields: dict[str, Any], wanted: str) -> None:
    tokens = [*ids("abc"), 1, TOKENIZER.eos_token_id]
    ending = StopCriteria(TOKENIZER, SamplingParams(**fields), [TOKENIZER.eos_token_id])
    count = next(count for count in range(1, 6) if ending.reason(tokens[:count]) is not None)
    assert ending.text(tokens[:count]) == wanted
