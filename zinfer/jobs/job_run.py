"""`JobRun`: one run of a job, from what the output has to its summary."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from zinfer.config import Settings
from zinfer.config.settings import say_without_effect
from zinfer.errors import JobError
from zinfer.jobs.arrangement import choose_mesh
from zinfer.jobs.batch_source import BatchSource
from zinfer.jobs.completer import Completer
from zinfer.jobs.embedding_head import EmbeddingHead
from zinfer.jobs.execution_mode import ExecutionMode, job_limits
from zinfer.jobs.index import scan_input
from zinfer.jobs.input_formats import check_first_rows
from zinfer.jobs.job_forecast import forecast_batch, forecast_job
from zinfer.jobs.manifest import Manifest
from zinfer.jobs.messages import Ready
from zinfer.jobs.openai_response import OpenAIResponses
from zinfer.jobs.output import Output, OutputFile, RowWriter
from zinfer.jobs.peers import Peers
from zinfer.jobs.progress import JobForecast, Meter
from zinfer.jobs.prompts import Batch, BatchCutter, Prompt, PromptReader, prefetch_iter
from zinfer.jobs.records import Records
from zinfer.jobs.report import write_report
from zinfer.jobs.request import JobRequest, Task, UnusableInput
from zinfer.jobs.row_sample import RowSample
from zinfer.jobs.rows import RowState, read_lines
from zinfer.jobs.summary import JobSummary
from zinfer.jobs.versions import software
from zinfer.jobs.weights import Weights, WeightsFile, new_sums, read_sums, write_sums
from zinfer.model.build import build_meta_model
from zinfer.planning.job_plan import Job
from zinfer.planning.job_sizes import Sizes, choose_sizes, plans_sizes
from zinfer.ranks.mesh import ALONE, Mesh
from zinfer.requests.prompt_encoder import NO_TOKENIZER, PromptEncoder, find_tokenizer
from zinfer.store.saved_parts import open_for_rank
from zinfer.units import duration, name_values
from zinfer.weights.checkpoint import tokenizer_hash
from zinfer.weights.range_sums import FileSums


class JobRun:
    """One run of a job on rank 0: its input rows, its weights, its execution mode, and the other ranks, if any.

    Args:
        request: was checked.
        meter: is told of the progress.
        peers: None: there are no other ranks.
        rows: a JSONL file with the rows of the input.

    Raises:
        UnusableInput, ConfigError, CheckpointError, PlanError, JobError: as `run_job`.
    """

    def __init__(self, request: JobRequest, settings: Settings, meter: Meter, peers: Peers | None, rows: Path) -> None:
        self._request, self._settings, self._meter, self._peers = request, settings, meter, peers
        generates = request.generates
        say_without_effect(settings, meter.note)
        self._checkpoint, fingerprint = open_for_rank(request.model, 0)
        if peers is not None:
            peers.check_same(fingerprint, software())
        self._weights = Weights(self._checkpoint)
        model = build_meta_model(self._checkpoint, settings.dtype)
        limits = job_limits(model, settings, generates=generates)
        tokenizer, prefix = find_tokenizer(self._checkpoint.folder), ""
        if request.task is Task.EMBED:
            head = EmbeddingHead.read(self._checkpoint.folder, request.pooling)
            limits = head.limits(limits, self._checkpoint.folder)
            prefix = head.prompt(request.prompt_name)
        self._encoder = PromptEncoder(tokenizer, model.config.get_text_config().vocab_size, limits)
        self._encoder.prefix = prefix
        # Another thread encodes the rows, and must not share its tokenizer.
        self._tokenizer = deepcopy(tokenizer)
        num_shares = 1 if peers is None else Mesh.of(vars(settings.parallel), peers.hosts).num_shares
        self._mode = ExecutionMode(request, settings, model, self._tokenizer, limits, self._weights, meter, num_shares)
        self._index = scan_input(rows, name=request.input, may_be_empty=True)
        self._reader = PromptReader(self._encoder, self._index, request.form, generates=generates)
        for note in check_first_rows(self._index, request.form):
            meter.note(note)
        self._sample: RowSample | None = None
        self._recorded: dict[str, FileSums] = {}
        self._divided: Mapping[str, int] = {}
        prompts = map(self._reader.read, read_lines(rows))
        if tokenizer is None and self._index.num_rows and not any(isinstance(row, Prompt) for row in prompts):
            raise UnusableInput(f"model {self._checkpoint.folder} has no tokenizer; {NO_TOKENIZER}")

    def run(self, out: Output) -> JobSummary:
        """Compute the rows missing from the output."""
        try:
            return self._run(out)
        except BaseException as error:
            if self._peers is not None:
                self._peers.abandon(error)
            raise

    def _run(self, out: Output) -> JobSummary:
        meter, mode = self._meter, self._mode
        mode.limit_batch_size(self._index.num_rows)
        former = None if self._request.restart else out.manifest
        if former is not None:
            mode.reuse_batch_size(former.settings)
        self._manifest = self._new_manifest({} if former is None else former.weights)
        states = self._resume(out)
        if self._request.ordered:
            out.keep_order(self._index)
        meter.num_rows = self._index.num_rows
        meter.num_finished = meter.num_skipped = meter.num_rows - states.count(RowState.MISSING)
        if self._peers is not None or (mode.is_batched and not self._manifest.sizes and plans_sizes(self._settings)):
            self._sample = RowSample.read(self._reader)  # before another thread encodes
        if mode.judges_batch_size and not out.is_begun:
            self._choose_batch_size()
        if self._sample is None and self._index.num_rows > mode.batch_size and RowState.MISSING in states:
            self._sample = RowSample.read(self._reader)
        responses = OpenAIResponses(
            self._manifest.began, self._manifest.model_name, self._tokenizer, has_token_ids=True
        )
        is_partial, written = self._request.only_missing, out.token_ids_of
        cutter = BatchCutter(self._reader, states, mode.batch_size, only_missing=is_partial, written=written)
        batches = BatchSource(prefetch_iter(cutter))
        writing = RowWriter(out, meter.add_finished, partial(self._keep_sums, out))
        with closing(writing) as writer, closing(batches) as source:
            records = Records(responses, writer.put, states)
            while (batch := source.next()) is not None:
                self._finish(batch, out, records, source)
            if self._peers is not None:
                self._peers.wait()
        assert RowState.MISSING not in states
        if not out.is_begun:  # an empty input
            out.begin(self._manifest)
        out.finish()
        summary = self._summary(records)
        self._write_report(summary)
        if self._peers is not None:
            self._peers.finish(summary)
        return summary

    def close(self) -> None:
        """Stop threads and processes, and free memory."""
        with closing(self._mode), closing(self._encoder):
            pass

    def _new_manifest(self, weights: Mapping[str, WeightsFile]) -> Manifest:
        request, checkpoint = self._request, self._checkpoint
        return Manifest(
            model={
                "fingerprint": checkpoint.fingerprint,
                "tokenizer": tokenizer_hash(checkpoint.folder),
                "chat_template": self._encoder.template_hash,
            },
            input={
                "sha256": self._index.sha256,
                "size_bytes": self._index.size_bytes,
                **({} if request.limit is None else {"limit": request.limit}),
            },
            settings=self._mode.settings(),
            versions=software(),
            began=datetime.now().astimezone(),
            model_name=Path(request.model).name or checkpoint.folder.name,
            weights=self._weights.entries(weights),
        )

    def _resume(self, out: Output) -> bytearray:
        """Resume the job of the output, with its start time, model name and sizes.

        Returns:
            [num_rows] RowState by ordinal, read from the output.
        """
        states, now, former = bytearray(self._index.num_rows), self._manifest, out.manifest
        if self._request.restart:
            out.check_ours()
            former = None
        else:
            out.check_same_job(now)
        if former is not None:
            self._recorded = read_sums(out.path, former.began.isoformat())
            self._weights.check_same(former.weights, now.weights, self._meter.note, bool(self._recorded))
            if now.weights != former.weights:
                out.keep(replace(former, weights=now.weights))
            if former.versions != now.versions:
                then = name_values(former.versions)
                self._meter.note(f"this job began with {then}; now {name_values(now.versions)}")
            model_name = former.model_name or now.model_name
            began, sizes, divided = former.began, former.sizes, former.divided
            self._manifest = replace(now, began=began, sizes=sizes, divided=divided, model_name=model_name)
            states, torn_bytes = out.resume(self._index)
            if torn_bytes:
                self._meter.note(f"{out.path}: dropped a torn last line of {torn_bytes} bytes")
        self._encoder.now = self._manifest.began
        if isinstance(out, OutputFile):
            self._mode.sums = new_sums(self._recorded)
        return states

    def _choose_batch_size(self) -> None:
        """Set the batch size that `Completer.choose_batch_size` returns for the first rows."""
        batches = BatchCutter(self._reader, bytearray(self._index.num_rows), self._mode.batch_size)
        prompts = next((batch.prompts for batch in batches if batch.prompts), None)
        if prompts is not None:
            self._mode.batch_size = self._load(prompts).choose_batch_size(prompts)
            self._mode.limit_batch_size(self._index.num_rows)
            settings = {**self._manifest.settings, "batch_size": self._mode.batch_size}
            self._manifest = replace(self._manifest, settings=settings)

    def _load(self, prompts: Sequence[Prompt]) -> Completer:
        """Return the completer. All ranks load the model for the first batch at the same time."""
        mode, peers, say = self._mode, self._peers, self._meter.note
        if mode.completer is not None:
            return mode.completer
        self._meter.begin("planning")
        if peers is None:
            return mode.load(prompts, self._manifest.sizes or self._choose_sizes(prompts))
        mesh = choose_mesh(self._request, self._settings, lambda: self._planned(prompts), peers.hosts, say)
        self._divided = mesh.divided
        sizes = self._manifest.sizes or self._choose_sizes(prompts, mesh, len(set(peers.hosts)))
        peers.open(prompts, sizes, mesh, self._recorded, mode.sums)
        mode.num_shares = mesh.num_shares
        completer = mode.load(prompts, sizes, mesh.stated)
        peers.wait_ready(Ready(completer.sizes, completer.num_pages))
        self._meter.load = lambda: completer.load().with_ranks(peers.loads())
        return completer

    def _keep_sums(self, out: Output) -> None:
        """Write the checksums of what all ranks have read, before rows that were computed with it are written."""
        if (sums := self._mode.sums) is None:
            return
        if self._peers is not None:
            self._peers.collect_sums()
        if sums.is_changed:
            write_sums(out.path, self._manifest.began.isoformat(), sums)

    def _choose_sizes(self, prompts: Sequence[Prompt], mesh: Mesh = ALONE, num_hosts: int = 1) -> Sizes:
        if not self._mode.is_batched:
            return {}
        folder, say = self._checkpoint.folder, self._meter.note
        return choose_sizes(folder, self._settings, self._planned(prompts), say, mesh, num_hosts)

    def _planned(self, prompts: Sequence[Prompt]) -> Job:
        """Return the job by rows from all over the input; by those of the first batch where no others can be used."""
        num_rows, sample = self._index.num_rows, self._sample
        return (sample if sample is not None and sample.prompts else RowSample(num_rows, tuple(prompts))).job()

    def _finish(self, batch: Batch, out: Output, records: Records, source: BatchSource) -> None:
        """Compute a batch if needed, and write its missing rows. The other ranks begin with the first one computed."""
        completer = self._load(batch.prompts) if batch.prompts else None
        if not out.is_begun:
            out.begin(self._manifest)
        assert out.manifest is not None
        if completer is not None and not self._meter.forecast.stretches:  # the first batch
            self._meter.begin("planning")
            self._note_changes(out.manifest, completer)
            self._predict(completer, batch, records.states)
        if completer is not None and not out.manifest.sizes:
            out.keep(replace(out.manifest, sizes=completer.sizes, divided=self._divided))
        self._meter.begin("running")
        missing = records.begin_batch(batch.missing)
        if completer is None:
            return
        if self._peers is not None and not self._peers.has_started:
            self._peers.start(source.next, records.begin_batch, records.write)
        if self._peers is not None:
            self._peers.share(batch.prompts, missing.keys())
        with closing(self._mode.complete(batch.prompts, missing.keys())) as answers:
            for prompt, answer in answers:
                if self._peers is not None:
                    self._peers.check()
                if (ordinal := missing.get(id(prompt))) is not None:
                    records.write(ordinal, prompt, answer)

    def _note_changes(self, former: Manifest, completer: Completer) -> None:
        """Say what has changed since the job began that may change the bits of rows, if it began before."""
        if not former.sizes:
            return
        then, now = dict(former.sizes), dict(completer.sizes)
        pairs = {name: (then.get(name, "none"), now.get(name, "none")) for name in (*then, *now)}
        changed = [f"{name} {before}, now {size}" for name, (before, size) in pairs.items() if before != size]
        if former.divided != self._divided:
            words = (name_values(each) or "undivided layers" for each in (former.divided, self._divided))
            changed.append(", now ".join(words))
        if changed:
            self._meter.note(f"this job began with {'; '.join(changed)}: last bits of the missing rows may differ")

    def _predict(self, completer: Completer, batch: Batch, states: bytearray) -> None:
        """Predict the rows that the output lacks, before the first batch: this one by itself if it is not whole."""
        mode, rest, forecasts = self._mode, bytearray(states), list[JobForecast]()
        if self._sample is None or self._index.num_rows <= mode.batch_size or batch.has_written:
            forecasts.append(forecast_batch(completer, batch, mode.num_shares))
            for ordinal, _ in batch.missing:
                rest[ordinal] = RowState.DONE
        if self._sample is not None and RowState.MISSING in rest:
            forecasts.append(forecast_job(completer, self._sample, rest, mode.batch_size, mode.num_shares))
        text = "; then ".join(each.text for each in forecasts)
        whole = JobForecast(text, tuple(part for each in forecasts for part in each.stretches))
        if len(forecasts) > 1 and (seconds := whole.seconds(whole.num_rows)):
            text = f"{duration(seconds)} in all: {text}"
        self._meter.forecast = replace(whole, text=text)
        self._meter.note(f"predicted: {text}")

    def _summary(self, records: Records) -> JobSummary:
        meter, completer = self._meter, self._mode.completer
        forecast = meter.forecast
        return JobSummary(
            num_rows=meter.num_rows,
            num_done=records.states.count(RowState.DONE),
            num_failed=records.states.count(RowState.FAILED),
            num_skipped=meter.num_skipped,
            num_prompt_tokens=records.num_prompt_tokens,
            num_output_tokens=records.num_output_tokens,
            wall_s=time.monotonic() - meter.started_s,
            running_s=meter.running_s,
            predicted_s=forecast.seconds(forecast.num_rows),
            predicted_passes=forecast.passes(forecast.num_rows),
            passes_predicted_s=0.0 if completer is None else completer.predicted_s,
            launching_s=0.0 if completer is None else completer.launching_s,
            computing_s=self._mode.computing_s,
            stats=None if completer is None else completer.stats(),
            notes=tuple(meter.notes),
            output=str(self._request.output),
            failures=dict(records.failures.most_common()),
            device=self._mode.device,
            predicted_tokens_per_s=meter.predicted_tokens_per_s,
            other_ranks=() if self._peers is None else self._peers.stats(),
            num_in_step=1 if self._peers is None else self._peers.num_in_step,
            input_errors={} if completer is None else completer.input_errors.by_layer(),
            phase_s=self._phase_s(),
        )

    def _phase_s(self) -> dict[str, float]:
        """Return the seconds of each phase: those before the batches, the first pass, and all others."""
        completer = self._mode.completer
        found = {phase: seconds for phase, seconds in self._meter.phase_s.items() if phase != "running"}
        if completer is not None:
            first_s = min(completer.first_pass_s, self._mode.computing_s)
            found |= {"first pass": first_s, "passes": self._mode.computing_s - first_s}
        return found

    def _write_report(self, summary: JobSummary) -> None:
        report = self._request.report
        if report is None:
            return
        try:
            write_report(report, summary, self._mode.close_timeline())
        except OSError as error:
            raise JobError(
                f"report {report} cannot be written: {error.strerror} (errno {error.errno}). "
                f"All rows are in {summary.output}"
            ) from error
