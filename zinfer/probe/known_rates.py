"""The rates that a run plans with: from a recorded `zinfer probe` of this machine and disk, else from a quick
measurement once per process, kept only in memory."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from zinfer.errors import ConfigError
from zinfer.probe.card import read_card
from zinfer.probe.disk import checked_file, disk_number, quick_read
from zinfer.probe.findings import recall
from zinfer.probe.measure import measure_copy, measure_device
from zinfer.probe.rates import EXCHANGES, Rates
from zinfer.probe.sizes import quick_sizes

_HURRIED: Final = "in a hurry; zinfer probe measures better"

_lock = threading.Lock()  # one measurement at a time: concurrent ones would halve their rates
_hurried_devices: dict[torch.device, Rates] = {}
_hurried_disks: dict[tuple[torch.device, int], float] = {}


def known_rates(device: torch.device, files: Sequence[Path] | None) -> Rates:
    """Return the rates of a device and of the slowest disk with ``files``.

    Takes no time if `zinfer probe` has measured them, else about a second with a GPU and a third of one without.

    Args:
        device: with an index if it is a CUDA device.
        files: files of the checkpoint. Empty: use the disk probed last; None: nothing is read, and the disk counts as
            infinitely fast.

    Raises:
        ConfigError: a file is missing, empty or unreadable; or there are no files and no recorded probe.
        OSError: the disk failed; the message names the file.
    """
    found = recall(read_card(device.type))
    if found is None and files is not None and not files:
        raise ConfigError(
            "no file to measure the disk with, and no findings of this machine on record; plan for a machine that is "
            "known with --machine (`zinfer plan --machine list` lists them), or run `zinfer probe --path FOLDER` once, "
            "FOLDER being on the disk that is to hold the checkpoint"
        )
    by_disk = _files_by_disk(files or ())
    with _lock:
        rates = _hurried_device(device) if found is None else found.to_rates(device.index or 0)
        if files is None:
            return replace(rates, disk_bytes_per_s=math.inf)
        if not files:
            return rates
        probed = {number: found and found.read_bytes_per_s(number) for number in by_disk}
        reads = [probed[number] or _hurried_disk(device, number, on_disk) for number, on_disk in by_disk.items()]
    hurried = found is not None and not all(probed.values())
    return replace(
        rates,
        disk_bytes_per_s=min(reads),
        origin=f"{rates.origin}, but the disk {_HURRIED}" if hurried else rates.origin,
    )


def _files_by_disk(files: Sequence[Path]) -> dict[int, list[Path]]:
    """Group the files by device number, and check that each is readable."""
    by_disk: dict[int, list[Path]] = {}
    for file in files:
        by_disk.setdefault(disk_number(checked_file(file)), []).append(file)
    return by_disk


def _hurried_device(device: torch.device) -> Rates:
    """Measure everything but the disk; the caller sets its rate, which is 0 here."""
    if device not in _hurried_devices:
        sizes = quick_sizes(device)
        found = measure_device(device, str(device), sizes)
        host = found.link.to_device_bytes_per_s
        if found.link.kind != "host copies":
            host = measure_copy(sizes.host_bytes, repeats=sizes.repeats)
        origin = f"measured {_HURRIED}"
        rates = found.rates(host_bytes_per_s=host, disk_bytes_per_s=0.0, origin=origin)
        _hurried_devices[device] = replace(rates, **_exchanges(device))
    return _hurried_devices[device]


def _exchanges(device: torch.device) -> Mapping[str, Any]:
    """Return what ranks exchange on cards like this one, if all of its host map each other's memory; else nothing.

    Measuring it takes a process for each card.
    """
    if device.type != "cuda":
        return {}
    others = [other for other in range(torch.cuda.device_count()) if other != device.index]
    joined = bool(others) and all(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    return EXCHANGES.get(torch.cuda.get_device_name(device), {}) if joined else {}


def _hurried_disk(device: torch.device, number: int, files: Sequence[Path]) -> float:
    if (device, number) not in _hurried_disks:
        _hurried_disks[device, number] = quick_read(files, quick_sizes(device).seconds_per_point)
    return _hurried_disks[device, number]
