"""What the inline PTX of widening computes, of every byte and of random words, in the emulation."""

import numpy as np
import pytest
import torch
from ptx_emulation import Array, Machine, halves

from zinfer.kernels import widening
from zinfer.kernels.quantized import FLOAT4_MAGNITUDES

_WORDS = np.random.default_rng(0).integers(0, 2**32, (2, 4096), dtype=np.uint32)
_WORDS[0, :256] = np.arange(256, dtype=np.uint32) * 0x01010101
_FLOAT4 = np.array([*FLOAT4_MAGNITUDES, *(-each for each in FLOAT4_MAGNITUDES)])
_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num(480).numpy()
_FLOAT8[255] = -480


def run(text: str, num_outputs: int, is_bfloat: bool, *words: Array) -> Array:
    """Numbers in 16 bits, [outputs, pairs, 2]."""
    constraints = ",".join(["=r"] * num_outputs + ["r"] * len(words))
    found = Machine([]).run(text, constraints, [each.view(np.int32) for each in words])
    return np.stack([halves(each.view(np.uint32), is_bfloat) for each in found])


def codes_of(word: Array, bits: int) -> Array:
    """Codes of words, the lowest first, [codes, words]."""
    return np.stack([word >> bits * number & (1 << bits) - 1 for number in range(32 // bits)])


def factor(exponent: int) -> Array:
    """Words of two equal powers of two in bfloat16."""
    bits = torch.tensor(2.0**exponent).bfloat16().view(torch.int16).item()
    return np.full(_WORDS.shape[1], bits * 0x10001, np.uint32)


@pytest.mark.parametrize("is_bfloat", [True, False])
def test_words_of_e4m3(is_bfloat: bool) -> None:
    first, second = (_FLOAT8[codes_of(word, 8)] for word in _WORDS)
    in_order = run(widening.floats_asm("$2", "$0", "$1", is_bfloat), 2, is_bfloat, _WORDS[0])
    assert np.array_equal(np.concatenate(in_order.transpose(0, 2, 1)), first)
    apart = run(widening.words_asm(is_bfloat, is_float=True), 4, is_bfloat, *_WORDS)
    assert np.array_equal(apart, np.stack((first, second), -1))


def test_words_with_scales() -> None:
    for text, values, bits, exponent in (
        (widening.scaled_words_asm(), _FLOAT8, 8, 120),
        (widening.scaled_nibbles_asm(), _FLOAT4, 4, 126),
    ):
        found = run(text, 32 // bits, True, *_WORDS, factor(exponent - 3))
        assert np.array_equal(found, np.stack([values[codes_of(word, bits)] for word in _WORDS], -1) / 8)
