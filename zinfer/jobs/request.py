"""The arguments of a job. Imports nothing heavy: the command line needs it for `--help`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zinfer.errors import JobError

if TYPE_CHECKING:
    from zinfer.jobs.row_form import RowForm

PathLike = str | os.PathLike[str]
STANDARD_STREAM = Path("-")
"""An input: stdin. An output: stdout."""


WEIGHTS: Final[Mapping[str, Mapping[str, object]]] = {
    "fp16": {"dtype": "fp16"},
    "int8": {"quantization": {"bits": 8}},
    "int4": {"quantization": {"bits": 4, "group_size": 128}},
    "fp8": {"quantization": {"bits": 8, "format": "fp8"}},
}
"""The keys of the configuration that each choice of ``--weights`` states."""


class OtherRankFailed(JobError):
    """Another rank of the job failed or is gone; the message names it, its host and the cause."""


class UnusableInput(JobError):
    """Raised before any compute if a job's input, output or settings cannot be used.

    Args:
        line: of the input, the first that cannot stay as it is; None if the fault lies in no line.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class Task(StrEnum):
    """The result of each row: generated text, an embedding or a label."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"


class InputFormat(StrEnum):
    """The format of an input; AUTO goes by its content and its name."""

    AUTO = "auto"
    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"


class Pooling(StrEnum):
    """How token vectors become one embedding: as the checkpoint says, their mean, the first token's, or the last's."""

    AUTO = "auto"
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


@dataclass(frozen=True)
class JobRequest:
    """The arguments of `run_job`.

    Attributes:
        form: how rows become requests.
        options: more keys of the configuration.
    """

    model: PathLike
    input: Path
    output: Path
    config: PathLike | Mapping[str, object] | None
    device: str
    form: "RowForm"
    batch_size: int | None
    restart: bool
    trace: Path | None
    report: Path | None
    task: Task = Task.GENERATE
    pooling: Pooling = Pooling.AUTO
    prompt_name: str | None = None
    fast: bool = False
    only_missing: bool = False
    limit: int | None = None
    ordered: bool = False
    input_format: InputFormat = InputFormat.AUTO
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the configuration that are arguments."""
        return {"device": self.device, **self.options}

    @property
    def generates(self) -> bool:
        """Whether rows get generated tokens."""
        return self.task is Task.GENERATE

    def check(self) -> None:
        """Raise UnusableInput for invalid numbers and paths, and for options that the task does not use."""
        sizes = {"max_new_tokens": self.form.max_new_tokens, "batch_size": self.batch_size, "limit": self.limit}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise UnusableInput(f"{name} must be at least 1, not {size}")
        if not self.generates and (unused := self.form.for_generation):
            raise UnusableInput(f"{unused[0]} is for jobs that generate; leave it out beside the task {self.task}")
        if self.prompt_name is not None and self.task is not Task.EMBED:
            raise UnusableInput(f"prompt_name is for the task embed; leave it out beside the task {self.task}")
        if self.pooling is not Pooling.AUTO and self.task is not Task.EMBED:
            raise UnusableInput(
                f"pooling {self.pooling} is for the task embed; leave it out beside the task {self.task}"
            )
        if self.report is not None and find_spec("matplotlib") is None:
            raise UnusableInput("a report needs matplotlib; run `pip install '.[report]'`, or leave --report out")
        try:
            self._check_paths()
        except OSError as error:
            raise UnusableInput(
                f"{error.filename} cannot be accessed: {error.strerror} (errno {error.errno}); give a path in "
                "folders that you may search"
            ) from error

    def _check_paths(self) -> None:
        if self.output == STANDARD_STREAM:
            return self._check_reports({"input": self.input})
        if not self.output.name or self.output.is_dir():
            raise UnusableInput(f"output {self.output} is a folder; give a file in it")
        if self.output.exists() and self.input.exists() and self.output.samefile(self.input):
            raise UnusableInput(f"output {self.output} is the input file; give another --output")
        return self._check_reports(
            {"input": self.input, "output": self.output, "output's manifest": manifest_path(self.output)}
        )

    def _check_reports(self, taken: dict[str, Path]) -> None:
        for name, path in (("report", self.report), ("trace", self.trace)):
            if path is None:
                continue
            if not path.parent.is_dir():
                raise UnusableInput(f"{name} {path} is in no folder; give a --{name} in a folder that exists")
            for other, its_path in taken.items():
                if path.resolve() == its_path.resolve():
                    raise UnusableInput(f"{name} {path} is the {other} file; give another --{name}")
            taken[name] = path


def kept_message(output: Path) -> str:
    """Return a message on whether the output holds rows, for a job that ends early."""
    if output == STANDARD_STREAM:
        return "Rows on stdout are whole; none is kept for another run"
    has_rows = output.is_file() and output.stat().st_size
    return f"The rows in {output} are kept" if has_rows else "No row was written"


def manifest_path(output: Path) -> Path:
    """Return the path of an output's manifest."""
    return output.with_name(output.name + ".manifest.json")


def checksums_path(output: Path) -> Path:
    """Return the path of the checksums of the weights that an unfinished job has read."""
    return output.with_name(output.name + ".checksums")
