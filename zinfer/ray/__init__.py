"""What Ray runs of zinfer: a class for `map_batches` of Ray Data, and ranks in a placement group."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zinfer.jobs.ray_data import LLMPredictor
    from zinfer.ranks.ray_actors import RankActors

__all__ = ["LLMPredictor", "RankActors"]
_HOMES: Final = {"LLMPredictor": "zinfer.jobs.ray_data", "RankActors": "zinfer.ranks.ray_actors"}
_EXTRA: Final = ("ray", "pyarrow")


def __getattr__(name: str) -> Any:
    """Import on first use, and name the extra if it is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'zinfer.ray' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise ImportError(f"zinfer.ray needs {error.name}; install it with: pip install '.[ray]'") from error


def __dir__() -> list[str]:
    return sorted(__all__)
