"""When a text ends, and where it is cut."""

import pytest
from jobs_support import EOS, letters_tokenizer

from zinfer.batching.ending import Ending, special_stops

TOKENIZER = letters_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text).input_ids
    return found


def ended(text: str, ending: Ending) -> tuple[int, str | None, str]:
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
    assert ended("abcabcxxabc", Ending(TOKENIZER, (), stop, 8, least)) == wanted


def test_an_end_token_ends_whatever_the_stops_are() -> None:
    assert ended("ab", Ending(TOKENIZER, ids("b"), ("q",), 8)) == (2, "stop", "a")


def test_stop_strings_that_are_special_tokens_are_known_by_their_ids() -> None:
    assert special_stops(TOKENIZER, ("a", EOS)) == {2}
    assert special_stops(None, ("a",)) == frozenset()
    assert special_stops(TOKENIZER, ()) == frozenset()
