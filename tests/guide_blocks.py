"""The code blocks of the guide's pages: fences, comments with instructions for the next block, hidden code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDE = DOCS / "guide"

HIDDEN = "<!-- hidden"
_FENCE = r"^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$"
FENCE = re.compile(_FENCE, re.MULTILINE | re.DOTALL)
PART = re.compile(rf"^{HIDDEN}\n(?P<hidden>.*?)^-->$|{_FENCE}", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!-- (?P<words>[^\n]*?) -->\n+\Z", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of a page. `comment` is the one right before it, `line` that of its first line of code."""

    page: Path
    language: str
    text: str
    comment: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"

    @property
    def file(self) -> str | None:
        """The file that holds the block, for those after it."""
        return self.comment.removeprefix("file: ") if self.comment.startswith("file: ") else None


def pages() -> list[Path]:
    """Every page of the documentation."""
    return sorted(DOCS.rglob("*.md"))


def pages_that_run() -> list[Path]:
    """Those whose blocks are run, and compared with what they show."""
    return [page for page in pages() if page.parent.name in ("guide", "architecture")]


def blocks_of(page: Path) -> Iterator[Block]:
    """In the page's order; hidden code has the language "hidden"."""
    content = page.read_text(encoding="utf-8")
    for found in PART.finditer(content):
        before = content[: found.start()]
        line = before.count("\n") + 2
        if found["hidden"] is not None:
            yield Block(page, "hidden", found["hidden"], "", line)
            continue
        comment = COMMENT.search(before)
        yield Block(page, found["language"].strip(), found["text"], comment["words"] if comment else "", line)
