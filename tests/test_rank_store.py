"""Calls to rank 0's store when a rank has failed meanwhile."""

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from zinfer.errors import RankError
from zinfer.ranks.rank_store import RankStore


class Slow(HashStore):
    """Answers after a while, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_under_way = 0
        self.is_asked = threading.Event()

    def add(self, key: str, number: int) -> int:
        self.is_asked.set()
        self.num_under_way += 1
        time.sleep(1.5)
        self.num_under_way -= 1
        return number

    def check(self, keys: list[str]) -> bool:
        self.is_asked.set()
        self.num_under_way += 1
        time.sleep(0.01)
        self.num_under_way -= 1
        return False


@pytest.mark.parametrize("ask", [lambda store: store.add("key", 1), lambda store: store.arrives("key", 3600.0)])
def test_no_call_is_under_way_once_a_failure_is_raised(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[RankStore], object]
) -> None:
    """Where one returned into a Python that has ended, C++ would abort the process."""
    slow, failures = Slow(), list[RankError]()
    monkeypatch.setattr("zinfer.ranks.rank_store.PrefixStore", lambda prefix, store: store)
    store = RankStore(lambda: slow, "model", lambda why: RankError(str(why)), lambda: next(iter(failures), None))

    def tell() -> None:
        slow.is_asked.wait()
        failures.append(RankError("rank 1 was killed"))

    telling = threading.Thread(target=tell)
    telling.start()
    with pytest.raises(RankError, match="rank 1 was killed"):
        ask(store)
    assert slow.num_under_way == 0
    telling.join()
    store.close()
