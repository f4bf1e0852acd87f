"""What the README says of the configuration is so."""

import re
from pathlib import Path

import pytest

from zinfer.config import resolve_settings
from zinfer.config.key import Status
from zinfer.config.triage import BY_PATH
from zinfer.errors import ConfigError


def test_the_readme_describes_keys_that_are_honoured() -> None:
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    table = text.split("## Configuration")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name.split(":")[0].lstrip(".") for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(names) > 40
    for name in names:
        named = [key for path, key in BY_PATH.items() if f".{path}".endswith(f".{name}")]
        assert Status.HONOURED in {key.status for key in named}, name


def test_the_readme_names_what_is_refused() -> None:
    for config in ({"tensor_parallel": {"tp_size": 2}}, {"mp_size": 2}, {"ep_size": 2}, {"moe": {"ep_size": 2}}):
        with pytest.raises(ConfigError, match=r"is not available yet: .* over several GPUs"):
            resolve_settings(config)
