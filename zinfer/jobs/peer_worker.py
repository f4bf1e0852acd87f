"""A rank other than 0 in a job: it computes the batches that rank 0 sends. It reads no input and writes no output.

Of ranks that make the same passes only the first asks for batches and answers; rank 0 sends them to the others too.
"""

import queue
import threading
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from signal import SIGINT, Signals
from typing import Any, Final

from zinfer.config import Settings
from zinfer.errors import RankError, SilentRankError, silent_rank_of
from zinfer.jobs.completer import Completer
from zinfer.jobs.execution_mode import ExecutionMode, job_limits
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
    Left,
    Open,
    Ready,
    Sums,
    WantSums,
    Work,
)
from zinfer.jobs.progress import Load, Meter
from zinfer.jobs.request import JobRequest, OtherRankFailed, UnusableInput
from zinfer.jobs.summary import JobSummary
from zinfer.jobs.versions import software
from zinfer.jobs.weights import find_other_bytes, new_sums
from zinfer.model.build import build_meta_model
from zinfer.nvme.pool import start_thread
from zinfer.ranks.group import RankGroup
from zinfer.ranks.links import open_links
from zinfer.ranks.open_models import fail_models
from zinfer.ranks.rank_watch import watch_job
from zinfer.ranks.sockets import end_link
from zinfer.ranks.values import from_bytes, to_bytes
from zinfer.requests.prompt_encoder import find_tokenizer
from zinfer.store.saved_parts import open_for_rank
from zinfer.weights import Checkpoint
from zinfer.weights.range_sums import RangeSums

_NEWS_S: Final = 1.0  # of counters, for the progress that rank 0 shows
_GRACE_S: Final = 1.0  # for news of rank 0, if the model fails with it


class PeerWorker:
    """Computes batches for rank 0.

    Args:
        request: of the job; its input and output are rank 0's.
        settings: of the job.
        group: the processes of the job.

    Raises:
        RankError: rank 0 did not connect.
    """

    def __init__(self, request: JobRequest, settings: Settings, group: RankGroup) -> None:
        self._group = group
        self._answers = False
        self._request = replace(request, report=None)
        self._settings = settings
        self._mode: ExecutionMode | None = None
        self._sums: RangeSums | None = None
        self._over = threading.Event()
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_alone = self._was_told = self._is_closed = self._has_left = False
        [self._link] = open_links(group)
        self._receiver = start_thread("zinfer-rank-0", self._receive, self._fail)
        self._watch = watch_job(group, self._give_up)

    def run(self) -> JobSummary:
        """Compute what rank 0 sends until the job is done.

        Raises:
            OtherRankFailed: rank 0 ended early, or a rank that this one needs.
            SilentRankError: a rank has not answered for long.
        """
        try:
            return self._serve()
        except BaseException as raised:
            failure = find_other_bytes(raised) or raised
            fail_models(failure)
            cause, text = self._explain(failure)
            self._send(Failed(cause, text))
            if cause is Cause.OTHER_RANK:
                self._receiver.join(_GRACE_S)
            is_alone, was_told = self._is_alone, self._was_told  # before the connection is ended here
            with suppress(RankError):  # which tells less
                self.close()
            if (silent := silent_rank_of(failure)) is not None:
                raise silent from None
            if is_alone and not was_told and cause is not Cause.SIGNAL:
                text = f"{self._first()} ended without a word: it was killed, or has lost its connection"
                raise RankError(text) from failure
            if is_alone or cause is Cause.OTHER_RANK:
                raise OtherRankFailed(text) from failure
            if failure is not raised:
                raise failure from None
            raise

    def close(self) -> None:
        """Serve the other ranks until none computes, or one has failed; free memory and end the connection.

        May be called again.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._over.set()
        try:
            if self._mode is not None:
                self._mode.close()
        finally:
            self._has_left = True
            end_link(self._link)
            self._watch.end()

    def _serve(self) -> JobSummary:
        checkpoint, fingerprint = open_for_rank(self._request.model, self._group.rank)
        self._send(Hello(fingerprint, software()))
        prepared = self._prepared(checkpoint)
        completer: Completer | None = None
        while True:
            match self._next():
                case Open() as message:
                    completer = self._load(prepared.result(), message)
                    self._send(Ready(completer.sizes, completer.num_pages))
                    start_thread("zinfer-news", partial(self._count, completer), self._fail)
                case Begin():
                    self._answers = True
                    self._send(Idle(Load() if completer is None else completer.load()))
                case Work() as message:
                    assert completer is not None
                    self._compute(completer, message)
                    if self._answers:
                        self._send(Idle(completer.load()))
                case End():
                    self._over.set()
                    self._tell_sums()
                    self._send(Ended(None if completer is None else completer.stats()))
                case Finished(summary):
                    return summary
                case message:
                    raise AssertionError(f"rank 0 sent {message!r}")

    def _prepared(self, checkpoint: Checkpoint) -> "Future[ExecutionMode]":
        """Make ready to load while rank 0 plans; what fails on this rank alone is raised by the result."""
        settings, found = self._settings, Future[ExecutionMode]()
        try:
            model = build_meta_model(checkpoint, settings.dtype)
            limits = job_limits(model, settings, generates=self._request.generates)
            tokenizer = find_tokenizer(checkpoint.folder)
            found.set_result(ExecutionMode(self._request, settings, model, tokenizer, limits, None, Meter()))
        except Exception as failure:  # rank 0, which says it better, comes to the same
            found.set_exception(failure)
        return found

    def _load(self, mode: ExecutionMode, message: Open) -> Completer:
        self._mode = mode
        mode.sums = self._sums = None if message.sums is None else new_sums(message.sums)
        return mode.load(message.prompts, message.sizes, message.parallel)

    def _compute(self, completer: Completer, work: Work) -> None:
        prompts = work.prompts
        places = {id(prompt): place for place, prompt in enumerate(prompts)}
        missing = {id(prompts[place]) for place in work.missing}
        with closing(completer.complete(prompts, missing)) as completed:
            for prompt, answer in completed:
                if self._answers and id(prompt) in missing:
                    self._send(Answered(places[id(prompt)], answer, completer.load()))

    def _count(self, completer: Completer) -> None:
        """Send the counters now and then: answers come late in a batch, and together."""
        while not self._over.wait(_NEWS_S):
            self._send(completer.load())

    def _tell_sums(self) -> None:
        self._send(Sums(() if self._sums is None else tuple(self._sums.take_new())))

    def _next(self) -> Any:
        message = self._inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def _receive(self) -> None:
        """Receive rank 0's messages; once it is gone, nothing is computed any more."""
        with suppress(EOFError, OSError):
            while not isinstance(message := self._read(self._link.recv_bytes()), Finished | Left):
                if isinstance(message, WantSums):
                    self._tell_sums()
                else:
                    self._inbox.put(message)
            self._was_told = True
            if isinstance(message, Finished):
                self._inbox.put(message)
                return
        if self._has_left:  # the models of this process are another job's by now
            return
        self._is_alone = True
        self._inbox.put(OtherRankFailed(f"{self._first()} ended the job"))
        fail_models(RankError(f"{self._first()} ended the job"))

    def _read(self, data: bytes) -> Any:
        try:
            return from_bytes(data)
        except ValueError as error:
            raise RankError(f"{self._first()}: {error}") from error

    def _fail(self, failure: BaseException) -> None:
        """Let `run` raise the error of a thread, also while the model computes."""
        self._inbox.put(failure)
        fail_models(failure)

    def _give_up(self, failure: SilentRankError) -> None:
        self._inbox.put(failure)
        fail_models(failure)
        if failure.rank == 0:  # a message to it may be on its way for good
            end_link(self._link)

    def _first(self) -> str:
        return f"rank 0 on {self._group.hosts[0]}"

    def _send(self, message: Any) -> None:
        with suppress(OSError), self._sending:  # rank 0 is gone: `_receive` notices
            self._link.send_bytes(to_bytes(message))

    def _explain(self, failure: BaseException) -> tuple[Cause, str]:
        if not isinstance(failure, Exception):
            name = Signals(getattr(failure, "signal_number", SIGINT)).name
            return Cause.SIGNAL, f"{name}: stopped"
        if isinstance(failure, UnusableInput):
            return Cause.REFUSAL, str(failure)
        cause = failure.__cause__ if isinstance(failure.__cause__, Exception) else failure
        for each in (failure, cause):  # a rank's failure may have a cause of its own: the connection that ended
            if isinstance(each, RankError | OtherRankFailed):
                return Cause.OTHER_RANK, str(each)
        return Cause.ERROR, f"{type(cause).__name__}: {cause}"
