"""What an output belongs to: the model, the input and every setting that changes results, in a file beside the output.

Memory budgets are no part of it: a job may go on with other ones. Sizes of
passes are, but those that were chosen and not stated are taken over and not compared.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from zinfer import __version__
from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.fingerprint import tokenizer_hash
from zinfer.config import Settings
from zinfer.errors import JobError
from zinfer.jobs.prompts import PromptMaker
from zinfer.jobs.request import JobRequest
from zinfer.jobs.weights import WeightsFile
from zinfer.nvme.whole_file import replace_file
from zinfer.requests.sampling_params import DEFAULT_NEW_TOKENS

KIND = "zinfer batch job"
VERSION = 2


@dataclass(frozen=True)
class Manifest:
    """Compared: `model`, `input` and `settings`. Kept: `versions` of the software that began the job, the local time
    when it `began` (ISO 8601, with its zone), which stays "now" for chat templates that write the date, the `sizes` of
    passes and cache that were chosen when the first row was computed, for whoever goes on: empty before that, and the
    `model_name` of OpenAI rows that name none. `weights`, by the names of files, are compared by `jobs.weights`.
    """

    model: Mapping[str, str]
    input: Mapping[str, str | int]
    settings: Mapping[str, str | int]
    versions: Mapping[str, str]
    began: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    model_name: str = ""
    weights: Mapping[str, WeightsFile] = field(default_factory=dict)

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
    except (ValueError, RecursionError) as error:
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
    sizes = content.get("sizes", {})
    if not isinstance(sizes, dict) or not all(type(size) is int and size > 0 for size in sizes.values()):
        raise JobError(f"manifest {path} is damaged: sizes: not whole numbers; give another --output")
    model_name = content.get("model_name", "")
    if not isinstance(model_name, str):
        raise JobError(f"manifest {path} is damaged: model_name: not a text; give another --output")
    weights = _read_weights(path, content.get("weights"))
    return Manifest(
        **cast(dict[str, dict[str, Any]], parts), began=began, sizes=sizes, model_name=model_name, weights=weights
    )


def _read_weights(path: Path, documents: object) -> dict[str, WeightsFile]:
    try:
        if not isinstance(documents, dict):
            raise ValueError("not an object")
        return {name: WeightsFile.read(document) for name, document in documents.items()}
    except ValueError as error:
        raise JobError(f"manifest {path} is damaged: weights: {error}; give another --output") from error


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


def model_identity(checkpoint: Checkpoint, maker: PromptMaker) -> dict[str, str]:
    """What tells the model and its tokenizer from others."""
    return {
        "fingerprint": checkpoint.fingerprint(),
        "tokenizer": tokenizer_hash(checkpoint.folder),
        "chat_template": maker.template_hash,
    }


def result_settings(request: JobRequest, settings: Settings, dtype: torch.dtype) -> dict[str, str | int]:
    """The settings on which the rows' bytes depend."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, str | int] = {
        "max_new_tokens": request.max_new_tokens or f"{DEFAULT_NEW_TOKENS}, or what fits",
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "max_out_tokens": settings.max_out_tokens or "the model's",
        "min_out_tokens": settings.min_out_tokens,
    }
    if settings.quantization is not None:
        found["quantization"] = json.dumps(settings.quantization.as_document())
    return found


def versions() -> dict[str, str]:
    """Of the software that runs."""
    others = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "zinfer": __version__, **others}
