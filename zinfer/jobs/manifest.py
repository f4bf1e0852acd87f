"""The manifest beside an output: its model, its input and every setting that changes results.

It leaves out memory budgets, so a job can be resumed with others. A resumed job reuses the batch sizes that zinfer
chose; those set by the user are compared.
"""

from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from zinfer.errors import JobError
from zinfer.jobs.weights import WeightsFile
from zinfer.nvme.whole_file import place_file
from zinfer.requests.field_errors import field_error

KIND: Final = "zinfer batch job"
VERSION: Final = 4


def _size(value: object) -> int | str:
    """Check a size: a number, or the word for a dtype, a place or an order."""
    if isinstance(value, str) or (type(value) is int and value > 0):
        return value
    raise ValueError(f"must be a positive whole number or a word, not {value!r}")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Manifest:
    """Identity of a job. `model`, `input` and `settings` must match for a run to resume it.

    Attributes:
        versions: software that began the job.
        began: local start time, which stays "now" for chat templates that write the date.
        sizes: batch and cache sizes, and whether tokens are guessed, chosen at the first row; empty before that.
        divided: among how many ranks layers or the model were, by the mode.
        model_name: model name in OpenAI rows that name none.
        weights: by file name; `jobs.weights` compares them.
    """

    kind: Literal["zinfer batch job"] = KIND
    version: Literal[4] = VERSION
    model: dict[str, str]
    input: dict[str, str | int]
    settings: dict[str, str | int]
    versions: dict[str, str]
    began: datetime
    sizes: dict[str, Annotated[int | str, PlainValidator(_size)]] = field(default_factory=dict)
    divided: Mapping[str, int] = field(default_factory=dict)
    model_name: str = ""
    weights: dict[str, WeightsFile] = field(default_factory=dict)

    def differences(self, now: "Manifest") -> list[str]:
        """Return one message for each value that differs."""
        pairs = {part: (getattr(self, part), getattr(now, part)) for part in ("model", "input", "settings")}
        return [
            f"{part}.{name}: {old.get(name, 'absent')} in the manifest, {new.get(name, 'absent')} now"
            for part, (old, new) in pairs.items()
            for name in dict.fromkeys([*old, *new])
            if old.get(name) != new.get(name)
        ]


_MANIFEST: Final = TypeAdapter(Manifest)


class OtherVersion(JobError):
    """The manifest is that of another version of zinfer, whose job this one cannot resume."""


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest, or None if the file does not exist.

    Raises:
        OtherVersion: the file is a manifest of another version.
        JobError: it is no manifest, damaged, or cannot be read.
    """
    try:
        return _MANIFEST.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JobError(f"manifest {path} cannot be read: {error.strerror} (errno {error.errno})") from error
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] in ((), ("kind",)):
            raise JobError(
                f"{path} is not a manifest of a zinfer job; move it away or give another --output"
            ) from error
        if first["loc"] == ("version",):
            raise OtherVersion(
                f"manifest {path} has version {first['input']}, this zinfer writes {VERSION}; finish the job with the "
                "zinfer that began it, discard its rows with --restart, or give another --output"
            ) from error
        raise JobError(f"manifest {path} is damaged: {field_error(error, Manifest)}; give another --output") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the file atomically: even after a crash, readers find the old file or the whole new one.

    Raises:
        JobError: it cannot be written; no partial file remains.
    """
    try:
        place_file(path, [_MANIFEST.dump_json(manifest, indent=2), b"\n"])
    except OSError as error:
        raise JobError(
            f"manifest {path} cannot be written: {error.strerror} (errno {error.errno}); "
            "make room or give an --output elsewhere"
        ) from error
