"""Predicts which block is used next: the block that followed last time, or the next one in the model's order.

A prediction depends on the last two blocks, so that the two uses of one block in a pass (tied embedding and head) are
told apart by their predecessors. A wrong prediction costs time, never correctness.
"""

from collections.abc import Iterator, Sequence


class AccessPredictor:
    """Records the uses of blocks and predicts the next ones.

    Args:
        blocks: indices of the streamed blocks in the model's order.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        self._default = dict(zip(blocks, [*blocks[1:], *blocks[:1]], strict=True))
        self._followers: dict[tuple[int | None, int], int] = {}
        self._previous: int | None = None
        self._current: int | None = None

    def use(self, block: int) -> None:
        """Record that ``block`` is used now."""
        if self._current is not None:
            self._followers[self._previous, self._current] = block
        self._previous, self._current = self._current, block

    def ahead(self) -> Iterator[int]:
        """Yield the blocks expected after the current one, each once; none before the first use."""
        seen: set[int] = set()
        previous, current = self._previous, self._current
        while current is not None:
            following = self._followers.get((previous, current), self._default[current])
            if following in seen:
                return
            seen.add(following)
            yield following
            previous, current = current, following
