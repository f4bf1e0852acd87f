"""What rank 0 tells of several failures: the one that was first, not those that follow from it."""

import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from zinfer.errors import JobError, RankError, SilentRankError
from zinfer.jobs import peers as module
from zinfer.jobs.messages import Cause, Failed, Ready
from zinfer.jobs.peers import Peers
from zinfer.jobs.request import OtherRankFailed
from zinfer.ranks.values import to_bytes


def full_disk() -> JobError:
    error = JobError("output out.jsonl cannot be written: No space left on device")
    error.__cause__ = OSError(28, "No space left on device")
    return error


def until_it_raises(check: Callable[[], None]) -> None:
    while True:
        check()
        time.sleep(0.001)


def watched_peers(monkeypatch: pytest.MonkeyPatch) -> tuple[Peers, Connection, Callable[[SilentRankError], None]]:
    """Rank 0's side of a job of two ranks, the other end of its connection, and what its watch calls."""
    here, there = Pipe()
    links, calls = [here], []

    def watch_job(group: object, call: Callable[[SilentRankError], None]) -> Any:
        calls.append(call)
        return SimpleNamespace(end=lambda: None)

    monkeypatch.setattr(module, "open_links", lambda group: links)
    monkeypatch.setattr(module, "watch_job", watch_job)
    monkeypatch.setattr(module, "_GRACE_S", 0.2)
    monkeypatch.setattr(module, "fail_models", lambda failure: None)
    peers = Peers(SimpleNamespace(hosts=["a", "b"]), lambda: "Rows are kept")  # type: ignore[arg-type]
    return peers, there, calls[0]


@pytest.mark.parametrize(
    ("own", "cause", "told"),
    [
        (full_disk(), Cause.OTHER_RANK, None),  # rank 1 means this rank
        (full_disk(), Cause.ERROR, "rank 1 on b: news. Rows are kept"),
        (RankError("rank 1 is gone"), Cause.OTHER_RANK, None),
        (OtherRankFailed("rank 1 ended"), Cause.OTHER_RANK, "rank 1 on b: news. Rows are kept"),
        (KeyboardInterrupt(), Cause.SIGNAL, None),
        (KeyboardInterrupt(), Cause.ERROR, "rank 1 on b: news. Rows are kept"),
        (ValueError("of rank 0 alone"), Cause.ERROR, None),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__),
)
def test_what_was_first_is_told(
    own: BaseException, cause: Cause, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, there, _ = watched_peers(monkeypatch)
    there.send_bytes(to_bytes(Failed(cause, "news")))
    with pytest.raises(OtherRankFailed):
        until_it_raises(peers.check)
    found = peers.first_failure(own)
    assert (found is None) == (told is None)
    assert told is None or str(found).startswith(told)


def test_a_silent_rank_ends_a_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection tells of it; that to it is ended, as a message to it may be on its way for good."""
    peers, there, notice = watched_peers(monkeypatch)
    silent = SilentRankError("rank 1 on b has not answered", 1)
    Timer(0.1, notice, [silent]).start()
    with pytest.raises(SilentRankError, match="rank 1 on b has not answered"):
        peers.wait_ready(Ready({}, None))
    with pytest.raises(EOFError):
        there.recv()
    error = JobError("rows 1 to 4 failed")
    error.__cause__ = RankError("a gather broke")
    assert peers.first_failure(error) is silent
