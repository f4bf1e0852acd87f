"""Completes prompts with `zinfer.LLM` for several homes of the weights in one run, and compares the seconds of the
jobs.

    python benchmarks/job.py [--cases fp16,int8,int8-kv8,int4-kv8] [--homes none,cpu,nvme] [--shared 400]
                             [--model opt-30b | llama-3-70b] [--prompts 1024 --prompt 512 --new 32] [--out FILE]

Each case runs once for each home, with weights on the device, in host memory or on disk: some layers of a model's
shape, prompts of random tokens, greedy. A case's name with the suffix ``-plain`` runs without fused kernels.
``tokens_per_s`` counts new tokens; ``matrix_tflops`` is two operations per parameter of the layers and computed token,
``steady_tflops`` the same in the median of full passes; ``streamed_over_resident`` the resident job's seconds
over the streamed one's, ``over_predicted`` a job's seconds over the prediction (without shared prefixes);
``streamed_gb`` was copied to the device in the job, and ``kv_gb`` of KV cache from host memory; compute
waited ``link_stall_s`` for them. ``of_disk`` is the time to read the job's bytes at the rate of plain reads, measured
before and after, over the job's seconds; ``link_share`` and ``disk_share`` are the engine's own, of the rates that it
knows. ``host_ms`` and ``rest_ms`` are from `HostWork.figures`. With ``--shared`` all prompts begin with that many equal
tokens, and the last home runs again with prompts of the same lengths without a common prefix; ``shared_over_own`` is
its seconds over the others. Each engine first runs a small job of the same shapes as a warm-up. Put ``nvme`` last,
where the warm-up is shorter, with ``--tokens-per-pass 131072``: all homes use the first home's pages, which must leave
room for the large passes that are worthwhile from disk.

All homes must generate the same tokens. The last line is JSON.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
from ceilings import PlainReads, best_disk_setting
from host_work import HostWork
from random_model import layer_params, llama_config, opt_config, save_random
from result import keep, publish
from transformers import PretrainedConfig

import zinfer
from zinfer.offload.stats import RunStats

CASES: Final[dict[str, dict[str, object]]] = {
    "fp16": {},
    "fp16-kv8": {"kv_cache_dtype": "int8"},
    "fp16-hosted": {"kv_cache_tier": "host"},
    "int8": {"quantization": {"bits": 8}},
    "int8-products": {"quantization": {"bits": 8, "activations": True}},
    "fp8-products": {"quantization": {"bits": 8, "format": "fp8", "activations": True}},
    "int8-kv8": {"quantization": {"bits": 8}, "kv_cache_dtype": "int8"},
    "int4-kv8": {"quantization": {"bits": 4, "group_size": 128}, "kv_cache_dtype": "int8"},
}
_PLAIN: Final = "-plain"
_NAMES: Final = {"none": "resident", "cpu": "streamed", "nvme": "from_disk"}
_WARM_UP_PROMPTS: Final = 180
_LONG_WARM_UP_PROMPTS: Final = 64


class Bench:
    """One checkpoint and one job."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder = folder
        self._args = args
        generator = torch.Generator().manual_seed(1)

        def prompts(count: int, length: int) -> list[list[int]]:
            return torch.randint(10, 50000, (count, length), generator=generator).tolist()

        shared = prompts(1, args.shared)[0]
        self._prompts = [[*shared, *own] for own in prompts(args.prompts, args.prompt - args.shared)]
        self._own = prompts(args.prompts, args.prompt) if shared else []
        # Others than the job's: what the cache still holds of them would be found. The one after the other ends, so
        # that every number of texts that a job ends with was there once, and the kernels for it are compiled.
        other = prompts(_WARM_UP_PROMPTS, args.prompt)
        self._warm_up = [ids if i < _LONG_WARM_UP_PROMPTS else ids[:16] for i, ids in enumerate(other)]
        self._layer_params = layer_params(config_of(args))

    def measure(self, case: str) -> dict[str, object]:
        """The job with the weights in each home."""
        found: dict[str, object] = {}
        wanted: list[tuple[int, ...]] = []
        sizes: dict[str, int] = {}
        first = last = {"seconds": 0.0}
        homes = self._args.homes.split(",")
        for home in homes:
            last, tokens, chosen = self._run(case, home, sizes, self._prompts)
            if not wanted:
                # The same passes: what shares one decides the last bits of a random model's logits, and so its tokens.
                first, wanted, sizes = last, tokens, chosen
            elif tokens != wanted:
                raise SystemExit(f"gate: {case}: weights from {home!r} give other tokens than from {homes[0]!r}")
            else:
                found[f"{_NAMES[home]}_over_{_NAMES[homes[0]]}"] = round(first["seconds"] / last["seconds"], 4)
            found[_NAMES[home]] = last
        if self._own:
            own, _, _ = self._run(case, homes[-1], sizes, self._own)
            found["own"], found["shared_over_own"] = own, round(own["seconds"] / last["seconds"], 4)
        return found

    def _run(
        self, case: str, home: str, sizes: dict[str, int], prompts: list[list[int]]
    ) -> tuple[dict[str, float], list[tuple[int, ...]], dict[str, int]]:
        """The figures, the tokens, and the sizes that were chosen beside those that are given."""
        args = self._args
        stated = {"tokens_per_pass": args.tokens_per_pass, "max_sequences": args.sequences}
        section = {
            "speculate": "off",  # guesses, which streamed passes try, would share passes with other tokens
            **{key: size for key, size in stated.items() if size is not None},
            **CASES[case.removesuffix(_PLAIN)],
            **sizes,
        }
        offload = {"device": home, "nvme_path": str(self._folder.parent / "store")}
        config: dict[str, object] = {"zero_optimization": {"offload_param": offload}, "zinfer": section}
        config["replace_with_kernel_inject"] = not case.endswith(_PLAIN)
        params = zinfer.SamplingParams(max_new_tokens=args.new, ignore_eos=True)
        # Resident passes of few texts would be replayed in forms of their own, whose products round otherwise.
        config["enable_cuda_graph"] = False
        # Rates that are measured anew in each engine must not decide what passes carry.
        with zinfer.LLM(self._folder, config, swaps_to_disk=False) as llm:
            print(case, home, llm.plan, flush=True)
            llm.generate(_as_prompts(self._warm_up), _warm_up_params(home))
            disk_rates = [self._disk_rate(home)]
            before, tokens = llm.stats(), llm.num_tokens
            host_work = HostWork()
            with host_work.watched():
                begin_s = time.perf_counter()
                found = llm.generate(_as_prompts(prompts), params)
                seconds = time.perf_counter() - begin_s
            disk_rates.append(self._disk_rate(home))
            predicted = llm.predict([args.prompt] * args.prompts, args.new)
            stats, steady_s = llm.stats(), self._steady_s_per_token(llm)
            chosen = {"kv_cache_memory": llm.batching.kv_bytes}
            passes, tokens = stats.passes - before.passes, llm.num_tokens - tokens
            host_figures = host_work.figures([size for size, _ in llm.passes()])
        if any(completion.error for completion in found):
            raise SystemExit(f"gate: {case}: {next(each.error for each in found if each.error)}")
        disk_bytes = stats.bytes_read_disk - before.bytes_read_disk
        figures = {
            "seconds": round(seconds, 3),
            "over_predicted": round(seconds / predicted.seconds, 4),
            "passes": passes,
            "tokens_per_pass": round(tokens / passes, 1),
            "sequences_per_pass": round(len(found) * args.new / passes, 1),
            "tokens_per_s": round(len(found) * args.new / seconds, 1),
            "matrix_tflops": round(2 * self._layer_params * tokens / seconds / 1e12, 1),
            "steady_tflops": round(2 * self._layer_params / steady_s / 1e12, 1),
            "gb_of_streamed_blocks": round(stats.streamed_bytes_per_pass / 1e9, 3),
            "streamed_gb": round((stats.bytes_to_device - before.bytes_to_device) / 1e9, 3),
            "kv_gb": round((stats.kv_bytes_to_device - before.kv_bytes_to_device) / 1e9, 3),
            "link_stall_s": round(stats.stall_s["link"] - before.stall_s["link"], 3),
            **_shares(stats),
            **host_figures,
        }
        if home == "nvme":
            disk_rate = statistics.mean(disk_rates)
            figures |= {"disk_gb": round(disk_bytes / 1e9, 3), "disk_gb_per_s": round(disk_rate / 1e9, 3)}
            figures |= {"of_disk": round(disk_bytes / disk_rate / seconds, 4)}
        print(case, home, figures, flush=True)
        return figures, [completion.token_ids for completion in found], chosen

    def _disk_rate(self, home: str) -> float:
        """Bytes per second of plain reads of the checkpoint; 0 where nothing comes from disk."""
        if home != "nvme":
            return 0.0
        files = sorted(self._folder.glob("*.safetensors"))
        return PlainReads(files, best_disk_setting(files)).bytes_per_s()

    @staticmethod
    def _steady_s_per_token(llm: zinfer.LLM) -> float:
        """The median over passes that carry nearly as much as the largest."""
        passes = llm.passes()
        most = max(size.num_tokens for size, _ in passes)
        return statistics.median(seconds / size.num_tokens for size, seconds in passes if size.num_tokens > 0.9 * most)


def _as_prompts(several: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in several]


def _shares(stats: RunStats) -> dict[str, float]:
    """Of the rates that the engine knows, what it used of them since it was made; refused above their ceiling."""
    shares = {"link_share": stats.link_share, "disk_share": stats.disk_share}
    return {name: round(share, 4) for name, share in shares.items() if share is not None}


def _warm_up_params(home: str) -> list[zinfer.SamplingParams]:
    """Texts that end one after the other; from disk, where every pass takes seconds, all at once."""
    counts = [2 if home == "nvme" else 2 + number // 3 for number in range(_WARM_UP_PROMPTS)]
    return [zinfer.SamplingParams(max_new_tokens=count, ignore_eos=True) for count in counts]


def config_of(args: argparse.Namespace) -> PretrainedConfig:
    return llama_config(args.layers) if args.model == "llama-3-70b" else opt_config(args.layers, args.hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="fp16,int8,int8-kv8")
    parser.add_argument("--homes", default="none,cpu", help="of none, cpu and nvme, those to run in this order")
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
