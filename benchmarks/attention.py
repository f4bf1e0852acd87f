"""Times paged attention: decodes relative to memory bandwidth, prompts relative to torch's flash attention.

    python benchmarks/attention.py [--models opt-30b,llama-3-70b] [--pages float16,int8,float8_e4m3fn]
                                   [--only decode | prompt] [--tune] [--out F]

A decode's ``of_memory`` is the rate at which it reads keys and values (with scales), as a share of a device copy's
rate. A prompt's ``of_flash`` is the time of `torch.nn.functional.scaled_dot_product_attention` with its flash kernel
over the time taken: the same queries and keys, contiguous and of one length, in full 16 bits; after a context its mask
is aligned to the lower right. Times are the device's, from CUDA graphs. Pages are at random places; passes over few
pages alternate between several sets, so that bytes are read from memory and not from the cache. 16 x 512 @ 4096:
sixteen chunks of 512 tokens, each the last of 4,096.

--tune times tiles instead, and prints the best for each model and kind of pages.

Results are checked first. The last line is JSON.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from attention_cases import AttentionCall, AttentionCase, attention_call
from device_clock import Call, copy_bytes_per_s, graph_seconds, num_copies
from race import compiled, least, race
from result import publish
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from zinfer.kernels.attention_arguments import AttentionRule
from zinfer.kernels.decode_attention import DecodeTiles, decode_attention
from zinfer.kernels.kv_pages import KVPages, PagedLayout
from zinfer.kernels.paged_attention import paged_attention_kernel, paged_attention_ref
from zinfer.kernels.prompt_attention import PromptTiles, prompt_attention

_HEAD_DIM: Final = 128
_PAGE_SIZE: Final = 64
_MODELS: Final = {"opt-30b": (56, 56), "llama-3-70b": (64, 8)}  # heads, and those of keys
_DECODES: Final = ((512, 540), (256, 2000), (16, 8000))  # texts, keys of each
_PROMPTS: Final = ((16, 512, 512), (4, 2048, 2048), (1, 8192, 8192), (16, 512, 4096))  # chunks, tokens, context
_DRAWN_PAGES: Final = 1024  # at once: random numbers take more memory than codes
_GATE_SEGMENTS: Final = ((1, 540), (1, 1), (1, 2000), (1, 7777), (300, 700), (513, 513))
_DECODE_TILES: Final = (
    *(DecodeTiles(64, split, warps, 3) for split in (512, 1024) for warps in (2, 4)),
    *(DecodeTiles(64, 512, warps, stages) for warps in (2, 4) for stages in (2, 4)),
    *(DecodeTiles(32, 512, warps, stages) for warps in (1, 2) for stages in (3, 4)),
    *(DecodeTiles(128, 512, warps, 2) for warps in (4, 8)),
    DecodeTiles(16, 512, 1, 4),
)
_PROMPT_TILES: Final = (
    *(PromptTiles(128, 64, 8, stages) for stages in (2, 3)),
    *(PromptTiles(128, 32, 8, stages) for stages in (3, 4)),
    *(PromptTiles(64, 64, 4, stages) for stages in (2, 3)),
    *(PromptTiles(64, 32, 4, stages) for stages in (3, 4)),
    PromptTiles(64, 128, 4, 2),
    PromptTiles(128, 128, 8, 2),
)


@dataclass(frozen=True)
class Work:
    """Segments of one size over one model's pages.

    Args:
        count, queries, context: so many segments, queries of each, and keys that the last of them sees.
        pages: dtype of keys and values.
    """

    model: str
    pages: torch.dtype
    count: int
    queries: int
    context: int

    def __str__(self) -> str:
        size = f"{self.context}" if self.queries in (1, self.context) else f"{self.queries} @ {self.context}"
        kind = "decode" if self.queries == 1 else "prompt"
        return f"{self.model} {str(self.pages).removeprefix('torch.')} {kind} {self.count} x {size}"

    @property
    def heads(self) -> tuple[int, int]:
        return _MODELS[self.model]

    @property
    def read_bytes(self) -> int:
        """Of keys, values and scales, each once."""
        scale_bytes = 4 if self.pages.itemsize == 1 else 0
        return 2 * self.count * self.context * self.heads[1] * (_HEAD_DIM * self.pages.itemsize + scale_bytes)

    @property
    def flop(self) -> float:
        """Of both products, for the pairs that see each other."""
        pairs = self.queries * (self.context - (self.queries - 1) / 2)
        return 4 * self.count * pairs * self.heads[0] * _HEAD_DIM

    def calls(self) -> list[AttentionCall]:
        """Passes over disjoint pages of one memory."""
        per_segment = -(-self.context // _PAGE_SIZE)
        copies = num_copies(self.read_bytes)
        order = torch.randperm(copies * self.count * per_segment, dtype=torch.int32, device="cuda")
        tables = order.view(copies, self.count, per_segment)
        pages = random_pages(self.pages, len(order), self.heads[1])
        starts = torch.arange(self.count + 1, dtype=torch.int32, device="cuda") * self.queries
        lengths = torch.full((self.count,), self.context, dtype=torch.int32, device="cuda")
        decodes = self.count if self.queries == 1 else 0
        query = torch.randn(self.count * self.queries, self.heads[0], _HEAD_DIM, dtype=torch.float16, device="cuda")
        rule = AttentionRule(_HEAD_DIM**-0.5)
        return [
            AttentionCall(query, pages, PagedLayout(starts, lengths, table, self.queries, self.context, decodes), rule)
            for table in tables
        ]


def random_pages(dtype: torch.dtype, count: int, kv_heads: int) -> KVPages:
    pages = KVPages.empty(count, _PAGE_SIZE, kv_heads, _HEAD_DIM, _HEAD_DIM, dtype, "cuda")
    for part in (pages.keys, pages.values):
        for begin in range(0, count, _DRAWN_PAGES):
            some = part[begin : begin + _DRAWN_PAGES]
            drawn = torch.randn(some.shape, dtype=torch.float16, device="cuda")
            some.copy_((drawn * 30).clamp(-127, 127) if dtype == torch.int8 else drawn)
    for scales in (pages.key_scales, pages.value_scales):
        if scales is not None:
            scales.uniform_(0.02, 0.04)
    return pages


def check_kernels(models: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
    """The gate: kernels equal the reference, also where a layer has more rules than these models'."""
    cases = []
    for dtype in dtypes:
        full = dtype == torch.float16
        sizes = (_HEAD_DIM, _HEAD_DIM, _PAGE_SIZE)
        cases.append(AttentionCase(_GATE_SEGMENTS, *_MODELS[models[0]], *sizes, pages_dtype=None if full else dtype))
        ruled = AttentionCase(_GATE_SEGMENTS, *_MODELS[models[-1]], *sizes, torch.bfloat16, None if full else dtype)
        cases.append(replace(ruled, window=700, sinks=True, softcap=30.0, alibi=True))
    calls = [attention_call(case, "cuda") for case in cases]
    compiled([partial(paged_attention_kernel, call.query, call.pages, call.layout, call.rule) for call in calls])
    for case, call in zip(cases, calls, strict=True):
        found = paged_attention_kernel(call.query, call.pages, call.layout, call.rule)
        wanted = paged_attention_ref(call.query.float(), call.pages, call.layout, call.rule)
        allowed = 4 * torch.finfo(case.dtype).eps * (1 + wanted.abs()) + 1e-5
        worst = ((found.float() - wanted).abs() / allowed).max().item()
        if not worst <= 1:
            raise SystemExit(f"gate: {case}: {worst} times the allowed error; no figure is reported")


def with_tiles(call: AttentionCall, tiles: DecodeTiles | PromptTiles | None = None) -> Call:
    """One pass by the kernel that is for it, into one memory."""
    attend: Callable[..., None] = decode_attention if call.layout.most_queries == 1 else prompt_attention
    out = torch.empty_like(call.query)
    return partial(attend, call.query, call.pages, call.layout, call.rule, out, tiles)


def flash_seconds(work: Work) -> float:
    """Of torch's flash attention over as many contiguous keys."""
    heads, kv_heads = work.heads
    query = torch.randn(work.count, heads, work.queries, _HEAD_DIM, dtype=torch.float16, device="cuda")
    shape = (work.count, kv_heads, work.context, _HEAD_DIM)
    keys, values = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(2))
    mask = causal_lower_right(work.queries, work.context)

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=heads != kv_heads)

    return graph_seconds([attend])


class Bench:
    """One machine's attention, beside its copy rate and torch's."""

    def __init__(self) -> None:
        self.copy_rate = copy_bytes_per_s()
        self._flash_s: dict[tuple[str, int, int, int], float] = {}

    def measure(self, works: Sequence[Work]) -> Iterator[tuple[str, dict[str, float]]]:
        """Name and figures of each."""
        for work in works:
            seconds = graph_seconds([with_tiles(call) for call in work.calls()])
            yield str(work), self._decode(work, seconds) if work.queries == 1 else self._prompt(work, seconds)
            torch.cuda.empty_cache()

    def _decode(self, work: Work, seconds: float) -> dict[str, float]:
        rate = work.read_bytes / seconds
        figures = {"us": seconds * 1e6, "read_gb": work.read_bytes / 1e9, "gb_per_s": rate / 1e9}
        return _rounded(figures | {"of_memory": rate / self.copy_rate})

    def _prompt(self, work: Work, seconds: float) -> dict[str, float]:
        shape = (work.model, work.count, work.queries, work.context)
        if shape not in self._flash_s:
            self._flash_s[shape] = flash_seconds(work)
        flash_s = self._flash_s[shape]
        figures = {"us": seconds * 1e6, "tflop_per_s": work.flop / seconds / 1e12}
        return _rounded(figures | {"flash_us": flash_s * 1e6, "of_flash": flash_s / seconds})


def tune(works: Sequence[Work]) -> dict[str, str]:
    """The best tiles of each model, kind of pages and kernel, by the geometric mean of seconds."""
    times: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for work in works:
        calls = work.calls()
        tried = {tiles: [with_tiles(call, tiles) for call in calls] for tiles in _tiles_for(work)}
        for tiles, seconds in race(str(work), tried).items():
            times[" ".join(str(work).split()[:3])][tiles].append(seconds)
        torch.cuda.empty_cache()
    return {kind: str(least(found)) for kind, found in times.items()}


def _tiles_for(work: Work) -> tuple[DecodeTiles | PromptTiles, ...]:
    return _DECODE_TILES if work.queries == 1 else _PROMPT_TILES


def compile_all(works: Sequence[Work]) -> None:
    """Every kernel once, side by side: over small passes of each kind."""
    kinds = {(work.model, work.pages, work.queries == 1) for work in works}
    small = [Work(model, pages, 2, 1 if decodes else 128, 1600) for model, pages, decodes in kinds]
    compiled([with_tiles(work.calls()[0]) for work in small])


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(figure, 3) for name, figure in figures.items()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(_MODELS), help="comma-separated")
    parser.add_argument("--pages", default="float16,int8,float8_e4m3fn", help="comma-separated dtypes")
    parser.add_argument("--only", choices=["decode", "prompt"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    models, dtypes = args.models.split(","), [getattr(torch, name) for name in args.pages.split(",")]
    decodes = [(count, 1, context) for count, context in _DECODES] if args.only != "prompt" else []
    prompts = list(_PROMPTS) if args.only != "decode" else []
    works = [Work(model, pages, *size) for model in models for pages in dtypes for size in (*decodes, *prompts)]
    torch.manual_seed(0)
    check_kernels(models, dtypes)
    found: dict[str, object] = {}
    bench = Bench()
    if args.tune:
        found |= tune(works)
        print(*(f"{kind}: {tiles}" for kind, tiles in found.items()), sep="\n", flush=True)
    else:
        compile_all(works)
        for name, figures in bench.measure(works):
            found[name] = figures
            print(name, json.dumps(figures), flush=True)
    work = {"benchmark": "attention", "copy_gb_per_s": round(bench.copy_rate / 1e9, 1)}
    publish(work | {"tiles" if args.tune else "cases": found}, args.out)


if __name__ == "__main__":
    main()
