"""Rank 0's side of a job on several ranks: it hands batches out, and takes answers and failures in.

A thread for each other rank waits for its messages, so a rank that dies is noticed at once, also while this one loads
or computes.

Ranks that make the same passes take each batch together: the first of them asks for it and answers, and the others, its
followers, compute it along with it.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from zinfer.errors import JobError, RankError, SilentRankError
from zinfer.jobs.completer import Answer
from zinfer.jobs.messages import (
    Answered,
    Begin,
    Cause,
    End,
    Ended,
    Failed,
    Finished,
    Hello,
    Idle,
    Open,
    Ready,
    Sums,
    WantSums,
    Work,
)
from zinfer.jobs.peer import Peer
from zinfer.jobs.progress import Load
from zinfer.jobs.prompts import Batch, Prompt
from zinfer.jobs.request import OtherRankFailed, UnusableInput
from zinfer.jobs.rows import BadRow
from zinfer.jobs.summary import JobSummary
from zinfer.nvme.pool import start_thread
from zinfer.offload.stats import RunStats
from zinfer.planning.job_sizes import MOST_SWAPPED, Sizes
from zinfer.ranks.group import RankGroup
from zinfer.ranks.links import open_links
from zinfer.ranks.mesh import Mesh
from zinfer.ranks.open_models import fail_models
from zinfer.ranks.rank_watch import watch_job
from zinfer.ranks.sockets import end_link
from zinfer.ranks.values import from_bytes
from zinfer.units import name_values
from zinfer.weights.range_sums import FileSums, RangeSums

_GRACE_S: Final = 2.0  # for news of the rank that failed first, if others fail with it
_LATE_GRACE_S: Final = 0.2
_BYTES: Final = "kv_cache_memory"
_OWN: Final = (_BYTES, MOST_SWAPPED)  # of each rank
_AGAIN: Final = "run the same command again to go on"


def _passes(ready: Ready) -> Sizes:
    """Return what decides a rank's passes: of its KV cache the pages, whatever they take."""
    sizes = {name: size for name, size in ready.sizes.items() if name not in _OWN}
    return {**sizes, "pages of the KV cache": ready.num_pages}


class Peers:
    """The other ranks of a job.

    Args:
        group: the processes of this job.
        kept: returns a message on the rows in the output.

    Raises:
        RankError: a rank did not connect.

    Attributes:
        hosts: the host of each process of the job.
        num_in_step: the ranks that take each batch together.
        has_started: whether the ranks compute batches.
    """

    def __init__(self, group: RankGroup, kept: Callable[[], str]) -> None:
        self._kept = kept
        self._changed = threading.Condition()
        self._failures: list[tuple[Cause, JobError | SilentRankError]] = []
        self._is_closed = False
        self._next: Callable[[], Batch | None] = lambda: None
        self._begin: Callable[[Iterable[tuple[int, Prompt | BadRow]]], Mapping[int, int]] = lambda missing: {}
        self._write: Callable[[int, Prompt, Answer], None] = lambda ordinal, prompt, answer: None
        self.has_started = False
        self._sums: RangeSums | None = None
        self.hosts, self.num_in_step = group.hosts, 1
        links = open_links(group)
        self._peers = [Peer(rank, group.hosts[rank], link) for rank, link in enumerate(links, start=1)]
        self._leaders: list[Peer] = []
        self._followers: dict[int, list[Peer]] = {}  # by the rank that leads them
        for peer in self._peers:
            start_thread(f"zinfer-peer-{peer.rank}", partial(self._listen, peer), partial(self._fail, peer))
        self._watch = watch_job(group, self._give_up)

    def check_same(self, fingerprint: str, versions: Mapping[str, str]) -> None:
        """Wait for all ranks, and compare what they run.

        Raises:
            UnusableInput: a rank has another checkpoint, or other software.
            OtherRankFailed: a rank failed.
        """
        self._wait(lambda: all(peer.hello is not None for peer in self._peers))
        for peer in self._peers:
            assert peer.hello is not None
            if peer.hello.fingerprint != fingerprint:
                raise UnusableInput(f"{peer.name} has another model than rank 0; give all ranks the same files")
            if peer.hello.versions != versions:
                theirs, ours = name_values(peer.hello.versions), name_values(versions)
                raise UnusableInput(f"{peer.name} runs {theirs}, rank 0 {ours}; install the same on all hosts")

    def open(
        self,
        prompts: Sequence[Prompt],
        sizes: Sizes,
        mesh: Mesh,
        recorded: Mapping[str, FileSums],
        sums: RangeSums | None,
    ) -> None:
        """Let all ranks load the model, while this one does.

        Args:
            recorded: checksums of the weights that the job began with.
            sums: are given those of all ranks; None: they are not compared and not kept.

        Parts of a model take different bytes for as many pages of its KV cache, so a size in bytes is one rank's alone.
        """
        first_of = {peer.rank: mesh.ranks_in_step(peer.rank)[0] for peer in self._peers}
        self._leaders = [peer for peer in self._peers if first_of[peer.rank] == peer.rank]
        self._followers = {first: [] for first in (0, *first_of.values())}
        for peer in self._peers:
            if peer not in self._leaders:
                self._followers[first_of[peer.rank]].append(peer)
        self.num_in_step = 1 + len(self._followers[0])
        if mesh.num_in_step > 1:
            sizes = {name: size for name, size in sizes.items() if name != _BYTES}
        self._sums = sums
        for peer in self._peers:
            self._send(peer, Open(tuple(prompts), dict(sizes), mesh.stated, None if sums is None else recorded))

    def wait_ready(self, own: Ready) -> None:
        """Wait until all ranks have loaded the model.

        Raises:
            JobError: a rank chose other sizes, which would change the bytes of its rows.
            OtherRankFailed: a rank failed.
        """
        self._wait(lambda: all(peer.ready is not None for peer in self._peers))
        for peer in self._peers:
            assert peer.ready is not None
            if _passes(peer.ready) != _passes(own):
                theirs, ours = name_values(_passes(peer.ready)), name_values(_passes(own))
                raise JobError(
                    f"{peer.name} chose other sizes than rank 0 ({theirs}; {ours}), which would change the rows; state "
                    "them in the config, as zinfer.tokens_per_pass and others"
                )

    def start(
        self,
        next_batch: Callable[[], Batch | None],
        begin: Callable[[Iterable[tuple[int, Prompt | BadRow]]], Mapping[int, int]],
        write: Callable[[int, Prompt, Answer], None],
    ) -> None:
        """Let the ranks compute batches.

        Args:
            next_batch: returns the next batch, None after the last; called by several threads.
            begin, write: as `Records.begin_batch` and `Records.write`, likewise.
        """
        self.has_started = True
        self._next, self._begin, self._write = next_batch, begin, write
        for peer in self._leaders:
            peer.is_busy = True
            self._send(peer, Begin())

    def collect_sums(self) -> None:
        """Wait for the checksums of all that the ranks have read; what those know that failed is lost."""
        with self._changed:
            for peer in self._peers:
                peer.owes_sums = True
        for peer in self._peers:
            self._send(peer, WantSums())
        with self._changed:  # a rank has told all before it ends
            self._changed.wait_for(
                lambda: (
                    self._failures
                    or self._is_closed
                    or not any(peer.owes_sums and not peer.is_ended for peer in self._peers)
                )
            )

    def share(self, prompts: Sequence[Prompt], missing: Collection[int]) -> None:
        """Let the ranks that make the same passes as this one compute its next batch.

        Args:
            missing: identities of the prompts whose rows the output lacks.
        """
        self._send_work(self._followers[0], prompts, missing)

    def wait(self) -> None:
        """Wait until the ranks have computed their batches.

        Raises:
            OtherRankFailed, JobError: as `check`.
        """
        self._wait(lambda: not any(peer.is_busy for peer in self._peers))
        for peer in self._peers:
            self._send(peer, End())
        self._wait(lambda: all(peer.is_ended for peer in self._peers))

    def finish(self, summary: JobSummary) -> None:
        """Tell the ranks that the job is done."""
        for peer in self._peers:
            self._send(peer, Finished(summary))
        self._watch.end()

    def check(self) -> None:
        """Raise the failure of a rank, if any.

        Raises:
            OtherRankFailed, SilentRankError: a rank failed.
            JobError: a row of it could not be written.
        """
        if self._failures:
            raise self._settled_failure() or AssertionError

    def first_failure(self, error: BaseException) -> JobError | SilentRankError | None:
        """End the connections; return the failure of a rank that may have caused this rank's ``error``, if any.

        A rank's failure makes the others fail, and launchers end them by a signal: what was first is told.
        """
        self.close()
        is_signal = not isinstance(error, Exception)
        if not is_signal and not _is_of_model(error):
            return None
        failure = self._settled_failure(is_late=is_signal)
        causes = {cause for cause, _ in self._failures}
        if causes <= {Cause.OTHER_RANK} and not isinstance(error, OtherRankFailed):  # that other rank is this one
            return None
        return None if is_signal and causes <= {Cause.SIGNAL, Cause.OTHER_RANK} else failure

    def _settled_failure(self, is_late: bool = False) -> JobError | SilentRankError | None:
        """Return why ranks failed, after a while in which the first of them has certainly been heard of.

        Args:
            is_late: whether that while is over, as when a launcher has had the time to send a signal.
        """
        with self._changed:
            grace_s = _LATE_GRACE_S if is_late else _GRACE_S
            self._changed.wait_for(lambda: any(cause is Cause.GONE for cause, _ in self._failures), grace_s)
            return min(self._failures, key=lambda each: each[0])[1] if self._failures else None

    def loads(self) -> Iterator[Load]:
        """Return the counters of the other shares, as last heard of."""
        return (peer.load for peer in self._leaders)

    def stats(self) -> tuple[RunStats, ...]:
        """Return the stats of the ranks that loaded the model, after `wait`."""
        return tuple(peer.stats for peer in self._peers if peer.stats is not None)

    def abandon(self, failure: BaseException) -> None:
        """End the ranks early: the model of this one serves them no more."""
        fail_models(failure)
        self.close()

    def close(self) -> None:
        """End the connections; ranks that have not ended do so. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            for peer in self._peers:
                peer.leave()
            with self._changed:
                self._changed.notify_all()
            self._watch.end()

    def _give_up(self, failure: SilentRankError) -> None:
        self._note(Cause.GONE, failure)
        if failure.rank:  # a message to it may be on its way for good
            end_link(self._peers[failure.rank - 1].link)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failures or is_over())
        self.check()

    def _listen(self, peer: Peer) -> None:
        try:
            while not peer.is_ended:
                message = from_bytes(peer.link.recv_bytes())
                self._take(peer, message)
                with self._changed:
                    self._changed.notify_all()
        except (EOFError, OSError):
            if not self._is_closed and not peer.has_failed:
                self._note(Cause.GONE, f"{peer.name} ended without a word: it was killed, or has lost its connection")
        except JobError as failure:  # of the output
            self._note(Cause.GONE, failure)

    def _fail(self, peer: Peer, failure: BaseException) -> None:
        self._note(Cause.ERROR, f"{peer.name}, in rank 0: {type(failure).__name__}: {failure}")

    def _take(self, peer: Peer, message: Any) -> None:
        match message:
            case Hello():
                peer.hello = message
            case Ready():
                peer.ready = message
            case Idle():
                peer.load = message.load
                self._hand_out(peer)
            case Load():
                peer.load = message
            case Answered():
                peer.load = message.load
                prompt = peer.prompts[message.place]
                if (ordinal := peer.missing.get(id(prompt))) is not None:
                    self._write(ordinal, prompt, message.answer)
            case Sums():
                self._add_sums(peer, message)
            case Ended():
                peer.stats, peer.is_ended = message.stats, True
            case Failed():
                peer.has_failed = True
                text = f"{peer.name}: {message.text}"
                self._note(message.cause, UnusableInput(text) if message.cause is Cause.REFUSAL else text)
            case _:
                raise AssertionError(f"{peer.name} sent {message!r}")

    def _add_sums(self, peer: Peer, message: Sums) -> None:
        if self._sums is not None and (found := self._sums.merge(message.found)) is not None:
            name, offset = found
            raise JobError(
                f"{peer.name} has read other weights than another rank, in {name} from byte {offset} on; give all "
                "ranks the same files"
            )
        peer.owes_sums = False

    def _hand_out(self, peer: Peer) -> None:
        while (batch := self._next()) is not None:
            peer.missing, peer.prompts = self._begin(batch.missing), batch.prompts
            if batch.prompts:
                self._send_work([peer, *self._followers[peer.rank]], batch.prompts, peer.missing)
                return
        peer.is_busy = False

    def _send_work(self, peers: Iterable[Peer], prompts: Sequence[Prompt], missing: Collection[int]) -> None:
        places = tuple(place for place, each in enumerate(prompts) if id(each) in missing)
        for peer in peers:
            self._send(peer, Work(tuple(prompts), places))

    def _send(self, peer: Peer, message: Any) -> None:
        with suppress(OSError):  # gone: its thread tells
            peer.send(message)

    def _note(self, cause: Cause, failure: JobError | SilentRankError | str) -> None:
        if isinstance(failure, str):
            failure = OtherRankFailed(f"{failure}. {self._kept()}; {_AGAIN}")
        with self._changed:
            self._failures.append((cause, failure))
            self._changed.notify_all()
        fail_models(failure)


def _is_of_model(error: BaseException) -> bool:
    """Whether the model failed, or its ranks did."""
    return isinstance(error, RankError | OtherRankFailed) or isinstance(error.__cause__, RuntimeError | OSError)
