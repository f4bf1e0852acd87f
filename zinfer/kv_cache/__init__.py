"""The paged KV cache: pages on the device or in host memory, and the swap space of preempted sequences."""

from typing import Final

MOVED_AT_ONCE_BYTES: Final = 64 << 20
"""Swapped pages that are moved at once, one at least: they are copied on the device first."""
