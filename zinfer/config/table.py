"""Write the table of all keys as Markdown: `python -m zinfer.config.table docs/guide/configuration.md` updates the page
between two markers; `--check` only reports whether the page is up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from zinfer.config.key import Key, Status
from zinfer.config.keys import KEYS
from zinfer.config.values import show

BEGIN: Final = "<!-- keys: written by python -m zinfer.config.table -->"
END: Final = "<!-- end of keys -->"

_TITLES: Final = {
    "": "Inference and training keys at the top",
    "zero_optimization": "ZeRO-Inference: `zero_optimization`",
    "zinfer": "zinfer's own keys: `zinfer`",
}


def key_table() -> str:
    """Return a table for each top-level section, supported keys first."""
    sections: dict[str, list[Key]] = {"": []}
    for key in sorted(KEYS, key=lambda key: (list(Status).index(key.status), key.path)):
        top = key.path.partition(".")[0]
        named = key.is_section or "." in key.path
        sections.setdefault(top if named else "", []).append(key)
    return "\n".join(line for name, keys in sections.items() for line in _section(name, keys))


def with_table(page: str) -> str:
    """Return the page with the current table between its markers.

    Raises:
        ValueError: the page does not have both markers in order, once each.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must have {BEGIN} and then {END}, once each")
    return f"{page.partition(BEGIN)[0]}{BEGIN}\n\n{key_table()}\n{END}{page.partition(END)[2]}"


def _section(name: str, keys: Sequence[Key]) -> Iterator[str]:
    yield f"### {_TITLES.get(name, f'`{name}`')}"
    yield ""
    yield "| key | status | what it does, or why not |"
    yield "|---|---|---|"
    for key in keys:
        aliases = ", ".join(f"`{alias}`" for alias in key.aliases)
        names = f"`{key.path}`" + (f" (also {aliases})" if aliases else "")
        yield f"| {names} | {'section' if key.is_section else key.status.value} | {_reason(key)} |"
    yield ""


def _reason(key: Key) -> str:
    text = key.reason.replace("|", "\\|")
    if key.same_as is not None:
        text += f"; means `{key.same_as}`"
    if key.default is not None:
        text += f" (default `{show(key.default)}`)"
    return text


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the page has the current table, 1 if it does not (with `--check`), 2 for wrong arguments."""
    paths = [Path(argument) for argument in arguments if argument != "--check"]
    if len(paths) != 1:
        print("usage: python -m zinfer.config.table [--check] PAGE.md", file=sys.stderr)
        return 2
    [path] = paths
    page = path.read_text(encoding="utf-8")
    wanted = with_table(page)
    if page == wanted:
        return 0
    if "--check" in arguments:
        print(f"{path}: the table of keys is out of date; run python -m zinfer.config.table {path}")
        return 1
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
