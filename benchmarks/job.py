"""Completes prompts with `zinfer.LLM`, weights resident and streamed, in one run: the job's seconds beside each other.

    python benchmarks/job.py [--cases fp16,int8,int8-kv8,int4-kv8] [--model opt-30b | llama-3-70b]
                             [--prompts 1024 --prompt 512 --new 32] [--out FILE]

Each case runs twice, weights on the device and weights in host memory: some layers of a model's shape, prompts of
random tokens, greedy. ``tokens_per_s`` counts new tokens; ``matrix_tflops`` is two operations for each parameter of the
layers and token computed, ``steady_tflops`` the same in the median of full passes; ``streamed_over_resident`` the
resident job's seconds over the streamed one's, ``over_predicted`` a job's seconds over what was predicted (as if no two
prompts began alike); ``streamed_gb`` went to the device in the job, and compute waited ``link_stall_s`` for it. A small
job of the same shapes comes first in each engine, as a warm-up.

A correctness gate: resident and streamed weights give the same tokens. The last line is JSON.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
from random_model import layer_params, llama_config, opt_config, save_random
from result import keep, publish
from transformers import PretrainedConfig

import zinfer

CASES: Final[dict[str, dict[str, object]]] = {
    "fp16": {},
    "fp16-kv8": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": {"bits": 8}},
    "int8-kv8": {"quantization": {"bits": 8}, "kv_cache_dtype": "int8"},
    "int4-kv8": {"quantization": {"bits": 4, "group_size": 128}, "kv_cache_dtype": "int8"},
}
_WARM_UP_PROMPTS: Final = 180


class Bench:
    """One checkpoint and one job."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder = folder
        self._args = args
        generator = torch.Generator().manual_seed(1)
        shared = torch.randint(10, 50000, (args.shared,), generator=generator).tolist()
        own = torch.randint(10, 50000, (args.prompts, args.prompt - args.shared), generator=generator).tolist()
        self._prompts = [{"prompt_token_ids": [*shared, *ids]} for ids in own]
        # Others than the job's: what the cache still holds of them would be found. The one after the other ends, so
        # that every number of texts that a job ends with was there once, and the kernels for it are compiled.
        other = torch.randint(10, 50000, (_WARM_UP_PROMPTS, args.prompt), generator=generator).tolist()
        self._warm_up = [{"prompt_token_ids": ids[: args.prompt if i < 64 else 16]} for i, ids in enumerate(other)]
        self._warm_up_params = [
            zinfer.SamplingParams(max_new_tokens=2 + i // 3, ignore_eos=True) for i in range(len(other))
        ]
        self._layer_params = layer_params(config_of(args))

    def measure(self, case: str) -> dict[str, object]:
        """The job over resident and over streamed weights."""
        resident, wanted, sizes = self._run(case, "none", {})
        # The same passes: what shares one decides the last bits of a random model's logits, and so its tokens.
        streamed, found, _ = self._run(case, "cpu", sizes)
        if wanted != found:
            raise SystemExit(f"gate: {case}: streamed weights give other tokens than resident ones")
        share = round(resident["seconds"] / streamed["seconds"], 4)
        return {"resident": resident, "streamed": streamed, "streamed_over_resident": share}

    def _run(
        self, case: str, home: str, sizes: dict[str, int]
    ) -> tuple[dict[str, float], list[tuple[int, ...]], dict[str, int]]:
        """The figures, the tokens, and the sizes that were chosen beside those that are given."""
        args = self._args
        stated = {"tokens_per_pass": args.tokens_per_pass, "max_sequences": args.sequences}
        section = {**{key: size for key, size in stated.items() if size is not None}, **CASES[case], **sizes}
        config = {"zero_optimization": {"offload_param": {"device": home}}, "zinfer": section}
        params = zinfer.SamplingParams(max_new_tokens=args.new, ignore_eos=True)
        with zinfer.LLM(self._folder, config) as llm:
            print(case, home, llm.plan, flush=True)
            llm.generate(self._warm_up, self._warm_up_params)
            before, tokens = llm.stats(), llm.num_tokens
            begin_s = time.perf_counter()
            found = llm.generate(self._prompts, params)
            seconds = time.perf_counter() - begin_s
            predicted = llm.predict([args.prompt] * args.prompts, args.new)
            stats, steady_s = llm.stats(), self._steady_s_per_token(llm)
            chosen = {"kv_cache_memory": llm.batching.footprint.kv_bytes}
            passes, tokens = stats.passes - before.passes, llm.num_tokens - tokens
        if any(completion.error for completion in found):
            raise SystemExit(f"gate: {case}: {next(each.error for each in found if each.error)}")
        figures = {
            "seconds": round(seconds, 3),
            "over_predicted": round(seconds / predicted.seconds, 4),
            "passes": passes,
            "tokens_per_pass": round(tokens / passes, 1),
            "tokens_per_s": round(len(found) * args.new / seconds, 1),
            "matrix_tflops": round(2 * self._layer_params * tokens / seconds / 1e12, 1),
            "steady_tflops": round(2 * self._layer_params / steady_s / 1e12, 1),
            "gb_of_streamed_blocks": round(stats.streamed_bytes_per_pass / 1e9, 3),
            "streamed_gb": round((stats.bytes_to_device - before.bytes_to_device) / 1e9, 3),
            "link_stall_s": round(stats.stall_s["link"] - before.stall_s["link"], 3),
        }
        print(case, home, figures, flush=True)
        return figures, [completion.token_ids for completion in found], chosen

    @staticmethod
    def _steady_s_per_token(llm: zinfer.LLM) -> float:
        """The median over passes that carry nearly as much as the largest."""
        passes = llm.passes()
        most = max(size.num_tokens for size, _ in passes)
        return statistics.median(seconds / size.num_tokens for size, seconds in passes if size.num_tokens > 0.9 * most)


def config_of(args: argparse.Namespace) -> PretrainedConfig:
    return llama_config(args.layers) if args.model == "llama-3-70b" else opt_config(args.layers, args.hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="fp16,int8,int8-kv8")
    parser.add_argument("--model", default="opt-30b", choices=["opt-30b", "llama-3-70b"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=7168, help="of OPT's proportions")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--shared", type=int, default=0, help="of a prompt's tokens, those that all begin with")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--tokens-per-pass", type=int, help="by default what LLM chooses")
    parser.add_argument("--sequences", type=int, help="likewise")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; by default a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, object] = {}
    work = {name: getattr(args, name) for name in ("model", "layers", "prompts", "prompt", "shared", "new")}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary) / "model"
        save_random(folder, config_of(args), torch.float16 if device == "cuda" else torch.float32, device)
        bench = Bench(folder, args)
        for case in args.cases.split(","):
            found[case] = bench.measure(case)
            print(case, found[case], flush=True)
            keep({"benchmark": "job", **work, "cases": found}, args.out)
    publish({"benchmark": "job", **work, "cases": found}, args.out)


if __name__ == "__main__":
    main()
