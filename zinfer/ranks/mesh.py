"""The mesh: how the ranks of a job are arranged in modes, each with sub-groups of its own.

[Note: how ranks are laid out]
Each mode divides something: replicas the rows, pipeline the layers, zero the bytes of each slab, expert a layer's
experts by number, tensor the matrices. Modes multiply: a mesh of 2 replicas and 4 ZeRO ranks has 8 ranks, of which 0
to 3 share one copy of the model and 4 to 7 the other. A rank is a number whose digits are its coordinates, in the order
of `MODES`, the last one varying fastest. Launchers number the ranks of a host one after the other, so the modes that
exchange the most bytes, at the end, stay within a host, where links are fast, and replicas, which exchange none, cross
hosts.

The sub-groups of modes are the ranks that differ in their coordinates alone. `groups_in` lists them in one order for
all processes, because torch makes communicators collectively. A failure of any rank ends the whole job, whatever its
sub-groups: `zinfer.ranks.model_ranks` beats and listens for all ranks of the mesh.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal, TypeAlias, get_args

from zinfer.errors import ConfigError

Mode: TypeAlias = Literal["replicas", "pipeline", "zero", "expert", "tensor"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
"""From the slowest varying coordinate to the fastest."""
DIVIDING: Final[tuple[Mode, ...]] = ("expert", "tensor")
"""The modes whose ranks divide each layer."""


@dataclass(frozen=True)
class Mesh:
    """The sizes of the modes; their product is the number of ranks.

    Attributes:
        replicas: groups of ranks that each have a whole model and their own rows.
        pipeline: stages, each with its part of the layers.
        zero: ranks that share each slab's bytes and gather it for compute, with rows of their own.
        expert: ranks with some of each layer's experts, and their part of the other matrices, computing the same rows.
        tensor: ranks with their part of each matrix, experts' too, computing the same rows. Beside `expert` it divides
            each expert, and all ranks of both divide the other matrices.
    """

    replicas: int = 1
    pipeline: int = 1
    zero: int = 1
    expert: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, stated: Mapping[str, int | None], hosts: Sequence[str]) -> "Mesh":
        """Return the mesh of a configuration.

        If it states no size above 1, see `by_hosts`. If it states no replicas, there are as many as the ranks allow.

        Args:
            stated: sizes by mode as in `zinfer.parallel`; None: not stated.
            hosts: the host of each rank.

        Raises:
            ConfigError: the sizes do not multiply to the number of ranks.
        """
        sizes = {mode: size for mode, size in stated.items() if size is not None}
        mesh = cls(**sizes)
        if "replicas" not in sizes:
            if mesh.size == 1 and "zero" not in sizes:
                return cls.by_hosts(hosts)
            mesh = replace(mesh, replicas=max(1, len(hosts) // mesh.size))
        mesh.check(len(hosts))
        return mesh

    @classmethod
    def by_hosts(cls, hosts: Sequence[str]) -> "Mesh":
        """Return ZeRO within each host and replicas across them; ZeRO over all ranks if hosts have unequal numbers."""
        runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
        is_even = len(set(runs)) == 1 and len(runs) == len(Counter(hosts))
        zero = runs[0] if is_even else len(hosts)
        return cls(replicas=len(hosts) // zero, zero=zero)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values())

    @property
    def sizes(self) -> dict[Mode, int]:
        """The sizes by mode, in the order of `MODES`."""
        return {mode: getattr(self, mode) for mode in MODES}

    @property
    def num_dividing(self) -> int:
        """The number of ranks that divide each layer and compute the same rows."""
        return prod(self.sizes[mode] for mode in DIVIDING)

    @property
    def divided(self) -> dict[str, int]:
        """The sizes above 1 of the modes in which ranks compute the same rows; they change the last bits of results."""
        return {mode: size for mode, size in self.sizes.items() if size > 1 and mode in (*DIVIDING, "pipeline")}

    @property
    def stated(self) -> dict[str, int]:
        """The sizes above 1, as `zinfer.parallel` takes them; `{"zero": 1}` for one rank."""
        return {mode: size for mode, size in self.sizes.items() if size > 1} or {"zero": 1}

    def check(self, num_ranks: int) -> None:
        """Raise ConfigError unless the mesh has this number of ranks."""
        if self.size != num_ranks:
            spelling = " (tensor_parallel.tp_size)" if self.tensor > 1 else " (ep_size)" if self.expert > 1 else ""
            raise ConfigError(
                f"zinfer.parallel = {json.dumps(self.stated)}{spelling} needs {_ranks(self.size)}, and there "
                f"{'is' if num_ranks == 1 else 'are'} {num_ranks}; start {_ranks(self.size)} (--ranks {self.size}, or "
                f'torchrun), choose sizes whose product is {num_ranks}, or remove the key ("auto")'
            )

    def coordinates(self, rank: int) -> dict[Mode, int]:
        """Return the place of a rank in each mode, from 0."""
        found: dict[Mode, int] = {}
        for mode in reversed(MODES):
            rank, found[mode] = divmod(rank, self.sizes[mode])
        return {mode: found[mode] for mode in MODES}

    def ranks_along(self, mode: Mode, rank: int) -> tuple[int, ...]:
        """Return the sub-group of a rank in a mode: the ranks that differ in it alone, ascending."""
        stride = prod(self.sizes[each] for each in MODES[MODES.index(mode) + 1 :])
        first = rank - self.coordinates(rank)[mode] * stride
        return tuple(first + place * stride for place in range(self.sizes[mode]))

    def ranks_in(self, modes: Iterable[Mode], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from a rank in these modes alone, itself among them, ascending."""
        found = {rank}
        for mode in modes:
            found = {each for own in found for each in self.ranks_along(mode, own)}
        return tuple(sorted(found))

    def ranks_in_step(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute the same passes as a rank, itself among them, ascending."""
        return self.ranks_in(("pipeline", *DIVIDING), rank)

    @property
    def num_in_step(self) -> int:
        """The number of ranks that compute the same passes."""
        return self.pipeline * self.num_dividing

    @property
    def num_shares(self) -> int:
        """The number of groups of ranks that each compute rows of their own."""
        return self.size // self.num_in_step

    def share_of(self, rank: int) -> int:
        """Return the number of a rank's group among those that compute rows of their own."""
        firsts = sorted({self.ranks_in_step(each)[0] for each in range(self.size)})
        return firsts.index(self.ranks_in_step(rank)[0])

    def groups_in(self, modes: Iterable[Mode]) -> Iterator[tuple[int, ...]]:
        """Yield all sub-groups of modes, in the order of their first ranks, the same for every process."""
        modes = tuple(modes)
        for rank in range(self.size):
            if (members := self.ranks_in(modes, rank))[0] == rank:
                yield members

    def __str__(self) -> str:
        return " x ".join(f"{mode} {size}" for mode, size in self.stated.items())


ALONE: Final = Mesh()
"""One process."""


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
