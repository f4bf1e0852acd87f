"""A job without weights: random weights of a model's shape, random prompts, and the speed beside its prediction."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, Final

import torch
from rich.console import Console

from zinfer.batching.llm import LLM
from zinfer.config import Settings, resolve_settings
from zinfer.config.settings import mute_key_report, say_without_effect
from zinfer.display import shown
from zinfer.engine.random_weights import RandomWeights, forget_pages, write_random
from zinfer.errors import CheckpointError, ConfigError, JobError, PlanError
from zinfer.jobs.bench_prompts import BenchPrompt, prompts_of, share_of
from zinfer.jobs.bench_request import BenchRequest
from zinfer.jobs.bench_result import BenchResult
from zinfer.jobs.comparison import MOST_ROWS, Compared, check_room, compare
from zinfer.jobs.completer import load_of
from zinfer.jobs.memory_cap import held_beyond
from zinfer.jobs.progress import Forecast, JobForecast, Meter, Stretch
from zinfer.jobs.rehearsal import Rehearsal
from zinfer.jobs.rivals import Task, is_installed
from zinfer.jobs.summary import weights_line
from zinfer.model.built_outline import made_up_model
from zinfer.model.known_models import find_known_model, known_config
from zinfer.nvme.temporary_folder import temporary_folder
from zinfer.offload.block import Tier
from zinfer.offload.partition import Partition
from zinfer.planning.job_estimator import JobPrediction
from zinfer.planning.job_plan import Job
from zinfer.planning.job_sizes import Sizes, choose_sizes, plans_sizes, split
from zinfer.probe.limits import choose_device
from zinfer.ranks.group import RankGroup, all_values, join_group
from zinfer.ranks.mesh import Mesh
from zinfer.requests.sampling_params import SamplingParams
from zinfer.units import human_bytes
from zinfer.weights import Checkpoint
from zinfer.weights.folder import CONFIG_NAME
from zinfer.weights.hub import config_folder

_SAMPLE_BYTES: Final = 512 << 20  # to measure the disk with


def run_bench(request: BenchRequest, console: Console | None = None) -> BenchResult:
    """Run a job on random weights, and measure it.

    Args:
        request: model, prompts and limits.
        console: where to show progress; None shows nothing.

    Raises:
        ConfigError, CheckpointError, PlanError: nothing was computed.
        JobError: a prompt failed.
        OSError: the disk failed, or has no room for the random weights.
        RankError: another rank failed.
    """
    meter, keys = Meter(console), request.keys()
    settings = resolve_settings(request.config, keys, swaps=True, is_job=True)
    if settings.batching.speculate == "auto":  # texts of random weights repeat themselves: guesses would come true
        keys["speculate"] = "off"
        settings = resolve_settings(request.config, keys, swaps=True, is_job=True)
    group = join_group(choose_device(settings).type)
    mesh = Mesh.of(vars(settings.parallel), group.hosts if group else [gethostname()])
    place, members = (group.rank, mesh.ranks_along("zero", group.rank)) if group else (0, (0,))
    partition = Partition(members.index(place), len(members))
    scratch = settings.offload.nvme_path
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with shown(meter), temporary_folder("bench", scratch) as folder:
        say_without_effect(settings, meter.note)
        checkpoint, every = _prepare(request, settings, folder)
        prompts = share_of(every, mesh.share_of(place), mesh, request)
        if group is not None and request.compare and len(set(group.hosts)) > 1:
            raise ConfigError("--compare runs rivals on one host; leave it out, or start ranks on one host")
        if any(map(is_installed, request.compare)):
            check_room(checkpoint, folder)
        with held_beyond(request.memory_cap, settings) as held:
            weights, begin_s = RandomWeights(folder, request.experts, partition, group), time.perf_counter()
            job = Job(len(every), *_lengths(prompts))
            meter.begin("planning")
            sizes = _choose_sizes(folder, checkpoint, settings, job, meter, mesh, group)
            meter.begin("loading")
            with _open(request, checkpoint, keys, sizes, weights) as llm:
                start_s = time.perf_counter() - begin_s
                meter.begin("planning")
                predicted = llm.predict(*_lengths(prompts))
                if group is not None:
                    all_values(group, None)  # they share each other's passes; rates are measured before any
                weights.leave_cache()
                found = _measure(request, llm, weights, prompts, predicted, meter, start_s, held)
        if group is not None:
            found = BenchResult.together(all_values(group, found), mesh)
            if group.rank > 0:  # its process ends, and leaves its memory to rivals
                return found
        meter.begin("comparing")
        compared = _compared(request, checkpoint, every, found, folder)
        meter.begin("end")
        return replace(found, compared=compared, phase_s=meter.phase_s)


def _choose_sizes(
    scratch: Path,
    checkpoint: Checkpoint,
    settings: Settings,
    job: Job,
    meter: Meter,
    mesh: Mesh,
    group: RankGroup | None,
) -> Sizes:
    """Return the sizes that the first rank chooses for all, by the rate of the disk that holds the random weights."""
    found: Sizes = {}
    if plans_sizes(settings) and (group is None or group.rank == 0):
        num_hosts, sample = len(set(group.hosts)) if group else 1, scratch / "sample.bin"
        write_random(sample, _SAMPLE_BYTES, torch.float16)
        try:
            forget_pages(sample)
            found = choose_sizes(checkpoint.folder, settings, job, meter.note, mesh, num_hosts, [sample])
        finally:
            sample.unlink()
    return found if group is None else all_values(group, found)[0]


def _compared(
    request: BenchRequest, checkpoint: Checkpoint, prompts: list[BenchPrompt], found: BenchResult, scratch: Path
) -> tuple[Compared, ...]:
    if not request.compare:
        return ()
    device = "cpu" if found.device == "cpu" else "cuda"
    if device == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of the model's memory
    task = Task(
        rival="",
        checkpoint="",
        scratch=str(scratch),
        prompts=[list(prompt.token_ids) for prompt in prompts],
        new_tokens=request.new_tokens,
        batch_size=MOST_ROWS[device],
        device=device,
        device_bytes=request.memory_cap,
        num_ranks=len(found.ranks) or 1,
        result="",
    )
    return tuple(compare(request.compare, task, checkpoint, found.tokens_per_s))


def _prepare(request: BenchRequest, settings: Settings, scratch: Path) -> tuple[Checkpoint, list[BenchPrompt]]:
    """Return the outline of the checkpoint, and the prompts."""
    tree, checkpoint = made_up_model(_config_folder(request.model, scratch), settings.dtype)
    return checkpoint, prompts_of(request, checkpoint.folder, tree, settings.max_out_tokens)


def _config_folder(model: str, scratch: Path) -> Path:
    """Return the folder with the model's config.json; that of a published model is written to ``scratch``."""
    if (known := find_known_model(model)) is not None:
        (scratch / CONFIG_NAME).write_text(json.dumps(known_config(known)))
        return scratch
    folder = config_folder(model)
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"--model {model}: the folder holds no {CONFIG_NAME}; copy the model's there, weights are not needed"
        )
    return folder


@contextmanager
def _open(
    request: BenchRequest, checkpoint: Checkpoint, keys: Mapping[str, Any], sizes: Sizes, weights: RandomWeights
) -> Iterator[LLM]:
    chosen, arguments = split(sizes)
    options = {**keys, **chosen}
    rehearsal = Rehearsal(checkpoint, request.config, options, weights.prepare)
    beside, arguments = rehearsal.beside_load, {**arguments, "prepare": weights.prepare}
    try:
        with mute_key_report():  # `run_bench` has said it
            llm = LLM(checkpoint, request.config, beside_load=beside, **arguments, **options)
    except PlanError as error:
        if request.memory_cap is None:
            raise
        raise PlanError(
            f"--memory-cap {human_bytes(request.memory_cap)} (zinfer.max_device_memory): {error}"
        ) from error
    with llm:
        weights.wait_for_disk()
        yield llm
        rehearsal.note_passes()


def _measure(
    request: BenchRequest,
    llm: LLM,
    weights: RandomWeights,
    prompts: Sequence[BenchPrompt],
    predicted: JobPrediction,
    meter: Meter,
    start_s: float,
    held: tuple[int, int],
) -> BenchResult:
    meter.note(f"weights: {weights_line(llm.stats(), llm.device.type)}")
    meter.note(f"predicted: {predicted}")
    meter.num_rows = len(prompts)
    forecast = Forecast(f"{predicted}", predicted.tokens_per_s, predicted.seconds, predicted.num_passes)
    meter.forecast = JobForecast(forecast.text, (Stretch.of([forecast], len(prompts), len(prompts)),))
    meter.load = partial(load_of, llm)
    meter.begin("running")
    meter.begin_batch(len(prompts), len(prompts))
    num_new, begin_s = _generate(llm, prompts, meter), meter.running_since_s
    assert begin_s is not None
    seconds = time.monotonic() - begin_s
    homed = list(zip(weights.blocks, llm.plan.homes, strict=True))
    own_bytes = weights.partition.homed_bytes
    device = torch.cuda.get_device_name() if llm.device.type == "cuda" else "cpu"
    return BenchResult(
        model=request.model,
        device=device,
        num_rows=len(prompts),
        predicted=predicted,
        seconds=seconds,
        start_s=start_s,
        num_prompt_tokens=sum(_lengths(prompts)[0]),
        num_new_tokens=num_new,
        stats=llm.stats(),
        tier_bytes={
            tier.name: sum(own_bytes(block.block, home) for block, home in homed if home.tier is tier) for tier in Tier
        },
        busy_s=llm.predict_passes().busy_s,
        file=weights.file,
        file_bytes=weights.file_bytes,
        first_pass_s=min(llm.first_pass_s, seconds),
        held_bytes=held[0],
        context_bytes=held[1],
    )


def _generate(llm: LLM, prompts: Sequence[BenchPrompt], meter: Meter) -> int:
    """Complete all prompts, and return the number of new tokens."""
    rows: list[Any] = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
    params = [SamplingParams(max_new_tokens=prompt.new_tokens, ignore_eos=True) for prompt in prompts]
    num_new = 0
    for completion in llm.stream(rows, params):
        if completion.error is not None:
            raise JobError(f"prompt {completion.prompt_index + 1}: {completion.error}")
        num_new += len(completion.token_ids)
        meter.add_finished(1)
    return num_new


def _lengths(prompts: Sequence[BenchPrompt]) -> tuple[list[int], list[int]]:
    """Return the tokens of each prompt, and the new tokens of each."""
    return [len(prompt.token_ids) for prompt in prompts], [prompt.new_tokens for prompt in prompts]
