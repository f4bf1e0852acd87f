"""Identify the weights of a job by a checksum per file, computed while the first load reads them.

Weights on the device or in host memory are hashed when they are loaded, those on disk when they first stream: in the
first pass, before any row is written. From the first row on, a separate thread reads what no pass reads (vision towers,
buffers, originals whose quantized copy streams). Tensors missing from the index are not hashed.
Until a file's checksum is known, the manifest has only its size and modification time: a job killed before that can be
resumed only with the unmodified file.
"""

import errno
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.faults import unreadable
from zinfer.errors import JobError
from zinfer.jobs.request import UnusableInput
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.pool import Pool
from zinfer.offload.tensor_checksums import TensorChecksums
from zinfer.units import human_bytes

_CHUNK_BYTES: Final = 16 << 20


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class WeightsFile:
    """A weights file in the manifest; ``xxh3_128`` is the checksum of its tensors, None if not known yet."""

    size_bytes: int
    mtime_ns: int
    xxh3_128: str | None = None


class Weights:
    """The weights of one run of a job."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._identities = checkpoint.files
        self._names = {file: file.relative_to(checkpoint.folder).as_posix() for file in checkpoint.files}
        self._known = {
            self._names[file]: WeightsFile(identity.num_bytes, identity.mtime_ns)
            for file, identity in checkpoint.files.items()
        }
        self._checksums = TensorChecksums(
            {(entry.file, entry.offset): entry.nbytes for entry in checkpoint.tensors.values()}
        )
        self._pool: Pool | None = None
        self._rest: Future[None] | None = None
        self._is_given_up = threading.Event()

    @property
    def checksums(self) -> TensorChecksums | None:
        """Checksums to update while the files are read; None if the manifest has all of them."""
        return None if all(file.xxh3_128 for file in self._known.values()) else self._checksums

    @property
    def files(self) -> dict[str, WeightsFile]:
        """Entries for the manifest, by file name."""
        return dict(self._known)

    def adopt(self, former: Mapping[str, WeightsFile], note: Callable[[str], None]) -> None:
        """Adopt the manifest's checksums; files whose size or time differ are read and compared.

        Raises:
            UnusableInput: a file holds other bytes, or changed before the job knew its checksum.
            CheckpointError: a file cannot be read.
        """
        others = {}
        for file, name in self._names.items():
            then, now = former.get(name, WeightsFile(-1, -1)), self._known[name]
            if (then.size_bytes, then.mtime_ns) == (now.size_bytes, now.mtime_ns):
                self._known[name] = then
            else:
                others[file] = then
        if others:
            num_bytes = sum(self._identities[file].num_bytes for file in others)
            note(
                f"{len(others)} weights files have changed times since this job began; reading their "
                f"{human_bytes(num_bytes)} to see whether they hold the same"
            )
        for file, then in others.items():
            self._compare(file, then)

    def _compare(self, file: Path, then: WeightsFile) -> None:
        name, identity = self._names[file], self._identities[file]
        if then.xxh3_128 is None:
            former = replace(identity, num_bytes=then.size_bytes, mtime_ns=then.mtime_ns)
            what = f"was written to since this job began ({former.difference(identity)}), and the job was ended before "
            what += "it knew the file's checksum"
        else:
            try:
                self._read_missing(file)
            except OSError as error:
                raise unreadable(file, error) from error
            checksum = self._checksums.of_file(file)
            if checksum == then.xxh3_128:
                self._known[name] = replace(self._known[name], xxh3_128=checksum)
                return
            sums = f"xxh3_128 {then.xxh3_128} in the manifest, {checksum} now"
            what = f"holds other weights than when this job began ({sums})"
        raise UnusableInput(
            f"model {file} {what}; restore the file, give another --output, or --restart to discard the job's rows"
        )

    def check_unchanged(self) -> None:
        """Raise JobError if a file was replaced or modified since the job read its header."""
        for file, then in self._identities.items():
            try:
                now = FileIdentity.of(file)
            except OSError as error:
                raise JobError(f"model {file} cannot be accessed: {error.strerror} (errno {error.errno})") from error
            if now != then:
                raise JobError(
                    f"model {file} was changed while the job ran ({then.difference(now)}); run the same command again"
                )

    def hash_unread(self) -> None:
        """Start to hash the tensors that no pass reads; does nothing if started already, or if all are known."""
        if self._pool is None and self.checksums is not None:
            self._pool = Pool(1, "zinfer-checksums")
            self._rest = self._pool.submit(self._finish)

    def has_new_checksums(self) -> bool:
        """Return whether new checksums are available, once.

        Raises:
            JobError: a file cannot be read, or has changed.
        """
        if self._rest is None or not self._rest.done():
            return False
        rest, self._rest = self._rest, None
        try:
            rest.result()
        except OSError as error:
            raise JobError(f"model: a checksum of its weights cannot be taken: {error}") from error
        return True

    def wait(self) -> None:
        """Wait for `hash_unread`."""
        if self._rest is not None:
            self._rest.exception()

    def close(self) -> None:
        """Stop reading."""
        self._is_given_up.set()
        if self._pool is not None:
            self._pool.close()

    def _finish(self) -> None:
        found = {}
        for file, name in self._names.items():
            if self._known[name].xxh3_128 is None:
                self._read_missing(file)
                if self._is_given_up.is_set():
                    return
                found[name] = replace(self._known[name], xxh3_128=self._checksums.of_file(file))
        self.check_unchanged()
        self._known |= found

    def _read_missing(self, file: Path) -> None:
        """Hash the tensors that no pass has read, without leaving them in the page cache."""
        with file.open("rb", buffering=0) as stream:
            for offset, nbytes in self._checksums.missing(file):
                digest = xxhash.xxh3_128()
                stream.seek(offset)
                while (begin := stream.tell()) < offset + nbytes:
                    if self._is_given_up.is_set():
                        return
                    data = stream.read(min(_CHUNK_BYTES, offset + nbytes - begin))
                    if not data:
                        raise OSError(errno.EIO, f"the file ends at byte {begin}, before its last tensor")
                    digest.update(data)
                    os.posix_fadvise(stream.fileno(), begin, len(data), os.POSIX_FADV_DONTNEED)
                self._checksums.add((file, offset), digest.digest())
