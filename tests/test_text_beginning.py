"""Texts that are far too long are refused by their beginning, and none that fits."""

import pytest
from jobs_support import letters_tokenizer

from zinfer.errors import ConfigError
from zinfer.requests.length_limits import LengthLimits, Limit
from zinfer.requests.prompt_encoder import PromptEncoder
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.text_beginning import check_beginning

LIMIT = Limit(128, "the model's positions")


def test_only_a_beginning_of_a_long_text_is_encoded() -> None:
    seen: list[int] = []

    def encode(text: str) -> list[str]:
        seen.append(len(text))
        return list(text)

    with pytest.raises(ConfigError, match=r"the prompt's first 6,144 characters of 7,000,000 have 6,144 tokens.* 128"):
        check_beginning("1+" * 3_500_000, LIMIT, encode)
    assert seen == [6144]


@pytest.mark.parametrize("text", ["a" * 384, " " * 100_000 + "a b", "a" + " " * 100_000 + "b" * 300])
def test_texts_of_which_the_tokenizer_drops_much_are_not_refused(text: str) -> None:
    """The tokens of the last one are counted by those who encode all of it."""
    check_beginning(text, LIMIT, str.split)
    check_beginning(text, LIMIT, lambda part: part.replace(" ", ""))


def test_encoders_refuse_by_the_beginning() -> None:
    encoder = PromptEncoder(letters_tokenizer(), 131, LengthLimits(total=LIMIT))
    with pytest.raises(ConfigError, match="first 6,144 characters"):
        encoder.encode("a" * 10_000, SamplingParams())
    with pytest.raises(ConfigError, match="has 6000 tokens"):
        encoder.encode("a" * 6000, SamplingParams())
    assert len(encoder.tokenize("a" * 10_000)) == 10_000
