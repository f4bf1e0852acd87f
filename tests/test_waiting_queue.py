"""Who starts next: the foreground, lower priorities, and owners in turn, by the tokens that each has had."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2 as httpx
from jobs_support import letters_model
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from zinfer import LLM
from zinfer.batching.request import Request
from zinfer.scheduling.precedence import Precedence
from zinfer.scheduling.sequence import Sequence, SequenceState
from zinfer.scheduling.waiting_queue import WaitingQueue
from zinfer.serve.caller import CALLER, name_of
from zinfer.serve.guard import Guard


class Arrivals:
    """Adds sequences to a queue, and takes them out as a scheduler does."""

    def __init__(self) -> None:
        self.queue = WaitingQueue("arrival")
        self.num_added = 0

    def add(self, count: int, owner: str, num_prompt: int = 10, **precedence: Any) -> None:
        for _ in range(count):
            self.queue.add(
                Sequence(self.num_added, [1] * num_prompt, 100, precedence=Precedence(owner=owner, **precedence))
            )
            self.num_added += 1

    def admit(self, count: int, num_new: int = 0) -> str:
        """Names of the owners whose sequences start, one after the other ends."""
        found = ""
        for _ in range(count):
            sequence = self.queue.first()
            assert sequence is not None
            self.queue.remove_first()
            sequence.output_ids += [1] * num_new
            self.queue.charge(sequence)
            found += sequence.precedence.owner
        return found


def test_one_request_does_not_wait_for_a_thousand_of_another() -> None:
    arrivals = Arrivals()
    arrivals.add(1000, "a")
    assert arrivals.admit(100) == "a" * 100
    arrivals.add(1, "b")
    assert "b" in arrivals.admit(2)
    assert arrivals.admit(899) == "a" * 899
    assert arrivals.queue.first() is None


def test_turns_are_counted_in_tokens_of_prompts_and_outputs() -> None:
    arrivals = Arrivals()
    arrivals.add(100, "a", num_prompt=30)
    arrivals.add(100, "b", num_prompt=10)
    assert arrivals.admit(40).count("b") == 30
    arrivals = Arrivals()
    arrivals.add(100, "a", num_prompt=5)
    arrivals.add(100, "b", num_prompt=5)
    found = ""
    for _ in range(60):
        first = arrivals.queue.first()
        assert first is not None
        found += arrivals.admit(1, num_new=25 if first.precedence.owner == "a" else 5)
    assert found.count("b") == 45


def test_nobody_saves_up_turns() -> None:
    arrivals = Arrivals()
    arrivals.add(1, "b")
    arrivals.add(50, "a")
    arrivals.admit(31)
    arrivals.add(20, "b")
    assert arrivals.admit(20).count("b") in (10, 11), "it was away for thirty turns"


def test_owners_that_are_gone_are_forgotten() -> None:
    """Each of many comes once, and its clock is ahead when it leaves."""
    queue = WaitingQueue("arrival")
    for number in range(3000):
        sequence = Sequence(number, [1] * 5, 3, precedence=Precedence(owner=f"owner {number}"))
        queue.add(sequence)
        assert queue.first() is sequence
        queue.remove_first()
        sequence.state = SequenceState.RUNNING
        sequence.output_ids += [1, 1]
        queue.charge(sequence)
    assert len(queue._owners) <= 2048


def test_lower_numbers_come_first_and_the_background_last() -> None:
    arrivals = Arrivals()
    arrivals.add(2, "z", is_background=True, priority=-9)
    for priority in (1, 0, -1):
        arrivals.add(2, "a", priority=priority)
    found = []
    while (first := arrivals.queue.first()) is not None:
        found.append(first.precedence.priority)
        arrivals.queue.remove_first()
    assert found == [-1, -1, 0, 0, 1, 1, -9, -9]


def test_nobody_shuts_out_others_by_a_priority() -> None:
    arrivals = Arrivals()
    arrivals.add(60, "a", priority=-5)
    assert arrivals.admit(4) == "aaaa"
    arrivals.add(5, "b")
    assert arrivals.admit(10).count("b") == 5


def test_who_gave_up_is_passed_over() -> None:
    arrivals = Arrivals()
    arrivals.add(3, "a")
    first = arrivals.queue.first()
    assert first is not None
    first.state = SequenceState.FINISHED
    assert len(arrivals.queue.foreground()) == 2
    assert arrivals.admit(2) == "aa"
    assert arrivals.queue.first() is None


def test_an_llm_lets_owners_take_turns(tmp_path: Path) -> None:
    with LLM(letters_model(tmp_path), device="cpu", max_sequences=1) as llm:
        handles = [
            llm.prepare(["ab"] * 6, max_new_tokens=3, owner="a"),
            llm.prepare(["cd"] * 2, max_new_tokens=3, owner="b"),
            llm.prepare(["ef"], max_new_tokens=3, owner="a", priority=-1),
        ]
        order, priorities = list[str](), list[int]()
        deliver = llm._loop._deliver

        def note(request: Request, event: Any) -> None:
            order.append(request.precedence.owner)
            priorities.append(request.precedence.priority)
            deliver(request, event)

        llm._loop._deliver = note  # type: ignore[method-assign]
        llm._loop._commands.put(lambda: [llm._loop._begin(each) for each in handles])
        for handle in handles:
            assert len(list(handle)) == len(handle.requests)
        assert "".join(order) == "baabaaaaa", "in turn"
        assert priorities[:2] == [0, -1], "of its owner's the urgent one comes first"


def test_each_key_is_a_caller_of_its_own() -> None:
    async def name(request: object) -> PlainTextResponse:
        return PlainTextResponse(f"caller {CALLER.get()}")

    async def ask(keys: list[str], *given: str) -> list[str]:
        app = Guard(Starlette(routes=[Route("/v1/models", name)]), keys, 1000, 1000)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
            answers = [await http.get("/v1/models", headers={"Authorization": f"Bearer {each}"}) for each in given]
        return [each.text if each.status_code == 200 else str(each.status_code) for each in answers]

    callers = [f"caller {name_of(each)}" for each in (b"two", b"one")]
    assert asyncio.run(ask(["one", "two"], "two", "one", "three", "two")) == [*callers, "401", callers[0]]
    assert asyncio.run(ask([], "any")) == ["caller "]
    assert CALLER.get() == ""
