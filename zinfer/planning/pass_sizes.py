"""The sizes of passes with continuous batching, and the bytes of their activations."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from zinfer.config.settings import Batching
from zinfer.model.spec import ModelSpec
from zinfer.nvme.aligned import align_up
from zinfer.planning.memory import Request, find_footprint
from zinfer.sampling import BYTES_A_LOGIT, MOST_PART_LOGITS

if TYPE_CHECKING:
    import torch

MOST_TOKENS_PER_PASS: Final = 16_384
# Reading 16-bit weights from a 4 GB/s disk takes as long as computing 150,000 tokens with them on an H200.
MOST_TOKENS_FROM_DISK: Final = 131_072
_LEAST_TOKENS_PER_SEQUENCE: Final = 16  # of a pass; small cards run fewer sequences
_FEWEST_TOKENS_PER_PASS: Final = 1024  # lower bound of the chosen value
_MOST_ACTIVATION_SHARE: Final = 1 / 8  # of free memory
# Tokens that a layer computes at once. Its matrices are dequantized once per part.
_PART_TOKENS: Final = (16_384, 8_192, 4_096)
_MOST_PART_SHARE: Final = 1 / 16  # of free memory, for the activations of a part; the smallest part may exceed it
_MAX_SEQUENCES: Final = 1024
_MOST_SAMPLING_SHARE: Final = 1 / 32  # of free memory, for sampling
PIECE_PARTS: Final = 4
"""Parts of the sampler in a piece of the head's output, where a prompt's tokens are scored."""
REPLAYED_TOKENS: Final = (64, 128, 256, 512, 1024)
"""Of passes with prompts that a graph replays; others are padded to these."""
MOST_REPLAYED_TOKENS: Final = REPLAYED_TOKENS[-1]
_SEGMENTS: Final = (16, 64, 128, 256, 512, MOST_REPLAYED_TOKENS)
_FEW_LOGIT_ROWS: Final = 64
_RESIDUAL_COPIES: Final = 4  # of the residual stream: a layer's input and output, before and after joining


_LAUNCHED_PRODUCTS: Final = 300_000_000_000
"""Tokens times a layer's parameters that take a millisecond at 600 TFLOP/s, about as long as Python takes to launch a
layer of a pass with prompts."""
_MOST_STREAMED_BYTES: Final = 64 << 20
"""Streamed bytes per pass and block above which graphs do not help: the link takes more than a millisecond for them,
Python 0.6 ms to launch a layer."""
FEWEST_REPLAYED_ROWS: Final = 64
"""Decodes of a pass that are replayed wherever anything is."""
PATIENCE: Final = 8
"""Launches of a pass before its form is captured, which takes as long as some seven replays save (48 layers: 180 ms for
25 ms each); where a job's rows end one by one, most forms come once or twice."""

_SHORT_PASS_TOKENS: Final = 1024  # larger passes of Llama-3-8B complete no more tokens a second on an H200
# Tokens times parameters: 4 ms at 500 TFLOP/s. Python needs longer to schedule hundreds of sequences.
_SHORT_PASS_PRODUCTS: Final = 10**12


class PassSizes(NamedTuple):
    """Maximum tokens per pass, per part of it, sequences at once, and logits sampled at once; bytes of activations."""

    tokens: int
    part_tokens: int
    max_sequences: int
    part_logits: int
    activation_bytes: int


def logit_rows(num_rows: int) -> int:
    """Return how many rows of logits a GPU computes where so many are wanted: one of few numbers.

    cuBLAS has a kernel for every few rows, and loads it when it is first launched. That waits for all that the device
    has to do, and meanwhile nothing else is launched.
    """
    return round_up(num_rows, _FEW_LOGIT_ROWS)


def round_up(count: int, step: int) -> int:
    """Return the next power of two up to ``step``, itself one, and the next multiple of it above; 0 for none."""
    if count <= step:
        return 1 << (count - 1).bit_length() if count else 0
    return align_up(count, step)


def padded_rows(count: int) -> int:
    """Return the rows that so many are padded to: a power of two up to 8, then a multiple of 8.

    Above 64, a multiple of an eighth of the next power of two.
    """
    return round_up(count, max(8, 1 << (count - 1).bit_length() >> 3))


def padded_segments(count: int) -> int | None:
    """Return the chunks that so many, some of them of prompts, are padded to; None: too many to be replayed."""
    return next((each for each in _SEGMENTS if count <= each), None)


def most_streamed_bytes(num_blocks: int) -> int:
    """Return the streamed bytes of a pass above which it is not replayed, unless graphs were asked for."""
    return _MOST_STREAMED_BYTES * num_blocks


def replayed_tokens(layer_params: int) -> int:
    """Return the most tokens of a pass that Python takes longer to launch than the device to compute.

    Args:
        layer_params: of the largest layer.
    """
    return _LAUNCHED_PRODUCTS // max(layer_params, 1)


def short_pass_tokens(num_params: int) -> int:
    """Return the tokens of passes that are short, and complete as many tokens a second as larger ones.

    Args:
        num_params: of a model whose weights are resident, and which computes each token with all of them.
    """
    return max(_SHORT_PASS_TOKENS, _SHORT_PASS_PRODUCTS // num_params)


@lru_cache(maxsize=256)  # a search for sizes asks hundreds of times
def _layer_bytes(spec: ModelSpec, dtype: torch.dtype, num_rows: int, num_tokens: int, *, on_cuda: bool) -> int:
    """Return the activations of a layer in transformers' modules, with the logits of each row."""
    return find_footprint(spec, dtype, Request(num_rows, num_tokens, 1), on_cuda=on_cuda).activation_bytes


def find_pass_sizes(
    spec: ModelSpec,
    dtype: torch.dtype,
    stated: Batching,
    most: int,
    free_bytes: int,
    *,
    is_bounded: bool,
    on_cuda: bool,
    replays: bool,
) -> PassSizes:
    """Return the size of passes. Stated sizes are kept; the others are reduced from the largest useful until they fit.

    Args:
        spec: spec of the model with paged attention.
        most: largest useful number of tokens.
        free_bytes: free device memory, for weights and everything else.
        is_bounded: the device has a memory of its own, or a cap. Otherwise only the activations of a pass depend on
            ``free_bytes``, not what a layer or the sampler computes at once.
        on_cuda: as for `find_footprint`.
        replays: small passes may be captured as CUDA graphs.
    """
    most_part_bytes = free_bytes * _MOST_PART_SHARE if is_bounded else 0
    most_bytes = free_bytes * _MOST_ACTIVATION_SHARE
    part_logits = MOST_PART_LOGITS
    if is_bounded:
        part_logits = max(min(part_logits, int(free_bytes * _MOST_SAMPLING_SHARE) // BYTES_A_LOGIT), spec.vocab)

    def layer_bytes(num_rows: int, num_tokens: int) -> int:
        return _layer_bytes(spec, dtype, num_rows, num_tokens, on_cuda=on_cuda)

    def sampling_bytes(num_rows: int, num_tokens: int) -> int:
        """Return the logits, twice while some are selected, and what a part of them takes."""
        part = min(part_logits, num_tokens * spec.vocab) * (BYTES_A_LOGIT + 2 * PIECE_PARTS * dtype.itemsize)
        return 2 * num_rows * spec.vocab * dtype.itemsize + part

    def graph_bytes(num_rows: int) -> int:
        """Return what graphs share, and nothing else uses: a layer's activations, and the logits of each row."""
        return layer_bytes(1, MOST_REPLAYED_TOKENS) + num_rows * spec.vocab * dtype.itemsize

    fitting = (count for count in _PART_TOKENS if layer_bytes(1, count) <= most_part_bytes)
    part_tokens = next(fitting, _PART_TOKENS[-1])
    while True:
        tokens = stated.tokens_per_pass or most
        sequences = min(_MAX_SEQUENCES, most // _LEAST_TOKENS_PER_SEQUENCE)
        max_sequences = min(stated.max_sequences or sequences, tokens)
        num_rows = logit_rows(max_sequences) if on_cuda else max_sequences
        layers = max(layer_bytes(1, min(tokens, part_tokens)), layer_bytes(num_rows, 1))
        residual = _RESIDUAL_COPIES * tokens * spec.hidden * dtype.itemsize
        nbytes = (graph_bytes(num_rows) if replays else 0) + residual + max(layers, sampling_bytes(num_rows, tokens))
        if nbytes <= most_bytes or most == _FEWEST_TOKENS_PER_PASS:
            return PassSizes(tokens, min(tokens, part_tokens), max_sequences, part_logits, nbytes)
        most //= 2
