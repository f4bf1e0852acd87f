"""Jobs run beside a damaged cache of compiled kernels, which are compiled again, and a line says so."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import triton
from jobs_support import letters_model, prompt_rows, write_rows
from triton.runtime.cache import FileCacheManager

from zinfer.engine import kernel_cache
from zinfer.engine.kernel_cache import are_compiled, check_kernel_cache, ensure_kernel_cache, note_compiled

SCRIPT = Path(__file__).with_name("cached_kernel.py")
NUM_KERNELS = 3
NUM_PARTS = 7  # files of a kernel that its group names
COMPILED = """
import json, sys
from hashlib import sha256
from traceback import format_exc
import triton
from cached_kernel import compiled
found = []
for triton.knobs.cache.dir in sys.argv[2:]:
    try:
        found.append(str([sha256(compiled(number)).hexdigest() for number in range(int(sys.argv[1]))]))
    except Exception:
        found.append(format_exc())
print(json.dumps(found))
"""


def run_python(*words: str, kernels: Path) -> "subprocess.Popen[str]":
    """Start Python without the interpreter of kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(kernels), "PYTHONPATH": f"{SCRIPT.parent}:{SCRIPT.parents[1]}"}
    return subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def codes(*caches: Path) -> list[str]:
    """The machine code of all kernels, as Triton finds it in each cache or compiles it; or its error."""
    process = run_python("-c", COMPILED, str(NUM_KERNELS), *map(str, caches), kernels=caches[0])
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found: list[str] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of three real kernels."""
    kernels = tmp_path_factory.mktemp("intact")
    out, err = run_python(str(SCRIPT), str(NUM_KERNELS), kernels=kernels).communicate(timeout=120)
    assert len(out.split()) == NUM_KERNELS, err
    return kernels


def copied(intact: Path, folder: Path) -> Path:
    """A copy of the cache, in which groups name the copied files."""
    shutil.copytree(intact, folder)
    for group in folder.glob("*/__grp__*.json"):
        group.write_text(group.read_text().replace(str(intact), str(folder)))
    return folder


@pytest.fixture
def kernels(intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cache, which Triton uses here."""
    folder = copied(intact, tmp_path / "kernels")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))
    return folder


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Looks at the cache as a process does that will launch kernels, and returns its warnings."""
    monkeypatch.setattr(logging.getLogger("zinfer"), "propagate", True)
    monkeypatch.setattr(kernel_cache, "triton_key", str)  # each look would hash Triton's files in a thread beside

    def look() -> list[str]:
        caplog.clear()
        ensure_kernel_cache.cache_clear()
        ensure_kernel_cache()
        return [record.getMessage() for record in caplog.records]

    yield look
    ensure_kernel_cache.cache_clear()


def one(kernels: Path, pattern: str) -> Path:
    return sorted(kernels.glob(f"*/{pattern}"))[0]


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "group cut": ("__grp__*.json", lambda path: cut(path, 40)),
    "group empty": ("__grp__*.json", lambda path: cut(path, 0)),
    "group of another kind": ("__grp__*.json", lambda path: path.write_text("[]")),
    "no parts": ("__grp__*.json", lambda path: path.write_text('{"child_paths": [3]}')),
    "binary missing": ("*.cubin", Path.unlink),
    "binary empty": ("*.cubin", lambda path: cut(path, 0)),
    "binary cut": ("*.cubin", lambda path: cut(path, path.stat().st_size - 1)),
    "binary of zeros": ("*.cubin", lambda path: path.write_bytes(bytes(path.stat().st_size))),
    "binary is a folder": ("*.cubin", lambda path: (path.unlink(), path.mkdir())),
    "facts missing": ("add_kernel.json", Path.unlink),
    "facts cut": ("add_kernel.json", lambda path: cut(path, 100)),
    "facts of another kind": ("add_kernel.json", lambda path: path.write_text("{}")),
    "text of other bytes": ("*.ttir", lambda path: path.write_bytes(b"\xff" * 900)),
}
CRASHES = ("group of another kind", "binary missing", "facts cut", "text of other bytes")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_kernel_is_compiled_again_and_the_others_are_kept(
    damage: str, kernels: Path, warned: Callable[[], list[str]]
) -> None:
    assert warned() == []
    note_compiled("model")
    pattern, spoil = DAMAGES[damage]
    path = one(kernels, pattern)
    spoil(path)
    said = f"{kernels}: 1 kernel is damaged, and compiled again"
    assert (warned(), warned()) == ([said], [])
    assert not are_compiled("model")
    groups = [FileCacheManager(path.name).get_group("add_kernel.json") for path in kernels.iterdir() if path.is_dir()]
    assert sorted(0 if group is None else len(group) for group in groups) == [0, NUM_PARTS, NUM_PARTS]


@pytest.mark.slow
def test_triton_alone_would_end_the_job(intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [copied(intact, tmp_path / damage) for damage in CRASHES]
    for damage, cache in zip(CRASHES, caches, strict=True):
        pattern, spoil = DAMAGES[damage]
        spoil(one(cache, pattern))
    for damage, said in zip(CRASHES, codes(*caches), strict=True):
        assert said.startswith("Traceback"), damage
    for cache in caches:
        monkeypatch.setattr(triton.knobs.cache, "dir", str(cache))
        check_kernel_cache()
    wanted, *found = codes(intact, *caches)
    assert wanted.startswith("[")
    assert found == [wanted] * len(CRASHES)


def test_libraries_that_are_cut_are_deleted(kernels: Path, warned: Callable[[], list[str]]) -> None:
    library = Path(sys.modules["_ssl"].__file__ or "")
    path = FileCacheManager("LIBRARY").put(library.read_bytes(), library.name)
    assert warned() == []
    cut(Path(path), 5000)
    assert len(warned()) == 1
    assert not Path(path).exists()


def test_kernels_that_somebody_deleted_are_missed(kernels: Path, warned: Callable[[], list[str]]) -> None:
    note_compiled("model")
    assert are_compiled("model")
    (kernels / "zinfer-damaged").write_bytes(b"\xff\0")
    assert not are_compiled("damaged")
    shutil.rmtree(one(kernels, "*.cubin").parent)
    assert warned() == []
    assert not are_compiled("model")


@pytest.mark.slow
@pytest.mark.parametrize(
    "seconds", [0.05, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 0.02, 0.1, 0.2))]
)
def test_a_killed_compilation_leaves_nothing_that_hurts(
    tmp_path: Path, seconds: float, intact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = run_python(str(SCRIPT), "50", kernels=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    assert kernel_cache._discard_damaged(tmp_path) == 0, "Triton writes a group last"
    found, wanted = codes(tmp_path, intact)
    assert found == wanted
    assert wanted.startswith("[")


@pytest.mark.slow
def test_a_killed_warmup_notes_nothing_and_a_job_runs(tmp_path: Path) -> None:
    """On a CPU the command refuses, so this runs what it calls."""
    model, kernels = letters_model(tmp_path / "model", num_layers=2), tmp_path / "kernels"
    config = {"zinfer": {"device": "cpu", "tokens_per_pass": 4096}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    warming = f"from zinfer.jobs.warmup import warm_up; print('begun', flush=True); warm_up({str(model)!r}, {config})"
    process = run_python("-c", warming, kernels=kernels)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(kernels.glob("zinfer-*"))
    rows, output = write_rows(tmp_path / "in.jsonl", prompt_rows(3)), tmp_path / "out.jsonl"
    options = ("--model", str(model), "--input", str(rows), "--output", str(output), "--config")
    process = run_python("-m", "zinfer", "run", *options, str(tmp_path / "ds.json"), kernels=kernels)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert len(output.read_text().splitlines()) == 3
