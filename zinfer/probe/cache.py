"""Findings kept between runs: one JSON file a machine, replaced in one step, disks accumulated."""

import logging
import os
from pathlib import Path

from zinfer.errors import ConfigError
from zinfer.nvme.whole_file import replace_file
from zinfer.probe.card import MachineCard
from zinfer.probe.findings import Findings, parse_findings

log = logging.getLogger(__name__)


def cache_path(card: MachineCard) -> Path:
    """Where the machine's findings lie: `$XDG_CACHE_HOME/zinfer`, by default `~/.cache/zinfer`."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative one is to be ignored (XDG Base Directory Specification).
    folder = home if home.is_absolute() else Path.home() / ".cache"
    return folder / "zinfer" / f"probe-{card.fingerprint}.json"


def recall(card: MachineCard) -> Findings | None:
    """The findings on record, None where there are none or the file is no use, which is logged."""
    path = cache_path(card)
    try:
        return parse_findings(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        log.warning("findings of an earlier probe are left aside: %s", error)
        return None


def record(findings: Findings) -> None:
    """Replace the machine's findings and keep the disks that only the former ones have.

    A file that cannot be written is logged and left as it was: the figures are printed all the same.
    """
    former = recall(findings.card)
    whole = findings if former is None else findings.with_disks_of(former)
    path = cache_path(findings.card)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, whole.to_json() + "\n")
    except OSError as error:
        reason = "the findings are not kept; set XDG_CACHE_HOME to a folder that can be written to"
        log.warning("%s: %s; %s", path, error.strerror, reason)
