"""The batch job: prompts in a JSONL file, completions in another, crash-safe and resumable, rows byte-identical.

A row's bytes depend on the model, the input, the machine, and the settings and sizes in the manifest; never on when the
job was ended or how often, nor on the memory budgets of a run that goes on.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from zinfer.checkpoint import Checkpoint
from zinfer.config import resolve_settings
from zinfer.config.without_effect import said_before, say_without_effect
from zinfer.display import shown
from zinfer.errors import JobError
from zinfer.jobs.batches import Batch, BatchCutter
from zinfer.jobs.completer import Answer, Completer
from zinfer.jobs.encoding import Encoding
from zinfer.jobs.exceptions import UnusableInput
from zinfer.jobs.execution_mode import EngineFactory, Method
from zinfer.jobs.index import RowIndex, scan_input
from zinfer.jobs.manifest import Manifest, model_identity, result_settings, versions
from zinfer.jobs.openai_response import OpenAIResponses
from zinfer.jobs.output import OutputFile, Resumed, RowState
from zinfer.jobs.prefetch_iter import ahead
from zinfer.jobs.progress import Meter
from zinfer.jobs.prompts import NO_TOKENIZER, Prompt, PromptMaker
from zinfer.jobs.reasons import reason_of, reason_of_bad
from zinfer.jobs.records import Records, first_error
from zinfer.jobs.request import JobRequest, PathLike
from zinfer.jobs.rows import BadRow
from zinfer.jobs.run_page import write_run_page
from zinfer.jobs.summary import JobSummary
from zinfer.jobs.task import Pooling, Task
from zinfer.jobs.timeline import Timeline
from zinfer.jobs.weights import Weights
from zinfer.jobs.writer import RowWriter
from zinfer.model.build import build_meta_model
from zinfer.model.context_length import read_limits
from zinfer.units import duration, name_values


def run_job(
    model: PathLike,
    input: PathLike,
    output: PathLike,
    *,
    config: PathLike | Mapping[str, object] | None = None,
    device: str = "auto",
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    restart: bool = False,
    trace: PathLike | None = None,
    report: PathLike | None = None,
    task: str = "generate",
    pooling: str = "mean",
    console: Console | None = None,
    engine_factory: EngineFactory | None = None,
) -> JobSummary:
    """Completes every row of `input` into `output`, going on where an earlier run of the same job stopped.

    Args:
        model: a checkpoint folder with its tokenizer.
        input: JSONL with `prompt`, `messages` or `prompt_token_ids` in each row, and optionally `id` and what
            `zinfer.SamplingParams` takes. Rows are greedy unless they give a temperature. Rows with a `custom_id` are
            those of an OpenAI batch, with a temperature of 1 unless they give one.
        output: JSONL, appended to: rows as they finish, each in its input's form. Its manifest lies beside it as
            `<output>.manifest.json`.
        config: DeepSpeed-style configuration, a dict or the path of a JSON file.
        device: "auto", "cuda" or "cpu".
        max_new_tokens: for rows that do not say themselves; None: 128, or what the model's context leaves.
        batch_size: rows that share passes; when all of them are complete the next ones begin. Part of what decides
            the rows' bytes, and the most that is computed again after a crash. By default 4,096 or
            fewer, for ten minutes at most, or 32 where a family of models has to be padded.
        restart: discard the rows of an earlier job in `output`, whatever its settings were.
        trace: a file for a Perfetto trace of reads, copies and computes, written when the job ends.
        report: an HTML page of what the job did over time, written when it ends.
        task: "generate", or of models that need not generate "embed" (a vector of length 1 a row, from the encoder) or
            "classify" (a label, and the scores of all). Rows then have a source and an id alone.
        pooling: of "embed": "mean" over a text's tokens, or "cls", the first one's.
        console: shows progress there; None shows nothing.
        engine_factory: makes an engine for padded batches, called as `zinfer.init_inference` is; by default that is
            made where the family of models takes no other batches.

    Raises:
        UnusableInput, ConfigError, CheckpointError, PlanError: no prompt was computed.
        JobError: the job stopped in the middle; the rows in the output are whole, and the same call goes on.
    """
    traced = None if trace is None else Path(trace)
    page = None if report is None else Path(report)
    request = JobRequest(
        model,
        Path(input),
        Path(output),
        config,
        device,
        max_new_tokens,
        batch_size,
        restart,
        traced,
        page,
        Task(task),
        Pooling(pooling),
    )
    request.check()
    with shown(Meter(console)) as meter:
        return _Job(request, meter, engine_factory).run()


class _Job:
    """One run of a job."""

    def __init__(self, request: JobRequest, meter: Meter, engine_factory: EngineFactory | None) -> None:
        self._request = request
        self._meter = meter
        self._engine_factory = engine_factory
        self._completer: Completer | None = None
        self._timeline: Timeline | None = None
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._computing_s = 0.0
        self._kept_sizes: Mapping[str, int] = {}
        self._said_cost = False
        self._failures: Counter[str] = Counter()

    def run(self) -> JobSummary:
        request = self._request
        generates = request.task is Task.GENERATE
        settings = self._settings = resolve_settings(request.config, {"device": request.device}, parks=generates)
        say_without_effect(settings, self._meter.note)
        checkpoint = Checkpoint.open(request.model)
        model = build_meta_model(checkpoint, settings.dtype)
        method = self._method = Method(request, settings, model, self._engine_factory, self._meter)
        limits = read_limits(model, settings.max_out_tokens, generates=generates)
        vocab_size = model.config.get_text_config().vocab_size
        maker = self._maker = PromptMaker.from_folder(
            checkpoint.folder, limits, vocab_size, request.max_new_tokens, generates=generates
        )
        # Rows are encoded by another thread, which must not share its tokenizer.
        self._tokenizer = deepcopy(maker.tokenizer)
        index = scan_input(request.input, may_be_empty=True)
        weights = self._weights = Weights(checkpoint)
        if maker.tokenizer is None and index.num_rows and not maker.finds_usable_row(index):
            raise UnusableInput(f"model {checkpoint.folder} has no tokenizer; {NO_TOKENIZER}")
        identity = model_identity(checkpoint, maker)
        with OutputFile(request.output) as out:
            if out.manifest is not None and not request.restart:
                method.take_batch_size(out.manifest.settings)
            manifest = Manifest(
                model=identity,
                input={"sha256": index.sha256, "size_bytes": index.size_bytes},
                settings={**result_settings(request, settings, model.dtype), **method.settings()},
                versions=versions(),
                began=maker.now.isoformat(),
                model_name=Path(request.model).name or checkpoint.folder.name,
                weights=weights.files,
            )
            resumed = self._resume(out, index, manifest, maker)
            self._records = Records(OpenAIResponses(maker.now, self._model_name, self._tokenizer))
            self._meter.num_rows = index.num_rows
            self._meter.num_finished = self._meter.num_skipped = index.num_rows - resumed.states.count(RowState.MISSING)
            try:
                if method.chooses_batch_size and not out.is_begun:
                    self._choose_batch_size(index, maker)
                    manifest = replace(manifest, settings={**manifest.settings, "batch_size": method.batch_size})
                cutter = BatchCutter(index, resumed.states, method.batch_size, maker.prompt_of)
                with closing(RowWriter(out, self._meter.add_finished)) as writer, closing(ahead(cutter)) as batches:
                    for batch in batches:
                        self._finish(batch, out, writer, manifest, resumed.states)
                assert RowState.MISSING not in resumed.states
                if not out.is_begun:  # an empty input
                    out.begin(manifest)
                weights.wait()
                self._keep_weights(out)
                out.refuse_altered()
                return self._ended(resumed.states)
            finally:
                self._close()
                maker.close()

    def _choose_batch_size(self, index: RowIndex, maker: PromptMaker) -> None:
        """Let as many rows share passes as `Completer.rows_together` says of the first ones."""
        states = bytearray(index.num_rows)
        batches = BatchCutter(index, states, self._method.batch_size, maker.prompt_of)
        prompts = next((batch.prompts for batch in batches if batch.prompts), None)
        if prompts is not None:
            self._method.batch_size = self._loaded(prompts).rows_together(prompts)

    def _close(self) -> None:
        try:
            self._weights.close()
            if self._timeline is not None:
                self._timeline.close()
        finally:
            if self._completer is not None:
                self._completer.close()

    def _resume(self, out: OutputFile, index: RowIndex, manifest: Manifest, maker: PromptMaker) -> Resumed:
        self._model_name = manifest.model_name
        if self._request.restart:
            out.refuse_stranger()
            return Resumed(bytearray(index.num_rows), 0)
        out.refuse_unless(manifest)
        if out.manifest is None:
            return Resumed(bytearray(index.num_rows), 0)
        self._weights.adopt(out.manifest.weights, self._meter.note)
        if self._weights.files != out.manifest.weights:
            out.keep(replace(out.manifest, weights=self._weights.files))
        maker.now = datetime.fromisoformat(out.manifest.began)
        if out.manifest.versions != manifest.versions:
            former, now = name_values(out.manifest.versions), name_values(manifest.versions)
            self._meter.note(f"this job began with {former}; now {now}")
        self._model_name = out.manifest.model_name or manifest.model_name
        self._kept_sizes = out.manifest.sizes
        resumed = out.resume(index)
        if resumed.torn_bytes:
            self._meter.note(f"{out.path}: dropped a torn last line of {resumed.torn_bytes} bytes")
        return resumed

    def _finish(self, batch: Batch, out: OutputFile, writer: RowWriter, manifest: Manifest, states: bytearray) -> None:
        """Computes a batch where that is needed and has its missing rows written."""
        completer = self._loaded(batch.prompts) if batch.prompts else None
        if not out.is_begun:
            out.begin(manifest)
        assert out.manifest is not None
        if completer is not None and not out.manifest.sizes:
            out.keep(replace(out.manifest, sizes=completer.sizes))
        self._meter.begin("running")
        ordinals: dict[int, int] = {}
        for ordinal, item in batch.missing:
            if isinstance(item, BadRow):
                writer.put(self._records.refused(item))
                self._failures[reason_of_bad(item)] += 1
                states[ordinal] = RowState.FAILED
            else:
                ordinals[id(item)] = ordinal
        if completer is not None:
            self._complete(completer, batch.prompts, ordinals, writer, states, out)

    def _keep_weights(self, out: OutputFile) -> None:
        """Put checksums into the manifest that have become known."""
        if self._weights.is_news():
            assert out.manifest is not None
            out.keep(replace(out.manifest, weights=self._weights.files))

    def _complete(
        self,
        completer: Completer,
        prompts: Sequence[Prompt],
        ordinals: Mapping[int, int],
        writer: RowWriter,
        states: bytearray,
        out: OutputFile,
    ) -> None:
        """ordinals: of the missing rows, by the identity of their prompts."""
        begin_s = time.monotonic()
        self._say_what_a_kill_costs(len(prompts))
        self._meter.begin_batch(len(ordinals), len(prompts))
        if num_again := len(prompts) - len(ordinals):
            self._meter.note(
                f"computing {num_again:,} rows again that are in the output already, beside {len(ordinals):,} that are "
                "missing: they shared passes, and so every row stays as it would have been"
            )
        rows = f"rows {prompts[0].row.id!r} to {prompts[-1].row.id!r}"
        with _stopping(rows, self._request.output), closing(completer.complete(prompts, ordinals.keys())) as completed:
            for prompt, answer in completed:
                self._weights.read_rest()
                self._keep_weights(out)
                if (ordinal := ordinals.get(id(prompt))) is not None:
                    states[ordinal] = self._write(prompt, answer, writer)
        self._meter.end_batch()
        self._computing_s += time.monotonic() - begin_s

    def _say_what_a_kill_costs(self, num_rows: int) -> None:
        """Once: rows that share passes are computed together or not at all."""
        if self._said_cost:
            return
        self._said_cost = True
        seconds = self._meter.predicted_row_s * num_rows
        taking = f", {duration(seconds)} as predicted" if seconds else ""
        self._meter.note(
            f"if this job is killed, at most the batch under way is computed again: {num_rows:,} rows{taking}; "
            "rows that are written are kept"
        )

    def _write(self, prompt: Prompt, answer: Answer, writer: RowWriter) -> RowState:
        writer.put(self._records.completed(prompt, answer))
        if (error := first_error(answer)) is not None:
            self._failures[reason_of(error)] += 1
            return RowState.FAILED
        self._num_prompt_tokens += len(prompt.token_ids)
        if not isinstance(answer, Encoding):
            self._num_output_tokens += sum(len(each.token_ids) for each in answer)
        return RowState.DONE

    def _loaded(self, prompts: Sequence[Prompt]) -> Completer:
        """The completer, made when the first batch needs it, with room for that one."""
        if self._completer is None:
            self._meter.begin("loading")
            with _stopping("loading the model", self._request.output), said_before():
                checksums, limits = self._weights.checksums, self._maker.limits
                completer = self._method.open(prompts, self._kept_sizes, self._tokenizer, limits, checksums)
                self._completer = completer
                self._weights.check_unchanged()
                self._meter.note(f"plan: {completer.plan}")
                forecast = completer.forecast(prompts)
            self._meter.note(f"predicted: {forecast.text}")
            self._meter.predicted_row_s = forecast.seconds / len(prompts)
            self._meter.predicted_row_passes = forecast.num_passes / len(prompts)
            if self._request.report is not None:
                self._timeline = Timeline(completer.stats, completer.load)
        return self._completer

    def _ended(self, states: bytearray) -> JobSummary:
        summary = self._summary(states)
        if self._request.report is not None:
            if self._timeline is not None:
                self._timeline.close()
            moments = [] if self._timeline is None else self._timeline.moments
            try:
                write_run_page(self._request.report, str(self._request.output), summary, moments)
            except OSError as error:
                raise JobError(
                    f"report {self._request.report} cannot be written: {error.strerror} (errno {error.errno}). All "
                    f"rows are in {self._request.output}"
                ) from error
        return summary

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
            predicted_s=0.0 if self._completer is None else self._completer.predicted_s,
            computing_s=self._computing_s,
            stats=None if self._completer is None else self._completer.stats(),
            notes=tuple(meter.notes),
            output=str(self._request.output),
            failures=dict(self._failures.most_common()),
        )


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
