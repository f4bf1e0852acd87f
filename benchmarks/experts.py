"""Times products of experts, relative to the bytes of experts that have tokens, and to torch's grouped product.

    python benchmarks/experts.py [--models qwen3,mixtral] [--tokens 1,16,512,1024,4096]
                                 [--formats full,int8,int4-128] [--dtype bfloat16] [--tune] [--out FILE]
    python benchmarks/experts.py --models deepseek-v3 --tokens 8,512,4096,16384,40960 --formats fp8-blocks,int4-128
    python benchmarks/experts.py --models gpt-oss --tokens 8,512,4096,16384 --formats mxfp4,nvfp4

``of_copy`` is the rate at which our kernel reads and writes the necessary bytes (matrices of experts that have tokens,
once, inputs and outputs), as a share of a copy's rate in the same run; ``tflops`` the multiplications per second;
``over_torch`` the time of torch's grouped product with full bfloat16 weights over ours, whatever format ours have, with
tokens already in the order of experts; ``over_gathering`` the same with torch's gather and scatter, from tokens in
their own order to pairs in theirs, like ours. ``of_dense`` is the share of the rate at which torch multiplies as many
tokens as there are pairs, 16,384 at the most, with one full matrix. ``codes_us`` and ``decoded_us`` are the times of
both ways with quantized matrices, of which `grouped_linear` takes one. The lines of ``torch`` have both times.
``groups`` is the time of sorting tokens by expert. Every call has tokens of other experts, so that their bytes are read
from memory.

--tune measures the candidates of kernel_tiles.py instead, for the same tokens, and prints the best of those with
correct sums.

Results are checked first. The last line is JSON.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from device_clock import copy_bytes_per_s, graph_seconds, num_copies
from kernel_cases import (
    BLOCKS_FP8,
    DEEPSEEK_V3,
    GPT_OSS_120B,
    MIXTRAL_8X7B,
    MXFP4,
    MXFP8,
    NVFP4,
    QWEN3_30B_A3B,
    Mixture,
    fits_experts,
    grouped_allowed_error,
    random_choice,
    random_experts,
)
from kernel_tiles import DECODED_CANDIDATES, grouped_candidates, scaled_candidates
from race import least, race
from result import keep, publish
from torch.nn import functional

from zinfer.kernels.expert_routing import Groups
from zinfer.kernels.grouped_linear import (
    ExpertWeights,
    decoded_linear,
    decodes,
    grouped_linear,
    grouped_linear_kernel,
    grouped_linear_ref,
)
from zinfer.kernels.grouped_tiles import block_tokens_for, table_of
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.kernels.scaled_linear import can_scale, scaled_experts
from zinfer.kernels.tiles import Tiles

MODELS: Final = {
    "qwen3": QWEN3_30B_A3B,
    "mixtral": MIXTRAL_8X7B,
    "deepseek-v3": DEEPSEEK_V3,
    "gpt-oss": GPT_OSS_120B,
}
FORMATS: Final = {
    "full": None,
    "int8": QuantFormat(8),
    "int8-128": QuantFormat(8, group_size=128),
    "int4-128": QuantFormat(4, group_size=128),
    "int4-128-asymmetric": QuantFormat(4, group_size=128, symmetric=False),
    "fp8-blocks": BLOCKS_FP8,
    "mxfp8": MXFP8,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
_GATE: Final = (Mixture(7, 3, 192, 512), Mixture(40, 4, 512, 768))
_GROUPINGS: Final = 4
_FEWEST_DECODED: Final = 32  # tokens an expert that dequantizing matrices first is tried with
_MOST_DENSE: Final = 16384


def check_kernels(dtype: torch.dtype, names: Sequence[str]) -> None:
    """The gate: products with every format are those of float64."""
    for mixture in _GATE:
        for name in named(names, mixture):
            weight = experts_in(name, mixture, dtype)
            for tokens in (1, 2, 33, 900):
                groups = Groups.of(random_choice(mixture, tokens, "cuda"), mixture.experts)
                x = torch.randn(tokens, mixture.columns, dtype=dtype, device="cuda")
                products = {"grouped": grouped_linear, **ways(weight)}
                if name == "full":
                    products |= {"codes": grouped_linear_kernel, "torch": torch_gathering}
                rounded = {"decoded", "grouped"} if isinstance(weight, QuantizedMatrix) else set()
                sums = {rounds: Sums(x, weight, groups, rounds) for rounds in (False, True)}
                if not all(
                    sums[way in rounded].are_right(product(x, weight, groups)) for way, product in products.items()
                ):
                    raise SystemExit(f"gate: {name}, {mixture}, {tokens} tokens: no figure is reported")


def named(names: Sequence[str], mixture: Mixture) -> list[str]:
    """The names of formats in which the experts' matrices can be stored, one below the other."""

    def can_stack(format: QuantFormat | None) -> bool:
        return format is None or format.outer is not None or format.can_follow(mixture.rows)

    return [name for name in names if fits_experts(FORMATS[name], mixture) and can_stack(FORMATS[name])]


class Sums:
    """Those of float64, for others to be compared with."""

    def __init__(self, x: torch.Tensor, weight: ExpertWeights, groups: Groups, rounds: bool = False) -> None:
        self.wanted = grouped_linear_ref(x.double(), weight, groups)
        self.allowed = grouped_allowed_error(x, weight, groups, self.wanted, rounds)

    def are_right(self, found: torch.Tensor) -> bool:
        return bool(((found.double() - self.wanted).abs() <= self.allowed).all())


def experts_in(name: str, mixture: Mixture, dtype: torch.dtype) -> ExpertWeights:
    """Random experts in the order in which a model's would be stored."""
    format = FORMATS[name]
    arranged = None if format is None else format.arranged(mixture.rows, mixture.columns)
    return random_experts(arranged, mixture, dtype, "cuda")


def ways(weight: ExpertWeights) -> dict[str, Callable[..., torch.Tensor]]:
    """The ways to multiply with quantized matrices, whatever the number of tokens."""
    if not isinstance(weight, QuantizedMatrix):
        return {}
    return {"codes": scaled_experts if can_scale(weight) else grouped_linear_kernel, "decoded": decoded_linear}


class Calls:
    """Tokens, and experts for them, other ones for each call."""

    def __init__(self, mixture: Mixture, tokens: int, weight_bytes: int, dtype: torch.dtype) -> None:
        self.pairs = tokens * mixture.chosen
        choices = [random_choice(mixture, tokens, "cuda")]
        self.used = len(choices[0].unique())
        self.read_bytes = weight_bytes * self.used // mixture.experts
        choices += [random_choice(mixture, tokens, "cuda") for _ in range(num_copies(self.read_bytes) - 1)]
        self.choices = choices
        self.groups = [Groups.of(choice, mixture.experts) for choice in choices]
        self.x = torch.randn(tokens, mixture.columns, dtype=dtype, device="cuda")
        self.moved_bytes = self.read_bytes + (self.x.numel() + self.pairs * mixture.rows) * dtype.itemsize
        self.flops = 2 * self.pairs * mixture.rows * mixture.columns


def measure(
    mixture: Mixture, names: Sequence[str], token_counts: Sequence[int], dtype: torch.dtype, copy_rate: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Name and figures of each case of one matrix's shape."""
    shape = f"{mixture.experts}x{mixture.rows}x{mixture.columns}"
    torchs = {}
    for tokens, figures in measure_torch(mixture, token_counts):
        torchs[tokens] = figures
        yield f"torch {shape} tokens {tokens}", figures
    dense = {tokens: dense_flops_per_s(mixture, tokens * mixture.chosen, dtype) for tokens in token_counts}
    for name in named(names, mixture):
        weight = experts_in(name, mixture, dtype)
        for tokens in token_counts:
            calls = Calls(mixture, tokens, weight.nbytes, dtype)
            products = [partial(grouped_linear, calls.x, weight, groups) for groups in calls.groups]
            seconds = graph_seconds(products)
            several = ways(weight) if calls.pairs >= _FEWEST_DECODED * mixture.experts else {}
            own = {
                f"{way}_us": round(1e6 * graph_seconds([partial(product, calls.x, weight, calls.groups[0])]), 2)
                for way, product in several.items()
            }
            yield (
                f"{name} {shape} tokens {tokens}",
                {
                    "us": round(seconds * 1e6, 2),
                    "of_copy": round(calls.moved_bytes / seconds / copy_rate, 3),
                    "tflops": round(calls.flops / seconds / 1e12, 1),
                    "of_dense": round(calls.flops / seconds / dense[tokens], 3),
                    **own,
                    "over_torch": round(torchs[tokens]["us"] / seconds / 1e6, 3),
                    "over_gathering": round(torchs[tokens]["gathering_us"] / seconds / 1e6, 3),
                    "experts": calls.used,
                },
            )
        del weight
    for tokens in token_counts:
        choices = [random_choice(mixture, tokens, "cuda") for _ in range(_GROUPINGS)]
        seconds = graph_seconds([partial(order_of, choice, mixture.experts) for choice in choices])
        yield f"groups of {mixture.experts} tokens {tokens}", {"us": round(seconds * 1e6, 2)}


def dense_flops_per_s(mixture: Mixture, pairs: int, dtype: torch.dtype) -> float:
    """The rate of torch's product of up to 16,384 tokens with one matrix in full."""
    tokens = min(pairs, _MOST_DENSE)
    x = torch.randn(tokens, mixture.columns, dtype=dtype, device="cuda")
    weight = torch.randn(mixture.rows, mixture.columns, dtype=dtype, device="cuda")
    return 2 * tokens * mixture.rows * mixture.columns / graph_seconds([partial(functional.linear, x, weight)])


def order_of(choice: torch.Tensor, num_experts: int) -> torch.Tensor:
    return Groups.of(choice, num_experts).order


def torch_gathering(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """As `grouped_linear`, by torch's grouped product, which wants pairs in the order of experts."""
    place = torch.arange(groups.num_pairs, device=x.device)
    gathered = x[groups.order // (groups.num_pairs // x.shape[0])]
    products = functional.grouped_mm(gathered, weight.transpose(1, 2), offs=groups.ends)
    return products[torch.empty_like(place).scatter_(0, groups.order, place)]


def measure_torch(mixture: Mixture, token_counts: Sequence[int]) -> Iterator[tuple[int, dict[str, float]]]:
    """Tokens, and figures of torch's grouped product of them: of pairs in order already, and with gathering."""
    weight = random_experts(None, mixture, torch.bfloat16, "cuda")
    assert isinstance(weight, torch.Tensor)
    for tokens in token_counts:
        calls = Calls(mixture, tokens, weight.nbytes, torch.bfloat16)
        x = calls.x.repeat_interleave(mixture.chosen, dim=0)
        bare = graph_seconds(
            [partial(functional.grouped_mm, x, weight.transpose(1, 2), offs=groups.ends) for groups in calls.groups]
        )
        gathering = graph_seconds([partial(torch_gathering, calls.x, weight, groups) for groups in calls.groups])
        yield (
            tokens,
            {
                "us": round(bare * 1e6, 2),
                "gathering_us": round(gathering * 1e6, 2),
                "tflops": round(calls.flops / bare / 1e12, 1),
            },
        )


def tune(
    mixtures: Sequence[Mixture], names: Sequence[str], token_counts: Sequence[int], dtype: torch.dtype
) -> dict[str, str]:
    """The best tiles of each table's entry, by the geometric mean of seconds over the shapes."""
    times: dict[str, dict[object, list[float]]] = defaultdict(lambda: defaultdict(list))
    for mixture in mixtures:
        for name in named(names, mixture):
            weight = experts_in(name, mixture, dtype)
            for tokens in token_counts:
                calls = Calls(mixture, tokens, weight.nbytes, dtype)
                table, product, candidates = tuned(weight, calls.groups[0])
                tried = {
                    tiles: [partial(product, calls.x, weight, groups, None, tiles) for groups in calls.groups]
                    for tiles in candidates
                }
                label = f"{name} {mixture.rows}x{mixture.columns} tokens {tokens}"
                sums = Sums(calls.x, weight, calls.groups[0], rounds=table == "decoded")
                for tiles, seconds in race(label, tried).items():
                    if sums.are_right(tried[tiles][0]()):
                        times[table][tiles].append(seconds)
                    else:
                        print(f"{label}: WRONG SUMS of {tiles}", flush=True)
                del sums
            del weight
    return {key: str(least(found)) for key, found in times.items()}


def tuned(weight: ExpertWeights, groups: Groups) -> tuple[str, Callable[..., torch.Tensor], Sequence[Tiles]]:
    """The name of a table's entry, the product with it, and candidates for it."""
    mean = -(-groups.num_pairs // groups.num_experts)
    if isinstance(weight, QuantizedMatrix) and decodes(weight, groups):
        return "decoded", decoded_linear, DECODED_CANDIDATES
    if isinstance(weight, QuantizedMatrix) and can_scale(weight):
        found = list(scaled_candidates(mean))
        return f"scaled {found[0].block_tokens}", scaled_experts, found[::2]  # columns are not split
    block_tokens = block_tokens_for(groups.num_pairs, groups.num_experts)
    table = table_of(weight)
    return f"{table} {block_tokens}", grouped_linear_kernel, list(grouped_candidates(table, block_tokens))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3,mixtral")
    parser.add_argument("--tokens", default="1,16,512,1024,4096")
    parser.add_argument("--formats", default="full,int8,int4-128")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_grad_enabled(False)
    dtype, names = getattr(torch, args.dtype), args.formats.split(",")
    check_kernels(dtype, names)
    token_counts = [int(count) for count in args.tokens.split(",")]
    mixtures = [mixture for model in args.models.split(",") for mixture in MODELS[model]]
    copy_rate = copy_bytes_per_s()
    work = {"benchmark": "experts", "dtype": args.dtype, "copy_gb_per_s": round(copy_rate / 1e9, 1)}
    if args.tune:
        best = tune(mixtures, names, token_counts, dtype)
        print(*(f"{key}: {tiles}," for key, tiles in best.items()), sep="\n", flush=True)
        publish(work | {"tiles": best}, args.out)
        return
    found: dict[str, object] = {}
    for mixture in mixtures:
        for name, figures in measure(mixture, names, token_counts, dtype, copy_rate):
            found[name] = figures
            print(name, json.dumps(figures), flush=True)
            keep(work | {"cases": found}, args.out)
    publish(work | {"cases": found}, args.out)


if __name__ == "__main__":
    main()
