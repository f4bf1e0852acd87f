"""`zinfer probe` on several ranks: what they reach at once, who prints it, and what the planner takes from it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from probe_support import CARD, MIB, TINY, made_up_findings
from ranks_support import run_ranks
from typer.testing import CliRunner

from zinfer.probe.findings import parse_findings, recall, record
from zinfer.probe.ranks import RankRates, parse_topology

FOUR = RankRates(4, 1, "nccl", 1 << 30, 183e9, 437e9, 286e9, (0, 0, 1, 1), ())
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
"""


def probed(rank: int, folder: Path) -> tuple[str, str]:
    """The output of the command in a process that torchrun started."""
    from zinfer.cli import app
    from zinfer.probe import sizes

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    sizes.FULL_CPU = TINY  # type: ignore[misc]
    found = CliRunner().invoke(app, ["probe", "--path", str(folder), "--device", "cpu", "--json"])
    assert found.exit_code == 0, found.output
    return found.stdout, found.stderr


@pytest.mark.slow
def test_two_ranks_measure_together_and_one_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text, said), silent = run_ranks(2, probed, tmp_path)
    assert silent == ("", ""), "rank 1 says nothing"
    assert "measuring 2 ranks at once" in said
    found = parse_findings(text, Path("stdout"))
    [ranks] = found.ranks
    assert (ranks.num_ranks, ranks.num_hosts, ranks.backend, ranks.nbytes) == (2, 1, "gloo", MIB)
    assert ranks.nodes == (None, None)
    rates = found.to_rates()
    assert rates.gather_bytes_per_s == ranks.gather_bytes_per_s > 0
    assert rates.links_together == ((2, ranks.to_device_bytes_per_s),)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert recall(found.card) == found, "kept for plans"


def test_the_planner_gets_what_the_most_ranks_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = replace(FOUR, num_ranks=2, to_device_bytes_per_s=109e9, gather_bytes_per_s=485e9)
    apart = replace(FOUR, num_ranks=8, num_hosts=2, gather_bytes_per_s=20e9)
    rates = made_up_findings(ranks=(FOUR, two, apart)).to_rates()
    assert rates.gather_bytes_per_s == 437e9
    assert rates.all_reduce_bytes_per_s == 286e9
    assert rates.links_together == ((2, 109e9), (4, 183e9)), "ranks rather than one process"
    assert rates.shared(2, 1).link_bytes_per_s == 54.5e9
    assert rates.shared(8, 1).link_bytes_per_s == 183e9 / 4, "as of the most that were measured"
    assert rates.shared(1, 1) == rates
    assert rates.shared(4, 4).disk_bytes_per_s == rates.disk_bytes_per_s / 4, "four copies from one disk"
    alone = made_up_findings().to_rates()
    assert alone.gather_bytes_per_s is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record(made_up_findings(ranks=(FOUR, two)))
    record(made_up_findings(ranks=(replace(FOUR, gather_bytes_per_s=1e9),)))
    record(made_up_findings())
    kept = recall(CARD)
    assert kept is not None
    assert kept.ranks == (two, replace(FOUR, gather_bytes_per_s=1e9)), "other numbers of ranks are kept"


def test_older_findings_without_ranks_are_read() -> None:
    text = made_up_findings().to_json()
    assert '"ranks": []' in text
    assert parse_findings(text.replace(',\n  "ranks": []', ""), Path("old")) == made_up_findings()


def test_the_topology_is_read_as_nvidia_smi_prints_it() -> None:
    assert parse_topology(TOPOLOGY) == (("X", "NV18"), ("NV18", "X"))
    assert parse_topology("no devices were found\n") == ()
    assert parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == (("X",),)
