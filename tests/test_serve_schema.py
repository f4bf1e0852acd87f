"""Thousands of requests that schemathesis makes of the server's own OpenAPI schema; none fails it, none hangs."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jobs_support import letters_model
from serve_support import KEY, Server, serving

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=TEMPLATE)


def schema_of(server: Server) -> dict[str, Any]:
    with server.http() as http:
        found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def run_schemathesis(server: Server, folder: Path, most: int, seed: int, phases: str) -> Any:
    """Send a server up to so many cases of each operation; returns the report, which has no failures and no errors.

    In one thread: hypothesis parses the sources of lambdas, and of two threads that do so at once Python 3.11 lets one
    end with "AST constructor recursion depth mismatch".
    """
    report = folder / "report.json"
    words = ["run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--workers", "1"]
    words += ["--checks", "not_a_server_error", "--request-timeout", "60", "--continue-on-failure"]
    words += ["--max-examples", str(most), "--seed", str(seed), "--no-color", "--no-shrink", "--phases", phases]
    words += ["--suppress-health-check", "all", "--warnings", "off", "--report", "json"]
    words += ["--report-json-path", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:]
    found = json.loads(report.read_text())
    assert (found["failures"], found["errors"]) == ([], []), "no answer in time is an error"
    assert found["operations"]["tested"] == found["operations"]["total"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
@pytest.mark.parametrize("options", [("--files", "kept"), ("--task", "embed")], ids=["generate", "embed"])
def test_requests_of_the_schema_are_answered(model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """So many of them: operations without parameters have few cases, so the others get more, in several rounds."""
    number, num_sent, seed = int(os.environ.get("ZINFER_SCHEMA_CASES", 300)), 0, 0
    phases = "examples,coverage,fuzzing"
    with ThreadPoolExecutor(1) as threads, serving(model, tmp_path, *options) as server:  # killed before stderr's end
        said = threads.submit(server.process.stderr.read)
        num_operations = sum(len(each) for each in schema_of(server)["paths"].values())
        while num_sent < number:
            seed += 1
            most = max((number - num_sent) // num_operations, 20)
            counts = run_schemathesis(server, tmp_path, most, seed, phases)["test_cases"]
            assert counts["generated"] > 0 == counts["with_failures"] == counts["errored"]
            num_sent, phases = num_sent + counts["generated"], "fuzzing"
            print(f"round {seed}: {counts['generated']} cases of {num_operations} operations, {num_sent} in all")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
    assert "Traceback" not in said.result()
