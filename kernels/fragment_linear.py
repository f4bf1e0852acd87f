"""Multiplies few tokens with a matrix in the order of fragments, straight from memory into tensor cores.

After Marlin (Frantar et al. 2024, arXiv 2408.11743). A warp takes 32 rows; each lane loads the 16 bytes of codes that
it multiplies with, a turn of 256 columns ahead, and widens them in its registers. The warps share x, which is copied to
shared memory a turn ahead, in the order of fragments. Whole numbers are multiplied, and the sum over each group is
scaled. All that is inline PTX: in Triton's own language what tensor cores take passes through shared memory.

Sums are taken in a fixed order: where programs share rows, the last one adds all their sums, first to last. The same
arguments give the same bits. Launches are dependent ones (compute capability 9.0): the first codes are loaded while the
kernel before still runs.

From 17 tokens on tiles of 16 run beside each other, and find each other's codes in the cache.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from zinfer.kernels.dequantize import has_kernels
from zinfer.kernels.fragment_kernel import fragment_kernel
from zinfer.kernels.launching import INTERPRETED, dependent_options, on_device
from zinfer.kernels.quantized import FRAGMENT_COLUMNS, QuantizedMatrix

_TILE_TOKENS: Final = 16
_WARP_ROWS: Final = 32
_WARPS_AT_ONCE: Final = 16  # of a multiprocessor
_MOST_REGISTERS: Final = 128  # of a thread, so that they have room
_NUM_COUNTERS: Final = 1 << 14
_ALIGNMENT: Final = 16  # bytes that are copied at a time
_LEAST_CAPABILITY: Final = (8, 0)


@dataclass(frozen=True)
class FragmentCut:
    """A product cut into programs: ``num_tiles`` of rows one below the other, of ``turns`` turns each, in a row.

    Each of the programs of a tile of tokens takes an equal stripe of that row, and may begin and end inside of tiles.
    It has ``row_warps`` times ``k_warps`` warps; the latter share a turn's columns.
    """

    row_warps: int
    k_warps: int
    turns: int
    num_tiles: int
    programs: int

    @classmethod
    def of(cls, token_tiles: int, rows: int, columns: int, processors: int) -> "FragmentCut":
        """For tiles of tokens on so many multiprocessors: as many programs as run at once, if there are turns."""
        row_warps = 4 if rows % (4 * _WARP_ROWS) == 0 else 2
        k_warps = 2 if columns % (2 * FRAGMENT_COLUMNS) == 0 else 1
        turns = columns // (k_warps * FRAGMENT_COLUMNS)
        num_tiles = rows // (row_warps * _WARP_ROWS)
        places = processors * _WARPS_AT_ONCE // (row_warps * k_warps)
        programs = max(1, min(places // max(token_tiles, 1), num_tiles * turns))
        return cls(row_warps, k_warps, turns, num_tiles, programs)


def can_multiply(matrix: QuantizedMatrix) -> bool:
    """Whether the kernel takes the matrix: in the order of fragments, in half precision, on a GPU that has the PTX."""
    return (
        matrix.format.in_fragments
        and matrix.dtype in (torch.float16, torch.bfloat16)
        and has_kernels(matrix)
        and not INTERPRETED
        and _device_facts(matrix.codes.device)[0] >= _LEAST_CAPABILITY
    )


def fragment_linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ W.T + bias`` with the values of ``matrix`` for W, sums in float32.

    The matrix must be nothing that a kernel has just written (`launching.grid_dependency_wait`); a copy engine may
    have.

    Args:
        x: [..., columns], of the matrix's dtype and device.
        matrix: one that `can_multiply` names.
        bias: [rows].
    """
    flat = _aligned(x.reshape(-1, matrix.columns))
    out = torch.empty((flat.shape[0], matrix.rows), dtype=x.dtype, device=x.device)
    _launch(flat, matrix, bias, None, out)
    return out.view(*x.shape[:-1], matrix.rows)


def chosen_linear(
    x: torch.Tensor,
    matrices: QuantizedMatrix,
    chosen: torch.Tensor,
    rows: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ W.T + bias`` of pairs of a token and a matrix, each read for each of its pairs.

    Args:
        x: [tokens or pairs, columns]; pairs are numbered token after token.
        matrices: of ``rows`` each, whole 64s, one below the other; one that `can_multiply` names.
        chosen: [pairs] int64: the number of each one's matrix; at most `most_pairs`.
        bias: [matrices, rows].

    Returns:
        [pairs, rows].
    """
    assert (x.dtype, x.shape[1]) == (matrices.dtype, matrices.columns)
    out = torch.empty((chosen.numel(), rows), dtype=x.dtype, device=x.device)
    _launch(_aligned(x), matrices, bias, chosen, out)
    return out


def most_pairs(rows: int) -> int:
    """Pairs that `chosen_linear` takes of matrices of so many rows: each has a counter for every tile of them."""
    return _NUM_COUNTERS // FragmentCut.of(1, rows, FRAGMENT_COLUMNS, 1).num_tiles


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def _launch(
    x: torch.Tensor,
    matrix: QuantizedMatrix,
    bias: torch.Tensor | None,
    chosen: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill out [tokens, rows] for x [tokens, columns], or [pairs, rows]."""
    assert matrix.format.in_fragments
    assert matrix.column_scales is matrix.column_order is None, "x is to be scaled and ordered"
    assert matrix.codes.is_contiguous()
    assert matrix.scales.is_contiguous()
    assert matrix.codes.data_ptr() % _ALIGNMENT == matrix.scales.data_ptr() % _ALIGNMENT == 0
    if not out.numel() or not matrix.columns:
        return
    tokens, rows = (out.shape[0] if chosen is None else 1), out.shape[1]
    token_tiles = -(-tokens // _TILE_TOKENS) if chosen is None else len(chosen)
    cut = FragmentCut.of(token_tiles, rows, matrix.columns, _device_facts(x.device)[1])
    octets = 1 if tokens <= _TILE_TOKENS // 2 else 2
    # Of each tile that a program shares with others, at most one for each step along the row of tiles.
    pieces = (token_tiles, cut.programs + cut.num_tiles, cut.row_warps * _WARP_ROWS * 8 * octets)
    sums = torch.empty(pieces, dtype=torch.float32, device=x.device)
    counters = _counters(x.device)
    assert cut.num_tiles * token_tiles <= len(counters)
    with on_device(x):
        fragment_kernel[cut.programs, token_tiles](
            x,
            matrix.codes,
            matrix.scales,
            None if bias is None else bias.contiguous(),
            chosen,
            out,
            sums,
            counters,
            1 if chosen is None else len(chosen) // len(x),
            tokens,
            rows,
            matrix.columns,
            cut.turns,
            IS_BFLOAT=x.dtype == torch.bfloat16,
            OCTETS=octets,
            STEPS_PER_GROUP=matrix.columns // matrix.scales.shape[1] // 64,
            ROW_WARPS=cut.row_warps,
            K_WARPS=cut.k_warps,
            **dependent_options(x.device),
            num_warps=cut.row_warps * cut.k_warps,
            maxnreg=_MOST_REGISTERS,
        )


@cache
def _device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors."""
    if device.type != "cuda":  # a caller runs or compiles the kernel otherwise
        return _LEAST_CAPABILITY, 132
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


_counters_of: dict[tuple[torch.device, int | None], torch.Tensor] = {}


def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that a call uses and leaves as zeros: one set a stream, for concurrent calls must not share them.

    Captured calls share one more set, so graphs must not run beside each other. The first call that is not captured
    makes it, because memory of a capture belongs to its graph.
    """
    is_cuda = device.type == "cuda"
    is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
    key = device, None if is_captured else torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
    found = _counters_of.get(key)
    if found is None:
        found = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        if not is_captured:
            _counters_of[key] = found
            _counters_of.setdefault((device, None), torch.zeros_like(found))
    return found
