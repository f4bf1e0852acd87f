"""`zinfer probe` in this process: what it prints, where, and what it keeps."""

import json
import os
from pathlib import Path

import pytest
import torch
from probe_support import MIB, TINY
from typer.testing import CliRunner, Result

from zinfer.cli import app
from zinfer.config.resolve import resolve_settings
from zinfer.probe.card import read_card
from zinfer.probe.findings import parse_findings, recall


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty record, and small sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("zinfer.probe.sizes.FULL_CPU", TINY)
    monkeypatch.setattr("zinfer.probe.sizes.FULL_CUDA", TINY)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


def zinfer_probe(*options: str | Path) -> Result:
    return CliRunner().invoke(app, ["probe", *map(str, options)])


def test_a_table_and_a_record(folder: Path) -> None:
    result = zinfer_probe("--path", folder, "--device", "cpu")
    assert result.exit_code == 0, result.output
    for words in ("disk reads", "disk writes", "host copy, 1 thread", "the device is the host", "TFLOP/s", "float32"):
        assert words in " ".join(result.stdout.split()) or words in result.stdout
    assert "measuring host memory" in result.stderr
    found = recall(read_card("cpu"))
    assert found is not None
    assert [disk.path for disk in found.disks] == [str(folder)]
    assert list(folder.iterdir()) == []


def test_one_json_document_and_nothing_else(folder: Path, device: str) -> None:
    result = zinfer_probe("--path", folder, "--json", "--device", device)
    assert result.exit_code == 0, result.output
    found = parse_findings(result.stdout, Path("stdout"))
    assert recall(read_card(device)) == found
    assert len(found.devices) == (torch.cuda.device_count() if device == "cuda" else 1)
    assert found.to_rates().link_bytes_per_s > 0


def test_no_cache_keeps_nothing(folder: Path, home: Path) -> None:
    result = zinfer_probe("--path", folder, "--no-cache", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert not home.exists()


def test_tune_prints_a_section_that_a_run_takes(folder: Path, home: Path) -> None:
    (folder / "model.safetensors").write_bytes(os.urandom(2 * MIB))
    result = zinfer_probe("--tune", folder)
    assert result.exit_code == 0, result.output
    section = json.loads(result.stdout)
    aio = resolve_settings(section, {}).aio
    assert aio.block_size in TINY.block_sizes
    assert (aio.queue_depth or 1) * (aio.intra_op_parallelism or 1) in TINY.read_depths
    assert "GB/s" in result.stderr
    assert "read" in result.stderr
    assert not home.exists()


def test_a_wrong_path_exits_2_and_says_which(tmp_path: Path) -> None:
    for option in ("--path", "--tune"):
        result = zinfer_probe(option, tmp_path / "nowhere")
        assert result.exit_code == 2
        assert f"error: {tmp_path / 'nowhere'}: No such file or directory" in result.stderr
        assert result.stdout == ""


def test_a_failing_disk_exits_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr("zinfer.probe.probe.measure_disk", fail)
    result = zinfer_probe("--path", folder, "--device", "cpu")
    assert result.exit_code == 1
    assert "Input/output error" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_exits_2(folder: Path) -> None:
    result = zinfer_probe("--path", folder, "--device", "cuda")
    assert result.exit_code == 2
    assert "torch sees no CUDA device" in result.stderr
