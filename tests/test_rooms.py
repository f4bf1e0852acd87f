"""Imports point down: from a room to those below it, from links of the package to less; and nowhere in a circle."""

import ast
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "cli",
    "chat",
    "mii",
    "ray",
    "ops",
    "runtime",
    "compat",
    "comm",
    "evaluation",
    "serve",
    "jobs",
    "batching",
    "engine",
    "planning",
    "kv_cache",
    "store",
    "inject",
    "model",
    "graphs",
    "weights",
    "probe",
    "sampling",
    "scheduling",
    "requests",
    "config",
    "ranks",
    "offload",
    "kernels",
    "nvme",
)
"""From the top floor down: a room imports itself, rooms after it and the ground, also inside functions."""
GROUND = ("errors", "units", "display")
ALONE = ("accelerator",)
"""Files that are import paths of DeepSpeed's, as the rooms ops and runtime are."""
LINKS = ("offload", "kernels", "nvme")
"""Top-level folders that are also rooms of the package; their bare names belong to other projects."""
ALLOWED: dict[str, tuple[str, ...]] = {
    "nvme": ("zinfer.nvme", "kvikio"),
    "kernels": ("zinfer.kernels", "torch", "triton"),
    "offload": ("zinfer.offload", "zinfer.nvme", "torch", "xxhash"),
    "scheduling": ("zinfer.scheduling", "zinfer.errors"),
    "config": ("zinfer.config", "zinfer.kernels", "zinfer.errors", "torch"),
}
"""All that these rooms may import besides the standard library."""
IMPORTERS = ("importlib.import_module", "import_module", "__import__")


def sources(room: str) -> dict[str, Path]:
    """Module names and files of a room."""
    folder = ROOT / room if room in LINKS else ROOT / "zinfer" / room
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(("zinfer", room, *parts))] = path
    return found


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and target of every import, wherever it stands; ``from a import b`` gives ``a.b``, relative ones a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
            target = node.args[0] if node.args else None
            yield node.lineno, target.value if isinstance(target, ast.Constant) else "a computed name"


def may_import(room: str, target: str) -> bool:
    top, *inner = target.split(".")
    if not top or top in LINKS:
        return False
    if room in ALLOWED:
        names = (*ALLOWED[room], *sys.stdlib_module_names)
        if not any(target == name or target.startswith(f"{name}.") for name in names):
            return False
    if top != "zinfer" or target == "zinfer.__version__":
        return True
    return bool(inner) and (inner[0] in GROUND or inner[0] in ROOMS[ROOMS.index(room) :])


def faults(room: str, name: str, tree: ast.AST) -> list[str]:
    return [f"{name}:{line} imports {target}" for line, target in imports(tree) if not may_import(room, target)]


def product_calls(*endings: str) -> Iterator[tuple[str, ast.Call]]:
    """All calls in the product of a function or method with one of these names, each with its module's name."""
    paths = {name: path for room in ROOMS for name, path in sources(room).items()}
    paths |= {f"zinfer.{path.stem}": path for path in (ROOT / "zinfer").glob("*.py")}
    for name, path in paths.items():
        text = path.read_text()
        if any(each in text for each in endings):
            yield from ((name, call) for call in calls(ast.parse(text, str(path)), endings))


def calls(tree: ast.AST, endings: Container[str]) -> Iterator[ast.Call]:
    """Calls of a function or method with one of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in endings:
            yield node


def test_each_folder_of_the_package_has_its_place_in_the_order() -> None:
    folders = {path.name for path in (ROOT / "zinfer").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS)
    loose = {path.stem for path in (ROOT / "zinfer").glob("*.py")}
    assert loose == {"__init__", "__main__", *GROUND, *ALONE}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room: str) -> None:
    found = [
        fault
        for name, path in sources(room).items()
        for fault in faults(room, name, ast.parse(path.read_text(), str(path)))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("room", "line", "allowed"),
    [
        ("nvme", "import torch", False),
        ("nvme", "from zinfer.offload.block import Block", False),
        ("nvme", "from zinfer.nvme.aligned import align_up", True),
        ("offload", "def late():\n    from zinfer import engine", False),
        ("offload", "import transformers", False),
        ("offload", "from nvme.reader import Reader", False),
        ("offload", "from ..nvme import reader", False),
        ("kernels", "import zinfer.offload", False),
        ("kernels", "import triton.language as tl", True),
        ("scheduling", "import torch", False),
        ("engine", "from offload.block import Block", False),
        ("engine", "def late():\n    from zinfer.batching.llm import LLM", False),
        ("engine", "import zinfer", False),
        ("engine", 'import importlib\nimportlib.import_module("nvme.reader")', False),
        ("engine", 'from importlib import import_module\nimport_module("nvme.reader")', False),
        ("engine", "from zinfer.nvme.reader import Reader", True),
        ("jobs", "from zinfer import __version__", True),
        ("cli", "from zinfer.batching.llm import LLM", True),
    ],
)
def test_a_planted_import_is_found(room: str, line: str, allowed: bool) -> None:
    assert (faults(room, "module", ast.parse(line)) == []) == allowed


@pytest.mark.parametrize("folder", ["tests", "scripts", "benchmarks", "examples"])
def test_the_links_are_never_imported_by_their_bare_names(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for line, target in imports(ast.parse(path.read_text(), str(path))):
            assert target.split(".")[0] not in LINKS, f"{path}:{line}"


def imports_at_load(statements: list[ast.stmt]) -> Iterator[str]:
    """Targets of the imports that run when the module is loaded: not those in functions or for type checkers."""
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (target for _, target in imports(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_at_load(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                inner = [child for child in getattr(node, field, []) if isinstance(child, ast.AST)]
                for child in inner:
                    yield from imports_at_load(child.body if isinstance(child, ast.ExceptHandler) else [child])


def graph(room: str) -> dict[str, set[str]]:
    """For each module of a room the modules of the room that its own text imports when it is loaded."""
    modules = sources(room)
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        edges[name] = set()
        for target in imports_at_load(ast.parse(path.read_text(), str(path)).body):
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != name:
                edges[name].add(target)
    return edges


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, or none."""
    left = {name: set(targets) for name, targets in edges.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


@pytest.mark.parametrize("room", ROOMS)
def test_no_modules_import_each_other_in_a_circle(room: str) -> None:
    assert find_cycle(graph(room)) == []


def test_a_circle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    body = ast.parse("if TYPE_CHECKING:\n    import a\ntry:\n    import b\nexcept ImportError:\n    import c").body
    assert list(imports_at_load(body)) == ["b", "c"]


@pytest.mark.parametrize("room", LINKS)
def test_each_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "zinfer" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


STARTING: Final = {
    "Thread": "start_thread",
    "Timer": "start_thread",
    "start_new_thread": "start_thread",
    "add_done_callback": "when_done",
}
"""What starts work whose error nobody hears, and what to call instead ([Note: no thread ends unseen])."""
HELPERS: Final = "zinfer.nvme.pool"


def test_threads_are_started_where_none_ends_unseen() -> None:
    found = [(name, ast.unparse(call.func)) for name, call in product_calls(*STARTING) if name != HELPERS]
    assert found == [], f"call {set(STARTING.values())} of {HELPERS}"


@pytest.mark.parametrize(
    "line",
    [
        "threading.Thread(target=work, daemon=True).start()",
        "Thread(target=work).start()",
        "Timer(1, work).start()",
        "_thread.start_new_thread(work, ())",
        "pool.submit(work).add_done_callback(call)",
    ],
)
def test_a_planted_thread_is_found(line: str) -> None:
    assert len([*calls(ast.parse(line), STARTING)]) == 1
