"""What is computed of requests whose tokens are known, so that others get the bits that they had beside them.

[Note: known tokens]
Which requests share a pass can change the last bits of each: libraries choose a kernel by the number of tokens. So when
a job goes on, requests that an earlier process completed take their places in the passes again. Their tokens are
followed, none is drawn, and passes in which no other request takes part are not computed. What a pass computes of them
may be anything, except in pages that others find through the prefix cache: these are computed as they were.
"""

import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from zinfer.batching.request import Request

EVERYTHING: Final = sys.maxsize


class _Node:
    """Prompts that begin with the same pages: the next page of each, and what is left of those that fill none."""

    def __init__(self) -> None:
        self.pages: dict[bytes, _Node] = {}
        self.rests: defaultdict[int, set[bytes]] = defaultdict(set)  # by length


class PromptTree:
    """Prompts by their pages.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size, self._root = page_size, _Node()

    def add(self, token_ids: "array[int]") -> None:
        """Add a prompt."""
        node, size = self._root, self._page_size
        end = len(token_ids) // size * size
        for begin in range(0, end, size):
            node = node.pages.setdefault(token_ids[begin : begin + size].tobytes(), _Node())
        node.rests[len(token_ids) - end].add(token_ids[end:].tobytes())

    def num_shared(self, token_ids: "array[int]") -> int:
        """Return how many tokens, from the first on, are in pages that a request with one of the prompts may have too.

        `EVERYTHING` if a whole prompt is among them: its output may go on in the same way.
        """
        node, begin = self._root, 0
        while True:
            page = token_ids[begin : begin + self._page_size]
            if any(page[:length].tobytes() in rests for length, rests in node.rests.items() if length <= len(page)):
                return EVERYTHING
            following = node.pages.get(page.tobytes())
            if following is None:
                return begin
            node, begin = following, begin + self._page_size


def count_needed(requests: Sequence[Request], page_size: int) -> dict[Request, int]:
    """Return for each request whose tokens are known how many tokens, from the first on, are to be computed."""
    known = [(request, request.known_ids) for request in requests if request.known_ids is not None]
    if not known:
        return {}
    tree = PromptTree(page_size)
    for request in requests:
        if request.known_ids is None:
            tree.add(request.prompt_ids)
    return {request: tree.num_shared(request.prompt_ids + known_ids) for request, known_ids in known}
