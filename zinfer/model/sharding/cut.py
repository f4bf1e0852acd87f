"""Cuts: the parts of a tensor along one dimension that a rank holds, and their runs of bytes in a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Shard:
    """The place of one rank among ``size`` that divide every layer.

    ``experts``: groups of them that divide the experts of a mixture by number. Within a group successive ranks divide
    each expert's matrices. All of them divide all else.
    """

    rank: int
    size: int
    experts: int = 1

    def __str__(self) -> str:
        of_experts = f" in {self.experts} groups" if self.within.size > 1 else ""
        return f"{self.rank} of {self.size}" + (f", by experts{of_experts}" if self.experts > 1 else "")

    @property
    def by_number(self) -> "Shard":
        """The place of its group among those that divide experts by number."""
        return Shard(self.rank // (self.size // self.experts), self.experts, self.experts)

    @property
    def within(self) -> "Shard":
        """Its place within its group."""
        return Shard(self.rank % (self.size // self.experts), self.size // self.experts)

    @property
    def key(self) -> str:
        """The key of the configuration that asks for it."""
        if self.experts == 1:
            return "tensor_parallel.tp_size"
        return "zinfer.parallel.expert" + (" x tensor" if self.within.size > 1 else "")

    @property
    def ending(self) -> str:
        """The end of names of files that hold its part."""
        groups = f"-{self.experts}" if self.within.size > 1 else ""
        return (f"{groups}-experts" if self.experts > 1 else "") + f"-{self.rank}-of-{self.size}"

    def bounds(self, count: int, unit: int = 1) -> tuple[int, int]:
        """Return this rank's range of ``count`` elements, divided evenly in units, of which the last may be cut."""
        each, more = divmod(-(-count // unit), self.size)
        begin = self.rank * each + min(self.rank, more)
        return begin * unit, min((begin + each + (self.rank < more)) * unit, count)

    def padded_bounds(self, count: int, unit: int = 1) -> tuple[int, int]:
        """Return this rank's range of ``count`` elements in equal ranges, of which the last may be shorter or empty."""
        each = self.padded_size(count, unit)
        return min(self.rank * each, count), min((self.rank + 1) * each, count)

    def padded_size(self, count: int, unit: int = 1) -> int:
        """Return the size of an equal range, a multiple of ``unit``."""
        return -(-count // (self.size * unit)) * unit


@dataclass(frozen=True)
class Cut:
    """Ranges of a tensor along ``dim``, one after the other.

    ``within``: the range of the first dimension, which is not ``dim`` then, that they are taken of; None: all of it.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    within: tuple[int, int] | None = None

    @property
    def length(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what is left of a tensor."""
        begin, end = self.within or (0, full[0])
        return (*(end - begin, *full[1:])[: self.dim], self.length, *full[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ranges of a tensor in new memory."""
        kept = tensor[slice(*self.within)] if self.within else tensor
        return torch.cat([kept.narrow(self.dim, begin, end - begin) for begin, end in self.ranges], self.dim)

    def runs(self, full: tuple[int, ...], begin: int, end: int) -> "Iterator[Runs]":
        """Yield the runs within elements ``begin`` to ``end`` of a tensor, which is stored row by row.

        The part must consist of whole slices of the dimensions before ``dim``, or lie within one.
        """
        inner = prod(full[self.dim + 1 :])
        slice_numel, kept_numel = full[self.dim] * inner, self.length * inner
        origin, kept_from = begin, 0
        if self.within is not None:
            kept_from, kept_to = (place * prod(full[1:]) for place in self.within)
            begin, end = max(begin, kept_from), min(end, kept_to)
            if begin >= end:
                return
        first, last = begin // slice_numel, -(-end // slice_numel)
        is_whole = begin % slice_numel == 0 and end % slice_numel == 0
        assert is_whole or last - first == 1, "a part of a tensor is whole slices, or within one"
        place = (first - kept_from // slice_numel) * kept_numel
        for low, high in self.ranges:
            start = max(first * slice_numel + low * inner, begin)
            stop = min(first * slice_numel + high * inner, end)
            if start < stop:
                ahead = start - (first * slice_numel + low * inner)
                yield Runs(start - origin, stop - start, place + ahead, last - first, slice_numel, kept_numel)
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
