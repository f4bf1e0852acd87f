"""Opens what guesses tokens beside a model: nothing, lookup in a sequence's own text, or a small model."""

from collections.abc import Callable
from typing import Protocol

from zinfer.batching.draft_model import DraftModel
from zinfer.config import Settings
from zinfer.engine.streamed_model import StreamedModel
from zinfer.scheduling.ngram_drafter import NGramDrafter
from zinfer.scheduling.speculation import Speculation, choose_kind


class _Estimates(Protocol):
    @property
    def free_tokens(self) -> Callable[[], int]: ...


def open_speculation(
    settings: Settings, model: StreamedModel, estimator: _Estimates, draft: DraftModel | None
) -> Speculation | None:
    """Return what guesses tokens: the small model if there is one, else lookup if asked for, or if it costs nothing.

    Args:
        estimator: of the model's passes; asked only if the answer depends on it, since it may measure rates.
    """
    kind = settings.batching.speculate
    if kind == "off":
        return None
    if draft is not None:
        return Speculation(draft)
    if kind == "auto":
        streams = model.device.type == "cuda" and model.plan.streamed_bytes > 0
        kind = choose_kind(streams, estimator.free_tokens)
    return Speculation(NGramDrafter()) if kind == "ngram" else None
