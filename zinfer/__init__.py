"""Runs models that do not fit in GPU memory: weights stream from disk and host memory while the layers compute."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zinfer.engine import InferenceEngine, init_inference

__version__ = "0.1.0"
__all__ = ["InferenceEngine", "__version__", "init_inference"]


def __getattr__(name: str) -> Any:
    """Import the engine on first use: torch and transformers take seconds, `zinfer --help` should not."""
    if name in ("InferenceEngine", "init_inference"):
        from zinfer import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'zinfer' has no attribute {name!r}")
