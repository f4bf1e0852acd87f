"""Holds device memory, so that a large GPU is as small as one that is to be tried."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zinfer.config import Settings
from zinfer.errors import ConfigError
from zinfer.probe.limits import choose_device
from zinfer.units import human_bytes


@contextmanager
def held_beyond(cap_bytes: int | None, settings: Settings) -> Iterator[tuple[int, int]]:
    """Hold all free memory of the GPU but ``cap_bytes`` for the duration of the block.

    The cap does not include CUDA's context. On a CPU, or without a cap, nothing is held.

    Yields:
        The bytes held, and the bytes that were in use before, by CUDA's context and other processes.

    Raises:
        ConfigError: less than the cap is free.
    """
    device = choose_device(settings)
    if device.type != "cuda":
        yield 0, 0
        return
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if cap_bytes is None:
        yield 0, total_bytes - free_bytes
        return
    if cap_bytes > free_bytes:
        raise ConfigError(
            f"--memory-cap (zinfer.max_device_memory): {human_bytes(cap_bytes)} are asked for, but only "
            f"{human_bytes(free_bytes)} of {torch.cuda.get_device_name(device)} are free; lower it"
        )
    ballast = torch.empty(free_bytes - cap_bytes, dtype=torch.uint8, device=device)
    try:
        yield ballast.numel(), total_bytes - free_bytes
    finally:
        del ballast
        torch.cuda.empty_cache()
