"""Messages between the server and its engines' processes arrive whole, however they are cut on their way."""

import asyncio
from itertools import pairwise
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from zinfer.serve.messages import Connection, Embedded, FromEngine, ToEngine


def sent(messages: list[ToEngine | FromEngine]) -> bytes:
    """The bytes of messages on their way."""
    writer = Mock(is_closing=lambda: False)
    connection = Connection(Mock(), writer, FromEngine)
    for message in messages:
        connection.send(message)
    return b"".join(call.args[0] for call in writer.write.call_args_list)


async def received(parts: list[bytes]) -> list[FromEngine]:
    """Messages of which these parts arrive, one after the other, until the end."""
    reader = asyncio.StreamReader()
    connection = Connection(reader, Mock(), FromEngine)

    async def feed() -> None:
        for part in parts:
            reader.feed_data(part)
            await asyncio.sleep(0)
        reader.feed_eof()

    feeding, found = asyncio.create_task(feed()), []
    while (message := await connection.receive()) is not None:
        found.append(message)
    await feeding
    return found


VECTORS = st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from([0, 3, 60_000, 70_000, 300_000]).map(bytes)))


@given(st.lists(VECTORS.map(Embedded), max_size=6), st.lists(st.integers(0, 2_000_000), max_size=8))
def test_messages_arrive_in_any_parts(messages: list[Embedded], cuts: list[int]) -> None:
    data = sent([*messages])
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[begin:end] for begin, end in pairwise(edges)]
    assert asyncio.run(received(parts)) == messages


@given(st.integers(1, 40))
def test_a_message_that_was_cut_off_is_the_end(num_lost: int) -> None:
    whole = [Embedded([(7, b"vector")]), Embedded([(8, bytes(100))])]
    assert asyncio.run(received([sent([*whole])[:-num_lost]])) == whole[:1]
