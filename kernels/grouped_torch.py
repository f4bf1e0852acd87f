"""Torch's grouped product in the place of ours: for full bfloat16 and so many tokens an expert that it is the faster.

It wants pairs in the order of experts, where ours reads tokens as they lie: rows are gathered before it and put back
after. Neither waits for the device, nor does the product itself where it is a kernel (compute capability 9 and 10;
elsewhere torch multiplies expert by expert, waiting for each), so that graphs can hold it.

Measured on an H200, 128 experts of 1536 x 2048, 8 of them a token, the time of torch's over ours, pairs being in order
already: 1.79 with one token, 1.51 with 16, 1.15 with 512 (32 pairs an expert), 0.81 with 4,096 (256; 427 us for 528,
480 TFLOP/s for 390). Not measured: what gathering takes, and what lies between. By arithmetic a pair's columns and rows
are read and written once more, 4 (columns + rows) bytes at about 4.2 TB/s (112 us for those 4,096 tokens, which leaves
no gain), and the product spares 2 x columns x rows / 390e12 less the same at 480e12 seconds: it pays where
columns x rows / (columns + rows) is above 1,000, and from about 100 pairs an expert on.
"""

from typing import Final

import torch
from torch.nn import functional

from zinfer.kernels.groups import Groups

LEAST_PAIRS_PER_EXPERT: Final = 128
LEAST_SIZE: Final = 1000
"""Of a matrix, columns x rows / (columns + rows): Qwen3-30B-A3B's have 878 and 559, Mixtral-8x7B's 3,584 and 3,186."""

_CAPABILITIES: Final = (9, 10)
_MOST_EXPERTS: Final = 1023
_ALIGNMENT: Final = 8  # elements of 16 bytes


def is_torchs(weight: torch.Tensor, groups: Groups) -> bool:
    """Whether torch's product is to be taken for weights on a GPU, [experts, rows, columns]: by shapes and dtype."""
    _, rows, columns = weight.shape
    are_many = groups.num_pairs >= LEAST_PAIRS_PER_EXPERT * groups.num_experts
    return are_many and rows * columns >= LEAST_SIZE * (rows + columns) and has_kernel(weight)


def has_kernel(weight: torch.Tensor) -> bool:
    """Whether torch multiplies with such weights on their GPU by one kernel, as they lie."""
    experts, rows, columns = weight.shape
    far = max(weight.stride(1), weight.stride(2))
    return (
        weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(weight.device)[0] in _CAPABILITIES
        and experts <= _MOST_EXPERTS
        and 1 in weight.stride()[1:]
        and not any(length % _ALIGNMENT for length in (rows, columns, far, weight.stride(0)))
        and weight.data_ptr() % (_ALIGNMENT * weight.itemsize) == 0
    )


def grouped_linear_torch(
    x: torch.Tensor, weight: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `grouped_linear` with weights in full; a bias is added to rounded sums, as transformers does."""
    share = groups.num_pairs // max(x.shape[0], 1)
    place = torch.arange(groups.num_pairs, device=x.device)
    products = functional.grouped_mm(x[groups.order // share], weight.transpose(1, 2), offs=groups.ends)
    if bias is not None:
        products += bias[torch.searchsorted(groups.ends, place, right=True)]
    return products[torch.empty_like(place).scatter_(0, groups.order, place)]
