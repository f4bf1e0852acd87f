"""The pages about the architecture name rooms and files that there are, in the order of the rooms."""

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
    sorted((DOCS / "architecture").glob("*.md")),
    ids=lambda page: page.stem,
)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    named = PATH.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
