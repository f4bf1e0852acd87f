"""Messages between the process that takes HTTP requests and one that computes, and how they are sent.

Both ends are processes of one command, connected by a socket pair or a Unix socket. Each message has its length before
it; the end of the connection is the end of the process at its other end.
"""

import asyncio
import struct
from typing import Any, Final

import msgspec

from zinfer.requests.completion import CompletionDelta
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.sampling_params import SamplingParams
from zinfer.scheduling.precedence import FIRST_COME, Precedence

_LENGTH: Final = struct.Struct("<Q")
_READ_BYTES: Final = 1 << 16


class Submit(msgspec.Struct, tag=True):
    """Complete a prompt. `number` names the request in later messages.

    One in the background gives way to others, and gets its completions whole.
    """

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    precedence: Precedence = FIRST_COME


class Embed(msgspec.Struct, tag=True):
    """Embed a row of tokens."""

    number: int
    token_ids: list[int]


class Cancel(msgspec.Struct, tag=True):
    """End a request; nothing more is heard of it."""

    number: int


class Close(msgspec.Struct, tag=True):
    """Release the model and end the process."""


class Ready(msgspec.Struct, tag=True):
    """The model is loaded. `embeds`: it takes `Embed`, else `Submit`.

    `limits` bound requests; `most_tokens` is what the KV cache holds of one sequence; `latency` is a line for the
    server's start, on the times of answers to be expected or on what embeddings are; `prompts` are texts that may
    precede what is embedded, by name, and `default_prompt` is the one where none is named; `row_settings` are as of
    `LLM`.
    """

    vocab_size: int
    limits: LengthLimits
    most_tokens: int
    latency: str = ""
    embeds: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    row_settings: dict[str, str] = {}


class Deltas(msgspec.Struct, tag=True):
    """What requests got since the last message, in order."""

    deltas: list[tuple[int, CompletionDelta]]


class Embedded(msgspec.Struct, tag=True):
    """The vectors of rows, each as little-endian float32."""

    vectors: list[tuple[int, bytes]]


class Refused(msgspec.Struct, tag=True):
    """A request cannot be computed, by the client's fault if it `is_invalid`. Nothing more is heard of it."""

    number: int
    message: str
    is_invalid: bool


class Failed(msgspec.Struct, tag=True):
    """A pass failed with these requests in it. `is_over`: the model computes no more, and the process ends."""

    numbers: list[int]
    message: str
    is_over: bool = False


class Counts(msgspec.Struct):
    """A histogram's counts, the last one of values above all bounds, and the sum of its values."""

    counts: list[int]
    total: float


class Load(msgspec.Struct, tag=True, kw_only=True):
    """Counters and sizes of the engine, sent about once a second.

    num_running: sequences that hold pages; ``num_background`` of them give way to others.
    num_pages: of the KV cache; ``num_used_pages`` of them are held, ``num_swapped_pages`` are elsewhere.
    num_tokens: computed so far; ``num_new_tokens`` of them were generated.
    free_tokens: of a pass; ``num_unused_tokens`` of them all passes left unused so far.
    pass_seconds, pass_tokens: by the bounds of `zinfer.batching.pass_meter`.
    shares: of the known rates of "link" and "disk", since the message before.
    stall_s: seconds waited so far, by cause.
    moved_bytes: so far, over "link" and "disk".
    blocks: number of blocks by home.
    memory_bytes: by what it holds or where it is: "device" and "host" for weights, "kv_cache".
    streamed_bytes: by one pass.
    """

    num_running: int
    num_background: int
    num_pages: int
    num_used_pages: int
    num_swapped_pages: int
    num_tokens: int
    num_new_tokens: int
    free_tokens: int
    num_unused_tokens: int
    pass_seconds: Counts
    pass_tokens: Counts
    shares: dict[str, float]
    stall_s: dict[str, float]
    moved_bytes: dict[str, int]
    blocks: dict[str, int]
    memory_bytes: dict[str, int]
    streamed_bytes: int

    @property
    def num_passes(self) -> int:
        """Passes so far."""
        return sum(self.pass_seconds.counts)


class Alive(msgspec.Struct, tag=True):
    """The process runs; sent each second from its start, by a thread that computes nothing."""


class Unusable(msgspec.Struct, tag=True):
    """The model could not be loaded; the process ends. `is_usage`: by what the user stated, not a failure."""

    message: str
    is_usage: bool


ToEngine = Submit | Embed | Cancel | Close
FromEngine = Ready | Deltas | Embedded | Refused | Failed | Load | Alive | Unusable


class Connection:
    """One end of a connection; `kind` is the union of messages that arrive at it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._held, self._begin = b"", 0  # what has arrived, and where the next message begins

    def send(self, message: ToEngine | FromEngine) -> None:
        """Queue a message; after the other end has gone it is dropped."""
        data = self._encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Any:
        """Return the next message; None: the other end has gone."""
        try:
            while missing := self._num_missing():
                read = self._reader.read(_READ_BYTES) if missing < _READ_BYTES else self._reader.readexactly(missing)
                if not (more := await read):
                    return None
                self._held, self._begin = self._held[self._begin :] + more, 0
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        begin, self._begin = self._begin + _LENGTH.size, self._end()
        return self._decoder.decode(memoryview(self._held)[begin : self._begin])

    def _num_missing(self) -> int:
        """Return how many bytes the next message's length lacks, or else the message; 0: it has arrived."""
        end = self._begin + _LENGTH.size
        return max(end - len(self._held), 0) or max(self._end() - len(self._held), 0)

    def _end(self) -> int:
        (length,) = _LENGTH.unpack_from(self._held, self._begin)
        return self._begin + _LENGTH.size + int(length)

    async def close(self) -> None:
        """Send what is queued, and close the connection."""
        try:
            await self._writer.drain()
            self._writer.close()
            await self._writer.wait_closed()
        except ConnectionError:
            pass
