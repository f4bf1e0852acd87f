"""Thousands of requests that schemathesis makes of the server's own OpenAPI schema; none fails it, none hangs."""

import os
import re
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
@pytest.mark.parametrize("options", [("--files", "kept"), ("--task", "embed")], ids=["generate", "embed"])
def test_requests_of_the_schema_are_answered(model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    number = int(os.environ.get("ZINFER_SCHEMA_CASES", 300))
    with serving(model, tmp_path, *options) as server, ThreadPoolExecutor(1) as threads:
        said = threads.submit(server.process.stderr.read)
        operations = [name for path, each in schema_of(server)["paths"].items() for name in each]
        words = ["run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--workers", "2"]
        words += ["--checks", "not_a_server_error", "--request-timeout", "60", "--continue-on-failure", "--seed", "1"]
        words += ["--max-examples", str(max(number // len(operations), 1)), "--no-color", "--no-shrink"]
        words += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all", "--warnings", "off"]
        words += ["--report", "json", "--report-json-path", str(tmp_path / "report.json")]
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-8000:]
        counts = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert counts is not None, done.stdout[-8000:]
        assert int(counts[1]) == int(counts[2]) >= number * 3 / 4
        print(counts[0])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        assert "Traceback" not in said.result()
