"""A stand-in for the Hugging Face hub on loopback: models in folders, described and served as the hub does it.

It knows what huggingface_hub asks for: descriptions, trees and refs of a model, and its files by range with their ETag
and commit. Files are not in LFS.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"
_API: Final = re.compile(
    r"/api/models/(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<what>revision|tree|refs)(?:/(?P<revision>.+))?)?"
)
_FILE: Final = re.compile(r"/(?P<repo>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_CHUNK: Final = 1 << 14


@dataclass
class HubServer:
    """The hub: what it has, how it behaves, and what it was asked for.

    Attributes:
        models: folder of each model; of ``name@revision`` for revisions other than main.
        gated: models whose files need the token ``accepted``.
        sizes: of files, in descriptions, in place of their own.
        stalls: files of which only the first chunk is sent, until `resume` is called.
        failing: the status with which every request fails; None: none.
        served: names of files in the order of their downloads, with the number of bytes sent.
        stalled: set once a file has stalled.
    """

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    stalls: set[str] = field(default_factory=set)
    failing: int | None = None
    served: list[tuple[str, int]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    _resumed: threading.Event = field(default_factory=threading.Event)

    def resume(self) -> None:
        """Send the rest of stalled files, or end their connections if they are gone."""
        self.stalls.clear()
        self._resumed.set()

    def files(self) -> set[str]:
        """Names of the files that were downloaded whole or in part."""
        return {name for name, _ in self.served}

    @property
    def variables(self) -> dict[str, str]:
        """The environment in which commands reach this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def find(self, repo: str, revision: str) -> tuple[Path, str] | None:
        """Return the folder and commit of a revision."""
        for name, folder in self.models.items():
            commit = COMMIT if "@" not in name else sha1(name.encode()).hexdigest()
            if name.partition("@")[0] == repo and revision in (commit, name.partition("@")[2] or "main"):
                return folder, commit
        return None

    def listing(self, folder: Path) -> list[tuple[str, int, str]]:
        """Return name, size and ETag of each file."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        return [
            (name, self.sizes.get(name, path.stat().st_size), sha1(path.read_bytes()).hexdigest())
            for name, path in zip(names, paths, strict=True)
        ]


@contextmanager
def hub_server(models: Mapping[str, Path]) -> Iterator[HubServer]:
    """Serve models at a free port."""
    hub = HubServer(dict(models))
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.resume()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.failing is not None:
            self._send(self.hub.failing, b"")
        elif (asked := _API.fullmatch(path)) is not None:
            self._describe(asked["repo"], asked["what"], asked["revision"] or "main")
        elif (asked := _FILE.fullmatch(path)) is not None:
            self._file(asked["repo"], asked["revision"], asked["file"])
        else:
            self._send(404, b"")

    def _found(self, repo: str, revision: str) -> tuple[Path, str] | None:
        if repo not in {name.partition("@")[0] for name in self.hub.models}:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif (found := self.hub.find(repo, revision)) is not None:
            return found
        else:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        return None

    def _describe(self, repo: str, what: str | None, revision: str) -> None:
        if (found := self._found(repo, revision)) is None:
            return
        folder, commit = found
        files = self.hub.listing(folder)
        if what == "refs":
            revisions = [name.partition("@")[2] or "main" for name in self.hub.models if name.partition("@")[0] == repo]
            refs = [{"name": each, "ref": f"refs/heads/{each}", "targetCommit": COMMIT} for each in revisions]
            document: Any = {"branches": refs, "tags": [], "converts": []}
        elif what == "tree":
            document = [{"type": "file", "oid": etag, "size": size, "path": name} for name, size, etag in files]
        else:
            siblings = [{"rfilename": name, "size": size, "blobId": etag} for name, size, etag in files]
            document = {"id": repo, "sha": commit, "siblings": siblings, "private": False, "downloads": 0, "tags": []}
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, file: str) -> None:
        if (found := self._found(repo, revision)) is None:
            return
        folder, commit = found
        if repo in self.hub.gated and self.headers.get("Authorization") != "Bearer accepted":
            self._send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {repo} is restricted"})
        elif not (folder / file).is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            body = (folder / file).read_bytes()
            headers = {"ETag": f'"{sha1(body).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            status, begin, end = 200, 0, len(body)
            if (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) is not None:
                status, begin, end = 206, int(asked[1]), min(int(asked[2] or end) + 1, end)
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(body)}"
            self._send(status, body[begin:end], headers, file)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, file: str = "") -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if file in self.hub.stalls:
                self.wfile.write(body[:_CHUNK])
                self.wfile.flush()
                self.hub.served.append((file, min(len(body), _CHUNK)))
                self.hub.stalled.set()
                self.hub._resumed.wait()
                body = body[_CHUNK:]
            elif file:
                self.hub.served.append((file, len(body)))
            self.wfile.write(body)
        except OSError:  # the client is gone
            self.close_connection = True
