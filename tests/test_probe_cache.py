"""Findings kept between runs: accumulated, replaced in one step, and never trusted blindly."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from probe_support import CARD, DISK, made_up_findings

from zinfer.probe.card import read_card
from zinfer.probe.findings import cache_path, recall, record


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_findings_are_kept_in_one_file_a_machine(home: Path) -> None:
    assert recall(CARD) is None
    record(made_up_findings())
    assert recall(CARD) == made_up_findings()
    assert list((home / "zinfer").iterdir()) == [cache_path(CARD)]
    for other in ({"cpu": "another"}, {"num_cores": 8}, {"gpus": ("a GPU",)}, {"driver": "581"}):
        assert recall(replace(CARD, **other)) is None


def test_the_folder_is_where_the_xdg_specification_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_path(CARD).parent == home / "zinfer"
    monkeypatch.setenv("HOME", "/home/somebody")
    for ignored in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_path(CARD).parent == Path("/home/somebody/.cache/zinfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_path(CARD).parent == Path("/home/somebody/.cache/zinfer")


def test_disks_accumulate() -> None:
    other = replace(DISK, number=8)
    record(made_up_findings())
    record(made_up_findings(disks=(other,), warnings=("new",)))
    assert recall(CARD) == made_up_findings(disks=(DISK, other), warnings=("new",))


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": 0}'])
def test_a_damaged_or_foreign_file_is_named_once_and_measured_anew(
    damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    record(made_up_findings())
    cache_path(CARD).write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert recall(CARD) is None
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert str(cache_path(CARD)) in message
    assert "\n" not in message
    record(made_up_findings())
    assert recall(CARD) == made_up_findings()


def test_a_place_that_cannot_be_written_to_is_said_and_nothing_more(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "zinfer").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        record(made_up_findings())
    assert any("set XDG_CACHE_HOME" in entry.getMessage() for entry in caplog.records)


def test_an_interrupted_write_leaves_the_former_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(made_up_findings())

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    record(made_up_findings(warnings=("new",)))
    assert recall(CARD) == made_up_findings()
    assert list((home / "zinfer").iterdir()) == [cache_path(CARD)]


def test_this_machines_card_is_the_same_each_time() -> None:
    card = read_card("cpu")
    assert card == read_card("cpu")
    assert card.fingerprint == read_card("cpu").fingerprint
    assert (card.gpus, card.driver) == ((), "")
    assert card.cpu
    assert card.num_cores == os.cpu_count()


@pytest.mark.gpu
def test_the_gpus_are_on_the_card() -> None:
    card = read_card("cuda")
    assert len(card.gpus) >= 1
    assert card.fingerprint != read_card("cpu").fingerprint
