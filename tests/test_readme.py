"""The README: at most a hundred and fifty lines, each of them so."""

import re
from pathlib import Path

import pytest
import torch
from guide_blocks import FENCE, GUIDE, ROOT, blocks_of
from guide_runner import PageRunner

from zinfer.model.families import FAMILIES

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_what_the_readme_shows_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "96")
    runner = PageRunner()
    languages = []
    for block in blocks_of(README):
        runner.run(block)
        languages.append(block.language)
    assert {"console", "python", "jsonl"} <= set(languages)


def test_the_first_examples_need_no_configuration() -> None:
    taught, _, after = TEXT.partition("## From DeepSpeed")
    assert after
    start, forced, disk = (GUIDE / "index.md").read_text(encoding="utf-8").partition("## Force the disk")
    assert forced
    assert "nvme" in disk
    for page in (taught, start):
        assert not re.search(r"--config|\.json\"|nvme", "".join(found["text"] for found in FENCE.finditer(page)))
    for page in GUIDE.glob("*.md"):
        first = next(FENCE.finditer(page.read_text(encoding="utf-8")), None)
        assert first is None or "--config" not in first["text"], page


def test_the_readme_counts_the_families() -> None:
    assert f"{len(FAMILIES)} families are tested" in TEXT


def test_the_figures_are_those_of_the_benchmarks() -> None:
    """Of the tables of rivals and of jobs, each number with its unit or factor."""
    figures = re.findall(r"(?m)[\d.,]+(?= s\b| x\))|\b[01]\.\d{3}\b|(?<=\| )[\d,]{5}(?= \|$)", measured())
    assert len(figures) > 25
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert [figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.,])", page)] == []


def measured() -> str:
    """The tables of the README, and its sentences about a pass."""
    start, _, rest = TEXT.partition("## When to use it")
    return start + rest.partition("## Measured")[2].partition("## ")[0]


def test_the_links_lead_somewhere() -> None:
    links = [link for link in LINK.findall(FENCE.sub("", TEXT)) if not link.startswith("https://")]
    assert "docs/guide/index.md" in links
    assert [link for link in links if not (ROOT / link).is_file()] == []
