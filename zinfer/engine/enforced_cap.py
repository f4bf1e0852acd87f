"""`EnforcedCap`: holds torch's allocator to `zinfer.max_device_memory`, so that no error of a plan takes more.

The allocator has one bound for a process and a device: what was taken before the first engine was opened, and the caps
of all open engines. While one of them has no cap, there is no bound. The driver's own memory (CUDA's context, loaded
kernels, nodes of captured graphs) is not the allocator's; a plan's reserve is meant for the last two.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zinfer.units import human_bytes


@dataclass
class _Bound:
    """One device: its fraction and the bytes taken before the first engine; and the caps of those that are open."""

    fraction: float
    taken_bytes: int
    caps: "dict[EnforcedCap, int | None]" = field(default_factory=dict)


_lock = threading.Lock()
_bounds: dict[torch.device, _Bound] = {}


class EnforcedCap:
    """The cap of one engine on its device, until `close`. On a CPU, where torch has no bound, it only explains errors.

    Args:
        device: with an index if it is a CUDA device.
        cap_bytes: None: the engine has no cap.
    """

    def __init__(self, device: torch.device, cap_bytes: int | None) -> None:
        self._device, self._cap_bytes = device, cap_bytes
        self._set(cap_bytes)

    def lower_to(self, nbytes: int) -> None:
        """Lower the bound to what the engine needs at most, for others to have the rest; nothing without a cap."""
        if self._cap_bytes is not None:
            self._set(min(self._cap_bytes, nbytes))

    def close(self) -> None:
        """Lift the bound; call it once the engine's memory is free. May be called again."""
        if self._device.type == "cuda":
            with _lock:
                bound = _bounds.get(self._device)
                if bound is not None and self in bound.caps:
                    del bound.caps[self]
                    _apply(self._device, bound)
                    if not bound.caps:
                        del _bounds[self._device]

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Let an out-of-memory error of the block say that the cap may be its cause.

        Raises:
            torch.OutOfMemoryError: the block's, with the cap and the remedy.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._cap_bytes is None:
                raise
            raise torch.OutOfMemoryError(
                f"zinfer.max_device_memory is {human_bytes(self._cap_bytes)}, and more was asked for than was planned; "
                "raise it, state zinfer.batch_size, prompt_len and new_tokens for generate, or lower "
                f"zinfer.tokens_per_pass and max_sequences. {error}"
            ) from error

    def _set(self, cap_bytes: int | None) -> None:
        if self._device.type != "cuda":
            return
        with _lock:
            bound = _bounds.get(self._device)
            if bound is None:
                fraction = torch.cuda.get_per_process_memory_fraction(self._device)
                bound = _bounds[self._device] = _Bound(fraction, torch.cuda.memory_reserved(self._device))
            bound.caps[self] = cap_bytes
            _apply(self._device, bound)


def _apply(device: torch.device, bound: _Bound) -> None:
    """Set the allocator's bound for the engines that are open."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    caps = [each for each in bound.caps.values() if each is not None]
    fraction = bound.fraction
    if caps and len(caps) == len(bound.caps):
        fraction = min(fraction, (bound.taken_bytes + sum(caps)) / total_bytes)
    if fraction != torch.cuda.get_per_process_memory_fraction(device):
        torch.cuda.set_per_process_memory_fraction(fraction, device)
