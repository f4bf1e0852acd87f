"""Tokens that may not come: bad words, and all but the allowed ones, in `LLM`, in padded batches and in jobs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs_run_support import model, output
from jobs_support import ResidentEngine, letters_tokenizer
from openai_support import asked, rows_of, text
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from zinfer import LLM, SamplingParams
from zinfer.errors import ConfigError
from zinfer.requests.bad_words import find_bad_word_ids, last_ids

__all__ = ["model", "output"]  # fixtures
LETTERS = letters_tokenizer()
WAYS: list[dict[str, Any]] = [{}, {"engine_factory": ResidentEngine}]


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A word and the space before it are one token; "no" and " " + "thing" are two."""
    vocabulary = {token: number for number, token in enumerate(["?", "bad", " bad", "no", " no", "thing", " "])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Split("thing", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu", kv_cache_memory="2MB") as made:
        yield made


def test_a_word_is_meant_at_the_start_and_behind_a_space() -> None:
    tokenizer = words_tokenizer()
    assert find_bad_word_ids(tokenizer, ("bad",), 7) == ((1,), (2,))
    assert find_bad_word_ids(tokenizer, ("  bad", "nothing"), 7) == ((1,), (2,), (3, 5), (4, 5))
    assert find_bad_word_ids(tokenizer, ("thing",), 7) == ((5,),)  # behind a space it is more tokens
    assert find_bad_word_ids(None, (), 7) == ()


def test_only_the_last_token_of_a_word_is_forbidden_behind_the_others() -> None:
    words = ((7,), (1, 2), (3, 1, 2), (1, 2, 4))
    assert list(last_ids(words, [])) == [7]
    assert list(last_ids(words, [5, 1])) == [7, 2]
    assert list(last_ids(words, [3, 1])) == [7, 2, 2]
    assert list(last_ids(words, [1, 2])) == [7, 4]


@pytest.mark.parametrize(
    ("words", "tokenizer", "message"),
    [
        (("  ",), words_tokenizer(), "bad_words: '  ' has no tokens; leave it out"),
        (("~",), LETTERS, "bad_words: '~' has token 97, but the model's vocabulary ends at 49; leave it out"),
        (("a",), None, "bad_words need a tokenizer; give token ids a logit_bias of -100 instead"),
    ],
)
def test_words_that_cannot_be_used(words: tuple[str, ...], tokenizer: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_bad_word_ids(tokenizer, words, 50)
    assert str(caught.value) == message


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.5, "seed": 3, "n": 3, "repetition_penalty": 1.1}])
def test_what_may_not_come_does_not(llm: LLM, drawn: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, **drawn}
    plain = llm.generate("abc", SamplingParams(**options))
    pair = plain[0].token_ids[4:6]
    bad_word = llm.tokenizer.decode(pair)
    single = llm.tokenizer.decode(plain[0].token_ids[:1])
    params = [
        SamplingParams(**options),
        SamplingParams(**options, bad_words=(bad_word,), logprobs=1),
        SamplingParams(**options, bad_words=(single,)),
        SamplingParams(**options, allowed_token_ids=(70, 71, 90)),
        SamplingParams(**options, allowed_token_ids=(70, 71), bad_words=(llm.tokenizer.decode([70]),)),
    ]
    num = params[0].n
    found = llm.generate(["abc"] * len(params), params)
    same, without_pair, without_single, few, one = (found[i : i + num] for i in range(0, len(found), num))
    assert [each.token_ids for each in same] == [each.token_ids for each in plain]
    assert without_pair[0].token_ids[:5] == plain[0].token_ids[:5]
    assert without_pair[0].token_ids[5] != pair[1]
    assert all(pair not in zip(each.token_ids, each.token_ids[1:], strict=False) for each in without_pair)
    assert all(each.logprobs is not None and len(each.logprobs) == 20 for each in without_pair)
    assert all(plain[0].token_ids[0] not in each.token_ids for each in without_single)
    assert {token_id for each in few for token_id in each.token_ids} <= {70, 71, 90}
    assert {token_id for each in one for token_id in each.token_ids} == {71}


def test_prompts_whose_tokens_cannot_be_forbidden(llm: LLM) -> None:
    params = [
        SamplingParams(max_new_tokens=2, allowed_token_ids=(5, 131)),
        SamplingParams(max_new_tokens=2, allowed_token_ids=(70,), bad_words=(llm.tokenizer.decode([70]),)),
        SamplingParams(max_new_tokens=2),
    ]
    beyond, nothing, fine = llm.generate(["abc"] * 3, params)
    assert beyond.error == "allowed_token_ids must be made of token ids below 131, the model's vocabulary, not 131"
    assert "the row's own settings leave no token" in str(nothing.error)
    assert fine.error is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", WAYS)
def test_rows_of_jobs(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    plain = rows_of(model, tmp_path, [text("p", temperature=0), {"id": "own", "prompt": "abc"}], **options)["own"]
    letter = plain["text"][2]
    bodies: dict[str, dict[str, Any]] = {
        "word": {"bad_words": [letter]},
        "few": {"allowed_token_ids": [70, 71]},
    }
    rows = [asked(f"their {name}", "completions", prompt="abc", temperature=0, **body) for name, body in bodies.items()]
    rows += [{"id": name, "prompt": "abc", **body} for name, body in bodies.items()]
    rows += [{"id": "none", "prompt": "abc", "allowed_token_ids": []}]
    (tmp_path / "second").mkdir()
    found = rows_of(model, tmp_path / "second", rows, **options)
    assert (letter in plain["text"], letter in found["word"]["text"]) == (True, False)
    assert set(found["few"]["token_ids"]) <= {70, 71}
    for name in bodies:
        assert found[f"their {name}"]["response"]["body"]["choices"][0]["text"] == found[name]["text"]
    wanted = "allowed_token_ids must be a list of token ids, whole numbers of at least 0, one at least, not []"
    assert found["none"]["error"] == f"line 5: {wanted}"
