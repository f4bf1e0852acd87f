"""The batch job: prompts in a JSONL file, completions in another, crash-safe and resumable, rows byte-identical.

A row's bytes depend on the model, the input, the settings in the manifest and the machine; never on memory budgets, on
when the job was ended or how often. A batch in which anything fails writes no row.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zinfer import __version__
from zinfer.checkpoint import Checkpoint
from zinfer.config import Settings, resolve_settings
from zinfer.config.settings import Batch as BatchSettings
from zinfer.display import shown
from zinfer.errors import JobError
from zinfer.jobs.batches import Batch, BatchCutter, input_changed
from zinfer.jobs.decoding import Completion, Engine, complete
from zinfer.jobs.identity import tokenizer_hash, weights_sample
from zinfer.jobs.index import RowIndex, scan_input
from zinfer.jobs.manifest import Manifest
from zinfer.jobs.output import OutputFile, Resumed, RowState
from zinfer.jobs.progress import Meter
from zinfer.jobs.prompts import Prompt, PromptMaker, Room
from zinfer.jobs.request import JobRequest, PathLike
from zinfer.jobs.rows import BadRow
from zinfer.jobs.summary import JobSummary
from zinfer.model import build_meta_model
from zinfer.sequence_length import max_positions
from zinfer.units import name_values

EngineFactory = Callable[..., Engine]


def run_job(
    model: PathLike,
    input: PathLike,
    output: PathLike,
    *,
    config: PathLike | Mapping[str, object] | None = None,
    device: str = "auto",
    max_new_tokens: int = 128,
    batch_size: int = 32,
    restart: bool = False,
    trace: PathLike | None = None,
    console: Console | None = None,
    engine_factory: EngineFactory | None = None,
) -> JobSummary:
    """Completes every row of `input` into `output`, going on where an earlier run of the same job stopped.

    Args:
        model: a checkpoint folder with its tokenizer.
        input: JSONL with `prompt` or `messages`, and optionally `id`, `max_new_tokens`, `temperature`, `top_p`,
            `top_k`, `seed` and `stop` in each row. Rows are greedy unless they give a temperature.
        output: JSONL, appended to. Its manifest lies beside it as `<output>.manifest.json`.
        config: DeepSpeed-style configuration, a dict or the path of a JSON file.
        device: "auto", "cuda" or "cpu".
        max_new_tokens: for rows that do not say themselves.
        batch_size: prompts computed together. Part of what decides the rows' bytes.
        restart: discard the rows of an earlier job in `output`, whatever its settings were.
        trace: a file for a Perfetto trace of reads, copies and computes, written when the job ends.
        console: shows progress there; None shows nothing.
        engine_factory: makes the engine, called as `zinfer.init_inference` is, which is the default.

    Raises:
        UnusableInput, ConfigError, CheckpointError, PlanError: no prompt was computed.
        JobError: the job stopped in the middle; the rows in the output are whole, and the same call goes on.
    """
    traced = None if trace is None else Path(trace)
    request = JobRequest(model, Path(input), Path(output), config, device, max_new_tokens, batch_size, restart, traced)
    request.check()
    with shown(Meter(console)) as meter:
        return _Job(request, meter, engine_factory or _init_inference).run()


class _Job:
    """One run of a job."""

    def __init__(self, request: JobRequest, meter: Meter, engine_factory: EngineFactory) -> None:
        self._request = request
        self._meter = meter
        self._engine_factory = engine_factory
        self._engine: Engine | None = None
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._predicted_s = 0.0
        self._computing_s = 0.0

    def run(self) -> JobSummary:
        request = self._request
        settings = self._settings = resolve_settings(request.config, {"device": request.device})
        for ignored in settings.without_effect:
            self._meter.note(f"without effect: {ignored.path} ({ignored.reason})")
        checkpoint = Checkpoint.open(request.model)
        model = build_meta_model(checkpoint, settings.dtype)
        room = Room.least(max_positions(model), settings.max_out_tokens)
        vocab_size = model.config.get_text_config().vocab_size
        maker = PromptMaker.from_folder(checkpoint.folder, room, vocab_size, request.max_new_tokens)
        index = scan_input(request.input)
        manifest = Manifest(
            model=_model_identity(checkpoint, maker),
            input={"sha256": index.sha256, "size_bytes": index.size_bytes},
            settings=_result_settings(request, settings, model.dtype),
            versions=_versions(),
            began=maker.now.isoformat(),
        )
        with OutputFile(request.output) as out:
            resumed = self._resume(out, index, manifest, maker)
            self._meter.num_rows = index.num_rows
            self._meter.num_finished = self._meter.num_skipped = index.num_rows - resumed.states.count(RowState.MISSING)
            try:
                for batch in BatchCutter(
                    index, resumed.states, request.batch_size, maker.prompt_of, room.max_tokens if room else None
                ):
                    self._finish(batch, maker, out, manifest, resumed.states)
                if RowState.MISSING in resumed.states:
                    raise input_changed(request.input)
                return self._summary(resumed.states)
            finally:
                if self._engine is not None:
                    self._engine.destroy()

    def _resume(self, out: OutputFile, index: RowIndex, manifest: Manifest, maker: PromptMaker) -> Resumed:
        if self._request.restart:
            out.refuse_stranger()
            return Resumed(bytearray(index.num_rows), 0)
        out.refuse_unless(manifest)
        if out.manifest is None:
            return Resumed(bytearray(index.num_rows), 0)
        maker.now = datetime.fromisoformat(out.manifest.began)
        if out.manifest.versions != manifest.versions:
            former, now = name_values(out.manifest.versions), name_values(manifest.versions)
            self._meter.note(f"this job began with {former}; now {now}")
        resumed = out.resume(index)
        if resumed.torn_bytes:
            self._meter.note(f"{out.path}: dropped a torn last line of {resumed.torn_bytes} bytes")
        return resumed

    def _finish(self, batch: Batch, maker: PromptMaker, out: OutputFile, manifest: Manifest, states: bytearray) -> None:
        """Computes a batch where that is needed and appends its missing rows."""
        engine = self._loaded(batch.parts) if batch.parts else None
        if not out.is_begun:
            out.begin(manifest)
        self._meter.begin("running")
        completions = {} if engine is None else self._complete(engine, batch, maker.tokenizer)
        records: list[dict[str, Any]] = []
        for ordinal, item in batch.missing:
            if isinstance(item, BadRow):
                records.append({"id": item.id, "error": item.message})
                states[ordinal] = RowState.FAILED
            else:
                records.append(completions[id(item)].record())
                states[ordinal] = RowState.DONE
        out.append(records)
        self._meter.num_finished += len(records)
        self._meter.batch_rows = 0
        self._num_prompt_tokens += sum(record.get("num_prompt_tokens", 0) for record in records)
        self._num_output_tokens += sum(record.get("num_output_tokens", 0) for record in records)

    def _complete(self, engine: Engine, batch: Batch, tokenizer: Any) -> dict[int, Completion]:
        """The completions of the batch's parts, by the identity of their prompts."""
        meter = self._meter
        num_steps = sum(max(prompt.max_new_tokens for prompt in part) for part in batch.parts)
        meter.batch_share = 0.0
        meter.batch_rows = sum(isinstance(item, Prompt) for _, item in batch.missing)

        def on_step(num_running: int) -> None:
            meter.num_tokens += num_running
            meter.batch_share += 1 / num_steps

        completions: list[Completion] = []
        for part in batch.parts:
            begin_s = time.monotonic()
            with _stopping(f"rows {part[0].row.id!r} to {part[-1].row.id!r}", self._request.output):
                completions += complete(engine, part, tokenizer, on_step)
            self._computing_s += time.monotonic() - begin_s
            num_passes = max(len(completion.token_ids) for completion in completions[-len(part) :])
            self._predicted_s += engine.predict(len(part), _longest(part), max(1, num_passes)).seconds
        return {id(completion.prompt): completion for completion in completions}

    def _loaded(self, parts: Sequence[Sequence[Prompt]]) -> Engine:
        """The engine, made when the first batch needs it, with room for that one."""
        if self._engine is None:
            request = self._request
            shape = {
                "batch_size": max(map(len, parts)),
                "prompt_len": max(map(_longest, parts)),
                "new_tokens": max(prompt.max_new_tokens for part in parts for prompt in part),
            }
            options: dict[str, object] = {} if request.trace is None else {"trace": str(request.trace)}
            if self._settings.batch == BatchSettings() and self._settings.memory.max_device_memory is None:
                options |= shape
            self._meter.begin("loading")
            with _stopping("loading the model", request.output):
                engine = self._engine_factory(request.model, config=request.config, device=request.device, **options)
                self._engine = engine
                self._meter.note(f"plan: {engine.plan}")
                predicted = engine.predict(**shape)
            self._meter.note(f"predicted: {predicted} (rates: {predicted.origin})")
        return self._engine

    def _summary(self, states: bytearray) -> JobSummary:
        meter = self._meter
        return JobSummary(
            num_rows=meter.num_rows,
            num_done=states.count(RowState.DONE),
            num_failed=states.count(RowState.FAILED),
            num_skipped=meter.num_skipped,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            wall_s=time.monotonic() - meter.started_s,
            running_s=meter.running_s,
            predicted_s=self._predicted_s,
            computing_s=self._computing_s,
            stats=None if self._engine is None else self._engine.stats(),
            notes=tuple(meter.notes),
        )


def _longest(part: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt."""
    return max(len(prompt.token_ids) for prompt in part)


@contextmanager
def _stopping(what: str, output: Path) -> Iterator[None]:
    """Turns a failure of the engine into a JobError that says what was under way; the cause stays attached."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        remedy = "run the same command again to go on"
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            remedy = (
                "lower zinfer.max_device_memory or zinfer.max_host_memory in the config, which leaves more for the "
                f"rows, and {remedy}; or begin anew with a smaller --batch-size and --restart"
            )
        kind = type(error).__name__
        raise JobError(f"{what}: {kind}: {error}\nThe rows in {output} are kept; {remedy}") from error


def _model_identity(checkpoint: Checkpoint, maker: PromptMaker) -> dict[str, str]:
    return {
        "fingerprint": checkpoint.fingerprint(),
        "weights_sample": weights_sample(list(checkpoint.files)),
        "tokenizer": tokenizer_hash(checkpoint.folder),
        "chat_template": maker.template_hash,
    }


def _result_settings(request: JobRequest, settings: Settings, dtype: torch.dtype) -> dict[str, str | int]:
    """The settings on which the rows' bytes depend."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, str | int] = {
        "max_new_tokens": request.max_new_tokens,
        "batch_size": request.batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "max_out_tokens": settings.max_out_tokens or "the model's",
        "min_out_tokens": settings.min_out_tokens,
    }
    if settings.quantization is not None:
        found["quantization"] = json.dumps(settings.quantization.as_document())
    return found


def _versions() -> dict[str, str]:
    others = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "zinfer": __version__, **others}


def _init_inference(*args: Any, **kwargs: Any) -> Engine:
    import zinfer  # here, for the package's own names are made from modules like this one

    engine: Engine = zinfer.init_inference(*args, **kwargs)
    return engine
