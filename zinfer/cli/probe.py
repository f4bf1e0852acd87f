"""`zinfer probe`: measure this machine, warn of bottlenecks, and keep the figures for plans and runs."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zinfer.cli.ending import Device, exit_on_error, importing, say
from zinfer.display import print_text


def probe(
    path: Annotated[
        Path, typer.Option(help="Folder on the disk to measure: checkpoints are read, others get a temporary file.")
    ] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of the table.")] = False,
    tune: Annotated[
        Path | None, typer.Option(help="Measure only the disk of this file or folder; prints an 'aio' section.")
    ] = None,
    device: Annotated[Device, typer.Option(help="cuda measures every GPU, cpu only the host.")] = "auto",
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Do not keep the figures for later plans and runs.")
    ] = False,
) -> None:
    """Measure this machine: the disk, host memory, PCIe and the device. Takes about half a minute.

    Exit codes: 0 measured, 2 an unusable path or device, 1 disk error.
    """
    with exit_on_error():
        if tune is not None:
            _tune(tune)
        else:
            _probe(path, device, as_json=as_json, no_cache=no_cache)


def _probe(path: Path, device: Device, *, as_json: bool, no_cache: bool) -> None:
    with importing():
        from zinfer.config import Settings
        from zinfer.probe.findings import record
        from zinfer.probe.limits import choose_device
        from zinfer.probe.probe import probed_devices, run_probe
        from zinfer.probe.sizes import full_sizes
        from zinfer.probe.table import findings_table

    devices = probed_devices(choose_device(Settings(device=device)))
    findings = run_probe(path, devices, full_sizes(devices), say)
    if not no_cache:
        record(findings)
    if as_json:
        print(findings.to_json())
        return
    console = Console()
    console.print(findings_table(findings))
    for warning in findings.warnings:
        print_text(console, f"warning: {warning}")


def _tune(path: Path) -> None:
    with importing():
        from zinfer.probe.disk import aio_section, measure_disk
        from zinfer.probe.sizes import FULL_CPU
        from zinfer.probe.table import sweep_table

    say(f"measuring the disk of {path}")
    disk = measure_disk(path, FULL_CPU)
    reads = disk.best("read")
    assert reads is not None, "reads are always swept"
    Console(stderr=True).print(sweep_table(disk.rates))
    print(json.dumps(aio_section(reads), indent=2))
