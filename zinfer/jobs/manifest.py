"""What an output belongs to: the model, the input and every setting that changes results, in a file beside the output.

Memory budgets are no part of it: results are bit-equal whatever they are, so a job may go on with other ones.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from zinfer.errors import JobError
from zinfer.nvme.whole_file import replace_file

KIND = "zinfer batch job"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Compared: `model`, `input` and `settings`. Kept: `versions` of the software that began the job, and the local
    time when it `began` (ISO 8601), which stays "now" for chat templates that write the date.
    """

    model: Mapping[str, str]
    input: Mapping[str, str | int]
    settings: Mapping[str, str | int]
    versions: Mapping[str, str]
    began: str

    def differences(self, now: "Manifest") -> list[str]:
        """One line for each thing that is not as it was, in words for the user."""
        return [
            f"{part}.{name}: {old.get(name, 'absent')} in the manifest, {new.get(name, 'absent')} now"
            for part, old, new in (
                ("model", self.model, now.model),
                ("input", self.input, now.input),
                ("settings", self.settings, now.settings),
            )
            for name in dict.fromkeys([*old, *new])
            if old.get(name) != new.get(name)
        ]


def manifest_path(output: Path) -> Path:
    """Where the manifest of an output lies."""
    return output.with_name(output.name + ".manifest.json")


def read_manifest(path: Path) -> Manifest | None:
    """The manifest, None if there is no such file.

    Raises:
        JobError: the file is not a manifest of this version.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JobError(f"manifest {path} cannot be read: {error.strerror} (errno {error.errno})") from error
    except ValueError as error:
        raise JobError(
            f"{path} is not a manifest of a zinfer job: {error}; move it away or give another --output"
        ) from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise JobError(f"{path} is not a manifest of a zinfer job; move it away or give another --output")
    if content.get("version") != VERSION:
        raise JobError(
            f"manifest {path} has version {content.get('version')}, this zinfer writes {VERSION}; "
            "finish the job with the zinfer that began it or give another --output"
        )
    parts = {name: content.get(name) for name in ("model", "input", "settings", "versions")}
    if missing := [name for name, part in parts.items() if not isinstance(part, dict)]:
        raise JobError(f"manifest {path} is damaged: no {', '.join(missing)}; give another --output")
    try:
        began = datetime.fromisoformat(content["began"]).isoformat()
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"manifest {path} is damaged: began: {error}; give another --output") from error
    return Manifest(**cast(dict[str, dict[str, Any]], parts), began=began)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replaces the file in one step: whoever reads it finds the old one or the whole new one, after a crash too.

    Raises:
        JobError: it cannot be written; nothing is left behind.
    """
    content: dict[str, Any] = {"kind": KIND, "version": VERSION, **asdict(manifest)}
    try:
        replace_file(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise JobError(
            f"manifest {path} cannot be written: {error.strerror} (errno {error.errno}); "
            "make room or give an --output elsewhere"
        ) from error
