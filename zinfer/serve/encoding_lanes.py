"""`EncodingLanes`: threads that encode texts, one for short texts and one for long ones."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from zinfer.requests.prompt_encoder import PromptEncoder

_T = TypeVar("_T")
SHORT: Final = 1 << 14
"""Characters, or tokens, of a short text: encoding takes 20 ms or less."""


class _Lane:
    """A thread with an encoder of its own: tokenizers are not thread-safe."""

    def __init__(self, name: str, encoder: PromptEncoder) -> None:
        self.encoder = encoder
        self.thread = ThreadPoolExecutor(1, f"zinfer-encode-{name}")


class EncodingLanes:
    """Does work with an encoder on another thread, so that long texts hold up nobody's short ones.

    Args:
        new_encoder: makes an encoder with a tokenizer that nobody else uses.
    """

    def __init__(self, new_encoder: Callable[[], PromptEncoder]) -> None:
        self._short, self._long = (_Lane(name, new_encoder()) for name in ("short", "long"))

    async def run(self, size: int, work: Callable[[PromptEncoder], _T]) -> _T:
        """Return the result of work over texts of so many characters or tokens."""
        lane = self._short if size <= SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(lane.thread, work, lane.encoder)

    @property
    def short_encoder(self) -> PromptEncoder:
        """That of short texts; only its thread may use the tokenizer."""
        return self._short.encoder

    def close(self) -> None:
        """End the threads, and the processes that render chats."""
        for lane in (self._short, self._long):
            lane.thread.shutdown()
            lane.encoder.close()


def size_of(value: Any, most: int = SHORT) -> int:
    """Return the characters of all texts in a JSON value, and one for each other item; beyond `most` not exactly."""
    size, left = 0, [value]
    while left and size <= most:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
            continue
        size += 1
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple):
            size += len(each) if each and type(each[0]) is int else 0
            left += () if each and type(each[0]) is int else each
    return size
