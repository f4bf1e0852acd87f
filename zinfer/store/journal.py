"""What a store in the making already has: a file with its identity in the first line, and one line a finished block."""

import json
import os
from pathlib import Path
from typing import Any

from zinfer.checkpoint.faults import unreadable
from zinfer.errors import CheckpointError
from zinfer.nvme.whole_file import replace_file
from zinfer.quantization.native.identity import Identity
from zinfer.quantization.native.manifest import FORMAT_VERSION, JOURNAL_NAME, StoredBlock


class Journal:
    """The journal of a folder that this process has locked.

    Attributes:
        identity: of the store that was begun.
        blocks: those that are finished, by their files' names.
    """

    def __init__(self, path: Path, option: str = "--output") -> None:
        """Read a journal; a torn last line, of a process that was killed, is cut off.

        Args:
            path: the file.
            option: what states its folder, for messages.

        Raises:
            CheckpointError: it is damaged, or of another version.
        """
        self._path = path
        self._option = option
        try:
            data = path.read_bytes()
            whole_bytes = data.rfind(b"\n") + 1
            if whole_bytes < len(data):
                os.truncate(path, whole_bytes)
        except OSError as error:
            raise unreadable(path, error) from error
        lines = [self._object(number, line) for number, line in enumerate(data[:whole_bytes].splitlines(), start=1)]
        try:
            version = lines[0]["format_version"]
            if version != FORMAT_VERSION:
                raise self._refusal(1, f"format_version is {version!r}, this zinfer writes {FORMAT_VERSION}")
            self.identity = Identity(dict(lines[0]["source"]), dict(lines[0]["settings"]))
            finished = [StoredBlock(line["name"], line["file"], line["bytes"], line["checksum"]) for line in lines[1:]]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise self._refusal(1, f"no journal of a store ({error!r})") from error
        self.blocks = {block.file: block for block in finished}

    @classmethod
    def begin(cls, folder: Path, identity: Identity) -> "Journal":
        """A new one, without blocks.

        Raises:
            OSError: the disk is full or failed; nothing is left behind.
        """
        members = {"format_version": FORMAT_VERSION, "source": identity.source, "settings": identity.settings}
        replace_file(folder / JOURNAL_NAME, json.dumps(members) + "\n")
        return cls(folder / JOURNAL_NAME)

    def add(self, block: StoredBlock) -> None:
        """Note a block whose file is on the disk, and return when the note is.

        Raises:
            OSError: the disk is full or failed; it names the journal.
        """
        line = json.dumps(block.as_json()).encode() + b"\n"
        try:
            with self._path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.blocks[block.file] = block

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._refusal(number, f"no JSON ({error})") from error
        if not isinstance(value, dict):
            raise self._refusal(number, "no JSON object")
        return value

    def _refusal(self, number: int, what: str) -> CheckpointError:
        remedy = f"give another {self._option}, or empty this folder"
        return CheckpointError(f"{self._path}: line {number}: {what}; {remedy}")
