"""Batch jobs: a file of prompts in, a file of completions out, resumable after a crash.

Names are imported on first use, so importing the package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zinfer.jobs.job import run_job
    from zinfer.jobs.request import UnusableInput
    from zinfer.jobs.summary import JobSummary

__all__ = ["JobSummary", "UnusableInput", "run_job"]

_MODULES = {"JobSummary": "summary", "UnusableInput": "request", "run_job": "job"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
