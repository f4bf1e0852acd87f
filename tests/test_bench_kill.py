"""The real `zinfer bench`, ended by signals: it leaves no file of random numbers."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from commands import start
from test_bench import LLAMA, folder_of, on_disk


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("number", "again"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)])
def test_a_signal_ends_it_without_leftovers(
    number: signal.Signals, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(on_disk(tmp_path)))
    options = ["--rows", "5000", "--prompt-len", "512", "--new-tokens", "100", "--config", tmp_path / "config.json"]
    command = ["bench", "--model", folder_of(LLAMA, tmp_path), "--device", "cpu", *options]
    process = start(command, tmp_path, warm=True)
    said = ""
    while "predicted: " not in said:
        line = process.stderr.readline()
        assert line, f"it ended early: {said}"
        said += line
    scratch = tmp_path / "scratch"
    (folder,) = scratch.iterdir()
    assert (folder / "random.bin").stat().st_size > 0
    time.sleep(0.2)  # it is computing; any place in a pass will do
    process.send_signal(number)
    if again:
        while "press Ctrl-C again" not in (line := process.stderr.readline()):
            assert line, "it ended without the line"
        process.send_signal(number)
    _, err = process.communicate(60)
    assert process.wait(60) in ((128 + number, -number) if again else (128 + number,))
    if not again:
        assert f"zinfer: {number.name}: stopped.\n" in err
        assert re.search(r"zinfer: stopping after this pass \(up to .*\); press Ctrl-C again to stop now\n", err)
    assert "Traceback" not in err
    assert list(scratch.iterdir()) == []
