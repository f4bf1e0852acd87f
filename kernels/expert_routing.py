"""Sorts pairs of a token and an expert by expert.

On a GPU one kernel sorts few pairs by comparing all with all; torch's sort and the steps after it take several
launches.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import device_function, on_device

_MOST_COMPARED: Final = 8192
"""Most pairs that are compared with all others: some 70 million comparisons still take less time than a sort."""
_OWN: Final = 32
_MOST_BLOCK: Final = 256
_LEAST_BLOCK: Final = 16


PairOrder: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""[pairs] int64, pair numbers sorted by expert, ascending within each; and [experts] int32, the end of each expert's
pairs among them."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Pairs of a token and an expert, sorted on first use, without waiting for the device.

    Attributes:
        chosen: [pairs] int64: the expert of each pair, in the order of tokens.
    """

    chosen: torch.Tensor
    num_experts: int

    @classmethod
    def of(cls, chosen: torch.Tensor, num_experts: int) -> "Groups":
        """Make the pairs of the chosen experts, [tokens, experts of each] int64."""
        return cls(chosen.reshape(-1).contiguous(), num_experts)

    @property
    def num_pairs(self) -> int:
        return self.chosen.numel()

    @property
    def order(self) -> torch.Tensor:
        return self._in_order[0]

    @property
    def ends(self) -> torch.Tensor:
        return self._in_order[1]

    @cached_property
    def _in_order(self) -> PairOrder:
        is_small = self.chosen.is_cuda and self.num_pairs <= _MOST_COMPARED
        return (pair_order_kernel if is_small else pair_order_ref)(self.chosen, self.num_experts)


def pair_order_ref(chosen: torch.Tensor, num_experts: int) -> PairOrder:
    """Return the order of pairs by expert, computed by torch."""
    found, order = torch.sort(chosen.reshape(-1), stable=True)
    every = torch.arange(num_experts, dtype=found.dtype, device=found.device)
    return order, torch.searchsorted(found, every, right=True, out_int32=True)


def pair_order_kernel(chosen: torch.Tensor, num_experts: int) -> PairOrder:
    """As `pair_order_ref`, by the Triton kernel: on a GPU, or on the CPU under Triton's interpreter."""
    flat = chosen.reshape(-1).contiguous()
    pairs = flat.numel()
    order = torch.empty(pairs, dtype=torch.int64, device=flat.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=flat.device)
    pair_programs = triton.cdiv(pairs, _OWN)
    with on_device(flat):
        _order_kernel[(pair_programs + triton.cdiv(num_experts, _OWN),)](
            flat,
            order,
            ends,
            pairs,
            num_experts,
            pair_programs,
            OWN=_OWN,
            BLOCK=max(_LEAST_BLOCK, min(triton.next_power_of_2(pairs), _MOST_BLOCK)),
            num_warps=4,
        )
    return order, ends


@device_function
def _load_experts(chosen_ptr, number, pairs):  # type: ignore[no-untyped-def]
    """Load the experts of some pairs; past the last pair, a number above all others."""
    return tl.load(chosen_ptr + number, mask=number < pairs, other=0x7FFFFFFF).to(tl.int32)[None, :]


@triton.jit(do_not_specialize=["pairs", "experts", "pair_programs"])
def _order_kernel(  # type: ignore[no-untyped-def]
    chosen_ptr, order_ptr, ends_ptr, pairs, experts, pair_programs, OWN: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the positions of some pairs or, in the last programs, the ends of some experts."""
    program = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    count = tl.zeros((OWN,), tl.int32)
    if program < pair_programs:
        own = program * OWN + tl.arange(0, OWN)
        wanted = tl.load(chosen_ptr + own, mask=own < pairs, other=0).to(tl.int32)[:, None]
        for begin in range(0, pairs, BLOCK):
            found = _load_experts(chosen_ptr, begin + other, pairs)
            is_before = (begin + other)[None, :] < own[:, None]
            count += tl.sum(((found < wanted) | ((found == wanted) & is_before)).to(tl.int32), 1)
        tl.store(order_ptr + count, own.to(tl.int64), mask=own < pairs)
    else:
        expert = (program - pair_programs) * OWN + tl.arange(0, OWN)
        for begin in range(0, pairs, BLOCK):
            found = _load_experts(chosen_ptr, begin + other, pairs)
            count += tl.sum((found <= expert[:, None]).to(tl.int32), 1)
        tl.store(ends_ptr + expert, count, mask=expert < experts)
