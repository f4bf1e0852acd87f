"""Measures several GPUs of one host against one of them, as a user starts them: `zinfer bench` in fresh processes.

    python benchmarks/ranks.py [--cases links,link-bound,compute-bound,gather,tensor,...] [--ranks 2] [--small]
                               [--compiled] [--out FILE]

Weights and prompts are random; a model's name with a number has that many layers of its shape. First
`zinfer probe --ranks` measures the links together, the gathers and the sums.

``copied_over_passes`` is what was copied to the GPUs over the streamed bytes of all passes: 1 if the ranks make each
pass together. ``links``: few rows, weights in host memory. ``link_share`` is the streamed bytes of all passes in the
job's seconds over the joint rate of the links; ``link_share_of_decodes`` is that of the passes and seconds which the
job has more than a shorter one, without the first passes. ``host_over_model`` is the pinned memory of all ranks over
the weights.
``link-bound``: the KV cache bounds the batch, so twice the GPUs are twice the links and twice the batch.
``compute-bound``: as many rows as one GPU computes at its full rate. ``gather``: seconds of a pass of 2,048 tokens a
rank in INT4, gathered from partitioned host memory, over those with the weights whole on each GPU;
``gather-on-devices``: likewise from memory of the GPUs.
``tensor``: one row, decoded by layers that are divided, over one GPU. ``opt-175b`` and ``llama-405b``: the
whole models, on all GPUs and, of the second, on one. ``over_one`` is tokens per second of all ranks over those of one.

Each run is a process of its own. The first with a model and its weights is made twice, and the second counts, so that
compiled kernels are on the disk; ``cold_s`` is the first's job. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from result import keep, publish

from zinfer.model.known_models import KNOWN_MODELS, known_config

_SMALL: Final = {"hidden_size": 128, "ffn_dim": 256, "word_embed_proj_dim": 128, "num_attention_heads": 4}


@dataclass(frozen=True)
class Job:
    """Options of `zinfer bench`.

    Attributes:
        model: a published model, with ``:N`` for N layers of it.
        mode: how the ranks share it, a size of ``zinfer.parallel``.
        homes: of ``offload_param.device``; None leaves them to the plan.
        options: keys of the section ``zinfer``.
    """

    model: str
    rows: int
    prompt_len: int
    new_tokens: int
    weights: str = "fp16"
    mode: str = "zero"
    homes: str | None = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)


_GATHERED: Final = Job("opt-30b:12", 1024, 512, 1, weights="int4", options={"tokens_per_pass": 2048})
# Too little for whole layers on each GPU.
_ON_DEVICES: Final = replace(_GATHERED, homes="none", options={"tokens_per_pass": 2048, "max_weight_memory": "3.35GB"})
CASES: Final = {
    "links": Job("opt-30b:12", 16, 32, 96),
    # Eight batches of what one GPU's cache holds: with fewer, a part of a batch more or less would decide.
    "link-bound": Job("opt-30b:12", 432, 128, 32, options={"kv_cache_memory": "3.6GB"}),
    "compute-bound": Job("opt-30b:12", 1024, 512, 32),
    "gather": _GATHERED,
    "gather-on-devices": _ON_DEVICES,
    "tensor": Job("llama-3-70b:60", 1, 64, 768, weights="int8", mode="tensor", homes="none"),  # fits one of 80 GB
    "opt-175b": Job("opt-175b", 384, 512, 32, homes=None),
    "llama-405b": Job("llama-3.1-405b", 512, 512, 32, weights="int4", homes=None),
}
_ON_ONE_TOO: Final = ("link-bound", "compute-bound", "tensor", "llama-405b")
_WHOLE: Final = Job(**{**vars(_GATHERED), "mode": "replicas", "homes": "none"})


class Runs:
    """Runs `zinfer bench`, and `zinfer probe` before.

    Args:
        folder: for configurations.
        num_ranks: of the runs on several GPUs.
        is_small: tiny shapes on the CPU, to try this file.
        is_compiled: runs of these models have left their kernels on the disk.
    """

    def __init__(self, folder: Path, num_ranks: int, is_small: bool, is_compiled: bool) -> None:
        self._folder, self._num_ranks, self._is_small, self._is_compiled = folder, num_ranks, is_small, is_compiled
        self._compiled = set[tuple[str, str, int]]()

    def probe(self) -> dict[str, Any]:
        """Return the rates of the ranks together."""
        device = "cpu" if self._is_small else "cuda"
        words = ["probe", "--ranks", str(self._num_ranks), "--device", device, "--path", str(self._folder), "--json"]
        found: dict[str, Any] = json.loads(self._run(words))["ranks"][-1]
        return found

    def together(self, job: Job) -> dict[str, Any]:
        """Run a job on all GPUs, with compiled kernels on the disk; ``cold_s`` says what it took without."""
        return self._compiled_bench(job, self._num_ranks)

    def alone(self, job: Job) -> dict[str, Any]:
        """Run a job on one GPU; as `together`."""
        return self._compiled_bench(job, 1)

    def _compiled_bench(self, job: Job, num_ranks: int) -> dict[str, Any]:
        key = (job.model, job.weights, num_ranks if job.mode == "tensor" else 1)  # which kernels depend on
        if self._is_compiled or job.homes is None or key in self._compiled:
            return self._bench(job, num_ranks)
        self._compiled.add(key)
        cold = self._bench(job, num_ranks)
        return self._bench(job, num_ranks) | {"cold_s": cold["seconds"]}

    def _bench(self, job: Job, num_ranks: int) -> dict[str, Any]:
        homes = {} if job.homes is None else {"zero_optimization": {"offload_param": {"device": job.homes}}}
        parallel = {"parallel": {job.mode: num_ranks}} if num_ranks > 1 else {}
        config = self._folder / "config.json"
        sizes = {"max_weight_memory": "26MB"} if self._is_small and "max_weight_memory" in job.options else {}
        config.write_text(json.dumps({**homes, "zinfer": {**job.options, **sizes, **parallel}}))
        words = ["bench", "--model", str(self._model(job.model)), "--weights", job.weights, "--config", str(config)]
        rows = min(job.rows, 8) if self._is_small else job.rows
        words += ["--rows", str(rows), "--prompt-len", str(job.prompt_len), "--new-tokens", str(job.new_tokens)]
        words += ["--ranks", str(num_ranks)]
        words += ["--device", "cpu"] if self._is_small else []
        begin_s = time.perf_counter()
        found: dict[str, Any] = json.loads(self._run([*words, "--json"]).splitlines()[-1])
        return found | {"process_s": time.perf_counter() - begin_s}

    def _model(self, name: str) -> Path | str:
        known, _, num_layers = name.partition(":")
        if not num_layers and not self._is_small:
            return known
        config = dict(known_config(KNOWN_MODELS["opt-30b" if self._is_small else known]))
        config |= _SMALL if self._is_small else {}
        folder = self._folder / f"model-{known}"
        folder.mkdir(exist_ok=True)
        text = json.dumps({**config, "num_hidden_layers": int(num_layers or 2)})
        (folder / "config.json").write_text(text)
        return folder

    @staticmethod
    def _run(words: list[str]) -> str:
        print("zinfer", *words, file=sys.stderr, flush=True)
        return subprocess.run(
            [sys.executable, "-m", "zinfer", *words], stdout=subprocess.PIPE, text=True, check=True
        ).stdout


def measure(case: str, runs: Runs, rates: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of a case and of what it is compared with, by name."""
    job = CASES[case]
    found = runs.together(job)
    figures: dict[str, Any] = _shown(found)
    others: dict[str, dict[str, Any]] = {}
    if case == "links":
        short = runs.together(replace(job, new_tokens=job.new_tokens // 3))
        others = {"a third of the new tokens": _shown(short)}
        more_bytes, more_s = _streamed_bytes(found) - _streamed_bytes(short), found["seconds"] - short["seconds"]
        figures["link_share"] = _streamed_bytes(found) / found["seconds"] / rates["to_device_bytes_per_s"]
        figures["link_share_of_decodes"] = more_bytes / more_s / rates["to_device_bytes_per_s"]
        figures["host_over_model"] = found["host_bytes"] / sum(found["bytes_by_home"].values())
    if case.startswith("gather"):
        whole = runs.together(_WHOLE)
        others = {"whole weights": _shown(whole)}
        figures["gathered_over_whole"] = _pass_s(found) / _pass_s(whole)
    if case in _ON_ONE_TOO:
        alone = runs.alone(job)
        others = {"one GPU": _shown(alone)}
        figures["over_one"] = found["tokens_per_s"] / alone["tokens_per_s"]
    return {case: figures, **{f"{case}, {name}": each for name, each in others.items()}}


def _num_passes(found: Mapping[str, Any]) -> float:
    """Passes of a rank; those of all are counted together."""
    return float(found["passes"]) / len(found.get("ranks", "1"))


def _pass_s(found: Mapping[str, Any]) -> float:
    return float(found["seconds"]) / _num_passes(found)


def _streamed_bytes(found: Mapping[str, Any]) -> float:
    """Bytes that all ranks copy in all passes if they make them together."""
    return float(found["streamed_bytes_per_pass"]) * _num_passes(found)


def _shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run: without the parts of each rank."""
    names = ("rows", "seconds", "predicted_s", "tokens_per_s", "prompt_tokens_per_s", "bottleneck", "start_s")
    more = (
        "over_predicted",
        "process_s",
        "passes",
        "bytes_by_home",
        "streamed_bytes_per_pass",
        "device_bytes",
        "host_bytes",
        "stall_s",
    )
    found = {**found, "over_predicted": found["seconds"] / found["predicted_s"]}
    shown = {name: found[name] for name in (*names, *more, "cold_s") if name in found}
    if streamed_bytes := _streamed_bytes(found):
        shown["copied_over_passes"] = (found["bytes_to_device"] - found["loaded_bytes"]) / streamed_bytes
    return shown


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="links,link-bound,compute-bound,gather,tensor")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--compiled", action="store_true", help="kernels are on the disk already: each job runs once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), args.ranks, args.small, args.compiled)
        rates = runs.probe()
        cases: dict[str, Any] = {}
        figures = {"benchmark": "ranks", "ranks": args.ranks, "joined": rates, "cases": cases}
        for case in args.cases.split(","):
            found = measure(case, runs, rates)
            cases |= found
            print(json.dumps(found), file=sys.stderr, flush=True)
            keep(figures, args.out)
    publish(figures, args.out)


if __name__ == "__main__":
    main()
