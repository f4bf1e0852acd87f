"""Times the kernels for quantized weights, relative to the fp16 vendor product and to memory bandwidth.

    python benchmarks/kernels.py [--shapes 28672x7168,7168x28672] [--tokens 1,16] [--formats int8,int4-128]
                                 [--dtype float16] [--tune] [--out F]

Measures products of few tokens both ways (fused, and dequantized for the vendor's product; the break-even point is
MOST_FUSED_TOKENS in kernels/quantized.py), INT8 by INT8 products, and `dequantize` itself. ``over_fp16`` is the
time of `torch.nn.functional.linear` in the full dtype over the time taken, ``over_bound`` the time taken over that of
moving the bytes at the rate of a device copy, both of this run; ``over_share`` the time taken over that in the full
dtype times the share of its bytes; ``call_us`` is the time of a call from Python. Matrices
are in a model's storage order and alternate, so that their bytes are read from memory and not from the cache.

--tune measures the candidates of kernel_tiles.py instead, and prints the best.

Results are checked first. The last line is JSON.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from device_clock import Call, call_seconds, copy_bytes_per_s, graph_seconds, num_copies
from kernel_cases import (
    FORMATS,
    FRAGMENTS,
    MXFP4,
    NVFP4,
    PUBLISHED,
    SMALL,
    SMALL_FRAGMENTS,
    TYPICAL,
    TYPICAL_PUBLISHED,
    Shape,
    allowed_error,
    fits,
    quantized_linear_ref,
    random_input,
    random_matrix,
)
from kernel_tiles import INT8_CANDIDATES, fused_candidates, scaled_candidates
from race import least, race
from result import keep, publish
from torch.nn import functional

from zinfer.kernels.dequantize import dequantize, dequantize_kernel, dequantize_ref
from zinfer.kernels.fragment_linear import can_multiply, fragment_linear
from zinfer.kernels.fused_linear import can_fuse, fused_linear
from zinfer.kernels.int8_linear import int8_linear, int8_linear_kernel, int8_linear_ref, quantize_tokens_kernel
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.kernels.scaled_linear import can_scale, scaled_linear
from zinfer.kernels.tiles import FusedTiles, block_tokens_for

_PUBLISHED_NAMES: Final = dict(zip(TYPICAL_PUBLISHED, ("fp8-blocks", "mxfp8", "mxfp4", "nvfp4"), strict=True))
_TUNED_FORMATS: Final = (QuantFormat(8), QuantFormat(4, group_size=128, symmetric=False))
_TUNED_TOKENS: Final = (1, 8, 16, 32, 64)
_TUNED_INT8_TOKENS: Final = 4096
_MOST_FUSED: Final = 256  # tokens that the fused kernel is tried with
_FEWEST_INT8: Final = 256  # tokens that INT8 by INT8 is tried with
_GATE_SHAPES: Final = (*SMALL, *SMALL_FRAGMENTS, Shape(1, 1024, 4096), Shape(40, 512, 2048))


def check_kernels(dtype: torch.dtype, names: Sequence[str]) -> None:
    """The gate: every kernel of the named formats equals its reference where its outputs were NaN before."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = empty(*args, **kwargs)
        return found.fill_(float("nan") if found.is_floating_point() else 77)

    published = PUBLISHED if dtype == torch.bfloat16 else ()
    for format in _named(dict.fromkeys((*FORMATS, *FRAGMENTS, *TYPICAL, *published)), names):
        for shape in filter(lambda shape: fits(format, shape), _GATE_SHAPES):
            matrix = random_matrix(format, shape.rows, shape.columns, dtype, "cuda")
            x, bias = random_input(shape, dtype, "cuda")
            with mock.patch.object(torch, "empty", poisoned):
                right = torch.equal(dequantize(matrix), dequantize_ref(matrix))
                if way := fused_way(matrix):
                    found = way(x, matrix, bias)
                    right &= _is_near(found, quantized_linear_ref(x, matrix, bias), x, matrix)
                if format == QuantFormat(8):
                    right &= _is_near(int8_linear_kernel(x, matrix, bias), int8_linear_ref(x, matrix, bias), x, matrix)
            if not right:
                raise SystemExit(f"gate: {format}, {shape}: a kernel differs from its reference; no figure is reported")


def fused_way(matrix: QuantizedMatrix) -> Callable[..., torch.Tensor] | None:
    """The product with codes; None: there is none."""
    if matrix.format.in_fragments:
        return fragment_linear if can_multiply(matrix) else None
    return scaled_linear if can_scale(matrix) else fused_linear if can_fuse(matrix) else None


def _is_near(found: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor, matrix: QuantizedMatrix) -> bool:
    allowed = allowed_error(x, matrix, wanted, rounds=False)
    return bool(((found.double() - wanted.double()).abs() <= allowed).all())


class Bench:
    """One machine's kernels, beside its copy rate."""

    def __init__(self, dtype: torch.dtype, tokens: Sequence[int], names: Sequence[str]) -> None:
        self._dtype = dtype
        self._tokens = tokens
        self._names = names
        self.copy_rate = copy_bytes_per_s()

    def measure(self, rows: int, columns: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Name and figures of each case of one matrix's shape."""
        full_s = self._full_seconds(rows, columns)
        published = TYPICAL_PUBLISHED if self._dtype == torch.bfloat16 else ()
        formats = dict.fromkeys(format.arranged(rows, columns) for format in (*TYPICAL, *published))
        for format in _named(formats, self._names):
            matrices = self._matrices(format, rows, columns)
            yield f"{name_of(format)} {rows}x{columns} dequantize", self._dequantizing(matrices)
            for tokens in self._tokens:
                x, _ = random_input(Shape(tokens, rows, columns), self._dtype, "cuda")
                for way, multiply in self._products(matrices[0], tokens).items():
                    calls = [partial(multiply, x, matrix) for matrix in matrices]
                    moved_bytes = matrices[0].nbytes + (rows + columns) * tokens * self._dtype.itemsize
                    figures = self._figures(calls, moved_bytes) if tokens <= _MOST_FUSED else self._figures(calls, 0)
                    share = matrices[0].nbytes / (rows * columns * self._dtype.itemsize)
                    figures["over_fp16"] = round(full_s[tokens] * 1e6 / figures["us"], 3)
                    figures["over_share"] = round(figures["us"] / (full_s[tokens] * 1e6 * share), 3)
                    yield f"{name_of(format)} {rows}x{columns} tokens {tokens} {way}", figures

    @staticmethod
    def _products(matrix: QuantizedMatrix, tokens: int) -> dict[str, Callable[..., torch.Tensor]]:
        """The ways to multiply so many tokens that are worth measuring, by name."""
        found: dict[str, Callable[..., torch.Tensor]] = {"dequantize": _dequantized}
        if tokens <= _MOST_FUSED and (way := fused_way(matrix)):
            found["fused"] = way
        if tokens >= _FEWEST_INT8 and matrix.format == QuantFormat(8):
            found["w8a8"] = int8_linear
            found["w8a8-vendor"] = _vendor_int8
        return found

    def _figures(self, calls: Sequence[Call], moved_bytes: int) -> dict[str, float]:
        seconds = graph_seconds(calls)
        figures = {"us": round(seconds * 1e6, 2), "call_us": round(call_seconds(calls) * 1e6, 2)}
        if moved_bytes:
            figures["over_bound"] = round(seconds * self.copy_rate / moved_bytes, 3)
        return figures

    def _dequantizing(self, matrices: Sequence[QuantizedMatrix]) -> dict[str, float]:
        first = matrices[0]
        out = torch.empty(first.rows, first.columns, dtype=self._dtype, device="cuda")
        return self._figures(
            [partial(dequantize_kernel, matrix, out) for matrix in matrices], first.nbytes + out.nbytes
        )

    def _matrices(self, format: QuantFormat, rows: int, columns: int) -> list[QuantizedMatrix]:
        first = random_matrix(format, rows, columns, self._dtype, "cuda")
        others = [
            random_matrix(format, rows, columns, self._dtype, "cuda") for _ in range(num_copies(first.nbytes) - 1)
        ]
        return [first, *others]

    def _full_seconds(self, rows: int, columns: int) -> dict[int, float]:
        """Of the vendor's product in the full dtype, by tokens."""
        nbytes = rows * columns * self._dtype.itemsize
        weights = [torch.randn(rows, columns, dtype=self._dtype, device="cuda") for _ in range(num_copies(nbytes))]
        found = {}
        for tokens in self._tokens:
            x, _ = random_input(Shape(tokens, rows, columns), self._dtype, "cuda")
            found[tokens] = graph_seconds([partial(functional.linear, x, weight) for weight in weights])
        return found

    def tune(self, shapes: Sequence[tuple[int, int]]) -> dict[str, str]:
        """The best tiles of each table's entry, by the geometric mean of seconds over the shapes."""
        best: dict[str, str] = {}
        for format in _TUNED_FORMATS:
            by_tile: dict[int, dict[FusedTiles, list[float]]] = defaultdict(lambda: defaultdict(list))
            for rows, columns in shapes:
                matrices = self._matrices(format, rows, columns)
                for tokens in _TUNED_TOKENS:
                    x, _ = random_input(Shape(tokens, rows, columns), self._dtype, "cuda")
                    tried = {
                        tiles: [partial(fused_linear, x, matrix, None, tiles) for matrix in matrices]
                        for tiles in fused_candidates(format.bits, tokens)
                    }
                    for tiles, seconds in race(f"{name_of(format)} {rows}x{columns} tokens {tokens}", tried).items():
                        by_tile[block_tokens_for(tokens)][tiles].append(seconds)
            for block_tokens, times in by_tile.items():
                best[f"({format.bits}, {block_tokens})"] = str(least(times))
        scaled = self._tune_scaled(shapes) if self._dtype == torch.bfloat16 else {}
        return best | {"int8_linear": self._tune_int8(shapes)} | scaled

    def _tune_scaled(self, shapes: Sequence[tuple[int, int]]) -> dict[str, str]:
        """The best tiles for MXFP4 and NVFP4 together, by tokens."""
        times: dict[int, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
        for format, (rows, columns), tokens in product((MXFP4, NVFP4), shapes, _TUNED_TOKENS):
            matrices = self._matrices(format, rows, columns)
            x, _ = random_input(Shape(tokens, rows, columns), self._dtype, "cuda")
            tried = {
                tiles: [partial(scaled_linear, x, matrix, None, tiles) for matrix in matrices]
                for tiles in scaled_candidates(tokens)
            }
            for tiles, seconds in race(f"{name_of(format)} {rows}x{columns} tokens {tokens}", tried).items():
                times[block_tokens_for(tokens)][tiles].append(seconds)
        return {f"scaled {tokens}": str(least(found)) for tokens, found in times.items()}

    def _tune_int8(self, shapes: Sequence[tuple[int, int]]) -> str:
        times: dict[Any, list[float]] = defaultdict(list)
        for rows, columns in shapes:
            matrices = self._matrices(QuantFormat(8), rows, columns)
            x, _ = random_input(Shape(_TUNED_INT8_TOKENS, rows, columns), self._dtype, "cuda")
            tried = {
                tiles: [partial(int8_linear_kernel, x, matrix, None, tiles) for matrix in matrices]
                for tiles in INT8_CANDIDATES
            }
            for tiles, seconds in race(f"w8a8 {rows}x{columns} tokens {_TUNED_INT8_TOKENS}", tried).items():
                times[tiles].append(seconds)
        return str(least(times))


def _dequantized(x: torch.Tensor, matrix: QuantizedMatrix) -> torch.Tensor:
    return functional.linear(x, dequantize(matrix))


def _vendor_int8(x: torch.Tensor, matrix: QuantizedMatrix) -> torch.Tensor:
    """As `int8_linear`, by `torch._int_mm`."""
    codes, scales = quantize_tokens_kernel(x)
    sums = torch._int_mm(codes, matrix.codes.T).float()
    return sums.mul_(scales.unsqueeze(1)).mul_(matrix.scales.float().T).to(x.dtype)


def name_of(format: QuantFormat) -> str:
    if format in _PUBLISHED_NAMES:
        return _PUBLISHED_NAMES[format]
    kind = f"{'fp' if format.is_float else 'int'}{format.bits}"
    return kind + (f"-{format.group_size}" if format.group_size else "") + ("" if format.symmetric else "-asymmetric")


def _named(formats: Iterable[QuantFormat], names: Sequence[str]) -> list[QuantFormat]:
    """Those with one of the names, or all."""
    return [format for format in formats if not names or name_of(format) in names]


def _names(text: str) -> list[str]:
    known = {name_of(format) for format in (*TYPICAL, *TYPICAL_PUBLISHED)}
    if unknown := set(names := text.split(",")) - known:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: known are {', '.join(sorted(known))}")
    return names


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="28672x7168,7168x28672", help="rows x columns")
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256,4096")
    parser.add_argument("--formats", type=_names, default=[], help="as the figures name them; by default all")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    dtype = getattr(torch, args.dtype)
    check_kernels(dtype, args.formats)
    shapes = [(int(rows), int(columns)) for rows, columns in (shape.split("x") for shape in args.shapes.split(","))]
    bench = Bench(dtype, [int(count) for count in args.tokens.split(",")], args.formats)
    work = {"benchmark": "kernels", "dtype": args.dtype, "copy_gb_per_s": round(bench.copy_rate / 1e9, 1)}
    found: dict[str, object] = {}
    if args.tune:
        found |= bench.tune(shapes)
        print(*(f"{key}: {tiles}," for key, tiles in found.items()), sep="\n", flush=True)
    else:
        for rows, columns in shapes:
            for name, figures in bench.measure(rows, columns):
                found[name] = figures
                print(name, json.dumps(figures), flush=True)
                keep(work | {"cases": found}, args.out)
    publish(work | {"tiles" if args.tune else "cases": found}, args.out)


if __name__ == "__main__":
    main()
