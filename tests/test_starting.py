"""A signal while a command starts, in the seconds in which torch and transformers are imported."""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from commands import start
from guide_blocks import ROOT
from interrupted_import import interrupt_import

import zinfer
from zinfer.cli.ending import importing

DEMO = ROOT / "examples" / "demo" / "model"


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("command", "module", "number"),
    [
        # torch drops what is raised while it imports numpy, and numpy cannot be imported a second time.
        (f"run --model {DEMO} --input i --output o", "numpy", signal.SIGINT),
        (f"run --model {DEMO} --input i --output o", "numpy.linalg", signal.SIGTERM),
        pytest.param(f"quantize --model {DEMO} --output o", "numpy.linalg", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("plan --model llama-3-8b", "numpy", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("plan --model llama-3-8b --rows 9", "numpy.linalg", signal.SIGINT, marks=pytest.mark.slow),
        ("probe", "numpy", signal.SIGHUP),
        ("families", "numpy.linalg", signal.SIGINT),
    ],
)
def test_a_signal_during_an_import_ends_the_command(
    command: str, module: str, number: signal.Signals, tmp_path: Path
) -> None:
    process = start(command.split(), tmp_path, warm=False, prepare=(interrupt_import, (module, int(number))))
    out, said = process.communicate(timeout=60)
    message = f"zinfer: {number.name}: stopped while starting, before anything was read or written.\n"
    assert (process.returncode, out, said) == (128 + number, "", message)
    assert not list(tmp_path.iterdir())


def test_imports_look_for_no_garbage_and_what_follows_does() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.slow
def test_what_was_imported_is_not_looked_through_again() -> None:
    code = "from zinfer.cli.ending import importing\nwith importing():\n    import zinfer.config\nimport gc\n"
    code += "print(gc.get_freeze_count() > 100_000 > len(gc.get_objects()))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"


@pytest.mark.slow
def test_python_in_the_folder_above_a_checkout_imports_the_package(tmp_path: Path) -> None:
    """The checkout's own folder is named zinfer too, and no package: it must not come before the installed one."""
    checkout, site = tmp_path / "zinfer", tmp_path / "site"
    for name in ("zinfer", "offload", "kernels", "nvme"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    options = re.findall(r"--config-settings \S+", (ROOT / "scripts" / "environment").read_text(encoding="utf-8"))
    installing = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    subprocess.run([*installing, *" ".join(options).split(), "-e", str(checkout)], check=True, capture_output=True)
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "those-of-the-tests.pth").write_text(sysconfig.get_paths()["purelib"])
    for each in site.glob("__editable__*"):
        shutil.copy(each, packages)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
    for words, printed in (
        (["-c", "import zinfer; print(zinfer.__file__)"], str(checkout / "zinfer" / "__init__.py")),
        (["-m", "zinfer", "--version"], f"zinfer {zinfer.__version__}"),
        ([*torchrun, "-m", "zinfer", "--version"], f"zinfer {zinfer.__version__}"),
    ):
        ended = subprocess.run(
            [python, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout.strip()) == (0, printed), ended.stderr
