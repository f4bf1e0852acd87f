"""Recipes name files and names that there are, and a test that follows each."""

import ast
import re
from pathlib import Path

import pytest
from guide_blocks import DOCS, ROOT

RECIPES = sorted((DOCS / "recipes").glob("*.md"))
NAMED = re.compile(r"`((?:zinfer|offload|kernels|nvme|tests|benchmarks|scripts|docs)/[\w./-]*?)(?:::(\w+))?`")


def defined(path: Path) -> set[str]:
    """Names that a module's own lines define, functions within classes among them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def missing(text: str) -> list[str]:
    """The files that a text names and that are not there, and the names that their file does not define."""
    found = []
    for path, name in NAMED.findall(text):
        if "NAME" in path:
            continue
        if not (ROOT / path).exists():
            found.append(path)
        elif name and name not in defined(ROOT / path):
            found.append(f"{path}::{name}")
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_what_a_recipe_names_is_there(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert missing(text) == []
    assert re.search(r"`tests/test_\w+\.py`", text), "no test follows this recipe"


def test_what_is_not_there_is_found() -> None:
    text = "`zinfer/nothing.py`, `zinfer/units.py::nothing`, `zinfer/units.py`, `kernels/norm.py::norm`"
    assert missing(text) == ["zinfer/nothing.py", "zinfer/units.py::nothing"]


def test_the_index_lists_every_recipe() -> None:
    index = (DOCS / "recipes" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\w[\w-]*\.md)\)", index)) == {recipe.name for recipe in RECIPES} - {"index.md"}
