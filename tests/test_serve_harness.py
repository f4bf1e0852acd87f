"""lm_eval, an evaluation harness, against a server: with the guide's own commands, and tasks made up here."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from guide_blocks import GUIDE, ROOT, blocks_of
from serve_support import KEY, Server, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install 'lm-eval[api,hf]'"),
]
ROWS = [{"q": f"{first}+{first % 7}=", "a": f"{first + first % 7}"} for first in range(10, 30)]
WRONG = [{**row, "b": str(int(row["a"]) + 1)} for row in ROWS]
TASKS = {
    "hellaswag": """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["{{a}}", "{{b}}"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "gsm8k": """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
"""By the names of those in the guide, for which they stand."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(ROOT / "examples" / "demo" / "model", tmp_path_factory.mktemp("server")) as server:
        yield server


def guides_commands() -> dict[str, list[str]]:
    """The words of the guide's commands, by their tasks."""
    (block,) = (each for each in blocks_of(GUIDE / "serve.md") if each.text.startswith("export OPENAI_API_KEY"))
    lines = block.text.replace("\\\n", " ").splitlines()
    return {words[words.index("--tasks") + 1]: words for words in map(shlex.split, lines) if words[0] == "lm_eval"}


@pytest.mark.parametrize(("task", "metric"), [("hellaswag", "acc,none"), ("gsm8k", "exact_match,none")])
def test_the_guides_command_gives_the_scores(server: Server, tmp_path: Path, task: str, metric: str) -> None:
    """The demo's model adds two-digit numbers without a fault, if its prompts begin as it was taught."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in WRONG))
    source = f"task: made_up\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
    (tmp_path / "made_up.yaml").write_text(source + "test_split: test\n" + TASKS[task])
    words = [each.replace("http://127.0.0.1:8000", server.url) for each in guides_commands()[task][1:]]
    words[words.index("--tasks") + 1] = "made_up"
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "found")]
    offline = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words],
        cwd=ROOT,
        env={**os.environ, **offline, "OPENAI_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    (path,) = (tmp_path / "found").rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["n-samples"]["made_up"]["effective"] == len(ROWS)
    assert results["results"]["made_up"][metric] == 1.0
