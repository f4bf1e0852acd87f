"""Findings: their JSON form, what is refused in it, and the rates that the planner takes from them."""

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_support import DISK, made_up_device, made_up_findings

from zinfer.errors import ConfigError
from zinfer.probe.disk import DiskFindings, DiskRate
from zinfer.probe.findings import Findings, load_findings, parse_findings
from zinfer.probe.measure import LinkRates
from zinfer.probe.rates import Rates

SOURCE = Path("some/probe.json")
RATES = st.floats(1e-6, 1e18)


@given(RATES, RATES, st.dates(), st.lists(st.text(), max_size=3), st.booleans())
def test_findings_come_back_from_json(rate: float, other: float, day: date, lines: list[str], known: bool) -> None:
    device = made_up_device(flops_per_s=rate)
    if not known:
        device = replace(device, pcie=None)
    findings = made_up_findings(
        devices=(device, made_up_device()),
        taken_on=day,
        warnings=tuple(lines),
        memory=replace(made_up_findings().memory, copy_one_bytes_per_s=other),
    )
    assert parse_findings(findings.to_json(), SOURCE) == findings


def test_a_file_of_findings_is_read(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(made_up_findings().to_json())
    assert load_findings(path) == made_up_findings()
    with pytest.raises(ConfigError, match=r"absent\.json: No such file or directory; write it with `zinfer probe --js"):
        load_findings(tmp_path / "absent.json")


def changed(keys: str, value: Any) -> str:
    """The JSON form with one value replaced."""
    document = json.loads(made_up_findings().to_json())
    place = document
    *outer, last = [int(key) if key.isdecimal() else key for key in keys.split(".")]
    for key in outer:
        place = place[key]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        ("version", 1, "version: Input should be 2"),
        ("devices.0.flops_per_s", 0, "greater than 0"),
        ("devices.1.link.to_device_bytes_per_s", float("nan"), "to_device_bytes_per_s"),
        ("memory.copy_all_bytes_per_s", "fast", "memory.copy_all_bytes_per_s"),
        ("devices", [], "0 devices, but the card names 2 GPUs"),
        ("disks.0.rates.0.operation", "erase", "'read' or 'write'"),
        ("taken_on", "yesterday", "taken_on"),
    ],
)
def test_what_is_no_findings_is_refused(keys: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^some/probe\.json: .*{re.escape(words)}.*`zinfer probe`$"):
        parse_findings(changed(keys, value), SOURCE)


@given(st.integers(0, len(made_up_findings().to_json()) - 1))
def test_a_file_that_was_cut_off_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=r"some/probe\.json"):
        parse_findings(made_up_findings().to_json()[:length], SOURCE)


def test_the_planner_gets_the_figures_of_one_device_and_disk() -> None:
    slower = DiskFindings("/old", 8, (DiskRate("read", 4096, 1, 1e9, direct=True),))
    findings = made_up_findings(disks=(slower, DISK))
    origin = "measured by zinfer probe on 2026-11-21"
    others: dict[str, Any] = {"links_together": ((2, 110e9),), "launch_s": 0.5e-3}
    assert findings.to_rates() == Rates(55e9, 20e9, 56e9, 4.1e12, 790e12, origin, **others)
    assert findings.to_rates(1, 8) == Rates(55e9, 1e9, 56e9, 4.1e12, 700e12, origin, **others)
    host = made_up_device(link=LinkRates("host copies", 1 << 30, 10e9, None, None))
    assert made_up_findings(devices=(host, host)).to_rates().shares_host


def test_what_was_not_measured_is_said() -> None:
    findings = made_up_findings()
    for index in (-1, 2):
        with pytest.raises(ConfigError, match=f"has no device {index}; run `zinfer probe` again"):
            findings.to_rates(index)
    only_writes = made_up_findings(disks=(replace(DISK, rates=DISK.rates[2:]),))
    for lacking in (made_up_findings(disks=()), only_writes):
        with pytest.raises(ConfigError, match="run `zinfer probe --path FOLDER`"):
            lacking.to_rates()
    with pytest.raises(ConfigError, match="run `zinfer probe --path FOLDER`"):
        findings.to_rates(0, 99)


def test_the_disks_of_older_findings_are_kept() -> None:
    def with_disks(*disks: DiskFindings) -> Findings:
        return made_up_findings(disks=disks)

    other, again = replace(DISK, number=8, path="/other"), replace(DISK, path="/models/again")
    assert with_disks(again).with_disks_of(with_disks(DISK, other)).disks == (other, again)
    assert with_disks(other).with_disks_of(with_disks(DISK)).disks == (DISK, other)
