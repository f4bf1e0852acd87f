"""Cuts: the parts of a tensor along one dimension that a rank holds, and their runs of bytes in a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch


@dataclass(frozen=True)
class Shard:
    """The place of one rank among ``size`` that divide every layer.

    ``mode``: how they divide the experts of a mixture: by their number, or each one's matrices.
    """

    rank: int
    size: int
    mode: Literal["expert", "tensor"] = "tensor"

    def __str__(self) -> str:
        return f"{self.rank} of {self.size}" + (", by experts" if self.mode == "expert" else "")

    @property
    def key(self) -> str:
        """The key of the configuration that asks for it."""
        return "zinfer.parallel.expert" if self.mode == "expert" else "tensor_parallel.tp_size"

    @property
    def ending(self) -> str:
        """The end of names of files that hold its part."""
        return ("-experts" if self.mode == "expert" else "") + f"-{self.rank}-of-{self.size}"

    def bounds(self, count: int, unit: int = 1) -> tuple[int, int]:
        """Return this rank's range of ``count`` elements, divided in whole units as evenly as possible."""
        assert count % unit == 0, f"{count} is not a multiple of {unit}"
        each, more = divmod(count // unit, self.size)
        begin = self.rank * each + min(self.rank, more)
        return begin * unit, (begin + each + (self.rank < more)) * unit

    def padded_bounds(self, count: int, unit: int = 1) -> tuple[int, int]:
        """Return this rank's range of ``count`` elements in equal ranges, of which the last may be shorter or empty."""
        each = self.padded_size(count, unit)
        return min(self.rank * each, count), min((self.rank + 1) * each, count)

    def padded_size(self, count: int, unit: int = 1) -> int:
        """Return the size of an equal range, a multiple of ``unit``."""
        return -(-count // (self.size * unit)) * unit


@dataclass(frozen=True)
class Cut:
    """Ranges of a tensor along ``dim``, one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what is left of a tensor."""
        return (*full[: self.dim], self.length, *full[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ranges of a tensor in new memory."""
        return torch.cat([tensor.narrow(self.dim, begin, end - begin) for begin, end in self.ranges], self.dim)

    def runs(self, full: tuple[int, ...], begin: int, end: int) -> "Iterator[Runs]":
        """Yield the runs within elements ``begin`` to ``end`` of a tensor, which is stored row by row.

        The part must consist of whole slices of the dimensions before ``dim``, or lie within one.
        """
        inner = prod(full[self.dim + 1 :])
        slice_numel, kept_numel = full[self.dim] * inner, self.length * inner
        first, last = begin // slice_numel, -(-end // slice_numel)
        is_whole = begin % slice_numel == 0 and end % slice_numel == 0
        assert is_whole or last - first == 1, "a part of a tensor is whole slices, or within one"
        place = first * kept_numel
        for low, high in self.ranges:
            start = max(first * slice_numel + low * inner, begin)
            stop = min(first * slice_numel + high * inner, end)
            if start < stop:
                ahead = start - (first * slice_numel + low * inner)
                yield Runs(start - begin, stop - start, place + ahead, last - first, slice_numel, kept_numel)
            place += (high - low) * inner


@dataclass(frozen=True)
class Runs:
    """``count`` equal runs of elements: the first begins at ``begin`` and goes to ``place``; then each pitch on."""

    begin: int
    numel: int
    place: int
    count: int
    pitch: int
    place_pitch: int
