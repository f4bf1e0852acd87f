"""As deepspeed.runtime.utils, of which inference scripts use one function."""

from zinfer.compat.accelerator import see_memory_usage

__all__ = ["see_memory_usage"]
