"""What rank 0 keeps for all ranks, and how they reach it."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from zinfer.errors import RankError
from zinfer.ranks.rank_store import RankStore, StoredValues
from zinfer.ranks.sockets import connection_of


def gone(why: str | None) -> RankError:
    return RankError(f"gone: {why}")


class Served:
    """Values that threads serve to whoever connects."""

    def __init__(self) -> None:
        self.values, self.ends = StoredValues(), list[Connection]()

    def connect(self) -> Connection:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs = connection_of(listener.accept()[0])
        self.ends.append(theirs)
        threading.Thread(target=self.values.serve, args=(theirs,), daemon=True).start()
        return connection_of(ours)


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture(params=["rank 0", "another rank"])
def store(request: pytest.FixtureRequest, served: Served) -> Iterator[RankStore]:
    connect: Callable[[], Connection | StoredValues] = served.connect
    if request.param == "rank 0":
        connect = lambda: served.values  # noqa: E731
    found = RankStore(connect, "model", gone, lambda: None)
    yield found
    found.close()


def test_values_are_set_counted_awaited_and_deleted(store: RankStore, served: Served) -> None:
    other = RankStore(served.connect, "model", gone, lambda: None)
    assert (store.has("a"), store.arrives("a", 0.01)) == (False, False)
    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(store.arrives, "a", 60.0)
        other.set("a", b"\x00\xff")
        assert came.result()
    assert store.get("a") == b"\x00\xff"
    assert [store.set_once("b", "first"), other.set_once("b", "second")] == ["first", "first"]
    assert [store.add("n", 0), store.has("n"), store.add("n", 2), other.add("n", 3)] == [0, False, 2, 5]
    assert (other.has("a", "b", "n"), other.has("a", "c")) == (True, False)
    store.delete("a")
    assert not other.has("a")
    assert not RankStore(served.connect, "another", gone, lambda: None).has("b")


def test_the_end_of_rank_0_and_a_failure_met_elsewhere_end_a_wait(served: Served) -> None:
    failures: list[RankError] = []
    store = RankStore(served.connect, "model", gone, lambda: next(iter(failures), None))
    other = RankStore(served.connect, "model", gone, lambda: None)
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(each.arrives, "key", 3600.0) for each in (store, other)]
        failures.append(RankError("rank 1 was killed"))
        with pytest.raises(RankError, match="rank 1 was killed"):
            waits[0].result()
        served.values.set("another/key", b"")
        for end in served.ends:
            with socket.socket(fileno=end.fileno()) as own:
                own.shutdown(socket.SHUT_RDWR)
                own.detach()
        with pytest.raises(RankError, match="gone: "):
            waits[1].result()


def test_after_a_signal_no_answer_to_an_earlier_question_is_taken(served: Served) -> None:
    class Stopped(BaseException):
        """As a signal raises in the thread that asks."""

    signals: list[Stopped] = []

    def lost() -> None:
        if signals:
            raise signals.pop()

    store = RankStore(served.connect, "model", gone, lost)
    signals.append(Stopped())
    with pytest.raises(Stopped):
        store.arrives("late", 5.0)
    served.values.set("model/late", b"")
    store.set("now", b"value")
    assert store.get("now") == b"value"


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (TimeoutError("no answer"), "gone: None"),
        (TimeoutError(110, "Connection timed out"), "timed out"),
        (EOFError(), "its connection ended"),
    ],
)
def test_a_rank_0_that_does_not_answer_is_told_from_one_that_is_gone(failure: Exception, said: str) -> None:
    def connect() -> Connection:
        raise failure

    with pytest.raises(RankError, match=said):
        RankStore(connect, "model", gone, lambda: None)
