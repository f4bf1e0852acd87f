"""The benchmarks of the server: on the demo with few rows, and on narrow models."""

import json
import subprocess
import sys
from typing import Any

import pytest
from guide_blocks import ROOT


def measured(script: str, *words: str) -> dict[str, Any]:
    """What a benchmark's last line says."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *words],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_benchmark_compares_the_server_with_offline() -> None:
    sizes = ["--rows", "8", "--batch-rows", "20", "--chats", "2", "--repeats", "1", "--rate", "20", "--device", "cpu"]
    cases = measured("serve.py", *sizes)["cases"]
    assert cases["saturated, streams"]["same_texts"] == 1
    assert cases["saturated, streams"]["tokens"] == cases["saturated, whole"]["tokens"] == 8 * 24
    assert cases["saturated, streams"]["over_offline"] > 0
    assert cases["batch alone"]["over_offline"] > 0
    assert cases["chats beside the batch"]["tokens"] > 0
    assert cases["HTTP alone, 20 requests/s, whole"]["most_ms"] > 0


@pytest.mark.slow
def test_the_benchmark_of_latency_serves_talks_and_guesses() -> None:
    sizes = ["--small", "--requests", "8", "--batch", "4", "--seconds", "2"]
    cases = measured("serve_latency.py", *sizes)["cases"]
    assert cases["static"]["served"]["token_ms"]["p95"] > 0
    assert cases["chats"]["passes"] > 0
    assert cases["chats"]["gap_ms"]["p95"] > 0
    assert cases["lookup"]["ngram"]["passes"] < cases["lookup"]["off"]["passes"] / 2
