"""Tells whether a job goes on with the weights that it began with: by each file's size, and by samples of each tensor.

Samples take milliseconds a file, whatever its size and however many ranks read it. They tell other weights apart,
fine-tunes of one model too, also where a single matrix differs; they do not notice damage to a few bytes.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.faults import unreadable
from zinfer.checkpoint.header import TensorEntry
from zinfer.errors import JobError
from zinfer.jobs.request import UnusableInput
from zinfer.nvme.file_identity import FileIdentity

_SAMPLE_BYTES: Final = 4096
_NUM_READERS: Final = 16  # at once: a disk takes its time for each


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class WeightsFile:
    """A weights file in the manifest; ``sample_sha256`` is of the first, middle and last bytes of each tensor."""

    size_bytes: int
    mtime_ns: int
    sample_sha256: str


class Weights:
    """The weights files of one run of a job.

    Raises:
        CheckpointError: a file cannot be read.

    Attributes:
        files: entries for the manifest, by file name.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._identities = checkpoint.files
        self._paths = {file.relative_to(checkpoint.folder).as_posix(): file for file in checkpoint.files}
        tensors: defaultdict[Path, list[TensorEntry]] = defaultdict(list)
        for tensor in checkpoint.tensors.values():
            tensors[tensor.file].append(tensor)
        with ThreadPoolExecutor(_NUM_READERS, "zinfer-samples") as readers:
            samples = {file: readers.submit(_sample, file, tensors[file]) for file in self._paths.values()}
        self.files = {
            name: WeightsFile(self._identities[file].num_bytes, self._identities[file].mtime_ns, samples[file].result())
            for name, file in self._paths.items()
        }

    def check_same(self, former: Mapping[str, WeightsFile], note: Callable[[str], None]) -> None:
        """Compare the files with those that the job began with.

        Args:
            former: entries of the job's manifest.
            note: says that files have other times.

        Raises:
            UnusableInput: a file holds other weights.
        """
        for name, now in self.files.items():
            if difference := _difference(former.get(name), now):
                raise UnusableInput(
                    f"model {self._paths[name]} holds other weights than when this job began ({difference}); restore "
                    "the file, give another --output, or --restart to discard the job's rows"
                )
        if num_touched := sum(former[name] != now for name, now in self.files.items()):
            note(f"{num_touched} weights files have other times than when this job began, and hold the same")

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
