"""`zinfer quantize`: write a store of quantized weights."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from zinfer.cli.ending import Device, exit_on_error, importing, raise_on_signals, say
from zinfer.cli.options import STATED_BY, Model, NoDownload, model_folder
from zinfer.errors import ConfigError

if TYPE_CHECKING:
    from zinfer.config import Settings
    from zinfer.store.files import Calibration


def quantize(
    model: Model,
    output: Annotated[Path, typer.Option(help="A new or empty folder, or an unfinished store.")],
    bits: Annotated[int | None, typer.Option(help="4 or 8; default 8.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Columns that share a scale; default: a whole row.")] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Use zero points.")] = False,
    format: Annotated[
        Literal["int", "fp8"] | None, typer.Option(help="Integers, or 8-bit e4m3 floats; default int.")
    ] = None,
    include: Annotated[list[str] | None, typer.Option(help="Only weights whose names contain one of these.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Skip weights whose names contain one of these.")] = None,
    search: Annotated[
        Literal["none", "clip"] | None, typer.Option(help="clip narrows ranges to minimize the squared error.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="JSONL of prompts; columns with large activations are rounded more exactly.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page of the quantization errors.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of prompts; the report shows how likelihoods and greedy tokens change.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the weights are converted.")] = "auto",
    config: Annotated[
        Path | None, typer.Option(help="DeepSpeed-style JSON with the quantization, instead of the options here.")
    ] = None,
    no_download: NoDownload = False,
) -> None:
    """Write a store: a checkpoint of quantized weights that streams from disk without conversion.

    The model's own weights are fp16, bf16, fp32, FP8, GPTQ, AWQ, compressed-tensors or GGUF.

    Run the command again to resume after an interruption. Exit codes: 0 finished, 2 unusable input, 1 disk error, 130
    Ctrl-C, 143 SIGTERM.
    """
    section: dict[str, object] = {
        "bits": bits,
        "group_size": group_size,
        "symmetric": False if asymmetric else None,
        "format": format,
        "include": include or None,
        "exclude": exclude or None,
        "search": search,
    }
    with exit_on_error(lambda: f"The finished blocks in {output} are kept"), raise_on_signals():
        folder = model_folder(model, config, no_download=no_download)
        with importing():
            from zinfer.store.pipeline import summary_table
            from zinfer.store.writing import write_store

        stated = {key: value for key, value in section.items() if value is not None}
        settings = _settings(config, stated, device)
        _check_paths(folder, calibrate, report, prompts, settings)
        calibration = _calibration(folder, calibrate, settings) if calibrate else None
        summary = write_store(folder, output, settings, calibration=calibration, console=Console(stderr=True))
        Console().print(summary_table(summary))
        if report is not None:
            _write_report(folder, output, report, prompts, settings)


def _calibration(model: Path, prompts: Path, settings: "Settings") -> "Calibration":
    from zinfer.evaluation.calibrate import measure_squares
    from zinfer.jobs.index import scan_input
    from zinfer.store.files import Calibration

    return Calibration(scan_input(prompts).sha256, lambda: measure_squares(model, prompts, settings))


def _check_paths(
    model: Path, calibrate: Path | None, report: Path | None, prompts: Path | None, settings: "Settings"
) -> None:
    """Check the paths now, not after the store is written."""
    from zinfer.evaluation.compare import check_prompts

    if report is None and prompts is not None:
        raise ConfigError(f"--prompts {prompts} is only for the report; add --report FILE.html")
    if report is not None and not report.absolute().parent.is_dir():
        raise ConfigError(f"--report {report}: {report.parent} is not a folder; create it first")
    for option, path in (("--calibrate", calibrate), ("--prompts", prompts)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{option} {path}: no such file")
    if prompts is not None:
        check_prompts(model, prompts, settings)


def _write_report(model: Path, store: Path, report: Path, prompts: Path | None, settings: "Settings") -> None:
    from zinfer.evaluation.compare import compare_models
    from zinfer.evaluation.page import error_table, write_page
    from zinfer.evaluation.weight_error import measure_errors
    from zinfer.weights import Checkpoint

    errors, agreement = list(measure_errors(Checkpoint.open(model), Checkpoint.open(store))), None
    write_page(report, store.name, errors, None)  # first: comparing the models takes the longest, and may fail
    if prompts is not None:
        agreement = compare_models(model, store, prompts, replace(settings, quantization=None))
        write_page(report, store.name, errors, agreement)
    Console().print(error_table(errors, agreement))
    say(f"the report is in {report}")


def _settings(config: Path | None, stated: dict[str, object], device: Device) -> "Settings":
    """Return the settings from the options, or from the configuration file."""
    from zinfer.config import resolve_settings

    if config is None:
        return resolve_settings({"zinfer": {"device": device, "quantization": {"bits": 8} | stated}})
    if stated:
        options = ", ".join("--asymmetric" if key == "symmetric" else f"--{key.replace('_', '-')}" for key in stated)
        raise ConfigError(f"--config and {options} both set the quantization; remove one of the two")
    return resolve_settings(config, {"device": device}, options=STATED_BY)
