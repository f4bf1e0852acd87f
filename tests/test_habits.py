"""What editors, hooks and packagers read names files, commands and versions that there are."""

import re
import tomllib
from pathlib import Path

import yaml

import zinfer

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_ships_its_types() -> None:
    assert (ROOT / "zinfer" / "py.typed").read_bytes() == b""
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["zinfer"]


def test_the_changelog_has_the_present_version() -> None:
    versions = re.findall(r"(?m)^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert versions[0] == PROJECT["project"]["version"] == zinfer.__version__


def test_hooks_are_local_and_run_what_there_is() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    entries = [hook["entry"] for hook in config["repos"][0]["hooks"]]
    assert len(entries) == 6
    for entry in entries:
        for path in re.findall(r"(?:benchmarks|tests|docs)/[\w./]+", entry):
            assert (ROOT / path).is_file(), entry


def test_make_knows_scripts_that_there_are() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"(?m)^(\w+):.*## \w", makefile)
    assert {"help", "test", "fast", "gpu", "docs", "bench"} <= set(targets)
    assert set(targets) == set(re.findall(r"(?m)^\.PHONY: (.*)", makefile)[0].split())
    scripts = re.findall(r"(?:\./|\) )(\w+/[\w.]+)", makefile)
    assert "scripts/test" in scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_templates_ask_for_the_machine() -> None:
    templates = [*(ROOT / ".github").rglob("*.md")]
    assert len(templates) == 3
    for template in templates:
        assert "zinfer probe --json" in template.read_text(encoding="utf-8"), template
