"""Deltas that wait for a reader are joined, and nothing of them is lost."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.logprobs import Logprobs
from zinfer.serve.errors import ReplicaGone
from zinfer.serve.inbox import Inbox

TOKEN = st.tuples(st.integers(0, 2), st.text("abc", max_size=2), st.booleans())


@given(st.lists(st.one_of(TOKEN, st.none()), min_size=1))
def test_joined_deltas_hold_what_single_ones_do(steps: list[tuple[int, str, bool] | None]) -> None:
    async def run() -> None:
        inbox, read = Inbox(), []
        for token_id, step in enumerate(steps):
            if step is not None:
                sample, text, scored = step
                score = (Logprobs(-float(token_id), (), ()),) if scored else None
                inbox.put(CompletionDelta(0, sample, text, (token_id,), score))
            elif inbox._deltas:
                read += await inbox.take()
        if inbox._deltas:
            read += await inbox.take()
        for sample in range(3):
            wanted = [(number, step) for number, step in enumerate(steps) if step is not None and step[0] == sample]
            own = [each for each in read if each.sample_index == sample]
            assert "".join(each.text for each in own) == "".join(step[1] for _, step in wanted)
            assert [each for delta in own for each in delta.token_ids] == [number for number, _ in wanted]
            scores = [-each.chosen for delta in own for each in delta.logprobs or ()]
            assert scores == [number for number, step in wanted if step[2]]

    asyncio.run(run())


def test_an_error_comes_after_what_came_before_it_and_stays() -> None:
    async def run() -> None:
        inbox = Inbox()
        whole = Completion(0, 0, "ab", (1, 2), "length")
        inbox.put(CompletionDelta(0, 0, "a", (1,)))
        inbox.put(CompletionDelta(0, 0, "b", (2,), None, whole))
        inbox.put(ReplicaGone("gone"))
        assert await inbox.take() == [CompletionDelta(0, 0, "ab", (1, 2), None, whole)]
        for _ in range(2):
            with pytest.raises(ReplicaGone, match="gone"):
                await inbox.take()

    asyncio.run(run())


def test_a_reader_waits_for_the_first_delta() -> None:
    async def run() -> list[CompletionDelta]:
        inbox = Inbox()
        reading = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        assert not reading.done()
        inbox.put(CompletionDelta(0, 0, "a", (1,)))
        return await reading

    assert asyncio.run(run()) == [CompletionDelta(0, 0, "a", (1,))]
