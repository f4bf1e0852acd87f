"""Times `zinfer.LLM` at batch size 1 with a few streamed layers, with and without CUDA graphs, in one run.

    python benchmarks/spilled.py [--bits 16,8,4] [--layers 32] [--streamed 3] [--prompt 128 --new 64] [--small]
                                 [--out FILE]

Llama-3-8B's shape with random weights. The device holds all but ``--streamed`` layers; three or more, because two slots
take as much memory as two layers. They stream from pinned host memory, and no pages are lent to them.
``resident_ms``, ``launched_ms`` and ``ms`` are milliseconds of a token after the first: with all weights on the device,
with streamed layers without `enable_cuda_graph`, and with it. ``link_ms`` is the time of a pass's streamed bytes at the
rate of copies of one layer in the same run; ``of_bound`` the greater of it and ``resident_ms``, over ``ms``. All are
medians of several, after a warm-up of the same shape.

Checks that replayed passes generate the same tokens with streamed and with resident weights. The last line is JSON.
--small is for a quick try.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch
from ceilings import link_bytes_per_s
from result import keep, publish
from transformers import LlamaConfig, LlamaForCausalLM

import zinfer
from zinfer.offload.block import conversion_bytes

_ROUNDS: Final = 5
_WARM_UPS: Final = 3  # the first call of a form, the one that is recorded, and one that is replayed
_KV_BYTES: Final = 64 << 20  # a layer finds no room in it
_FULL_BITS: Final = 16
_NUM_SLOTS: Final = 2


class Bench:
    """One machine, and what is asked of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = torch.float16 if self._device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(1)
        self._prompt = torch.randint(10, 900, (args.prompt,), generator=generator).tolist()

    def measure(self, bits: int) -> dict[str, object]:
        """All ways to run weights of so many bits."""
        resident, wanted, plan = self._run(bits, cuda_graph=True)
        aside = max(_NUM_SLOTS * plan["layer_bytes"], plan["converting_bytes"])
        budget = plan["bytes"] - self._args.streamed * plan["layer_bytes"] + aside
        launched, _, _ = self._run(bits, cuda_graph=False, max_weight_memory=budget)
        replayed, found, short = self._run(bits, cuda_graph=True, max_weight_memory=budget)
        if found != wanted:
            raise SystemExit(f"gate: {bits} bits: tokens of streamed weights are not those of resident ones")
        link_ms = short["streamed_bytes"] / link_bytes_per_s(short["layer_bytes"], self._device) * 1e3
        return {
            "streamed_layers": short["streamed_blocks"],
            "resident_ms": _ms(resident),
            "launched_ms": _ms(launched),
            "ms": _ms(replayed),
            "times": round(launched / replayed, 2),
            "link_ms": round(link_ms, 3),
            "of_bound": round(max(link_ms, resident * 1e3) / (replayed * 1e3), 3),
            **{name: short[name] for name in ("replayed", "pieces", "eager")},
        }

    def _run(self, bits: int, *, cuda_graph: bool, **memory: int) -> tuple[float, list[int], dict[str, Any]]:
        """Seconds of a token after the first, the tokens, and what was planned and counted."""
        torch.manual_seed(0)
        with torch.device(self._device):
            model = LlamaForCausalLM._from_config(self._config(), dtype=self._dtype).eval().to("cpu")
        config: dict[str, Any] = {"kv_cache_memory": _KV_BYTES, **memory}
        if bits < _FULL_BITS:
            config["quantization"] = {"bits": bits}
        with zinfer.LLM(
            model, {"zinfer": config}, enable_cuda_graph=cuda_graph, replace_with_kernel_inject=True
        ) as llm:

            def generate(new: int) -> list[int]:
                params = zinfer.SamplingParams(max_new_tokens=new, ignore_eos=True)
                return list(llm.generate({"prompt_token_ids": self._prompt}, params)[0].token_ids)

            for _ in range(_WARM_UPS):
                tokens = generate(1 + self._args.new)
            seconds = (self._median_s(generate, 1 + self._args.new) - self._median_s(generate, 1)) / self._args.new
            blocks = llm._model._blocks
            found = {
                "bytes": sum(block.block.nbytes for block in blocks),
                "layer_bytes": max(block.block.nbytes for block in blocks if block.is_layer),
                "converting_bytes": conversion_bytes(
                    [block.block for block in blocks], to_host=self._device.type == "cuda"
                ),
                "streamed_bytes": llm.stats().streamed_bytes_per_pass,
                "streamed_blocks": sum(home.tier.name != "DEVICE" for home in llm.plan.homes),
                "replayed": llm.graphs.replayed,
                "pieces": llm.graphs.pieces,
                "eager": dict(llm.graphs.eager),
            }
        del model
        gc.collect()
        return seconds, tokens, found

    def _config(self) -> LlamaConfig:
        small = self._args.small
        return LlamaConfig(
            hidden_size=256 if small else 4096,
            intermediate_size=512 if small else 14336,
            num_hidden_layers=self._args.layers,
            num_attention_heads=4 if small else 32,
            num_key_value_heads=2 if small else 8,
            vocab_size=1000 if small else 128256,
            max_position_embeddings=8192,
        )

    def _median_s(self, generate: Any, new: int) -> float:
        found = []
        for _ in range(_ROUNDS):
            begin_s = time.perf_counter()
            generate(new)
            found.append(time.perf_counter() - begin_s)
        return statistics.median(found)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", default="16,8,4")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--streamed", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="narrow layers, which run anywhere")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    work = {"benchmark": "spilled", "layers": args.layers, "prompt": args.prompt, "new": args.new}
    found: dict[str, object] = {}
    for bits in args.bits.split(","):
        found[f"{bits} bits"] = bench.measure(int(bits))
        print(bits, found[f"{bits} bits"], flush=True)
        keep({**work, "cases": found}, args.out)
    publish({**work, "cases": found}, args.out)


if __name__ == "__main__":
    main()
