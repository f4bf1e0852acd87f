"""What a request's lengths are held against, and the sentence that refuses one."""

import pytest

from zinfer.requests.length_limits import LengthLimits, Limit

DECODER = LengthLimits.of_decoder(128, None)
PAIR = LengthLimits.of_encoder_decoder(64, 32, 80)


def test_the_tighter_limit_is_named() -> None:
    assert LengthLimits.of_decoder(128, 64) == LengthLimits(Limit(64, "max_out_tokens"))
    assert LengthLimits.of_decoder(128, 256) == LengthLimits(Limit(128, "the model's positions"))
    assert LengthLimits.of_decoder(None, None) == LengthLimits()
    assert LengthLimits.of_encoder(9, "the model's positions", 8).prompt == Limit(8, "max_out_tokens")


@pytest.mark.parametrize(
    ("limits", "num_prompt", "num_new", "problem"),
    [
        (DECODER, 120, 8, None),
        (DECODER, 128, 0, None),
        (DECODER, 129, 0, "the prompt's 129 tokens are more than 128 (the model's positions); shorten it"),
        (DECODER, 120, 9, "shorten it or ask for at most 8 new tokens"),
        (DECODER, 128, 1, "the prompt has 128 tokens, which leaves no room for new ones within 128"),
        (PAIR, 64, 15, None),
        (PAIR, 65, 1, "the prompt's 65 tokens are more than 64 (the encoder's positions)"),
        (PAIR, 1, 31, None),
        (PAIR, 1, 32, "32 new tokens are more than 31 (the decoder's positions, less the decoder's first token)"),
        (PAIR, 64, 16, "more than 79 (max_out_tokens, less the decoder's first token)"),
        (LengthLimits(), 10**9, 10**9, None),
    ],
)
def test_what_is_too_long_is_told_with_its_limit(
    limits: LengthLimits, num_prompt: int, num_new: int, problem: str | None
) -> None:
    found = limits.problem(num_prompt, num_new)
    assert found is None if problem is None else problem in str(found)
    most = limits.most_new(num_prompt)
    if problem is None and most is not None:
        assert num_new <= most
        assert limits.problem(num_prompt, most + 1) is not None
