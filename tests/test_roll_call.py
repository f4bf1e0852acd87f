"""The roll call: ranks find each other, and name the one that is missing; before torch is imported."""

import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from threading import Barrier
from typing import Any

import psutil
import pytest

from zinfer.errors import ConfigError, RankError
from zinfer.ranks.environment import RankEnvironment
from zinfer.ranks.roll_call import Roll, RollCall
from zinfer.ranks.roll_member import RollMember
from zinfer.ranks.sockets import accepted, connect, greet, prove, receive, reserve_port, send

SIZE = 3
LONG_S = 60.0
KEY = "k" * 16

MEMBER = """
import sys
from zinfer.ranks.environment import RankEnvironment
from zinfer.ranks.roll_member import RollMember
member = RollMember(RankEnvironment(2, 3, None, None, "second", "127.0.0.1", (int(sys.argv[1]),), "job", "k" * 16), 60)
member.wait_found(60)
print("torch" in sys.modules, flush=True)
sys.stdin.read()
"""


def rank_of(rank: int, *ports: int, job: str = "job") -> RankEnvironment:
    return RankEnvironment(rank, SIZE, None, None, "first" if rank < 2 else "second", "127.0.0.1", ports, job, KEY)


@contextmanager
def listening(answer: bytes = b"") -> Iterator[int]:
    """The port of another program, which sends an answer to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            try:
                while True:
                    found, _ = server.accept()
                    with found:
                        found.sendall(answer)
            except OSError:
                return

        threads.submit(serve)
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)


def joined(first: RollCall, *others: RollMember) -> list[Any]:
    """What each returns or raises, rank 0 first."""

    def caught(join: Callable[[], Roll]) -> Roll | Exception:
        try:
            return join()
        except Exception as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        calls = [threads.submit(caught, lambda: first.join(lambda hosts: " ".join(hosts)))]
        calls += [threads.submit(caught, other.join) for other in others]
        return [call.result() for call in calls]


def start_member(port: int, is_ready: bool) -> subprocess.Popen[str]:
    """Rank 2, in a process of its own that waits after its first sign, or joins."""
    text = MEMBER.replace("sys.stdin.read()", "member.join()") if is_ready else MEMBER
    words = [sys.executable, "-c", text, str(port)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_ranks_that_come_before_rank_0_join_and_open_links() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    others = [RollMember(rank_of(rank, port), LONG_S) for rank in (2, 1)]
    time.sleep(0.2)
    first = RollCall(rank_of(0, port), LONG_S)
    rolls = joined(first, *others)
    assert all(roll == rolls[0] for roll in rolls), rolls
    assert rolls[0].hosts == ("first", "first", "second")
    assert rolls[0].meeting == "first first second"
    for number in range(2):
        with ThreadPoolExecutor(1) as threads:
            mine = threads.submit(first.open_links, rolls[0], number)
            theirs = [other.open_links(rolls[1], number)[0] for other in others]
        for rank, link in zip((2, 1), theirs, strict=True):
            mine.result()[rank - 1].send((number, rank))
            assert link.recv() == (number, rank)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_ready", [False, True])
def test_a_killed_process_is_named_by_all(is_ready: bool) -> None:
    first = RollCall(rank_of(0, 0), LONG_S)
    other = RollMember(rank_of(1, first.port), LONG_S)
    with start_member(first.port, is_ready) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n", "torch was imported before the first sign"
        process.kill()
        process.wait()
    begin_s = time.monotonic()
    told = joined(first, other)
    assert time.monotonic() - begin_s < LONG_S / 4
    for error in told:
        assert isinstance(error, RankError)
        assert str(error).startswith("rank 2 of 3 on second has not joined: it ended or was killed"), error


def test_a_rank_that_never_comes_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.ranks.roll_call._LEAST_S", 0.1)
    first = RollCall(rank_of(0, 0), 1.0)
    told = joined(first, RollMember(rank_of(1, first.port), LONG_S))
    assert [str(error) for error in told] == ["rank 2 of 3 has not joined: nothing was heard of it for 1 s"] * 2


def test_a_process_that_starts_for_long_is_waited_for() -> None:
    first = RollCall(rank_of(0, 0), 0.1)
    others = [RollMember(rank_of(rank, first.port), 0.1) for rank in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        rolls = [threads.submit(first.join, lambda hosts: ""), threads.submit(others[0].join)]
        time.sleep(1.0)
        assert not any(roll.done() for roll in rolls)
        assert others[1].join() == rolls[0].result()


def test_a_rank_0_that_listens_but_does_not_answer_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.ranks.roll_member._ANSWER_S", 0.2)
    with ThreadPoolExecutor(SIZE) as threads:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            rolls = [threads.submit(RollMember(rank_of(rank, port), 0.1).join) for rank in (1, 2)]
            time.sleep(1.0)
            assert not any(roll.done() for roll in rolls)
        first = RollCall(rank_of(0, port), LONG_S).join(lambda hosts: "")
        assert [roll.result() for roll in rolls] == [first, first]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rank_that_has_called_but_not_read_the_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    monkeypatch.setattr("zinfer.ranks.roll_call._LEAST_S", 0.1)
    first = RollCall(rank_of(0, 0), 0.1)
    other = RollMember(rank_of(1, first.port), LONG_S)
    late = connect("127.0.0.1", first.port)
    drawn = greet(late, job="job", rank=2, what="rank", host="second")
    with ThreadPoolExecutor(2) as threads:
        rolls = [threads.submit(first.join, lambda hosts: ""), threads.submit(other.join)]
        time.sleep(1.0)
        assert not any(roll.done() for roll in rolls)
        if is_killed:
            late.close()
            for roll in rolls:
                with pytest.raises(RankError, match="rank 2 of 3 has not joined: nothing was heard of it for 0 s"):
                    roll.result()
        else:
            prove(late, KEY, drawn, receive(late))
            send(late, here=True)
            send(late, ready=True)
            assert rolls[0].result() == rolls[1].result()


def test_a_rank_lost_after_all_joined_ends_the_wait_for_its_link() -> None:
    first = RollCall(rank_of(0, 0), LONG_S)
    other = RollMember(rank_of(1, first.port), LONG_S)
    with start_member(first.port, True) as process:
        rolls = joined(first, other)
        process.wait()
    assert isinstance(rolls[0], Roll)
    other.open_links(rolls[1], 0)
    with pytest.raises(RankError, match="rank 2 of 3 on second ended or was killed"):
        first.open_links(rolls[0], 0)
    assert "rank 2 of 3 on second ended" in (first.find_lost(LONG_S) or "")
    assert "rank 2 of 3 on second ended" in (other.find_lost(LONG_S) or "")


def test_a_port_in_use_is_an_error_or_the_next_is_taken() -> None:
    with listening() as used:
        with pytest.raises(
            ConfigError, match=f"rank 0 on first cannot listen for the others .port {used}: Address alr"
        ):
            RollCall(rank_of(0, used), LONG_S)
        first = RollCall(rank_of(0, used, 0), LONG_S)
        others = [RollMember(rank_of(rank, used, first.port), LONG_S) for rank in (1, 2)]
        assert all(isinstance(each, Roll) for each in joined(first, *others))


def test_a_reserved_port_is_for_rank_0_alone() -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", port))
        first = RollCall(rank_of(0, port), LONG_S)
        assert RollMember(rank_of(1, port), LONG_S).wait_found(LONG_S)
        assert first.port == port


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "no rank 0 listens there|reset by peer|Broken pipe"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no rank of zinfer|bad message length|reset by peer"),
        (None, "Connection refused"),
    ],
)
def test_who_is_no_rank_0_is_named(answer: bytes | None, said: str) -> None:
    with listening(answer or b"") as port:
        port = 1 if answer is None else port
        with pytest.raises(
            RankError, match=f"rank 1 on first could not reach it in 0 s .*port {port}.*({said}).*MASTER"
        ):
            RollMember(rank_of(1, port), 0.0).join()


def test_an_address_that_is_unknown_is_named() -> None:
    unknown = "node0.invalid"
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is node0.invalid: .*; set it to the host of rank 0"):
        RollCall(replace(rank_of(0, 0), address=unknown), LONG_S)
    with pytest.raises(RankError, match=r"node0.invalid port 5: .*; check MASTER_ADDR and MASTER_PORT"):
        RollMember(replace(rank_of(1, 5), address=unknown), 0.0).join()


def test_ranks_on_the_host_of_rank_0_learn_the_address_that_others_reach() -> None:
    found = [each for several in psutil.net_if_addrs().values() for each in several if each.family == socket.AF_INET]
    address = next((each.address for each in found if not each.address.startswith("127.")), None)
    if address is None:
        pytest.skip("this machine has no address but loopbacks")
    own = [replace(rank_of(rank, 0), address="0.0.0.0" if rank == 0 else "127.0.0.1") for rank in range(SIZE)]
    first = RollCall(own[0], LONG_S)
    own = [replace(each, ports=(first.port,)) for each in own]
    others = [RollMember(own[1], LONG_S), RollMember(replace(own[2], address=address), LONG_S)]
    rolls = joined(first, *others)
    assert [each.find_address(rolls[0]) for each in (first, *others)] == [address] * SIZE


def answer_to(port: int, rank: int) -> dict[str, Any]:
    """What rank 0 answers to a process that calls as a rank, and leaves."""
    with closing(connect("127.0.0.1", port)) as connection:
        greet(connection, job="job", rank=rank, what="rank", host="first")
        return receive(connection)


def test_other_jobs_and_second_processes_of_a_rank_are_refused() -> None:
    first = RollCall(rank_of(0, 0), LONG_S)
    for own, said in (
        (rank_of(1, first.port, job="other"), "another job listens there"),
        (replace(rank_of(1, first.port), rank=3), "there is no rank 3 of 3"),
    ):
        with pytest.raises(RankError, match=said):
            RollMember(own, 0.0).join()
    there = RollMember(rank_of(1, first.port), LONG_S)
    assert there.wait_found(LONG_S)
    while "refused" not in answer_to(first.port, rank=1):  # rank 0 has not read yet that it is there
        time.sleep(0.01)
    with pytest.raises(RankError, match="rank 1 is there already, on first"):
        RollMember(rank_of(1, first.port), 0.0).join()


def test_of_two_processes_that_call_as_one_rank_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    have_called, of_rank_1 = Barrier(2), set()

    def greet_first(connection: Connection, **hello: Any) -> str:
        if hello["rank"] == 1:
            of_rank_1.add(connection)
        return greet(connection, **hello)

    def send_together(connection: Connection, **message: Any) -> None:
        if "here" in message and connection in of_rank_1:
            have_called.wait(LONG_S)
        send(connection, **message)

    monkeypatch.setattr("zinfer.ranks.roll_member.greet", greet_first)
    monkeypatch.setattr("zinfer.ranks.roll_member.send", send_together)
    first = RollCall(rank_of(0, 0), LONG_S)
    others = [RollMember(rank_of(1, first.port), LONG_S) for _ in range(2)]
    rolls = joined(first, *others, RollMember(rank_of(2, first.port), LONG_S))
    assert isinstance(rolls[0], Roll)
    assert rolls[3] == rolls[0]
    [refused] = [each for each in rolls[1:3] if each != rolls[0]]
    assert str(refused) == "rank 1 on first cannot join: rank 1 is there already, on first; give each process its own"


def test_who_has_no_key_joins_nothing_and_is_told_why() -> None:
    first = RollCall(rank_of(0, 0), LONG_S)
    with pytest.raises(RankError, match="what listens there has another key; set ZINFER_RANKS_KEY to one secret"):
        RollMember(replace(rank_of(1, first.port), key="another" * 4), 0.0).join()
    for what in ("rank", "link", "store"):  # one that takes the answer for a proof of its own
        with closing(connect("127.0.0.1", first.port)) as stranger:
            greet(stranger, job="job", rank=1, what=what, host="first", link=0)
            send(stranger, proof=receive(stranger)["proof"], here=True)
            assert stranger.poll(LONG_S)
            with pytest.raises(EOFError):
                receive(stranger)
    others = [RollMember(rank_of(rank, first.port), LONG_S) for rank in (1, 2)]
    assert all(isinstance(each, Roll) for each in joined(first, *others))


def test_a_process_with_too_many_files_accepts_again_once_it_can() -> None:
    class Full(socket.socket):
        num_refused = 0

        def accept(self) -> tuple[socket.socket, Any]:
            if self.num_refused < 3:
                self.num_refused += 1
                raise OSError([errno.EMFILE, errno.ENFILE, errno.ECONNABORTED][self.num_refused - 1], "no")
            return super().accept()

    with Full() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with closing(connect("127.0.0.1", listener.getsockname()[1])) as ours, closing(next(accepted(listener))) as end:
            send(ours, found=True)
            assert receive(end) == {"found": True}
            with socket.socket(fileno=end.fileno()) as found:
                assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                found.detach()
