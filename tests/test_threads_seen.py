"""No thread ends unseen: an error planted in each of the product's reaches whoever waits for it, within seconds.

The table has a row for each thread; `test_each_thread_has_a_row` looks them up in the sources.
"""

import ast
import asyncio
import io
import logging
import mmap
import os
import queue
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn, TypeAlias

import pytest
import torch
from jobs_support import letters_model
from rich.console import Console
from test_rehearsal import CONFIG, count_as_gpu
from test_rooms import product_calls
from test_transfer_lane import Numbers, lane, move_of

from zinfer import LLM
from zinfer.batching import lockstep
from zinfer.batching.handle import Handle
from zinfer.batching.serving_loop import ServingLoop
from zinfer.batching.stage_tokens import StageTokens
from zinfer.config import resolve_settings
from zinfer.display import Progress, shown
from zinfer.engine import kernel_cache
from zinfer.engine.rank_service import RankService
from zinfer.engine.streamed_model import _Life
from zinfer.errors import RankError, SilentRankError
from zinfer.jobs.messages import Open, Ready
from zinfer.jobs.output import RowWriter
from zinfer.jobs.peer_worker import PeerWorker
from zinfer.jobs.peers import Peers
from zinfer.jobs.progress import Load
from zinfer.jobs.prompts import prefetch_iter
from zinfer.jobs.rehearsal import Rehearsal
from zinfer.jobs.report import Timeline
from zinfer.jobs.request import JobRequest
from zinfer.jobs.row_form import RowForm
from zinfer.nvme.backend import Backend, Buffer, OpenFile
from zinfer.nvme.page_cache import end_reading_ahead, read_ahead
from zinfer.nvme.pool import Pool, call_all, start_thread, when_done
from zinfer.nvme.reader import Reader
from zinfer.offload.block import Block, SlabLayout
from zinfer.offload.partition import Partition
from zinfer.offload.ranks import GatherLane
from zinfer.offload.slots import Slot
from zinfer.offload.stream import HostStream
from zinfer.ranks import peer_memory
from zinfer.ranks import rank_watch as rank_watch_module
from zinfer.ranks.environment import RankEnvironment
from zinfer.ranks.group import RankGroup
from zinfer.ranks.rank_store import StoredValues
from zinfer.ranks.rank_watch import RankWatch
from zinfer.ranks.roll_call import Roll, RollCall
from zinfer.ranks.roll_member import RollMember
from zinfer.ranks.sockets import connect, greet, prove, receive, send
from zinfer.ranks.values import from_bytes, to_bytes
from zinfer.serve import engine_process
from zinfer.weights import hub

HEARD_S: Final = 20.0
"""Until whoever waits must have heard; most hear at once."""
LONG_S: Final = 3600.0


KEY: Final = "k" * 16
Row: TypeAlias = Callable[[Path], Callable[[], object]]


class PlantedError(Exception):
    """An error that nobody expects."""


def fail(*args: object, **options: object) -> NoReturn:
    raise PlantedError("planted")


class Failing:
    """An object of which every attribute fails."""

    def __getattr__(self, name: str) -> NoReturn:
        fail()


@pytest.fixture(autouse=True)
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End watches over ranks: one that a test leaves behind ends this process as soon as it calls what was planted."""
    begun: list[RankWatch] = []
    begin = RankWatch.__init__

    def noted(self: RankWatch, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        begun.append(self)

    monkeypatch.setattr(RankWatch, "__init__", noted)
    yield
    for each in begun:
        each.end()


def heard(wait: Callable[[], object]) -> BaseException:
    """The error that a call raises; it must not wait for good."""
    found: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            wait()
        except BaseException as error:
            found.put(error)
        else:
            found.put(None)

    threading.Thread(target=run, daemon=True).start()
    try:
        error = found.get(timeout=HEARD_S)
    except queue.Empty:
        raise AssertionError(f"whoever waits has heard nothing for {HEARD_S} s") from None
    assert error is not None, "nobody was told"
    return error


class Told:
    """A function that is told of a failure; calling `raised` waits for it, and raises it."""

    def __init__(self) -> None:
        self._found: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def __call__(self, failure: BaseException) -> None:
        self._found.put(failure)

    def raised(self) -> NoReturn:
        raise self._found.get()


class Logged(logging.Handler):
    """Waits for an error that is logged, where nobody waits for the thread itself."""

    def __init__(self) -> None:
        super().__init__()
        self._told = Told()
        logging.getLogger("zinfer").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args if isinstance(record.args, tuple) else ()
        error = record.exc_info[1] if record.exc_info else next(iter(args), None)
        if isinstance(error, BaseException):
            self._told(error)

    def raised(self) -> NoReturn:
        try:
            self._told.raised()
        finally:
            logging.getLogger("zinfer").removeHandler(self)


# Rows: each plants an error in one thread, and returns what its user waits for.


def pool(folder: Path) -> Callable[[], object]:
    begun, goes_on, own = threading.Event(), threading.Event(), Pool(1, "calls")

    def call() -> None:
        begun.set()
        goes_on.wait(HEARD_S)

    first, second = own.submit(call), own.submit(int)
    begun.wait()
    first.set_result(None)  # the thread will set it again
    goes_on.set()
    return second.result


def lane_load(folder: Path) -> Callable[[], object]:
    class Source(Numbers):
        num_parts = property(fail, fail)  # type: ignore[assignment]

        def __init__(self) -> None:
            self.wire_bytes = 1

    return lane_with(Source())


def lane_send(folder: Path) -> Callable[[], object]:
    class Source(Numbers):
        def load(self, part: int, staging: object) -> Sequence["Future[None]"]:
            given_up: Future[None] = Future()
            given_up.cancel()
            return [given_up]

    return lane_with(Source(1, 1))


def lane_with(source: Numbers) -> Callable[[], object]:
    def wait() -> None:
        with lane() as opened:
            transfers = move_of(source), move_of(Numbers(2, 3))
            for each in transfers:
                opened.submit(each)
            assert transfers[1].failure() is None, "the lane goes on"
            transfers[0].raise_failure()

    return wait


def gather(folder: Path) -> Callable[[], object]:
    ranks: Any = SimpleNamespace(
        partition=Partition(0, 2), take_turn=None, on_failure=lambda call: None, fail=lambda failure: None, gather=fail
    )
    stream = HostStream()
    gathering = GatherLane(ranks, stream)
    block = Block(0, "block", SlabLayout.pack([("weight", torch.uint8, (8,))]), ())
    slot = Slot.allocate(1 << 12, stream)
    transfer = gathering.begin(block, Numbers(1, 1), slot, stream)
    transfer.finish(stream.mark(), 0.0)
    return transfer.raise_failure


def heartbeat(folder: Path) -> Callable[[], object]:
    class Broken(Progress):
        line = fail

        def short_line(self, width: int) -> str:  # of the bar
            return ""

        def share(self) -> None:
            return None

    logged = Logged()

    def wait() -> None:
        progress = Broken(Console(file=io.StringIO()))
        with shown(progress, 0.01):
            logged.raised()

    return wait


def timeline(folder: Path) -> Callable[[], object]:
    calls: list[int] = []

    def load() -> Any:
        calls.append(1)
        return fail() if len(calls) == 1 else SimpleNamespace()

    own = Timeline(lambda: SimpleNamespace(), load)  # type: ignore[arg-type, return-value]
    return own.close


def rows(folder: Path) -> Callable[[], object]:
    writer = RowWriter(Failing(), lambda number: None)  # type: ignore[arg-type]
    writer.put({})
    return writer.close


def prefetch(folder: Path) -> Callable[[], object]:
    class Items:
        def __iter__(self) -> Iterator[int]:
            fail()

    return lambda: next(prefetch_iter(Items()))


def triton_key(folder: Path) -> Callable[[], object]:
    logged = Logged()

    def wait() -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(kernel_cache, "triton_key", fail)
            patched.setattr(kernel_cache.triton.knobs.cache, "dir", str(folder))
            kernel_cache.ensure_kernel_cache.__wrapped__()
            logged.raised()

    return wait


def rank_service(folder: Path) -> Callable[[], object]:
    told = Told()
    ranks: Any = SimpleNamespace(failure=None, fail=told, turns=Failing())
    RankService(ranks, Failing(), threading.Lock(), torch.device("cpu"))  # type: ignore[arg-type]
    return told.raised


class OneRequest:
    known_ids = detokenizer = None


class Batcher:
    """Computes nothing; ``changes`` are parts that fail."""

    has_known = False

    def __init__(self, **changes: object) -> None:
        self.abort = self.forget_prefixes = lambda: None
        self.begin = self.cancel = lambda requests: ()
        vars(self).update(changes)


def serving(*, closers: Sequence[Callable[[], object]] = (), **changes: object) -> ServingLoop:
    return ServingLoop(Batcher(**changes), torch.device("cpu"), closers)  # type: ignore[arg-type]


def serving_closer(folder: Path) -> Callable[[], object]:
    return serving(closers=[fail]).close


def serving_admission(folder: Path) -> Callable[[], object]:
    handle = Handle([OneRequest()])  # type: ignore[list-item]
    serving(begin=fail).submit(handle)
    return lambda: next(iter(handle))


def serving_prefixes(folder: Path) -> Callable[[], object]:
    return serving(forget_prefixes=fail).drop_prefixes


def serving_rest(folder: Path) -> Callable[[], object]:
    """A command that is left when the loop ends fails."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        goes_on.wait(HEARD_S)

    loop = serving(forget_prefixes=wait, cancel=fail)
    threading.Thread(target=loop.drop_prefixes, daemon=True).start()
    begun.wait()
    loop.cancel(Handle([OneRequest()]))  # type: ignore[list-item]
    loop.stop()
    goes_on.set()
    return loop.close


def leader(folder: Path) -> Callable[[], object]:
    told = Told()
    ranks: Any = SimpleNamespace(failure=None, fail=told)
    lockstep.Leader(ranks, [Failing()])  # type: ignore[list-item]
    return told.raised


def follower(folder: Path) -> Callable[[], object]:
    told = Told()
    ranks: Any = SimpleNamespace(failure=None, name_of=str, on_failure=lambda call: None)
    lockstep.Follower(ranks, 0, Failing()).listen(fail, told)  # type: ignore[arg-type]
    return told.raised


def stage_tokens(folder: Path) -> Callable[[], object]:
    ranks: Any = SimpleNamespace(failure=None, on_failure=lambda call: None, check=lambda: None)
    drawn: Any = SimpleNamespace(take=fail)
    return StageTokens(ranks, [], is_last=True).share(drawn, drawn).take


class Calls:
    """Of ranks that are in this process: what they ask of each other."""

    def __init__(self, **changes: object) -> None:
        self._values = StoredValues()
        self.links: list[Any] = []
        self.lost_ranks: Callable[[], frozenset[int]] = frozenset
        vars(self).update(changes)

    def open_store(self) -> StoredValues:
        return self._values

    def open_links(self, roll: Roll, number: int) -> list[Any]:
        return self.links


def group_of(rank: int, **changes: object) -> RankGroup:
    calls: Any = Calls(**changes)
    return RankGroup(rank, 2, rank, 2, "127.0.0.1", Roll(("a", "b"), "127.0.0.1", ""), calls)


def rank_watch(folder: Path) -> Callable[[], object]:
    told = Told()
    RankWatch(group_of(0, lost_ranks=fail), "model").on_failure(told)
    return told.raised


def peers(folder: Path) -> Callable[[], object]:
    own = Peers(group_of(0, links=[Failing()]), lambda: "Rows are kept")
    return lambda: own.wait_ready(Ready({}, None))


class Link:
    """Of a rank to rank 0, in this process: sends by a function, and receives one message after another."""

    def __init__(self, sends: Callable[[bytes], object], *messages: object, end: Callable[[], bytes]) -> None:
        self.send_bytes = sends
        self._messages, self._end = [*messages], end

    def recv_bytes(self) -> bytes:
        return to_bytes(self._messages.pop(0)) if self._messages else self._end()

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_RDONLY)


def working(folder: Path, link: Link) -> Callable[[], object]:
    letters_model(folder)
    request = JobRequest(folder, folder / "in", folder / "out", None, "cpu", RowForm(4), None, False, None, None)
    return PeerWorker(request, resolve_settings({}, {"device": "cpu"}), group_of(1, links=[link])).run


def rank_0(folder: Path) -> Callable[[], object]:
    return working(folder, Link(len, end=fail))


def news(folder: Path) -> Callable[[], object]:
    def send_bytes(data: bytes) -> None:
        if isinstance(from_bytes(data), Load):
            fail()

    return working(folder, Link(send_bytes, Open((), {}, {}, None), end=threading.Event().wait))  # type: ignore[arg-type]


def own_listener(port: int) -> socket.socket:
    """This process's socket that listens on a port."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = socket.socket(fileno=os.dup(int(name)))
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
                return found
            found.close()
    raise AssertionError(f"nobody listens on {port}")


def environment(rank: int, *ports: int) -> RankEnvironment:
    return RankEnvironment(rank, 2, None, None, "here", "127.0.0.1", ports, "job", KEY)


def accepting(folder: Path) -> Callable[[], object]:
    call = RollCall(environment(0, 0), LONG_S)
    with own_listener(call.port) as listener:
        listener.shutdown(socket.SHUT_RDWR)
    return lambda: call.join(fail)


def connected(call: RollCall, **hello: object) -> Connection:
    """A connection to a roll call that has proved to be rank 1's."""
    link = connect("127.0.0.1", call.port)
    drawn = greet(link, job="job", rank=1, **hello)
    prove(link, KEY, drawn, receive(link))
    return link


def attending(folder: Path) -> Callable[[], object]:
    call = RollCall(environment(0, 0), LONG_S)
    link = connected(call, what="rank", host="there")
    send(link, here=True)
    link.send_bytes(b"[" * 100_000)
    return lambda: call.join(fail)


def linking(folder: Path) -> Callable[[], object]:
    logged, call = Logged(), RollCall(environment(0, 0), LONG_S)
    link = connected(call, what="link", link=[1])

    def wait() -> None:
        with pytest.raises(EOFError):
            link.recv_bytes()
        logged.raised()

    return wait


def searching(folder: Path) -> Callable[[], object]:
    class Ports(tuple[int, ...]):
        __iter__ = fail

    return RollMember(replace(environment(1), ports=Ports()), LONG_S).join


def rehearsing(folder: Path) -> Callable[[], object]:
    def wait() -> None:
        with pytest.MonkeyPatch.context() as patched:
            count_as_gpu(folder / "kernels", patched.setattr)
            logged, own = Logged(), Rehearsal(letters_model(folder / "model"), CONFIG, {}, prepare=fail)
            with LLM(folder / "model", CONFIG, beside_load=own.beside_load):
                logged.raised()

    return wait


def ended_engine(folder: Path) -> Callable[[], object]:
    logged = Logged()
    part: Any = SimpleNamespace(remove=fail, close=lambda: None)
    threading.Thread(target=_Life(part, part, part, None, part).__del__).start()
    return logged.raised


def ended_process(run: Callable[[], object]) -> NoReturn:
    """Raise what a process says that is forked to run a call, and ends by it."""
    here, there = os.pipe()
    if not (pid := os.fork()):
        os.dup2(there, 2)
        try:
            run()
            time.sleep(HEARD_S)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(there)
    with open(here) as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 1, text
    raise PlantedError(text.splitlines()[-1])


def let_go(folder: Path) -> Callable[[], object]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(peer_memory, "_CLOSE_S", 0.1)
            patched.setattr(torch.cuda, "Stream", lambda *given, **options: None)
            patched.setattr(torch.cuda, "set_device", fail)
            group: Any = None
            peer_memory.PeerMemory(Partition(0, 2), torch.device("cuda"), group).give_up()
            time.sleep(HEARD_S)

    return partial(ended_process, run)


def end_of_rank(folder: Path) -> Callable[[], object]:
    def silent(group: object, call: Callable[[SilentRankError], None]) -> Any:
        call(SilentRankError("rank 1 has not answered", 1))
        return SimpleNamespace(end=lambda: None)

    def run() -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine_process, "_TOLD_S", 0.1)
            patched.setattr(engine_process, "join_group", lambda device: group_of(0))
            patched.setattr(engine_process, "watch_job", silent)
            patched.setattr(engine_process, "run_engine", lambda *given: asyncio.sleep(HEARD_S))
            engine_process.compute("", "", {}, {"device": "cpu"}, fail)

    return partial(ended_process, run)


def read_ahead_of_need(folder: Path) -> Callable[[], object]:
    def files() -> Iterator[Path]:
        yield fail()

    read_ahead(files(), 1)
    return end_reading_ahead


def downloading(folder: Path) -> Callable[[], object]:
    return partial(hub._stoppable, fail)


ROWS: Final[Mapping[str, tuple[Row, ...]]] = {
    "{}-{}": (pool,),
    "zinfer-ahead-{}": (read_ahead_of_need,),
    "zinfer-{}-{}": (lane_load, lane_send),
    "zinfer-download": (downloading,),
    "zinfer-gather": (gather,),
    "zinfer-heartbeat": (heartbeat,),
    "zinfer-timeline": (timeline,),
    "zinfer-rows": (rows,),
    "zinfer-prefetch-iter": (prefetch,),
    "zinfer-rehearsal": (rehearsing,),
    "zinfer-triton-key": (triton_key,),
    "zinfer-rank-service": (rank_service,),
    "zinfer-end-engine": (ended_engine,),
    "zinfer-serve": (serving_closer, serving_admission, serving_prefixes, serving_rest),
    "zinfer-lockstep": (leader, follower),
    "zinfer-tokens": (stage_tokens,),
    "zinfer-ranks": (rank_watch,),
    "zinfer-peer-{}": (peers,),
    "zinfer-rank-0": (rank_0,),
    "zinfer-news": (news,),
    "zinfer-roll-call": (accepting, attending, linking, searching),
    "zinfer-give-up": (let_go,),
    "zinfer-end": (end_of_rank,),
}
"""By the name that the thread is started with."""
SAID: Final[Mapping[Row, str]] = {
    pool: "InvalidStateError",
    lane_send: "CancelledError",
    linking: "TypeError",
    accepting: "rank 1 of 2 has not joined: rank 0 takes no more connections: OSError",
    attending: "rank 1 of 2 on there has not joined: it ended",
}
"""What the error says, where it is not the planted one."""


@pytest.mark.parametrize(("name", "plant"), [(name, plant) for name, plants in ROWS.items() for plant in plants])
def test_an_error_reaches_whoever_waits(name: str, plant: Row, tmp_path: Path) -> None:
    error = heard(plant(tmp_path))
    assert SAID.get(plant, "planted") in f"{type(error).__name__}: {error}"


def started_name(call: ast.Call) -> str:
    """The name that a thread is started with, its variable parts as {}."""
    [name, *_] = call.args
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    return "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in parts)


def test_each_thread_has_a_row() -> None:
    started = Counter(started_name(call) for _, call in product_calls("start_thread"))
    assert started
    for name, number in started.items():
        assert len(ROWS.get(name, ())) >= number, name


def test_a_callback_that_fails_is_told() -> None:
    told, future = Told(), Future[int]()
    when_done(future, fail, told)
    future.set_result(1)
    assert isinstance(heard(told.raised), PlantedError)


@pytest.mark.parametrize("count", [None, "many"], ids=repr)
def test_a_backend_that_returns_no_number_fails_the_read(tmp_path: Path, count: Any) -> None:
    class File(OpenFile):
        direct = True

        def __init__(self, path: Path) -> None:
            self.path = path

        def start(self, buffer: Buffer, offset: int) -> "Future[int]":
            found: Future[int] = Future()
            found.set_result(count)
            return found

        def close(self) -> None:
            pass

    class Odd(Backend):
        reads_device_memory = False
        open = staticmethod(File)  # type: ignore[assignment]

        def close(self) -> None:
            pass

    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 12))
    with closing(Reader(backend=Odd())) as reader:
        read = reader.read_async(path, 0, memoryview(mmap.mmap(-1, 1 << 12)))
        assert isinstance(heard(read.result), TypeError)


def test_each_of_several_calls_is_made_and_the_last_error_raised() -> None:
    made: list[int] = []
    with pytest.raises(PlantedError):
        call_all([partial(made.append, 1), fail, partial(made.append, 2)])
    assert made == [1, 2]


def test_a_callback_of_a_watch_that_fails_does_not_hide_a_failure_from_others() -> None:
    told, watch = Told(), RankWatch(group_of(0), "model")
    watch.on_failure(fail)
    watch.on_failure(told)
    with pytest.raises(PlantedError):
        watch.fail(RankError("a rank is lost"))
    assert isinstance(heard(told.raised), RankError)
    with pytest.raises(RankError, match="lost"):
        watch.check()
    watch.end()


def watch_with_a_callback_that_fails() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank_watch_module, "_END_S", 0.1)
        RankWatch(group_of(0, lost_ranks=fail), "model").on_failure(fail)
        time.sleep(HEARD_S)


def thread_whose_failure_cannot_be_told() -> None:
    start_thread("zinfer-test", fail, fail)


@pytest.mark.parametrize("run", [thread_whose_failure_cannot_be_told, watch_with_a_callback_that_fails])
def test_a_process_ends_where_nobody_can_be_told(run: Callable[[], None]) -> None:
    assert "failed, for which others wait: PlantedError: planted" in str(heard(partial(ended_process, run)))


def test_tokens_of_a_pass_that_takes_longer_than_a_beat_are_waited_for() -> None:
    ranks: Any = SimpleNamespace(failure=None, on_failure=lambda call: None, check=lambda: None, find_cause=RankError)
    drawn: Any = SimpleNamespace(take=lambda: time.sleep(1.5) or "tokens", where=lambda: None)
    assert StageTokens(ranks, [], is_last=True).share(drawn, drawn).take() == "tokens"
