"""The rates that a run plans with: from the record, else measured once a process."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from probe_support import DISK, MIB, TINY, made_up_device, made_up_findings

from zinfer.errors import ConfigError
from zinfer.probe import known_rates as rates
from zinfer.probe.card import read_card
from zinfer.probe.disk import DiskFindings, DiskRate
from zinfer.probe.findings import Findings, record
from zinfer.probe.known_rates import known_rates
from zinfer.probe.rates import EXCHANGES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty record, nothing measured yet, and small sizes."""
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(rates, "_hurried_devices", {})
    monkeypatch.setattr(rates, "_hurried_disks", {})
    monkeypatch.setattr(rates, "quick_sizes", lambda _: TINY)
    return home


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        path.write_bytes(bytes(MIB))
    return paths


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order."""
    names: list[str] = []
    for name in ("measure_device", "quick_read"):

        def note(*args: object, _name: str = name, _real: object = getattr(rates, name), **options: object) -> object:
            names.append(_name)
            return _real(*args, **options)  # type: ignore[operator]

        monkeypatch.setattr(rates, name, note)
    return names


def this_machines(*disks: DiskFindings) -> Findings:
    """Made-up findings on this machine's own card."""
    return made_up_findings(card=read_card("cpu"), devices=(made_up_device(),), disks=disks)


def test_without_a_record_it_is_measured_once_and_nothing_is_written(
    device: str, files: list[Path], measured: list[str], home: Path
) -> None:
    target = torch.device(device, 0) if device == "cuda" else CPU
    found = known_rates(target, files)
    assert measured == ["measure_device", "quick_read"]
    for rate in (
        found.link_bytes_per_s,
        found.disk_bytes_per_s,
        found.host_bytes_per_s,
        found.device_bytes_per_s,
        found.flops_per_s,
    ):
        assert 0 < rate < math.inf
    assert found.origin == "measured in a hurry; zinfer probe measures better"
    assert known_rates(target, files[:1]) == found
    assert len(measured) == 2
    assert not home.exists()


def test_a_record_is_taken_without_measuring(files: list[Path], measured: list[str]) -> None:
    record(this_machines(DISK, replace(DISK, number=files[0].stat().st_dev)))
    found = known_rates(CPU, files)
    assert measured == []
    assert found.disk_bytes_per_s == 20e9
    assert (found.link_bytes_per_s, found.flops_per_s) == (55e9, 790e12)
    assert found.origin == "measured by zinfer probe on 2026-11-21"


def test_a_disk_that_was_not_probed_is_read_in_a_hurry(files: list[Path], measured: list[str]) -> None:
    record(this_machines(replace(DISK, number=files[0].stat().st_dev + 1)))
    found = known_rates(CPU, files)
    assert measured == ["quick_read"]
    assert found.link_bytes_per_s == 55e9
    assert found.disk_bytes_per_s != 20e9
    assert found.origin == (
        "measured by zinfer probe on 2026-11-21, but the disk in a hurry; zinfer probe measures better"
    )


def test_the_slowest_of_several_disks_counts(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = DiskFindings("/slow", 1, (DiskRate("read", MIB, 1, 1e9, direct=True),))
    record(this_machines(slow, replace(DISK, number=2)))
    numbers = {files[0]: 1, files[1]: 2}
    monkeypatch.setattr(rates, "disk_number", numbers.__getitem__)
    assert known_rates(CPU, files).disk_bytes_per_s == 1e9
    assert known_rates(CPU, files[1:]).disk_bytes_per_s == 20e9


def test_without_files_the_disk_probed_last_counts(measured: list[str]) -> None:
    with pytest.raises(ConfigError, match="run `zinfer probe --path FOLDER` once"):
        known_rates(CPU, [])
    record(this_machines(DISK))
    assert known_rates(CPU, []).disk_bytes_per_s == 20e9
    assert measured == []


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, words in (
        ("absent", "No such file or directory; give a"),
        ("absent/model.safetensors", "No such file or directory; give a"),
        ("empty", "an empty file; give one"),
    ):
        with pytest.raises(ConfigError, match=f"{tmp_path / name}: {words}"):
            known_rates(CPU, [tmp_path / name])


@pytest.mark.parametrize(
    ("name", "num_gpus", "are_joined", "is_known"),
    [
        ("NVIDIA H200", 2, True, True),
        ("NVIDIA H200", 2, False, False),
        ("NVIDIA H200", 1, True, False),
        ("NVIDIA L4", 2, True, False),
    ],
)
def test_exchanges_are_known_by_the_card_where_all_of_a_host_are_joined(
    monkeypatch: pytest.MonkeyPatch, name: str, num_gpus: int, are_joined: bool, is_known: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one != other and are_joined)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = rates._exchanges(torch.device("cuda", 0))
    assert found == (EXCHANGES["NVIDIA H200"] if is_known else {})
    assert rates._exchanges(CPU) == {}
