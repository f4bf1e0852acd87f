"""A signal while a command starts, in the seconds in which torch and transformers are imported."""

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import start
from interrupted_import import interrupt_import

from zinfer.cli.ending import importing


@pytest.mark.parametrize(
    ("command", "module", "number"),
    [
        # torch drops what is raised while it imports numpy, and numpy cannot be imported a second time.
        ("run --model m --input i --output o", "numpy", signal.SIGINT),
        ("run --model m --input i --output o", "numpy.linalg", signal.SIGTERM),
        pytest.param("quantize --model m --output o", "numpy.linalg", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("plan --model m", "numpy", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("plan --model m --rows 9", "numpy.linalg", signal.SIGINT, marks=pytest.mark.slow),
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


def test_what_was_imported_is_not_looked_through_again() -> None:
    code = "from zinfer.cli.ending import importing\nwith importing():\n    import zinfer.config\nimport gc\n"
    code += "print(gc.get_freeze_count() > 100_000 > len(gc.get_objects()))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"
