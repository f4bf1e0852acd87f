"""A process that belongs to no job reaches its ports, and neither runs code in its ranks nor changes their values."""

import ast
import json
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import psutil
import pytest
from commands import start
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from ranks_job_support import CONFIG, Job, ended
from torch.distributed import TCPStore

import zinfer
from zinfer.jobs.messages import Work
from zinfer.ranks.values import from_bytes, to_bytes

NUM_ROWS = 64
PRODUCT = Path(zinfer.__file__).parent
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list")


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    letters_model(tmp_path / "model", num_layers=4)
    write_rows(tmp_path / "in.jsonl", prompt_rows(NUM_ROWS))
    (tmp_path / "ds.json").write_text(CONFIG)
    return Job(tmp_path, "out.jsonl", "--ranks", "2", "--batch-size", "2")


def open_ports(launcher: int) -> Iterator[tuple[str, int]]:
    """Where a launcher and its ranks listen: address and port."""
    own = psutil.Process(launcher)
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    yield each.laddr.ip, each.laddr.port


def attack(address: str, port: int, planted: bytes) -> None:
    """Send what a port might read: values of torch's store, messages of a Connection, greetings, and garbage."""
    with suppress(Exception):
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
        for key in [key for key in store.list_keys() if not key.endswith("failed")]:
            store.set(key, planted)
    hello = {"job": "", "rank": 1, "what": "rank", "host": "foreign", "drawn": "0" * 32}
    greetings = [json.dumps({**hello, "what": what}).encode() for what in ("rank", "link", "store")]
    for data in (planted, *greetings, os.urandom(64), b"GET / HTTP/1.0\r\n\r\n"):
        for message in (struct.pack("!i", len(data)) + data, data):
            with suppress(OSError), closing(socket.create_connection((address, port), 1.0)) as link:
                link.settimeout(0.2)
                link.sendall(message)
                link.recv(1 << 16)
                link.sendall(struct.pack("!i", len(planted)) + planted)


@pytest.mark.slow
def test_foreign_processes_neither_run_code_nor_change_rows(job: Job, tmp_path: Path) -> None:
    """Every port is one of this host alone, and no byte that comes there is taken for a rank's."""
    alone = Job(tmp_path, "alone.jsonl", "--batch-size", "2")
    assert [code for code, _, _ in ended([start(alone.words, tmp_path, warm=True)])] == [0]
    planted = pickle.dumps(Planted(tmp_path / "planted"))
    process = start(job.words, tmp_path, warm=True)
    seen: set[tuple[str, int]] = set()
    until_s = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until_s:
        for address, port in {*open_ports(process.pid)} - seen:
            seen.add((address, port))
            attack(address, port, planted)
        time.sleep(0.01)
    [(code, _, said)] = ended([process])
    assert code == 0, said
    assert seen, "ranks listen somewhere"
    assert {address for address, _ in seen} <= {"127.0.0.1", "::1"}, seen
    assert not (tmp_path / "planted").exists()
    assert len(read_rows(job.output)) == NUM_ROWS
    assert job.rows() == alone.rows()


def test_values_are_read_as_data(tmp_path: Path) -> None:
    planted = pickle.dumps(Planted(tmp_path / "planted"))
    for data in (planted, to_bytes(1)[:0], b"\xc1", to_bytes(["object"]).replace(b"\xa4list", b"\xa6object")):
        with pytest.raises(ValueError, match=r"what another rank sent"):
            from_bytes(data)
    foreign = [
        ["object", "subprocess:Popen", []],
        ["object", "zinfer.jobs.messages:Mapping", []],
        ["named", "zinfer.jobs.messages:Work", []],
        ["model", "zinfer.jobs.messages:Work", [], []],
        ["enum", "zinfer.jobs.messages:Work", "prompts"],
        ["object", "zinfer.cli.app:main", []],
        ["object", "zinfer.never.imported:Work", []],
        ["object", "zinfer.jobs.messages:Work", [1]],
        ["eval", "1"],
    ]
    for value in foreign:
        with pytest.raises(ValueError, match="what another rank sent cannot be read"):
            from_bytes(msgspec.msgpack.encode(value))
    with pytest.raises(TypeError, match="ranks send each other data, not"):
        to_bytes(Planted(tmp_path))
    assert from_bytes(to_bytes(Work((), (1, 2)))) == Work((), (1, 2))
    assert not (tmp_path / "planted").exists()


def test_the_product_unpickles_nothing() -> None:
    """Collectives of objects pickle, and so does `Connection.recv`; deepspeed.comm's names are passed on to scripts."""
    found = []
    for file in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Import(names=names) if UNPICKLING & {each.name.split(".")[0] for each in names}:
                    found.append(f"{file}:{node.lineno}: imports {names[0].name}")
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] in UNPICKLING:
                    found.append(f"{file}:{node.lineno}: imports {module}")
                case ast.Call(func=ast.Attribute(attr=name)) if name in (*OBJECTS, "recv_pyobj"):
                    found.append(f"{file}:{node.lineno}: calls {name}")
                case ast.Call(func=ast.Attribute(attr="recv"), args=[]):
                    found.append(f"{file}:{node.lineno}: unpickles a message")
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                    stated = {each.arg: ast.unparse(each.value) for each in keywords}
                    if stated.get("weights_only") != "True":
                        found.append(f"{file}:{node.lineno}: torch.load reads more than weights")
                case _:
                    pass
    assert not found, "\n".join(found)
