"""What a sequence needs of its own past: all of it, or the last positions where every layer of the model slides."""


class SlidingWindow:
    """The positions that a token attends to, and the pages that they lie in.

    Args:
        size: positions, the token's own among them; None: all that come before.
        page_size: tokens of a page.
    """

    def __init__(self, size: int | None, page_size: int) -> None:
        assert size is None or size >= 1
        self._size = size
        self._page_size = page_size

    @property
    def slides(self) -> bool:
        """Whether anything is ever left behind."""
        return self._size is not None

    def first_needed(self, position: int) -> int:
        """The first position that the token at ``position`` attends to."""
        return 0 if self._size is None else max(position - self._size + 1, 0)

    def pages_alone(self, num_prompt: int, max_new_tokens: int) -> int:
        """Pages without which a sequence cannot be completed; the last new token is never computed."""
        num_pages = self._pages_for(num_prompt + max_new_tokens - 1)
        if self._size is None:
            return num_pages
        # So many neighbouring positions lie in one page more than they fill, where they begin at a page's last.
        return min(num_pages, self._pages_for(self._size - 1) + 1)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)
