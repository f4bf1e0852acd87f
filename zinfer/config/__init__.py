"""DeepSpeed-style configuration: every key is supported, ignored with a reason, or refused; none is silently lost."""

from zinfer.config.resolve import resolve_settings
from zinfer.config.settings import Aio, Ignored, Memory, Offload, Settings, Streaming

__all__ = ["Aio", "Ignored", "Memory", "Offload", "Settings", "Streaming", "resolve_settings"]
