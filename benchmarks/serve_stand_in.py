"""A server whose replica computes nothing: it answers at once, so that what a request takes is HTTP's own time.

    python benchmarks/serve_stand_in.py TOKENIZER    # says where it listens

`replica` as the first argument is the process that answers.
"""

import asyncio
import sys
from pathlib import Path

from transformers import AutoTokenizer

from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.length_limits import LengthLimits
from zinfer.serve.engine_process import freeze_loaded, tell_life
from zinfer.serve.messages import Connection, Deltas, Ready, Submit, ToEngine
from zinfer.serve.replica_process import started_replicas, wait_for_server
from zinfer.serve.server import ServerOptions, serve
from zinfer.serve.service import ServiceLimits

_POSITIONS = 1 << 16


async def answer(socket_path: str) -> None:
    """Give each request its tokens, one a message as passes do, without any pause."""
    reader, writer = await asyncio.open_unix_connection(socket_path)
    connection = Connection(reader, writer, ToEngine)
    connection.send(Ready(_POSITIONS, LengthLimits(), _POSITIONS))
    living = asyncio.create_task(tell_life(connection))
    while isinstance(message := await connection.receive(), Submit):
        count = message.params.most_new_tokens
        if not message.precedence.is_background:
            for _ in range(count - 1):
                connection.send(Deltas([(message.number, CompletionDelta(0, 0, "a", (5,)))]))
        whole = Completion(0, 0, "a" * count, (5,) * count, "length")
        connection.send(Deltas([(message.number, CompletionDelta(0, 0, "a", (5,), None, whole))]))
    living.cancel()


def main() -> None:
    if sys.argv[1] == "replica":
        socket_path = sys.argv[sys.argv.index("--socket") + 1]
        if wait_for_server(Path(socket_path)):
            asyncio.run(answer(socket_path))
        return
    command = [sys.executable, __file__, "replica"]
    tokenizer = AutoTokenizer.from_pretrained(Path(sys.argv[1]))
    freeze_loaded()  # as the command does
    with started_replicas(command, 1) as replicas:
        options = ServerOptions(["stand-in"], port=0)
        serve(replicas, tokenizer, options, ServiceLimits(), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
