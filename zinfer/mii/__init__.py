"""DeepSpeed-MII's API over zinfer: ``import zinfer.mii as mii``."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zinfer.mii.batching_engine import BatchingEngine
    from zinfer.mii.deployment import client, serve
    from zinfer.mii.mii_client import MIIClient
    from zinfer.mii.mii_pipeline import MIIPipeline, pipeline
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
    "MIIClient": "mii_client",
    "client": "deployment",
    "serve": "deployment",
    "MIIPipeline": "mii_pipeline",
    "pipeline": "mii_pipeline",
    "GenerationFinishReason": "response",
    "Response": "response",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds. No submodule has a public name, or it would hide it."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"zinfer.mii.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'zinfer.mii' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
