"""Requests that nobody should send, and what a server answers to them."""

import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

ROUTES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0},
    "/v1/completions": {"prompt": "abc", "max_tokens": 2, "temperature": 0, "logprobs": 1},
    "/score": {"prompt": "abc", "completions": ["d", [40]]},
    "/tokenize": {"prompt": "abc", "add_special_tokens": False},
    "/detokenize": {"tokens": [40, 41]},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float"},
    "/generate": {"prompt": "abc", "max_new_tokens": 2},
    "/mii/letters": {"prompts": ["abc"], "max_new_tokens": 2},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
_FIELDS: Final = (
    *("n", "seed", "stop", "stream", "stream_options", "logit_bias", "logprobs", "top_logprobs", "top_k", "top_p"),
    *("min_p", "min_tokens", "max_tokens", "bad_words", "allowed_token_ids", "prompt_logprobs", "stop_token_ids"),
    *("chat_template_kwargs", "reasoning_effort", "response_format", "structured_outputs", "tools", "tool_choice"),
    *("priority", "echo", "best_of", "user", "model", "repetition_penalty", "presence_penalty", "metadata"),
    *("ignore_eos", "skip_special_tokens", "parallel_tool_calls", "temperature", "__proto__", "self", "", "\0"),
)
_DEEP: Final = "[" * 3000 + "]" * 3000
_VALUES: Final = (
    *("null", "true", "0", "-1", "1e400", "-1e400", "1" + "0" * 400, "1" + "0" * 5000, "0.1", "2147483648", "NaN"),
    *("9223372036854775808", "18446744073709551616", "Infinity", "-0", "1e-400", '""', '"a"', '"\\u0000"', "[]", "{}"),
    *('"\\ud800"', '"\\udc00\\ud800"', '"' + "a" * 3000 + '"', "[[]]", "[null]", '[{"role": 1}]', '[{"content": []}]'),
    *('{"": ""}', '{"\\ud800": 1}', '["\\u0000"]', _DEEP, '{"a":' * 3000 + "1" + "}" * 3000, '{"1": 1e400}', "[1e400]"),
    *('{"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}', '{"regex": "(a*)*b("}', '{"grammar": "x"}'),
    *(
        '{"type": "function", "function": {"name": "\\u0000"}}',
        '[{"type": "function", "function": {}}]',
        "[-1]",
        "[[-1]]",
    ),
    *(
        "[99999999999999999999]",
        '["a", 1]',
        "[true]",
        "[0.5]",
        '[{"role": "user", "content": "\\u0000"}]',
        '{"a": NaN}',
    ),
    *('{"choice": []}', '{"1": 1, "1": 2}', "[" + "40," * 500 + "40]", '["' + "b" * 40 + '"]', "-9223372036854775809"),
)
_LINES: Final = (
    *("authorization: Bearer no", "transfer-encoding: chunked", "transfer-encoding: gzip", "x" * 60_000 + ": y", ": a"),
    *("content-length: -1", "x: " + "y" * 200_000, "x: \0", "x:: :", " folded", "content-type: a/xml; charset=\xff"),
    *("expect: 100-continue", "upgrade: websocket", "content-encoding: gzip", "host: y", "x-request-id: \xff" * 50),
)
_PATHS: Final = (
    *("/%00", "/v1/files/%00", "/v1/files/..%2f..%2fx", "/v1/models/%ff%fe", "/\xff", "*", "http://x/", "//", "/a b"),
    *("/v1/models/" + "a" * 5000, "/" + "a" * 90_000, "/v1/batches?limit=1e9", "/v1/files?after=%00", "/mii/%00"),
    *("/page/%2e%2e", "/v1/files/x/content", "/v1/batches/x/cancel", "/docs", "/openapi.json", "/metrics", "/load?%"),
)


@dataclass(frozen=True)
class Hostile:
    """Bytes to send; `ending` is what the client does then: it reads, or half closes, closes or resets before."""

    data: bytes
    ending: str = "read"
    must_answer: bool = True

    def send(self, url: str, timeout: float) -> int | None:
        """Return the status of the answer; None: there was none."""
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), timeout=timeout) as client:
            try:
                client.sendall(self.data)
                if self.ending == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if self.ending in ("reset", "close"):
                    return None
                if self.ending == "half":
                    client.shutdown(socket.SHUT_WR)
                status = client.makefile("rb").readline().split()
            except ConnectionError:
                assert not self.must_answer, "the connection was reset before the answer was read"
                return None
        assert status or not self.must_answer, "the connection ended without an answer"
        return int(status[1]) if status else None


def head(path: str, length: int, *lines: str, key: str, method: str = "POST") -> bytes:
    """The head of a request, with the lines after it."""
    first = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    return (first + f"content-length: {length}\r\n" * (length >= 0) + "".join(f"{each}\r\n" for each in lines)).encode()


def mutated(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body with values that do not belong there."""
    path = draw.choice([*ROUTES])
    fields = {name: json.dumps(value) for name, value in ROUTES[path].items()}
    for _ in range(draw.randint(0, 3)):
        fields[draw.choice([*fields, *_FIELDS])] = draw.choice(_VALUES)
    pairs = [f"{json.dumps(name)}: {value}" for name, value in fields.items()]
    if draw.random() < 0.1:
        pairs.append(draw.choice(pairs))
    body = ("{" + ", ".join(pairs) + "}").encode()
    if draw.random() < 0.2:
        place = draw.randrange(len(body))
        body = body[:place] + draw.choice((b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"}", b'"')) + body[place + 1 :]
    return path, body


def hostile(draw: random.Random, key: str) -> Hostile:
    """A request of any kind that ends soon."""
    return draw.choices([kind for kind, _ in _KINDS], [weight for _, weight in _KINDS])[0](draw, key)


def _body(draw: random.Random, key: str) -> Hostile:
    path, body = mutated(draw)
    return Hostile(head(path, len(body), key=key) + b"\r\n" + body)


def _chunked(draw: random.Random, key: str) -> Hostile:
    path, body = mutated(draw)
    chunks = b"".join(b"%x\r\n%c\r\n" % (1, each) for each in body[:200])
    ends = draw.choice((b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"zz\r\n"))
    return Hostile(head(path, -1, "transfer-encoding: chunked", key=key) + b"\r\n" + chunks + ends)


def _huge(draw: random.Random, key: str) -> Hostile:
    num_bytes = draw.choice((100_000_000, 3_000_000))
    return huge(draw.choice([*ROUTES]), num_bytes, key=draw.choice((key, "no")), is_chunked=draw.random() < 0.5)


def huge(path: str, num_bytes: int, *, key: str, is_chunked: bool) -> Hostile:
    """A body of so many bytes."""
    body = b"[" * num_bytes
    if not is_chunked:
        return Hostile(head(path, num_bytes, key=key) + b"\r\n" + body)
    chunk = b"%x\r\n" % num_bytes + body + b"\r\n0\r\n\r\n"
    return Hostile(head(path, -1, "transfer-encoding: chunked", key=key) + b"\r\n" + chunk)


def _headers(draw: random.Random, key: str) -> Hostile:
    path, body = mutated(draw)
    line = draw.choice((f"content-length: {len(body) + 1}", f"content-length: {len(body)}", *_LINES))
    return Hostile(head(path, len(body), line, key=key) + b"\r\n" + body, must_answer=False)


def _line(draw: random.Random, key: str) -> Hostile:
    path = draw.choice(_PATHS)
    method = draw.choice(("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "CONNECT", "TRACE", "BREW", "get", ""))
    return Hostile(head(path, 0, key=key, method=method) + b"\r\n", must_answer=False)


def _cut(draw: random.Random, key: str) -> Hostile:
    path, body = mutated(draw)
    data = head(path, len(body), key=key) + b"\r\n" + body
    ending = draw.choice(("half", "close", "reset"))
    return Hostile(data[: draw.randrange(len(data) + 1)], ending, must_answer=False)


def _noise(draw: random.Random, key: str) -> Hostile:
    return Hostile(draw.randbytes(draw.randint(1, 3000)) + b"\r\n\r\n", "half", must_answer=False)


_Kind = Callable[[random.Random, str], Hostile]
_KINDS: Final[tuple[tuple[_Kind, float], ...]] = (
    *((_body, 12.0), (_chunked, 2.0), (_huge, 0.3), (_headers, 2.0)),
    *((_line, 2.0), (_cut, 3.0), (_noise, 1.0)),
)


def many(number: int, seed: int, key: str) -> Iterator[Hostile]:
    """So many requests, each of any kind."""
    draw = random.Random(seed)
    for _ in range(number):
        yield hostile(draw, key)
