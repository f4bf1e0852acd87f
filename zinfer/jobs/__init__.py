"""Batch jobs: a file of prompts in, a file of completions out, whatever happens in between.

The names are resolved on first use, so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zinfer.jobs.job import run_job
    from zinfer.jobs.request import UnusableInput
    from zinfer.jobs.summary import JobSummary

__all__ = ["JobSummary", "UnusableInput", "run_job"]


def __getattr__(name: str) -> Any:
    if name == "run_job":
        from zinfer.jobs.job import run_job

        return run_job
    if name == "JobSummary":
        from zinfer.jobs.summary import JobSummary

        return JobSummary
    if name == "UnusableInput":
        from zinfer.jobs.request import UnusableInput

        return UnusableInput
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
