"""How the rows of a job share passes: by continuous batching where the family of models allows it, else padded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from transformers import PreTrainedModel

from zinfer.config import Settings, resolve_settings
from zinfer.config.settings import Batch as BatchSettings
from zinfer.engine.engine import InferenceEngine
from zinfer.engine.streamed_model import FindReserve
from zinfer.errors import ConfigError, PlanError
from zinfer.jobs.batched import RaggedCompleter
from zinfer.jobs.completer import Completer
from zinfer.jobs.encoder import TOKENS_PER_PASS, EncodingCompleter, reserve_of
from zinfer.jobs.padded import Engine, PaddedCompleter, batch_shape
from zinfer.jobs.progress import Meter
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.request import JobRequest, Task
from zinfer.model.batching_support import check_family
from zinfer.model.spec import ModelSpec, is_generating_decoder
from zinfer.offload.tensor_checksums import TensorChecksums
from zinfer.planning.job_plan import ROWS_TOGETHER
from zinfer.probe.limits import find_limits
from zinfer.requests.length_limits import LengthLimits

EngineFactory = Callable[..., Engine]

_PADDED_ROWS: Final = 32
_CLASSIFIER: Final = "ForSequenceClassification"


class Method:
    """What is decided once for a job.

    Args:
        model: on the meta device.
        engine_factory: makes an engine for padded batches, whatever the family; None: only where it takes no other.
        meter: told where a family has to be padded.

    Raises:
        ConfigError: the model has not what the task needs.

    Attributes:
        batch_size: rows that share passes.
        chooses_batch_size: whether a new job is to take as many as suit it.
    """

    def __init__(
        self,
        request: JobRequest,
        settings: Settings,
        model: PreTrainedModel,
        engine_factory: EngineFactory | None,
        meter: Meter,
    ) -> None:
        self._request = request
        self._settings = settings
        self._factory = engine_factory
        self._meter = meter
        _check_task(model, request.task)
        self._encodes = request.task is not Task.GENERATE
        self._config = model.config
        self._is_predictable = is_generating_decoder(model)
        self._is_padded = engine_factory is not None
        if not self._is_padded and not self._encodes:
            try:
                check_family(model)
            except ConfigError as error:
                self._is_padded = True
                meter.note(f"padded batches through transformers' generate, which are slower: {error}")
        self.batch_size = request.batch_size or (_PADDED_ROWS if self._is_padded else ROWS_TOGETHER)
        self.chooses_batch_size = not (request.batch_size or self._is_padded or self._encodes)

    def take_batch_size(self, settings: Mapping[str, str | int]) -> None:
        """Go on with the batch size of the job that an output belongs to, where the caller states none."""
        former = settings.get("batch_size")
        if self.chooses_batch_size and isinstance(former, int) and former > 0:
            self.batch_size = former

    def settings(self) -> dict[str, str | int]:
        """The settings of passes on which rows' bytes depend."""
        if self._encodes:
            task: dict[str, str | int] = {"task": self._request.task, "tokens_per_pass": self._tokens_per_pass}
            pooling = {"pooling": str(self._request.pooling)} if self._request.task is Task.EMBED else {}
            return {"batch_size": self.batch_size, **task, **pooling}
        if self._is_padded:
            return {"batch_size": self.batch_size, "batching": "padded"}
        stated = {name: value for name, value in asdict(self._settings.batching).items() if value is not None}
        return {"batch_size": self.batch_size, "batching": "continuous", **stated}

    def open(
        self,
        prompts: Sequence[Prompt],
        sizes: Mapping[str, int],
        tokenizer: Any,
        limits: LengthLimits,
        checksums: TensorChecksums | None,
    ) -> Completer:
        """Load the model.

        Args:
            prompts: of the first batch; padded ones of that size are planned for.
            sizes: of the completer that began the job, if this one goes on.
            tokenizer: used by the calling thread alone.
            limits: of a padded row.
            checksums: taken of weights as they are read.
        """
        request, settings = self._request, self._settings
        if self._encodes:
            return self._open_encoder(prompts, tokenizer, checksums)
        if not self._is_padded:
            return RaggedCompleter(request, settings.batching, sizes, self._meter, checksums)
        options = self._options()
        states_room = settings.batch != BatchSettings() or settings.memory.max_device_memory is not None
        if self._is_predictable and not states_room:
            options |= batch_shape(prompts)
        engine: Engine
        if self._factory is not None:
            engine = self._factory(request.model, config=request.config, device=request.device, **options)
        else:
            settings = resolve_settings(request.config, {"device": request.device, **options})
            engine = InferenceEngine(request.model, settings, checksums=checksums)
        return PaddedCompleter(engine, tokenizer, limits.most_tokens, self._meter)

    def _open_encoder(self, prompts: Sequence[Prompt], tokenizer: Any, checksums: TensorChecksums | None) -> Completer:
        request = self._request
        settings = resolve_settings(request.config, {"device": request.device, **self._options()})
        find_reserve = self._find_reserve(prompts, settings)
        engine = InferenceEngine(request.model, settings, find_reserve=find_reserve, checksums=checksums)
        pad_token_id = engine.module.config.pad_token_id
        if pad_token_id is None and tokenizer is not None:
            pad_token_id = tokenizer.pad_token_id
        return EncodingCompleter(
            engine, request.task, request.pooling, pad_token_id or 0, self._tokens_per_pass, self._meter
        )

    def _find_reserve(self, prompts: Sequence[Prompt], settings: Settings) -> FindReserve | None:
        """Of an encoder; None where its config does not say how wide it is."""
        try:
            shape = ModelSpec.read_encoder(self._config)
        except PlanError as error:
            self._meter.note(f"no memory is set aside for activations, and weights may take too much: {error}")
            return None
        return reserve_of(shape, prompts, self._tokens_per_pass, on_cuda=find_limits(settings).on_cuda)

    def _options(self) -> dict[str, object]:
        return {} if self._request.trace is None else {"trace": str(self._request.trace)}

    @property
    def _tokens_per_pass(self) -> int:
        """Of an encoder."""
        return self._settings.batching.tokens_per_pass or TOKENS_PER_PASS


def _check_task(model: PreTrainedModel, task: Task) -> None:
    name = type(model).__name__
    if model.main_input_name != "input_ids":
        raise ConfigError(f"a {name} takes no text; give a model that does")
    if task is Task.GENERATE and not model.can_generate():
        raise ConfigError(f"a {name} cannot generate text; use --task embed or classify, or another model")
    if task is Task.CLASSIFY and not name.endswith(_CLASSIFIER):
        raise ConfigError(f"a {name} gives no labels; the task classify takes a *{_CLASSIFIER}")
    if task is Task.EMBED and getattr(model.config, "vision_config", None) is not None:
        raise ConfigError(f"a {name} takes pictures beside text; the task embed takes its text tower alone")
