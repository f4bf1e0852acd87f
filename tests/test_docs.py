"""The guide: what its pages show runs and gives what they say, its links and its navigation lead somewhere."""

import pkgutil
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from guide_blocks import DOCS, FENCE, GUIDE, HIDDEN, ROOT, blocks_of, pages, pages_that_run
from guide_runner import PageRunner

import zinfer
from zinfer.config import table
from zinfer.config.key import Status
from zinfer.config.keys import BY_PATH, KEYS
from zinfer.model.families import FAMILIES

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    """Of a page in the documentation: ``guide/index.md``."""
    return str(page.relative_to(DOCS))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder beside the examples, on a machine without a GPU and without figures of an earlier probe."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "96")
    return tmp_path


@pytest.mark.parametrize("page", pages_that_run(), ids=name)
def test_what_a_page_shows_is_so(page: Path, folder: Path) -> None:
    runner = PageRunner()
    for block in blocks_of(page):
        runner.run(block)


@pytest.mark.parametrize(
    "block",
    [
        "```python\nprint(1 + 1)  # -> 3\n```",
        "```python\nprint(2)\nassert True\n```",
        "```python\nvalue = 2\n```",
        "```python\nassert 1 == 2\n```",
        "<!-- deepspeed -->\n\n```python\nmodel = (\n```",
        "```console\n$ echo 2\n3\n```",
        "```console\n$ false\n```",
        "```console\n$ zinfer --version\nzinfer 0\n```",
        "<!-- slow -->\n\n```console\n$ zinfer plan --modle x\n```",
        "```sh\n./scripts/nothing\n```",
        "```sh\nzinfer walk\n```",
        '```json\n{"train_bach_size": 1}\n```',
        "```jsonl\n{\n```",
        "```fish\nls\n```",
    ],
)
def test_a_block_that_is_not_so_fails(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guide_blocks.ROOT", folder)
    page = folder / "page.md"
    page.write_text(f"# Page\n\n{block}\n")
    [found] = blocks_of(page)
    with pytest.raises((AssertionError, AttributeError, ValueError, SyntaxError)):
        PageRunner().run(found)


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_block_of_a_page_is_found(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    found = [block.language for block in blocks_of(page)]
    assert content.count("```") == 2 * len(FENCE.findall(content))
    assert len(found) == len(FENCE.findall(content)) + content.count(HIDDEN)


def anchors(page: Path) -> set[str]:
    """Of the headings, as Markdown's table of contents makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")))
    plain = [unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert target.is_relative_to(DOCS), link
        assert not anchor or anchor in anchors(target), link


def test_the_navigation_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert ROOT / site["docs_dir"] == DOCS
    [pattern] = site["not_in_nav"].split()
    listed = [page for page in pages() if not page.match(f"docs{pattern}")]
    assert sorted(pages_of(site["nav"])) == sorted(map(name, listed))
    assert f"/{site['site_dir']}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def pages_of(nav: list[dict[str, Any]]) -> Iterator[str]:
    for [inner] in (entry.values() for entry in nav):
        yield from [inner] if isinstance(inner, str) else pages_of(inner)


def words_of(page: Path) -> str:
    """Without code, on one line."""
    return " ".join(FENCE.sub("", page.read_text(encoding="utf-8")).split())


def test_the_readme_links_the_guide() -> None:
    assert "(docs/guide/index.md)" in words_of(ROOT / "README.md")


def test_the_guide_knows_the_families_that_are_batched() -> None:
    names = ", ".join(family.name for family in FAMILIES if family.is_batched)
    assert f": {names}." in words_of(GUIDE / "index.md")


@pytest.mark.parametrize("page", pages_that_run(), ids=name)
def test_measured_figures_are_those_of_the_benchmarks(page: Path) -> None:
    figures = re.findall(r"\d+\.\d{4}(?= s)|[\d.]+ ms|[\d.]+ GB/s|[\d.]+ % of", words_of(page))
    assert [figure for figure in figures if figure not in words_of(ROOT / "docs" / "benchmarks.md")] == []


def test_the_keys_that_matter_are_supported() -> None:
    text = (GUIDE / "configuration.md").read_text(encoding="utf-8")
    table = text.split("## The keys that matter")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name.split(":")[0].lstrip(".") for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(names) > 40
    for name in names:
        named = [key for path, key in BY_PATH.items() if f".{path}".endswith(f".{name}")]
        assert Status.SUPPORTED in {key.status for key in named}, name


def test_the_table_of_keys_is_the_present_one() -> None:
    assert table.main(["--check", str(GUIDE / "configuration.md")]) == 0, "run python -m zinfer.config.table"


def test_the_table_of_keys_has_every_key_once() -> None:
    rows = re.findall(r"(?m)^\| `([^`]+)`.*? \| (\w[\w ]*) \|", table.key_table())
    assert sorted(path for path, _ in rows) == sorted(key.path for key in KEYS)
    fates = dict(rows)
    assert all(fates[key.path] == "ignored" for key in KEYS if key.status is Status.IGNORED)


def test_a_page_whose_table_is_old_is_told_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Keys\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    assert table.main(["--check", str(page)]) == 1
    assert f"run python -m zinfer.config.table {page}" in capsys.readouterr().out
    assert table.main([str(page)]) == table.main(["--check", str(page)]) == 0
    assert page.read_text().startswith(f"# Keys\n{table.BEGIN}\n\n### ")
    assert page.read_text().endswith("after\n")
    with pytest.raises(ValueError, match="once each"):
        table.with_table("no markers")
    assert table.main([]) == 2


def test_the_page_of_python_has_every_public_name() -> None:
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    targets = re.findall(r"(?m)^::: (\S+)$", text)
    assert {name for name in zinfer.__all__ if name != "__version__"} <= {each.rpartition(".")[2] for each in targets}
    for target in targets:
        module, _, name = target.rpartition(".")
        if module.rpartition(".")[2].startswith("ray_"):  # imports an extra, which may not be installed
            source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            assert f"\nclass {name}:" in source
        else:
            assert pkgutil.resolve_name(target) is not None
