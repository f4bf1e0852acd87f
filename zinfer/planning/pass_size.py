"""How much a pass carries: its tokens, what a layer computes of them at once, and the activations that this takes."""

import math
from dataclasses import dataclass
from typing import Final

import torch

from zinfer.config.settings import Batching
from zinfer.model.spec import ModelSpec
from zinfer.planning.footprint import find_footprint
from zinfer.planning.request import Request

_MOST_TOKENS_PER_PASS: Final = 16_384
# 16-bit weights at 4 GB/s from a disk take as long as an H200 computes 150,000 tokens with them.
_MOST_TOKENS_FROM_DISK: Final = 131_072
_LEAST_TOKENS_PER_SEQUENCE: Final = 16  # of a pass, for each text that runs at once: short of that the card is small
_FEWEST_TOKENS_PER_PASS: Final = 1024  # that are chosen where nothing is stated
_MOST_ACTIVATION_SHARE: Final = 1 / 8  # of what is free
# Of a pass, what a layer computes at once: its matrices are dequantized once for each part.
_PART_TOKENS: Final = (16_384, 8_192, 4_096)
_MOST_PART_SHARE: Final = 1 / 16  # of what is free, for the activations of a part that is larger than the smallest
_MAX_SEQUENCES: Final = 1024
_RESIDUAL_COPIES: Final = 4  # of the residual stream: a layer's input and output, before and after joining


@dataclass(frozen=True)
class PassRoom:
    """Most tokens of a pass, of them those of a part, texts at once, and the bytes of activations."""

    tokens: int
    part_tokens: int
    max_sequences: int
    activation_bytes: int

    @classmethod
    def find(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        stated: Batching,
        free_bytes: int,
        *,
        on_cuda: bool,
        from_disk: bool,
    ) -> "PassRoom":
        """The stated sizes, and for the others as much as pays: fewer where a card is too small for many.

        Args:
            spec: of the model.
            dtype: of its activations.
            free_bytes: of the device, for weights and all else; no bound on a CPU.
            from_disk: whether layers stream from the disk.
        """
        spec = spec.over_pages()
        most_part_bytes = free_bytes * _MOST_PART_SHARE if on_cuda else 0
        fitting = (count for count in _PART_TOKENS if _part_bytes(spec, dtype, count, on_cuda) <= most_part_bytes)
        part_tokens = next(fitting, _PART_TOKENS[-1])
        most_bytes = free_bytes * _MOST_ACTIVATION_SHARE if on_cuda else math.inf
        most = _MOST_TOKENS_FROM_DISK if from_disk and on_cuda else _MOST_TOKENS_PER_PASS
        while True:
            tokens = stated.tokens_per_pass or most
            sequences = min(_MAX_SEQUENCES, most // _LEAST_TOKENS_PER_SEQUENCE)
            max_sequences = min(stated.max_sequences or sequences, tokens)
            nbytes = _activation_bytes(spec, dtype, tokens, part_tokens, max_sequences, on_cuda)
            if nbytes <= most_bytes or most == _FEWEST_TOKENS_PER_PASS:
                return cls(tokens, min(tokens, part_tokens), max_sequences, nbytes)
            most //= 2


def _activation_bytes(
    spec: ModelSpec, dtype: torch.dtype, tokens: int, part_tokens: int, max_sequences: int, on_cuda: bool
) -> int:
    """A part's activations, the residual stream of the pass, and the logits."""
    part_bytes = _part_bytes(spec, dtype, min(tokens, part_tokens), on_cuda)
    logits = find_footprint(spec, dtype, Request(max_sequences, 1, 1), on_cuda=on_cuda)
    residual = _RESIDUAL_COPIES * tokens * spec.hidden * dtype.itemsize
    return max(part_bytes, logits.activation_bytes) + residual


def _part_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int, on_cuda: bool) -> int:
    """Activations of a layer as transformers' modules make them."""
    return find_footprint(spec, dtype, Request(1, tokens, 1), on_cuda=on_cuda).activation_bytes
