"""`KnownPrefixes`: which beginnings of texts a replica has computed lately, and so has in its prefix cache, perhaps."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

_PAGE: Final = 64  # tokens; a replica's own pages may have other sizes
_HASH_BYTES: Final = 8


class KnownPrefixes:
    """Hashes of prefixes, the least recently used of which are forgotten as a cache forgets its pages.

    Args:
        most_tokens: that the replica's KV cache holds.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens // _PAGE
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, token_ids: Sequence[int]) -> None:
        """Note that a text is computed."""
        for each in [*_hashes(token_ids)][::-1]:  # the ends of texts are forgotten before their beginnings
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)

    def num_shared(self, token_ids: Sequence[int]) -> int:
        """Return how many first tokens of a text are known, in whole pages."""
        count = 0
        for each in _hashes(token_ids):
            if each not in self._hashes:
                break
            count += _PAGE
        return count


def _hashes(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield a hash of each prefix that ends with a page."""
    page, packed = b"", array("i", token_ids)
    for begin in range(0, len(packed) - _PAGE + 1, _PAGE):
        page = blake2b(page + packed[begin : begin + _PAGE].tobytes(), digest_size=_HASH_BYTES).digest()
        yield page
