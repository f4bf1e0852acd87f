"""What an output belongs to: the model, the input and every setting that changes results, in a file beside the output.

Memory budgets are no part of it: a job may be resumed with others. Sizes of passes are, but those that were chosen and
not stated are taken over and not compared.
"""

from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from zinfer.errors import JobError
from zinfer.jobs.weights import WeightsFile
from zinfer.nvme.whole_file import place_file
from zinfer.requests.field_errors import field_error

KIND: Final = "zinfer batch job"
VERSION: Final = 2


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Manifest:
    """Compared: `model`, `input` and `settings`. Kept: `versions` of the software that began the job, the local time
    when it `began`, which stays "now" for chat templates that write the date, the `sizes` of passes and cache that
    were chosen when the first row was computed, for a run that resumes: empty before that, and the `model_name` of
    OpenAI rows that name none. `weights`, by the names of files, are compared by `jobs.weights`.
    """

    kind: Literal["zinfer batch job"] = KIND
    version: Literal[2] = VERSION
    model: dict[str, str]
    input: dict[str, str | int]
    settings: dict[str, str | int]
    versions: dict[str, str]
    began: datetime
    sizes: dict[str, PositiveInt] = field(default_factory=dict)
    model_name: str = ""
    weights: dict[str, WeightsFile] = field(default_factory=dict)

    def differences(self, now: "Manifest") -> list[str]:
        """One line for each thing that is not as it was, in words for the user."""
        pairs = {part: (getattr(self, part), getattr(now, part)) for part in ("model", "input", "settings")}
        return [
            f"{part}.{name}: {old.get(name, 'absent')} in the manifest, {new.get(name, 'absent')} now"
            for part, (old, new) in pairs.items()
            for name in dict.fromkeys([*old, *new])
            if old.get(name) != new.get(name)
        ]


_MANIFEST: Final = TypeAdapter(Manifest)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest, None if there is no such file.

    Raises:
        JobError: the file is not a manifest of this version.
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
            raise JobError(
                f"manifest {path} has version {first['input']}, this zinfer writes {VERSION}; "
                "finish the job with the zinfer that began it or give another --output"
            ) from error
        raise JobError(f"manifest {path} is damaged: {field_error(error, Manifest)}; give another --output") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replaces the file in one step: a reader finds the old one or the whole new one, after a crash too.

    Raises:
        JobError: it cannot be written; nothing is left behind.
    """
    try:
        place_file(path, [_MANIFEST.dump_json(manifest, indent=2), b"\n"])
    except OSError as error:
        raise JobError(
            f"manifest {path} cannot be written: {error.strerror} (errno {error.errno}); "
            "make room or give an --output elsewhere"
        ) from error
