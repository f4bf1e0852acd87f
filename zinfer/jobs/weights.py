"""Tells whether a job goes on with the weights that it began with: by each file's size and time, or by samples.

Samples take milliseconds a file, whatever its size and however many ranks read it. They tell other weights apart, fine-
tunes of one model too; they do not notice damage to a few bytes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.faults import unreadable
from zinfer.checkpoint.fingerprint import weights_sample
from zinfer.errors import JobError
from zinfer.jobs.request import UnusableInput
from zinfer.nvme.file_identity import FileIdentity


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class WeightsFile:
    """A weights file in the manifest; ``sample_sha256`` is its `weights_sample`."""

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
        self.files = {
            name: WeightsFile(self._identities[file].num_bytes, self._identities[file].mtime_ns, _sample(file))
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


def _sample(file: Path) -> str:
    try:
        return weights_sample((file,))
    except OSError as error:
        raise unreadable(file, error) from error


def _difference(then: WeightsFile | None, now: WeightsFile) -> str | None:
    if then is None:
        return "there was no file of this name"
    if then.size_bytes != now.size_bytes:
        return f"{then.size_bytes:,} bytes then, {now.size_bytes:,} now"
    if then.sample_sha256 != now.sample_sha256:
        return f"samples {then.sample_sha256[:16]} in the manifest, {now.sample_sha256[:16]} now"
    return None
