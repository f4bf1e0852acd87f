"""How a job computes its rows: continuous batching if the model supports it, else padded batches; or encoding."""

import json
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from zinfer.batching.family_check import batched_limits, check_family
from zinfer.config import Settings, resolve_settings
from zinfer.config.settings import Batch as BatchSettings
from zinfer.config.settings import mute_key_report
from zinfer.engine.division import Prepare
from zinfer.engine.engine import InferenceEngine
from zinfer.engine.input_errors import InputErrors
from zinfer.engine.prepare import PreparedModel
from zinfer.engine.streamed_model import FindReserve
from zinfer.errors import ConfigError, JobError, PlanError
from zinfer.jobs.arrangement import with_mesh
from zinfer.jobs.completer import Answer, Completer, RaggedCompleter
from zinfer.jobs.embedding_head import EmbeddingHead, describe
from zinfer.jobs.encoder import (
    TOKENS_PER_PASS,
    Encoder,
    EncodingCompleter,
    encoder_reserve,
    find_pad_token_id,
    padding_config,
)
from zinfer.jobs.padded import PaddedCompleter, batch_shape, find_generation_pad
from zinfer.jobs.progress import Meter
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.report import Moment, Timeline
from zinfer.jobs.request import JobRequest, Task, kept_message
from zinfer.jobs.summary import weights_line
from zinfer.jobs.weights import Weights, find_other_bytes
from zinfer.model.context_length import read_limits
from zinfer.model.families import LIMITED_BY_ROTARY
from zinfer.model.padding import RowSharing, find_row_sharing
from zinfer.model.spec import ModelSpec, is_generating_decoder
from zinfer.planning.job_plan import ROWS_TOGETHER
from zinfer.planning.job_sizes import Sizes
from zinfer.requests.generation_config import GenerationDefaults
from zinfer.requests.length_limits import DEFAULT_NEW_TOKENS, LengthLimits
from zinfer.units import duration
from zinfer.weights import Checkpoint
from zinfer.weights.native import MANIFEST_NAME, Manifest
from zinfer.weights.range_sums import RangeSums

_PADDED_ROWS: Final = 32
_CLASSIFIER: Final = "ForSequenceClassification"


class ExecutionMode:
    """A job's method of computing rows, chosen once. Loads the model for the first batch.

    Args:
        model: on the meta device.
        tokenizer: used only by the calling thread.
        limits: length limits of a padded row.
        weights: of the job; None on a rank that does not write it.
        meter: notified if the model needs padded batches.
        num_shares: groups of ranks that share the job's batches.

    Raises:
        ConfigError: the model does not support the task.

    Attributes:
        device: "cuda" or "cpu".
        batch_size: rows that share passes.
        num_shares: as given.
        judges_batch_size: whether a new job judges its batch size by its first rows.
        sums: checksums of the weights that are read, to be set before the model is loaded; None: none are kept.
        completer: None before the first batch.
        computing_s: seconds in passes.
    """

    def __init__(
        self,
        request: JobRequest,
        settings: Settings,
        model: PreTrainedModel,
        tokenizer: Any,
        limits: LengthLimits,
        weights: Weights | None,
        meter: Meter,
        num_shares: int = 1,
    ) -> None:
        check_task(model, request.task)
        self._defaults = GenerationDefaults.of(model, settings.generation_config)
        self._request, self._settings = request, settings
        self._config, self._dtype, self._tokenizer, self._limits = model.config, model.dtype, tokenizer, limits
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = automatic if settings.device == "auto" else settings.device
        self._weights, self._meter = weights, meter
        self._encodes = request.task is not Task.GENERATE
        states_room = settings.batch != BatchSettings() or settings.memory.max_weight_memory is not None
        self._plans_room = is_generating_decoder(model) and not states_room and not self._encodes
        self._is_padded = False
        if not self._encodes and (why := why_padded(model, settings)) is not None:
            self._is_padded = True
            if self._defaults.notice:
                meter.note(self._defaults.notice)
            meter.note(f"padded batches through transformers' generate, which are slower: {why}")
        self._head: EmbeddingHead | None = None
        if request.task is Task.EMBED:
            self._head = EmbeddingHead.read(Path(model.name_or_path), request.pooling)
            meter.note(describe(self._head, self._head.prompt(request.prompt_name)))
        self._sharing = RowSharing() if self.is_batched else self._measure_sharing(model)
        if self._is_padded and self._plans_room:
            self._plans_room = self._knows_widths(model)
        self.batch_size = request.batch_size or (_PADDED_ROWS if self._is_padded else ROWS_TOGETHER)
        self.judges_batch_size = not (request.batch_size or request.only_missing or self._is_padded or self._encodes)
        self.num_shares = num_shares
        self.sums: RangeSums | None = None
        self.completer: Completer | None = None
        self.computing_s = 0.0
        self._timeline: Timeline | None = None
        self._says_places = False

    def _measure_sharing(self, model: PreTrainedModel) -> RowSharing:
        if self._encodes:
            pad_token_id = find_pad_token_id(padding_config(model), self._tokenizer)
        else:
            pad_token_id = find_generation_pad(model, self._tokenizer)
        found = find_row_sharing(model, pad_token_id, generates=not self._encodes)
        if found.why is not None:
            self._meter.note(found.why)
        return found

    def _knows_widths(self, model: PreTrainedModel) -> bool:
        try:
            ModelSpec.of(model)
        except PlanError as error:
            self._meter.note(_nothing_reserved(error))
            return False
        return True

    def reuse_batch_size(self, settings: Mapping[str, str | int]) -> None:
        """Use the batch size of the job being resumed, unless the caller set one."""
        former = settings.get("batch_size")
        if self._request.batch_size is None and isinstance(former, int) and former > 0:
            self.batch_size = former

    def limit_batch_size(self, num_rows: int) -> None:
        """Lower the batch size, unless the caller set one, so that shares get as many batches, and all as many rows."""
        if self._request.batch_size is None and (self.num_shares > 1 or num_rows > self.batch_size):
            num_rounds = max(1, -(-num_rows // (self.batch_size * self.num_shares)))
            self.batch_size = max(1, -(-num_rows // (num_rounds * self.num_shares)))

    def settings(self) -> dict[str, str | int]:
        """Return the settings that affect the rows' bytes."""
        request, settings = self._request, self._settings
        found: dict[str, str | int] = {
            "max_new_tokens": request.form.max_new_tokens or f"{DEFAULT_NEW_TOKENS}, or what fits",
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": self.device,
            "max_out_tokens": settings.max_out_tokens or "the model's",
            "min_out_tokens": settings.min_out_tokens,
            "batch_size": self.batch_size,
            **request.form.document(),
        }
        if not self._encodes and (defaults := self._defaults.identity):
            found["generation_config"] = json.dumps(defaults)
        if settings.quantization is not None:
            found["quantization"] = json.dumps(settings.quantization.as_document())
        if self._encodes:
            found |= {"task": request.task, "tokens_per_pass": self._tokens_per_pass}
            if self._head is not None:
                found |= {"pooling": str(self._head), "prompt": self._head.prompt(request.prompt_name)}
            return found
        if self._is_padded:
            return found | {"batching": "padded"}
        given = {name: value for name, value in asdict(settings.batching).items() if value is not None}
        stated = {name: value if isinstance(value, str | int) else str(value) for name, value in given.items()}
        return found | {"batching": "continuous"} | stated

    @property
    def is_batched(self) -> bool:
        """Whether rows are completed by continuous batching."""
        return not (self._encodes or self._is_padded)

    def load(self, prompts: Sequence[Prompt], sizes: Sizes, parallel: Mapping[str, int] | None = None) -> Completer:
        """Return the completer; the first call loads the model and plans memory for these prompts.

        Args:
            prompts: the first batch; padded batches are planned for its shape.
            sizes: sizes of the completer that began the job, if this run resumes it.
            parallel: sizes of the modes that ranks are arranged in; None: as configured.
        """
        if self.completer is None:
            if parallel is not None:
                self._request = with_mesh(self._request, parallel)
            meter = self._meter
            meter.begin("loading")
            with _job_errors("loading the model", kept_message(self._request.output)), mute_key_report():
                completer = self.completer = self._open(prompts, sizes)
                if self._weights is not None:
                    self._weights.check_unchanged()
                meter.note(f"weights: {weights_line(completer.stats(), self.device)}")
            meter.load = completer.load
            if self._request.report is not None:
                self._timeline = Timeline(completer.stats, completer.load)
        return self.completer

    def complete(
        self, prompts: Sequence[Prompt], missing: Collection[int]
    ) -> Generator[tuple[Prompt, Answer], None, None]:
        """Yield each prompt's answer, like `Completer.complete`. Call `load` first.

        Args:
            missing: identities of the prompts whose rows the output lacks.

        Raises:
            JobError: the engine failed; names the rows being computed.
        """
        assert self.completer is not None
        begin_s, meter, completer = time.monotonic(), self._meter, self.completer
        if not self.computing_s:
            self._say_what_is_lost(completer, prompts)
        num_followed = sum(map(completer.follows, prompts))
        meter.begin_batch(len(missing), len(prompts) - num_followed)
        if num_followed and not self._says_places:
            self._says_places = True
            meter.note(
                "written rows keep their places in the passes of their batch, so that the missing ones get the same "
                "bytes as without the interruption; passes without missing rows are left out"
            )
        if num_again := len(prompts) - num_followed - len(missing):
            meter.note(
                f"recomputing {num_again:,} finished rows with {len(missing):,} missing ones: they share passes, so "
                "the missing rows get the same bytes as without the interruption; --only-missing leaves them out, and "
                "last bits may differ"
            )
        rows = f"rows {prompts[0].row.id!r} to {prompts[-1].row.id!r}"
        kept = f"The rows in {self._request.output} are kept"
        with _job_errors(rows, kept), closing(completer.complete(prompts, missing)) as completed:
            yield from completed
        meter.end_batch()
        self.computing_s += time.monotonic() - begin_s

    def _say_what_is_lost(self, completer: Completer, prompts: Sequence[Prompt]) -> None:
        """Say what is computed again if the job is stopped: a batch, or what the rows under way have shared."""
        meter, most = self._meter, len(prompts)
        seconds, passes = meter.forecast.batch(0, most)
        what = "rows are computed again"
        if completer.most_under_way is not None:
            most = min(most, completer.most_under_way)
            seconds *= min(max(each.max_new_tokens for each in prompts) / max(passes, 1.0), 1.0)
            what = "rows under way are computed again, in passes as large as before"
        most = min(most * self.num_shares, meter.num_rows)  # each group has a batch of its own
        taking = f" ({duration(seconds)})" if seconds else ""
        meter.note(f"if stopped, at most {most:,} {what}{taking}; written rows are kept")

    def close_timeline(self) -> list[Moment]:
        """Stop the timeline and return its moments; empty without a report or if nothing was computed."""
        return [] if self._timeline is None else self._timeline.close()

    def close(self) -> None:
        """Stop threads and free memory."""
        try:
            self.close_timeline()
        finally:
            if self.completer is not None:
                self.completer.close()

    def _open(self, prompts: Sequence[Prompt], sizes: Sizes) -> Completer:
        request = self._request
        if self.is_batched:
            return RaggedCompleter(request, self._settings.batching, sizes, _preparing(self.sums))
        options: dict[str, object] = {} if request.trace is None else {"trace": str(request.trace)}
        if self._is_padded and self._plans_room:
            options |= batch_shape(prompts)
        settings = resolve_settings(request.config, {**request.keys, **options})
        find_reserve = self._find_reserve(prompts) if self._encodes else None
        prepare = _preparing(self.sums)
        engine = InferenceEngine(request.model, settings, find_reserve=find_reserve, prepare=prepare)
        input_errors = InputErrors(engine.module, settings.quantization)
        if self._is_padded:
            limit = self._limits.most_tokens
            return PaddedCompleter(engine, self._tokenizer, limit, self._sharing, input_errors, self._defaults)
        pad_token_id = find_pad_token_id(padding_config(engine.module), self._tokenizer)
        encoder = Encoder(engine, self._head, pad_token_id, self._sharing)
        return EncodingCompleter(engine, encoder, self._tokens_per_pass, input_errors)

    def _find_reserve(self, prompts: Sequence[Prompt]) -> FindReserve | None:
        """Return an encoder's memory reserve; None if its config does not give its width."""
        try:
            shape = ModelSpec.read_encoder(self._config)
        except PlanError as error:
            self._meter.note(_nothing_reserved(error))
            return None
        return encoder_reserve(shape, max(len(each.token_ids) for each in prompts), self._tokens_per_pass)

    @property
    def _tokens_per_pass(self) -> int:
        """Maximum tokens per pass of an encoder."""
        return self._settings.batching.tokens_per_pass or TOKENS_PER_PASS


def _preparing(sums: RangeSums | None) -> Prepare:
    """Return what prepares a model whose files, and those of a packed copy of it, are watched as they are read."""
    if sums is None:
        return PreparedModel.of

    def observe(checkpoint: Checkpoint) -> RangeSums:
        return sums.watch(checkpoint, _prefix(checkpoint))

    def prepare(*parts: Any) -> PreparedModel:
        return replace(PreparedModel.of(*parts), observe=observe)

    return prepare


def _prefix(checkpoint: Checkpoint) -> str:
    """Return the beginning of names of files: the same for stores of one model with the same part of each layer."""
    if checkpoint.is_listed or not (checkpoint.folder / MANIFEST_NAME).is_file():
        return ""
    part = Manifest.read(checkpoint.folder).identity.settings.get("shard")
    return "packed/" if part is None else f"packed {part}/"


def _nothing_reserved(error: PlanError) -> str:
    return (
        f"no memory is reserved for activations, so weights may take too much: {error}; where memory runs out, lower "
        "zinfer.max_weight_memory"
    )


def why_padded(model: PreTrainedModel, settings: Settings) -> str | None:
    """Return why rows are generated in padded batches; None: they are not.

    Rotary positions that change in long rows are no limit of padded batches, so these are taken unless rows stay below.
    """
    try:
        found = check_family(model)
    except ConfigError as error:
        return str(error)
    longest, border = read_limits(model, settings.max_out_tokens).most_tokens, found.max_tokens
    if found.limited_by != LIMITED_BY_ROTARY or border is None or (longest is not None and longest <= border):
        return None
    return f"{found.limited_by} {border} tokens; if rows stay within them, state max_out_tokens {border}"


def job_limits(model: PreTrainedModel, settings: Settings, *, generates: bool) -> LengthLimits:
    """Return the limits of a job's rows."""
    if generates and not model.config.is_encoder_decoder and why_padded(model, settings) is None:
        return batched_limits(model, settings.max_out_tokens)
    return read_limits(model, settings.max_out_tokens, generates=generates)


def check_task(model: PreTrainedModel, task: Task) -> None:
    """Raise ConfigError if a model cannot do a task."""
    name = type(model).__name__
    if model.main_input_name != "input_ids":
        raise ConfigError(f"a {name} takes no text; use a model that does")
    if task is Task.GENERATE and not model.can_generate():
        raise ConfigError(f"a {name} cannot generate text; use --task embed or classify, or another model")
    if task is Task.CLASSIFY and not name.endswith(_CLASSIFIER):
        raise ConfigError(f"a {name} has no labels; the task classify needs a *{_CLASSIFIER}")
    if task is Task.EMBED and getattr(model.config, "vision_config", None) is not None:
        raise ConfigError(f"a {name} takes images too; for the task embed, use its text tower alone")


@contextmanager
def _job_errors(what: str, kept: str) -> Iterator[None]:
    """Convert an engine failure to a JobError that names the running work; the cause stays attached."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        if (refusal := find_other_bytes(error)) is not None:
            raise refusal from None
        remedy = "run the same command again to go on"
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            remedy = (
                "lower zinfer.max_weight_memory or zinfer.max_host_memory in the config, which leaves more for the "
                f"rows, and {remedy}; or begin anew with a smaller --batch-size and --restart"
            )
        raise JobError(f"{what}: {type(error).__name__}: {error}\n{kept}; {remedy}") from error
