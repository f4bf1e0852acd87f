"""Times the kernels of `replace_with_kernel_inject`, relative to a device copy's rate and to torch.compile.

    python benchmarks/injected.py [--tokens 1,128,8192] [--widths 4096,8192] [--dtype float16] [--no-packed]
                                  [--out FILE]

``of_copy`` is the rate at which the necessary bytes are read and written, as a share of a copy's rate in the same run;
``over_compiled`` the time of the reference under `torch.compile` over ours, ``over_eager`` that of the eager reference.
Inputs alternate, so that large ones are read from memory.

Then the product of one or two tokens with a square matrix, and with one as wide as a gated MLP: ``of_copy`` as above,
of the matrix; ``over_torch`` the time of torch's own product over ours. Then products of layers that share their input:
``apart_over_packed`` is the device's time of separate products over that of one joint product,
``called_apart_over_packed`` the same when Python calls the modules.

First it checks that every kernel equals its rounded float64 reference, and that joint products equal those of the
layers.
The last line is JSON.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from device_clock import call_seconds, copy_bytes_per_s, graph_seconds, num_copies
from kernel_cases import random_matrix
from result import publish
from torch import nn
from torch.nn.functional import linear

from zinfer.inject.shared_product import SharedProduct
from zinfer.kernels.activation import activated_kernel, activated_ref, gated_kernel, gated_ref
from zinfer.kernels.gemv import MOST_TOKENS, gemv
from zinfer.kernels.norm import NormKind, norm_kernel, norm_ref
from zinfer.kernels.quantized import QuantFormat
from zinfer.kernels.quantized_linear import MOST_FRAGMENT_TOKENS
from zinfer.kernels.rotary import rotate_kernel, rotate_ref
from zinfer.weights.parameter import QuantizedParameter

_HEAD: Final = 128
_EPS: Final = 1e-6
_MLP: Final = 3.5  # times the width, as in Llama 3
_ALLOWED: Final = 2e-2  # of the largest value
_ROUNDS: Final = 5
_MOST_COPIES: Final = 64  # what few tokens read is in the cache anyway: the kernel before has written it

Kernel: TypeAlias = Callable[..., Any]
Case: TypeAlias = tuple[str, Kernel, Kernel, Callable[[], tuple[torch.Tensor, ...]], int]


def cases(tokens: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    """Name, kernel, reference, what makes inputs, and bytes that are read and written."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    size = dtype.itemsize
    for name, kind in {"rms_norm": NormKind(_EPS), "layer_norm": NormKind(_EPS, centred=True)}.items():
        kernel, ref = (partial(each, kind=kind) for each in (norm_kernel, norm_ref))
        yield name, kernel, ref, lambda: (random(1, tokens, width), random(width)), 2 * tokens * width * size
    heads = width // _HEAD

    def rotated() -> tuple[torch.Tensor, ...]:
        queries, keys = (random(1, tokens, count, _HEAD).transpose(1, 2) for count in (heads, heads // 8))
        return queries, keys, random(1, tokens, _HEAD), random(1, tokens, _HEAD)

    yield "rotary", rotate_kernel, rotate_ref, rotated, 2 * tokens * (width + width // 8 + _HEAD) * size
    mlp = int(_MLP * width)
    kernel, ref = (partial(each, activation="silu") for each in (gated_kernel, gated_ref))
    yield "gated_silu", kernel, ref, lambda: (random(1, tokens, mlp), random(1, tokens, mlp)), 3 * tokens * mlp * size
    kernel, ref = (partial(each, activation="gelu_tanh") for each in (activated_kernel, activated_ref))
    yield "gelu_tanh", kernel, ref, lambda: (random(1, tokens, 4 * width),), 2 * tokens * 4 * width * size


def is_right(kernel: Kernel, ref: Kernel, inputs: Sequence[torch.Tensor]) -> bool:
    found, wanted = kernel(*inputs), ref(*(each.double() for each in inputs))
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    return all(bool(((ours.double() - each).abs() <= _ALLOWED * each.abs().max()).all()) for ours, each in pairs)


def measure(case: Case, copy_rate: float) -> dict[str, float]:
    name, kernel, ref, make, moved_bytes = case
    inputs = [make() for _ in range(min(num_copies(moved_bytes), _MOST_COPIES))]
    if not is_right(kernel, ref, inputs[0]):
        raise SystemExit(f"gate: {name}: the kernel differs from its reference; no figure is reported")
    torch.compiler.reset()  # or the next shapes of one function run as they are
    compiled = torch.compile(ref, dynamic=False)
    # What comes out lies elsewhere in each graph: one kernel took 128 us in one script, and 142 in another.
    rounds = [
        [graph_seconds([partial(each, *given) for given in inputs]) for each in (kernel, compiled, ref)]
        for _ in range(_ROUNDS)
    ]
    own, compiled_s, eager_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {
        "us": round(own * 1e6, 2),
        "of_copy": round(moved_bytes / own / copy_rate, 3),
        "over_compiled": round(compiled_s / own, 3),
        "over_eager": round(eager_s / own, 2),
    }


def measure_product(tokens: int, rows: int, columns: int, dtype: torch.dtype, copy_rate: float) -> dict[str, float]:
    nbytes = rows * columns * dtype.itemsize
    weights = [torch.randn(rows, columns, dtype=dtype, device="cuda") for _ in range(num_copies(nbytes))]
    x = torch.randn(1, tokens, columns, dtype=dtype, device="cuda")
    if not is_right(gemv, linear, (x, weights[0])):
        raise SystemExit("gate: the product of few tokens differs from its reference; no figure is reported")
    own, torchs = (graph_seconds([partial(each, x, weight) for weight in weights]) for each in (gemv, linear))
    return {
        "us": round(own * 1e6, 2),
        "of_copy": round(nbytes / own / copy_rate, 3),
        "over_torch": round(torchs / own, 3),
    }


class Layers(nn.Module):
    """Linear layers that multiply the same numbers, their weights one behind the other."""

    def __init__(self, width: int, rows: Sequence[int], dtype: torch.dtype, format: QuantFormat | None) -> None:
        super().__init__()
        begin = 0
        matrix = None if format is None else random_matrix(format, sum(rows), width, dtype, "cuda")
        slab = torch.randn(sum(rows), width, dtype=dtype, device="cuda") / width**0.5 if matrix is None else None
        for index, count in enumerate(rows):
            there, begin = slice(begin, begin + count), begin + count
            layer = nn.Linear(width, count, bias=False, device="meta")
            if matrix is not None:
                layer.weight = QuantizedParameter.make(matrix.part(there), (count, width))
            elif slab is not None:
                layer.weight = nn.Parameter(slab[there], requires_grad=False)
            self.add_module(str(index), layer)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.children()]

    def share(self) -> None:
        """Compute by one product from now on."""
        layers = [layer for layer in self.children() if isinstance(layer, nn.Linear)]
        shared = SharedProduct(self.forward, layers, ("weight",))
        for module, forward in zip((self, *layers), (shared.forward, *shared.layer_forwards()), strict=True):
            module.forward = forward  # type: ignore[assignment]


def measure_packed(
    tokens: int, width: int, rows: Sequence[int], dtype: torch.dtype, format: QuantFormat | None
) -> dict[str, float]:
    nbytes = sum(rows) * width * dtype.itemsize * (1 if format is None else format.bits / 8 / dtype.itemsize)
    parts = [Layers(width, rows, dtype, format) for _ in range(num_copies(int(nbytes)))]
    x = torch.randn(1, tokens, width, dtype=dtype, device="cuda")
    wanted = parts[0](x)
    apart, called_apart = (clock([partial(each, x) for each in parts]) for clock in (graph_seconds, call_seconds))
    for each in parts:
        each.share()
    found = parts[0](x)
    is_near = all(
        bool(((ours - theirs).abs() <= _ALLOWED * theirs.abs().max()).all())
        for ours, theirs in zip(found, wanted, strict=True)
    )
    if not is_near or found[0].untyped_storage().data_ptr() != found[-1].untyped_storage().data_ptr():
        raise SystemExit("gate: one product differs from those of the layers, or is not one; no figure is reported")
    packed, called = (clock([partial(each, x) for each in parts]) for clock in (graph_seconds, call_seconds))
    return {
        "us": round(packed * 1e6, 2),
        "apart_over_packed": round(apart / packed, 3),
        "called_us": round(called * 1e6, 2),
        "called_apart_over_packed": round(called_apart / called, 3),
    }


def packed_cases(tokens: int, width: int) -> Iterator[tuple[str, tuple[int, ...], QuantFormat | None]]:
    """Name, the layers' rows, and how they are stored; quantized ones share only what no product dequantizes."""
    mlp = int(_MLP * width)
    formats = {"": None, " INT8": QuantFormat(8), " INT4": QuantFormat(4, 128).arranged(mlp, width)}
    for name, rows in {"heads": (width, width // 8, width // 8), "gates": (mlp, mlp)}.items():
        for stored, format in formats.items():
            if format is None or tokens <= MOST_FRAGMENT_TOKENS:
                yield f"packed {name}{stored}", rows, format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,128,8192")
    parser.add_argument("--widths", default="4096,8192")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--no-packed", dest="packed", action="store_false")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    dtype, copy_rate = getattr(torch, args.dtype), copy_bytes_per_s()
    found: dict[str, object] = {}
    for width in map(int, args.widths.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            for case in cases(tokens, width, dtype):
                key = f"{case[0]} {tokens} x {width}"
                found[key] = figures = measure(case, copy_rate)
                print(key, json.dumps(figures), flush=True)
            for rows in (width, int(_MLP * width)) if tokens <= MOST_TOKENS else ():
                key = f"product {tokens} x {width} -> {rows}"
                found[key] = figures = measure_product(tokens, rows, width, dtype, copy_rate)
                print(key, json.dumps(figures), flush=True)
            for name, rows, format in packed_cases(tokens, width) if args.packed else ():
                key = f"{name} {tokens} x {width}"
                found[key] = figures = measure_packed(tokens, width, rows, dtype, format)
                print(key, json.dumps(figures), flush=True)
    work = {"benchmark": "injected", "dtype": args.dtype, "copy_gb_per_s": round(copy_rate / 1e9, 1)}
    publish(work | {"cases": found}, args.out)


if __name__ == "__main__":
    main()
