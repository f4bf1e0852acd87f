"""As deepspeed.accelerator."""

from zinfer.compat.accelerator import Accelerator, get_accelerator

__all__ = ["Accelerator", "get_accelerator"]
