"""The rivals' benchmark: what ends a system badly is said in words, and no figure passes the gate unearned."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import job_systems
import peer_systems
import peer_worker
import peers

from zinfer.jobs import limited_process

CPU = torch.device("cpu")


def system_named(name: str) -> peer_systems.System:
    return next(system for system in (*peer_systems.SYSTEMS, *job_systems.JOB_SYSTEMS) if system.name == name)


TRACEBACK = "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\n    raise ValueError('inner')\n"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_SMALL_HIDDEN", 128)
        return peers.make_gate(tmp_path_factory.mktemp("gate") / "small", CPU)


@pytest.fixture
def work(gate: Any, tmp_path: Path) -> dict[str, Any]:
    folder = str(gate.folder)
    texts = {"prompts": gate.prompts, "tokens": gate.tokens}
    return {"small": folder, "large": folder, "batch": 2, "prompt": 4, "scratch": str(tmp_path), "result": ""} | texts


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", "it printed nothing"),
        ("loading\nkilled\n\n", "killed"),
        ("warning: old\n" + TRACEBACK + "ValueError: inner\nleaked 3 objects\n", "ValueError: inner"),
        (TRACEBACK + "ValueError: inner\n\nDuring it:\n\n" + TRACEBACK + "torch.Oom: full\n", "torch.Oom: full"),
        ("[rank0]: " + TRACEBACK + "[rank0]:   ^^\n[rank0]: OSError: [1/2] c++\n/x.h: error\n", "OSError: [1/2] c++"),
        (TRACEBACK + "KeyError\n", "KeyError"),
        (TRACEBACK + "    cut off", "cut off"),
    ],
)
def test_the_last_error_of_a_log(log: str, said: str) -> None:
    assert limited_process.last_error(log) == said


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('done')", None),
        ("raise ValueError('bad')", "exit code 1: ValueError: bad"),
        ("raise SystemExit('gate: wrong')", "exit code 1: gate: wrong"),
        ("import os; print('here', flush=True); os.abort()", "SIGABRT: here"),
    ],
)
def test_a_process_that_ends(script: str, said: str | None, tmp_path: Path) -> None:
    assert limited_process.run_limited([sys.executable, "-c", script], tmp_path / "log", 60) == said


def test_a_process_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    said = limited_process.run_limited(["sh", "-c", "sleep 600 & echo $!; wait"], tmp_path / "log", 2)
    child = int((tmp_path / "log").read_text())
    assert said == f"stopped at its limit of 2 s, after: {child}"
    stat = Path(f"/proc/{child}/stat")
    for _ in range(1000):  # the signal is sent; the system may take its time to act on it
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {child} goes on")


def test_names_choose_systems() -> None:
    def names(*asked: str) -> list[str]:
        return [system.name for system in peer_systems.chosen_systems(asked)]

    assert names("deepspeed-cpu") == ["zinfer-host", "deepspeed-cpu", "deepspeed-cpu-ahead", "zinfer-disk"]
    assert names("accelerate") == ["zinfer-host", "accelerate-host", "zinfer-disk", "accelerate-disk"]
    with pytest.raises(ValueError, match="no system is called 'accelerat'; known ones: zinfer-host, acc"):
        names("accelerat")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["zinfer-host", "accelerate-host", "zinfer-disk", "accelerate-disk"])
def test_the_gate_lets_a_right_system_pass(name: str, work: dict[str, Any]) -> None:
    peer_worker.check_tokens(system_named(name), peer_worker.Work(system=name, **work), CPU)


def test_the_gate_stops_a_system_whose_tokens_differ(gate: Any, work: dict[str, Any]) -> None:
    work["tokens"] = [[*row[:-1], row[-1] + 1] for row in gate.tokens]
    with pytest.raises(SystemExit, match="gate: accelerate-host: tokens differ from transformers' own"):
        peer_worker.check_tokens(
            system_named("accelerate-host"), peer_worker.Work(system="accelerate-host", **work), CPU
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_gate_stops_a_system_that_offloads_nothing(tier: Any, work: dict[str, Any]) -> None:
    """Its tokens are right; its layers are simply there."""

    def start(folder: Path, scratch: Path, device: torch.device) -> peer_systems.Running:
        running = peer_systems.start_accelerate(folder, scratch, device, tier)
        return peer_systems.Running(running.generate, lambda: 0, running.before_pass, running.close)

    system = peer_systems.System("idle", "accelerate", tier, start)
    with pytest.raises(SystemExit, match=rf"gate: idle: 0 of the layers' \d+ bytes lie in the {tier} tier"):
        peer_worker.check_tokens(system, peer_worker.Work(system="idle", **work), CPU)


@pytest.mark.slow
def test_a_system_runs_in_a_process_of_its_own(gate: Any, tmp_path: Path) -> None:
    args = argparse.Namespace(batch=2, prompt=4, limit=250, folder=tmp_path)
    system = system_named("accelerate-disk")
    figures = peers.run_system(system, gate.folder, gate, args)
    assert isinstance(figures, dict), figures
    assert figures["decode_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_system_that_is_not_installed_is_not_run(gate: Any, tmp_path: Path) -> None:
    args = argparse.Namespace(batch=2, prompt=4, limit=250, folder=tmp_path)
    absent = peer_systems.System("absent", "no_such_package", "host", system_named("accelerate-disk").start)
    assert peers.run_system(absent, gate.folder, gate, args) == "no_such_package: not installed"
    assert list(tmp_path.iterdir()) == []


def test_figures_are_ratios_within_a_tier() -> None:
    found: dict[str, dict[str, float] | str] = {
        "zinfer-host": {"decode_s": 0.5, "read_bytes": 0, "start_s": 1},
        "accelerate-host": {"decode_s": 2, "read_bytes": 0, "start_s": 1},
        "deepspeed-cpu": "deepspeed: not installed",
        "zinfer-disk": "SIGKILL: killed",
        "accelerate-disk": {"decode_s": 8, "read_bytes": 4e9, "start_s": 1},
    }
    rows = peers.with_ratios(found, 4 * 10**9, {"host": 16e9, "disk": 1e9})
    assert list(rows) == list(found)
    compared = {name: [row.get(key) for key in ("gb_per_s", "share", "times_zinfer_s")] for name, row in rows.items()}
    assert compared["zinfer-host"] == [8, 0.5, 1]
    assert compared["accelerate-host"] == [2, 0.125, 4]
    assert compared["accelerate-disk"] == [0.5, 0.5, None]
    assert rows["accelerate-disk"]["from_disk_gb"] == 4
    assert rows["deepspeed-cpu"] == {"tier": "host", "failed": "deepspeed: not installed"}
    peers.print_table(rows)
    assert json.loads(json.dumps(rows)) == rows
