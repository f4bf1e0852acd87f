"""How the rows of a job share passes: by continuous batching where the family of models allows it, else padded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from transformers import PreTrainedModel

from zinfer.batching.adapters import check_family
from zinfer.batching.job_plan import ROWS_TOGETHER
from zinfer.config import Settings
from zinfer.config.settings import Batch as BatchSettings
from zinfer.errors import ConfigError
from zinfer.jobs.completer import Completer
from zinfer.jobs.padded import Engine, PaddedCompleter, batch_shape
from zinfer.jobs.progress import Meter
from zinfer.jobs.prompts import Prompt, Room
from zinfer.jobs.ragged import RaggedCompleter
from zinfer.jobs.request import JobRequest
from zinfer.planning.model_shape import is_generating_decoder

EngineFactory = Callable[..., Engine]

_PADDED_ROWS: Final = 32


class Method:
    """What is decided once for a job.

    Args:
        model: on the meta device.
        engine_factory: makes an engine for padded batches, whatever the family; None: only where it takes no other.
        meter: told where a family has to be padded.

    Raises:
        ConfigError: the model does not generate text after text.

    Attributes:
        batch_size: rows that share passes.
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
        self._factory = engine_factory or _init_inference
        self._meter = meter
        if not model.can_generate() or model.main_input_name != "input_ids":
            raise ConfigError(f"a {type(model).__name__} does not go on with texts; give a model that does")
        self._is_predictable = is_generating_decoder(model)
        self._is_padded = engine_factory is not None
        if not self._is_padded:
            try:
                check_family(model)
            except ConfigError as error:
                self._is_padded = True
                meter.note(f"padded batches through transformers' generate, which are slower: {error}")
        self.batch_size = request.batch_size or (_PADDED_ROWS if self._is_padded else ROWS_TOGETHER)

    def settings(self) -> dict[str, str | int]:
        """The settings of passes on which rows' bytes depend."""
        if self._is_padded:
            return {"batch_size": self.batch_size, "batching": "padded"}
        stated = {name: value for name, value in asdict(self._settings.batching).items() if value is not None}
        return {"batch_size": self.batch_size, "batching": "continuous", **stated}

    def open(self, prompts: Sequence[Prompt], sizes: Mapping[str, int], tokenizer: Any, room: Room | None) -> Completer:
        """Load the model.

        Args:
            prompts: of the first batch; padded ones of that size are planned for.
            sizes: of the completer that began the job, if this one goes on.
            tokenizer: used by the calling thread alone.
            room: of a padded row.
        """
        request, settings = self._request, self._settings
        if not self._is_padded:
            return RaggedCompleter(request, settings.batching, sizes, self._meter)
        options: dict[str, object] = {} if request.trace is None else {"trace": str(request.trace)}
        states_room = settings.batch != BatchSettings() or settings.memory.max_device_memory is not None
        if self._is_predictable and not states_room:
            options |= batch_shape(prompts)
        engine = self._factory(request.model, config=request.config, device=request.device, **options)
        most_tokens = None if room is None or room.is_each else room.max_tokens
        return PaddedCompleter(engine, tokenizer, most_tokens, self._meter)


def _init_inference(*args: Any, **kwargs: Any) -> Engine:
    import zinfer  # here, for the package's own names are made from modules like this one

    engine: Engine = zinfer.init_inference(*args, **kwargs)
    return engine
