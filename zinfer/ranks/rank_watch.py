"""The watch over the ranks of a job: beats, and the news of the rank that failed first."""

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from zinfer.errors import RankError, SilentRankError
from zinfer.nvme.pool import call_all, start_thread
from zinfer.ranks.group import RankGroup
from zinfer.ranks.open_models import SharedModel, open_models
from zinfer.ranks.rank_store import RankStore
from zinfer.ranks.sockets import SILENCE_S

log = logging.getLogger(__name__)

BEAT_S: Final = 1
_MOST_BEAT_S: Final = 2 * BEAT_S  # of a process that runs
_LEFT: Final = 1 << 40  # added to the beats of a rank that has left, which is not lost
_HEARD_S: Final = 2.5 * BEAT_S
_LEAVE_PAUSE_S: Final = 0.02
_END_S: Final = 10.0
_jobs: Final = itertools.count()


def watch_job(group: RankGroup, call: Callable[[SilentRankError], None]) -> "RankWatch":
    """Return a watch over the ranks of a job, whether or not they have a model; called by all in the same order.

    Args:
        call: called from another thread once a rank has not answered for long. Connections tell of those that end.
    """
    watch = RankWatch(group, f"job/{next(_jobs)}", open_models)
    watch.on_failure(lambda failure: call(failure) if isinstance(failure, SilentRankError) else None)
    return watch


class RankWatch:
    """Beats for this rank, and listens for the other ranks of the job, whatever they share with this one.

    Args:
        group: the processes.
        prefix: of the keys in the store, the same on all ranks.
        models: returns those of this process that fail the job if their passes hang; by default none.

    Attributes:
        failure: why the ranks cannot go on; None while they can.
    """

    def __init__(self, group: RankGroup, prefix: str, models: Callable[[], Iterable[SharedModel]] = lambda: ()) -> None:
        self._group, self._prefix, self._models = group, prefix, models
        self.failure: BaseException | None = None
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._store_failure: RankError | None = None
        # A connection serves one thread: that of `_listen`, and whoever met a failure.
        self._news, self._spare = self.connect(), self.connect()
        self._failing = threading.Lock()
        self._over = threading.Event()
        self._listener = start_thread("zinfer-ranks", self._listen, self._lose)

    def connect(self) -> RankStore:
        """Return a connection to rank 0's store, for one thread; once rank 0 is gone, that is the failure."""
        return RankStore(self._group.connect, self._prefix, self._gone, lambda: self._store_failure)

    def check(self) -> None:
        """Raise the error of the rank that has failed, if any."""
        if self.failure is not None:
            raise self.failure

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Call from another thread, after those that were given before, once a rank has failed."""
        self._callbacks.append(call)

    def fail(self, failure: BaseException) -> None:
        """Tell the other ranks that this one cannot go on; only the first failure of all is told. Thread-safe."""
        if self.failure is None:
            call_all([partial(self._note, failure), partial(self._tell_others, failure)])

    def _tell_others(self, failure: BaseException) -> None:
        if not isinstance(failure, RankError):  # which names the rank
            failure = RankError(f"{self.name_of(self._group.rank)}: {type(failure).__name__}: {failure}")
        try:
            with self._failing:
                self._tell(self._spare, failure)
        except RankError as error:  # rank 0 is gone, which the others notice by themselves
            log.debug("the other ranks cannot be told: %s", error)

    def broken(self, error: BaseException) -> BaseException:
        """Return the error of a broken connection, with the rank that told of a failure or no longer beats."""
        with self._failing:
            try:
                before = self._beats(self._spare)
                if self._spare.arrives("failed", 3 * BEAT_S):
                    return self._told(self._spare)
                beats = self._beats(self._spare)
            except RankError as lost:
                return lost
        still = [rank for rank, beat in enumerate(beats) if beat == before[rank] < _LEFT]
        names = " and ".join(map(self.name_of, still))
        why = str(error) or type(error).__name__  # of a connection's end there is no text
        return RankError(f"{names or 'a rank'} ended or was killed: {why.splitlines()[0]}")

    def name_of(self, rank: int) -> str:
        """Return a rank's name for messages: its number and host."""
        return f"rank {rank} on {self._group.hosts[rank]}"

    def leave(self, store: RankStore, *, all_hear: bool) -> None:
        """As `end`; rank 0 first waits until the others have left, unless a rank has failed.

        Args:
            store: a connection of the calling thread.
            all_hear: whether all ranks hear of a failure by themselves, as by a gather that breaks.
        """
        try:
            if self._group.rank == 0:
                self._leave_last(store, all_hear=all_hear)
        except RankError as error:
            log.debug("left alone: %s", error)
        finally:
            self.end()

    def end(self) -> None:
        """Stop to beat; the others do not miss this rank."""
        self._over.set()
        try:
            self._listener.join()
            with self._failing:  # a failure, its own or another's, was told before
                self._spare.add(f"beat/{self._group.rank}", _LEFT)
        except RankError as error:  # the store is gone, and with it whoever waits for this rank
            log.debug("left alone: %s", error)
        if self.failure is None:
            self._news.close()
            self._spare.close()

    def _leave_last(self, store: RankStore, *, all_hear: bool) -> None:
        """Wait for the others, with the listener awake: of one that is lost no leave is heard.

        After a failure wait only as long as they need to hear of it.
        """
        until_s: float | None = None
        while not all(beat >= _LEFT for beat in self._beats(store)[1:]):
            if self.failure is not None:
                until_s = until_s or time.monotonic() + _HEARD_S
                if time.monotonic() >= until_s or all_hear:
                    return
            time.sleep(_LEAVE_PAUSE_S)

    def _listen(self) -> None:
        """Beat, and listen for the others' beats and failures.

        Silence is counted while this process runs: a job that was stopped and goes on, as by Ctrl-Z and fg, misses
        nobody.
        """
        heard, awake_s, looked_s = [(0, 0.0)] * self._group.size, 0.0, time.monotonic()
        try:
            while not self._over.wait(BEAT_S):
                self._news.add(f"beat/{self._group.rank}", 1)
                if self._news.has("failed"):
                    self._hear()
                    return
                ended = self._group.roll_call.lost_ranks()  # before the beats, which a rank that leaves adds to first
                beats = self._beats(self._news)
                since_s, looked_s = time.monotonic() - looked_s, time.monotonic()
                awake_s += (since_s := min(since_s, _MOST_BEAT_S))
                heard = [then if then[0] == beat else (beat, awake_s) for then, beat in zip(heard, beats, strict=True)]
                lost = [rank for rank in ended if beats[rank] < _LEFT]
                silent = [
                    rank for rank, (beat, at_s) in enumerate(heard) if beat < _LEFT and awake_s - at_s > SILENCE_S
                ]
                if lost or silent:  # and have told nothing
                    ended_early = RankError(f"{self.name_of((lost or silent)[0])} ended or was killed")
                    self._tell(self._news, ended_early if lost else self._silent(silent[0]))
                    self._hear()
                    return
                if (hanging := self._find_hanging(since_s)) is not None:
                    self._tell(self._news, hanging)
                    return  # the others end it: by itself it would end in silence
        except RankError as error:
            self._note(error)

    def _lose(self, failure: BaseException) -> None:
        """Fail with what has ended the listener.

        If a callback fails, whoever it would have told may wait for good: the process ends, unless others were told and
        end this watch soon.
        """
        try:
            if self.failure is not None:
                raise failure
            self.fail(failure)
        except BaseException:
            if not self._over.wait(_END_S):
                raise

    def _find_hanging(self, since_s: float) -> SilentRankError | None:
        """Return the failure of this rank itself if a pass of it hangs ([Note: a rank that hangs])."""
        for model in self._models():
            if hangs := model.progress.find_hang(since_s):
                return SilentRankError(f"{self.name_of(self._group.rank)} {hangs}", self._group.rank)
        return None

    def _hear(self) -> None:
        """Take the news of the rank that failed first, and let rank 0 know, which keeps it until all have heard."""
        self._note(self._told(self._news))
        self._news.add(f"beat/{self._group.rank}", _LEFT)

    def _tell(self, store: RankStore, failure: RankError) -> None:
        rank = failure.rank if isinstance(failure, SilentRankError) else None
        store.set_once("failed", json.dumps([str(failure), rank]))

    def _told(self, store: RankStore) -> RankError:
        text, rank = json.loads(store.get("failed"))
        return RankError(text) if rank is None else SilentRankError(text, rank)

    def _silent(self, rank: int) -> SilentRankError:
        why = f"has not answered for {SILENCE_S} s: it was stopped, or hangs"
        return SilentRankError(f"{self.name_of(rank)} {why}", rank)

    def _gone(self, why: str | None) -> RankError:
        if self._store_failure is None:
            text = f"{self.name_of(0)} is gone, which all ranks need: {why}"
            self._store_failure = self._silent(0) if why is None else RankError(text)
        self._note(self._store_failure)
        return self._store_failure

    def _beats(self, store: RankStore) -> list[int]:
        return [store.add(f"beat/{rank}", 0) for rank in range(self._group.size)]

    def _note(self, failure: BaseException) -> None:
        self.failure = self.failure or failure
        call_all([partial(call, failure) for call in self._callbacks])
