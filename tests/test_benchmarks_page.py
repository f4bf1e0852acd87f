"""docs/benchmarks.md has the figures of benchmarks/results, all of them, and no others."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch):
    """The module that writes the page."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import page

    yield page
    del sys.modules["page"]


def test_the_page_is_what_the_script_writes(page) -> None:
    assert page.PAGE.read_text() == page.fill(page.PAGE.read_text(), page.read_runs()), "run python benchmarks/page.py"


def test_every_result_has_its_table(page) -> None:
    names = [path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert len(names) > 20
    for name in names:
        assert f"### {name}\n" in page.PAGE.read_text(), name


def test_a_new_result_is_told_and_put_in(page, tmp_path: Path) -> None:
    card = {"cpu_cores": 4, "host_memory_gb": 8.0, "zinfer": "0.1.0", "python": "3.11.1"}
    run = {"benchmark": "job", "prompts": 1024, "cases": {"fp16": {"seconds": 12.345, "tokens_per_s": 1234.5}}}
    (tmp_path / "job-here.json").write_text(json.dumps(run | {"card": card}))
    runs = page.read_runs(tmp_path)
    blank = "<!-- hardware -->\nold\n<!-- end -->\nwords\n<!-- figures: job -->\n<!-- end -->\n"
    filled = page.fill(blank, runs)
    assert "### job-here\n\nprompts 1,024\n\n| case | job | new tokens/s |\n" in filled
    assert "| fp16 | 12.3 s | 1,234 |\n" in filled
    assert "| none used | 4 cores, 8.0 GB | zinfer 0.1.0, python 3.11.1 |\n" in filled
    assert "old" not in filled
    assert page.fill(filled, runs) == filled
    with pytest.raises(ValueError, match="no place for job: add"):
        page.fill("# Nothing\n", runs)
