"""Multiplies few tokens with a matrix in fragment order, loading codes directly into tensor core operands.

After Marlin (Frantar et al. 2024, arXiv 2408.11743). A warp computes 32 rows; each lane loads the 16 bytes of codes
that it multiplies, a turn of 256 columns ahead, and widens them in its registers. The warps share x, which is copied to
shared memory a turn ahead, in fragment order. Codes are multiplied as whole numbers, and the sum over each group is
scaled. This needs inline PTX: in Triton's own language operands of tensor cores pass through shared memory.

Sums are added in a fixed order: if programs share rows, the last program adds all their sums, first to last. The same
arguments give the same bits. Launches are dependent (compute capability 9.0): the first codes are loaded while the
previous kernel still runs.

From 17 tokens on, tiles of 16 tokens run concurrently, and share codes through the cache.
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
_MOST_REGISTERS: Final = 128  # of a thread, so that this many warps fit
_NUM_COUNTERS: Final = 1 << 14
_ALIGNMENT: Final = 16  # bytes that are copied at a time
_LEAST_CAPABILITY: Final = (8, 0)


@dataclass(frozen=True)
class FragmentCut:
    """The split of a product into programs: ``num_tiles`` tiles of rows with ``turns`` turns each form one sequence.

    Each of the programs of a tile of tokens computes an equal stripe of that sequence, and may begin and end inside a
    tile. It has ``row_warps`` times ``k_warps`` warps; the ``k_warps`` share a turn's columns.
    """

    row_warps: int
    k_warps: int
    turns: int
    num_tiles: int
    programs: int

    @classmethod
    def of(cls, token_tiles: int, rows: int, columns: int, processors: int) -> "FragmentCut":
        """Choose the programs for tiles of tokens: as many as run at once on the GPU, if there are turns."""
        row_warps = 4 if rows % (4 * _WARP_ROWS) == 0 else 2
        k_warps = 2 if columns % (2 * FRAGMENT_COLUMNS) == 0 else 1
        turns = columns // (k_warps * FRAGMENT_COLUMNS)
        num_tiles = rows // (row_warps * _WARP_ROWS)
        places = processors * _WARPS_AT_ONCE // (row_warps * k_warps)
        programs = max(1, min(places // max(token_tiles, 1), num_tiles * turns))
        return cls(row_warps, k_warps, turns, num_tiles, programs)


def can_multiply(matrix: QuantizedMatrix) -> bool:
    """Return whether the kernel supports the matrix: fragment order, half precision, a GPU that has the PTX."""
    return (
        matrix.format.in_fragments
        and matrix.dtype in (torch.float16, torch.bfloat16)
        and has_kernels(matrix)
        and not INTERPRETED
        and _device_facts(matrix.codes.device)[0] >= _LEAST_CAPABILITY
    )


def fragment_linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ W.T + bias`` with the values of ``matrix`` for W, sums in float32.

    No kernel may have just written the matrix (`launching.grid_dependency_wait`); a copy engine may have.

    Args:
        x: [..., columns], of the matrix's dtype and device.
        matrix: `can_multiply` is true for it.
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
    """Return ``x @ W.T + bias`` for pairs of a token and a matrix; a matrix is read for each of its pairs.

    Args:
        x: [tokens or pairs, columns]; pairs are in the order of tokens.
        matrices: stacked, of ``rows`` rows each, a multiple of 64; `can_multiply` is true for the stack.
        chosen: [pairs] int64: the number of each pair's matrix; at most `most_pairs` pairs.
        bias: [matrices, rows].

    Returns:
        [pairs, rows].
    """
    assert (x.dtype, x.shape[1]) == (matrices.dtype, matrices.columns)
    out = torch.empty((chosen.numel(), rows), dtype=x.dtype, device=x.device)
    _launch(_aligned(x), matrices, bias, chosen, out)
    return out


def most_pairs(rows: int) -> int:
    """Return the most pairs that `chosen_linear` supports for matrices of ``rows`` rows: each tile needs a counter."""
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
    # Partial sums of tiles that programs share: at most one piece for each step along the sequence of tiles.
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
    """Return the compute capability and the number of multiprocessors."""
    if device.type != "cuda":  # the kernel is interpreted, or compiled for another device
        return _LEAST_CAPABILITY, 132
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


_counters_of: dict[tuple[torch.device, int | None], torch.Tensor] = {}


def _counters(device: torch.device) -> torch.Tensor:
    """Return counters that are zero before and after each call: a set per stream, for concurrent calls cannot share it.

    Captured calls share another set, so graphs must not run concurrently. The first call that is not captured allocates
    it, because memory allocated in a capture belongs to its graph.
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
