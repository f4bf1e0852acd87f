"""`zinfer probe`: measures this machine, says what holds it back, and keeps the figures for plans and runs."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zinfer.cli.ending import Device, explained, importing, say
from zinfer.display import print_text


def probe(
    path: Annotated[
        Path, typer.Option(help="A folder on the disk to measure: a checkpoint's is read, another is written to.")
    ] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of the table.")] = False,
    tune: Annotated[
        Path | None, typer.Option(help="Measure this file's or folder's disk alone; prints an 'aio' section.")
    ] = None,
    device: Annotated[Device, typer.Option(help="cuda measures every GPU, cpu the host alone.")] = "auto",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep nothing for later plans and runs.")] = False,
) -> None:
    """Measure this machine: the disk, host memory, the link and the device. Takes about half a minute.

    Exit codes: 0 measured, 2 an unusable path or device, 1 stopped by an error of the disk.
    """
    with explained():
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
