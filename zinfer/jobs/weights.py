"""Tells whether a job goes on with the weights that it began with: by each file's size and times, else by its bytes.

A file whose size and times are as recorded is taken as it was. Of others, samples tell most other weights apart before
anything is loaded, in milliseconds a file; all other bytes are compared with checksums as they are loaded
([Note: ranges as they are read] in `zinfer.weights.range_sums`). The ranks of a job keep these together, in a file
beside the manifest that is written before the first row.
"""

import errno
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import xxhash
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from zinfer.errors import JobError
from zinfer.jobs.request import UnusableInput, checksums_path
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.whole_file import place_file
from zinfer.ranks.values import from_bytes, to_bytes
from zinfer.weights import Checkpoint
from zinfer.weights.folder import unreadable
from zinfer.weights.header import TensorEntry
from zinfer.weights.range_sums import FileSums, OtherBytes, RangeSums

_SAMPLE_BYTES: Final = 4096
_NUM_READERS: Final = 16  # at once: a disk takes its time for each
_REMEDY: Final = "restore the file, give another --output, or --restart to discard the job's rows"
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class WeightsFile:
    """A weights file in the manifest.

    Attributes:
        sample_sha256: of the first, middle and last bytes of each tensor.
        ctime_ns: of the last change of any kind, which no program can set back; None: recorded by an earlier zinfer.
    """

    size_bytes: int
    mtime_ns: int
    sample_sha256: str
    ctime_ns: int | None = None

    @property
    def state(self) -> tuple[int, int, int | None]:
        """What is known of the file without reading it."""
        return self.size_bytes, self.mtime_ns, self.ctime_ns


class Weights:
    """The weights files of one run of a job.

    Raises:
        CheckpointError: a file cannot be accessed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._identities = checkpoint.files
        self._paths = {file.relative_to(checkpoint.folder).as_posix(): file for file in checkpoint.files}
        self._ctimes_ns = {file: _ctime_ns(file) for file in checkpoint.files}
        self._tensors: defaultdict[Path, list[TensorEntry]] = defaultdict(list)
        for tensor in checkpoint.tensors.values():
            self._tensors[tensor.file].append(tensor)

    def entries(self, former: Mapping[str, WeightsFile]) -> dict[str, WeightsFile]:
        """Return the manifest's entries, by file name.

        Args:
            former: entries of the job's manifest; files that have their sizes and times are not read. Empty: all are.

        Raises:
            CheckpointError: a file cannot be read.
        """
        with ThreadPoolExecutor(_NUM_READERS, "zinfer-samples") as readers:
            return dict(zip(self._paths, readers.map(partial(self._entry, former), self._paths), strict=True))

    def check_same(
        self,
        former: Mapping[str, WeightsFile],
        now: Mapping[str, WeightsFile],
        note: Callable[[str], None],
        has_checksums: bool = False,
    ) -> None:
        """Compare the files with those that the job began with.

        Args:
            former: entries of the job's manifest.
            now: what `entries` returns.
            note: says that files have other times.
            has_checksums: whether all bytes will be compared as they are read.

        Raises:
            UnusableInput: a file holds other weights.
        """
        for name, entry in now.items():
            if difference := _difference(former.get(name), entry):
                raise UnusableInput(
                    f"model {self._paths[name]} holds other weights than when this job began ({difference}); {_REMEDY}"
                )
        if num_touched := sum(former[name] != entry for name, entry in now.items()):
            rest = "the rest is compared as it is read" if has_checksums else "of the rest no checksums were kept"
            note(
                f"{num_touched} weights files have other times than when this job began; sizes and samples of each "
                f"tensor are the same, and {rest}"
            )

    def _entry(self, former: Mapping[str, WeightsFile], name: str) -> WeightsFile:
        file, known = self._paths[name], former.get(name)
        identity, ctime_ns = self._identities[file], self._ctimes_ns[file]
        if known is not None and known.state == (identity.num_bytes, identity.mtime_ns, ctime_ns):
            return known
        sample = _sample(file, self._tensors[file])
        return WeightsFile(identity.num_bytes, identity.mtime_ns, sample, ctime_ns)

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


def new_sums(recorded: Mapping[str, FileSums]) -> RangeSums:
    """Return the checksums of one process of a job, which compares what it reads with those recorded."""
    return RangeSums(recorded, _REMEDY)


def read_sums(output: Path, job: str) -> dict[str, FileSums]:
    """Return the checksums beside an output; empty if there are none, or they are another job's.

    Raises:
        UnusableInput: they cannot be read, or are damaged.
    """
    path = checksums_path(output)
    try:
        data = path.read_bytes()
        if xxhash.xxh3_128_digest(memoryview(data)[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            raise ValueError("its bytes are not those that were written")
        then, found = from_bytes(data[_DIGEST_BYTES:])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnusableInput(
            f"checksums {path} of the job's weights cannot be read ({error}); --restart discards the job's rows, or "
            "remove this file: weights are then told apart by samples"
        ) from error
    return dict(found) if then == job else {}


def write_sums(output: Path, job: str, sums: RangeSums) -> None:
    """Replace the checksums beside an output.

    Args:
        job: identifies the job that wrote the output.

    Raises:
        JobError: they cannot be written.
    """
    path = checksums_path(output)
    data = to_bytes((job, sums.recorded()))
    try:
        place_file(path, [xxhash.xxh3_128_digest(data), data])
    except OSError as error:
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "check the disk"
        raise JobError(
            f"checksums {path} of the job's weights cannot be written: {error.strerror} (errno {error.errno}); "
            f"{remedy} and run the same command again to go on"
        ) from error


def find_other_bytes(failure: BaseException) -> UnusableInput | None:
    """Return the error for the user if a failure is of weights that are not those that the job began with."""
    cause: BaseException | None = failure
    while cause is not None and not isinstance(cause, OtherBytes):
        cause = cause.__cause__
    return None if cause is None else UnusableInput(str(cause))


def _ctime_ns(file: Path) -> int:
    try:
        return os.stat(file).st_ctime_ns
    except OSError as error:
        raise unreadable(file, error) from error


def _sample(file: Path, tensors: Sequence[TensorEntry]) -> str:
    """Return a SHA-256 of samples of a file's tensors, of which other weights differ in any that was trained."""
    digest = hashlib.sha256()
    try:
        with file.open("rb", buffering=0) as stream:
            with suppress(OSError):  # a file system may take no advice
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # read no more than a sample
            for tensor in tensors:
                last = max(tensor.nbytes - _SAMPLE_BYTES, 0)
                for offset in sorted({0, last // 2, last}):
                    size = min(_SAMPLE_BYTES, tensor.nbytes - offset)
                    digest.update(os.pread(stream.fileno(), size, tensor.offset + offset))
    except OSError as error:
        raise unreadable(file, error) from error
    return digest.hexdigest()


def _difference(then: WeightsFile | None, now: WeightsFile) -> str | None:
    if then is None:
        return "there was no file of this name"
    if then.size_bytes != now.size_bytes:
        return f"{then.size_bytes:,} bytes then, {now.size_bytes:,} now"
    if then.sample_sha256 != now.sample_sha256:
        return f"samples {then.sample_sha256[:16]} in the manifest, {now.sample_sha256[:16]} now"
    return None
