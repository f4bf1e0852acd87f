"""The pages about architecture and decisions name rooms and files that there are; drawings have the rooms' order."""

import re
from pathlib import Path

import pytest
from guide_blocks import DOCS, FENCE, ROOT
from test_rooms import ROOMS

PATH = re.compile(r"`((?:zinfer|offload|kernels|nvme|tests|benchmarks|scripts|docs|examples)/[\w./-]*)`")


def test_the_drawing_has_the_rooms_in_their_order() -> None:
    drawing = (DOCS / "images" / "rooms.svg").read_text(encoding="utf-8")
    assert tuple(re.findall(r'class="room"[^>]*>(\w+)<', drawing)) == ROOMS


@pytest.mark.parametrize("name", ["rooms.svg", "tiers.svg"])
def test_drawings_are_readable_in_light_and_dark(name: str) -> None:
    drawing = (DOCS / "images" / name).read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in drawing
    assert "<title" in drawing


@pytest.mark.parametrize(
    "page",
    [ROOT / "CONTRIBUTING.md", *sorted((DOCS / "architecture").glob("*.md"))],
    ids=lambda page: page.stem,
)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    named = PATH.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_contributing_is_one_page_with_links_that_lead_somewhere() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_decisions_have_a_number_three_parts_and_a_line_in_the_index() -> None:
    index = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8")
    decisions = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    assert len(decisions) > 50
    numbers = [int(page.name.partition("-")[0]) for page in decisions]
    assert len(set(numbers)) == len(numbers)
    for number, page in zip(numbers, decisions, strict=True):
        text = page.read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        assert title.startswith(f"{number}. ")
        assert f"* [{title}]({page.name})\n" in index
        assert re.findall(r"(?m)^\*\*(\w+)\.\*\*", text) == ["Context", "Decision", "Consequence"], page.name
        assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == [], page.name
