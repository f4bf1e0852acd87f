"""`zinfer probe`: measure this machine, warn of bottlenecks, and keep the figures for plans and runs."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from zinfer.cli.ending import Device, exit_on_error, importing, say
from zinfer.display import print_text

if TYPE_CHECKING:
    import torch

    from zinfer.probe.findings import Findings
    from zinfer.ranks.group import RankGroup

_KEPT: Final = "Nothing was kept"


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
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Also measure so many processes at once, one per GPU: links, gathers and sums."),
    ] = None,
) -> None:
    """Measure this machine: the disk, host memory, PCIe and the device. Takes about half a minute.

    Processes that torchrun started measure together too, without --ranks.

    Exit codes: 0 measured, 2 an unusable path or device, 1 disk error.
    """
    with exit_on_error():
        if tune is not None:
            _tune(tune)
            return
        with importing():
            from zinfer.cli.launch import begin_rank, choose_num_ranks, launch

            begin_rank(ranks)
            import torch  # noqa: F401  limits import it inside functions

            from zinfer.config import Settings
            from zinfer.probe.limits import choose_device
            from zinfer.ranks.group import join_group

        num_ranks = choose_num_ranks(ranks, device)
        if num_ranks > 1:
            launch(num_ranks, lambda: _KEPT)
        chosen = choose_device(Settings(device=device))
        group = join_group(chosen.type)
        if group is None:
            _tell(_measure(path, chosen), as_json=as_json, no_cache=no_cache)
        elif (findings := _measure_together(path, group, device)) is not None:
            _tell(findings, as_json=as_json, no_cache=no_cache)


def _measure(path: Path, device: "torch.device") -> "Findings":
    with importing():
        from zinfer.probe.probe import probed_devices, run_probe
        from zinfer.probe.sizes import full_sizes

    devices = probed_devices(device)
    return run_probe(path, devices, full_sizes(devices), say)


def _measure_together(path: Path, group: "RankGroup", device: Device) -> "Findings | None":
    """Measure this machine on rank 0 and then all ranks at once; returns the findings on rank 0, None on others."""
    with importing():
        from zinfer.config import Settings
        from zinfer.probe.limits import choose_device
        from zinfer.probe.ranks import measure_ranks
        from zinfer.probe.sizes import full_sizes
        from zinfer.ranks.model_ranks import ModelRanks

    own = choose_device(Settings(device=device))  # after joining, which chose a GPU for this rank
    with ExitStack() as owned:
        ranks = ModelRanks(group, own)
        owned.push(ranks.leave_after)
        findings = _measure(path, own) if group.rank == 0 else None
        ranks.exchange(True)
        if group.rank == 0:
            say(f"measuring {group.size} ranks at once")
        found = measure_ranks(ranks, own, full_sizes([own] * group.num_local))
        return None if findings is None else replace(findings, ranks=(found,))


def _tell(findings: "Findings", *, as_json: bool, no_cache: bool) -> None:
    with importing():
        from zinfer.probe.findings import record
        from zinfer.probe.table import findings_table

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
