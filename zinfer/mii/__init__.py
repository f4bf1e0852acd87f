"""DeepSpeed-MII's API over zinfer: ``import zinfer.mii as mii``."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zinfer.mii.batching_engine import BatchingEngine
    from zinfer.mii.client import MIIClient
    from zinfer.mii.deployment import client, serve
    from zinfer.mii.pipeline import MIIPipeline, pipeline
    from zinfer.mii.response import GenerationFinishReason, Response

__all__ = [
    "BatchingEngine",
    "GenerationFinishReason",
    "MIIClient",
    "MIIPipeline",
    "Response",
    "client",
    "pipeline",
    "serve",
]
_HOMES: Final = {
    "BatchingEngine": "batching_engine",
    "MIIClient": "client",
    "client": "deployment",
    "serve": "deployment",
    "MIIPipeline": "pipeline",
    "pipeline": "pipeline",
    "GenerationFinishReason": "response",
    "Response": "response",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds."""
    if name in _HOMES:
        found = getattr(importlib.import_module(f"zinfer.mii.{_HOMES[name]}"), name)
        globals()[name] = found  # a submodule of the same name would take its place
        return found
    raise AttributeError(f"module 'zinfer.mii' has no attribute {name!r}")
