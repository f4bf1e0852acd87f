"""Guesses which block is used next: what followed last time, the model's own order until there was a last time.

The guess looks at the last two blocks, so that a block with two uses in a pass (tied embedding and head) is told apart
by what came before it. A wrong guess costs time, never correctness.
"""

from collections.abc import Iterator, Sequence


class AccessPredictor:
    """The uses so far, and the ones expected.

    Args:
        blocks: indices of the streamed blocks in the model's order.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        self._default = dict(zip(blocks, [*blocks[1:], *blocks[:1]], strict=True))
        self._followers: dict[tuple[int | None, int], int] = {}
        self._previous: int | None = None
        self._current: int | None = None

    def use(self, block: int) -> None:
        """Note that ``block`` is used now."""
        if self._current is not None:
            self._followers[self._previous, self._current] = block
        self._previous, self._current = self._current, block

    def ahead(self) -> Iterator[int]:
        """The uses expected after the current one, each block once; none before the first use."""
        seen: set[int] = set()
        previous, current = self._previous, self._current
        while current is not None:
            following = self._followers.get((previous, current), self._default[current])
            if following in seen:
                return
            seen.add(following)
            yield following
            previous, current = current, following
