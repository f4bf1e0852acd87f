"""What the README says of the configuration is so."""

import re
from pathlib import Path

import pytest
from guide_blocks import GUIDE, ROOT

from zinfer.config import resolve_settings
from zinfer.config.key import Status
from zinfer.config.keys import BY_PATH
from zinfer.errors import ConfigError

CODE = re.compile(r"(?ms)^```(.*?)^```$")


def test_the_readme_describes_keys_that_are_honoured() -> None:
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    table = text.split("## Configuration")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name.split(":")[0].lstrip(".") for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(names) > 40
    for name in names:
        named = [key for path, key in BY_PATH.items() if f".{path}".endswith(f".{name}")]
        assert Status.HONOURED in {key.status for key in named}, name


def test_the_first_examples_need_no_configuration() -> None:
    for page in (ROOT / "README.md", GUIDE / "index.md"):
        taught, forced, after = page.read_text().partition("## Force the disk")
        assert forced
        assert not re.search(r"--config|\.json\"|nvme", "".join(CODE.findall(taught)))
        assert "nvme" in after
    for page in GUIDE.glob("*.md"):
        assert "--config" not in "".join(CODE.findall(page.read_text())[:1])


def test_the_readmes_examples_in_python_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    examples = [each for each in CODE.findall((ROOT / "README.md").read_text()) if "examples/demo/model" in each]
    assert len(examples) == 2
    for example in examples:
        exec(example.removeprefix("python\n"), {})
    assert capsys.readouterr().out.endswith("579 stop\n15 stop\n")


def test_the_readme_names_what_is_refused() -> None:
    for config in ({"tensor_parallel": {"tp_size": 2}}, {"mp_size": 2}, {"ep_size": 2}, {"moe": {"ep_size": 2}}):
        with pytest.raises(ConfigError, match=r"is not available yet: .* over several GPUs"):
            resolve_settings(config)
