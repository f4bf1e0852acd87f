"""A job's plan as a table for people and as a document for programs."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from zinfer.offload.block import Tier
from zinfer.planning.job_plan import Job, JobPlan
from zinfer.planning.outline import Outline
from zinfer.planning.prediction import speed
from zinfer.planning.presets import Machine
from zinfer.units import duration, human_bytes


def job_table(outline: Outline, machine: Machine, job: Job, planned: JobPlan) -> Table:
    """Sizes, homes, memory and time."""
    budget, plan, rehearsed = planned.budget, planned.plan, planned.rehearsed
    table = Table(title=f"zinfer plan: {outline.name} on {machine.name}", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    lengths = f"{_mean(job.prompt_lens):,.0f} tokens, {_mean(job.new_tokens):,.0f} new ones each"
    table.add_row("job", f"{job.num_rows:,} texts of {lengths}")
    table.add_row("rates", machine.rates.origin)
    table.add_section()
    table.add_row("tokens a pass", f"{budget.tokens_per_pass:,} at most, {rehearsed.tokens_per_pass:,.0f} on average")
    table.add_row("texts at once", _together(rehearsed.most_together, budget.max_sequences))
    dtype = str(budget.kv_dtype).removeprefix("torch.")
    pages = f"{budget.num_pages:,} pages of {budget.page_size} tokens in {dtype}"
    where = f" of host memory, {human_bytes(budget.footprint.kv_bytes)} of the device" if budget.is_hosted else ""
    table.add_row("KV cache", f"{pages}, {human_bytes(budget.kv_bytes)}{where}")
    table.add_row("activations", human_bytes(budget.footprint.activation_bytes))
    homes = ", ".join(f"{plan.num_blocks(tier)} {tier.name}" for tier in Tier)
    table.add_row("blocks by home", f"{homes}; {human_bytes(plan.streamed_bytes)} streamed a pass")
    table.add_section()
    table.add_row("new tokens", speed(planned.tokens_per_s))
    table.add_row("whole job", duration(planned.seconds))
    table.add_row("bottleneck", rehearsed.bottleneck)
    return table


def _together(most_together: int, max_sequences: int) -> str:
    """As many as the cache holds, where that is less than what is allowed."""
    if most_together >= max_sequences:
        return f"{max_sequences:,} at most"
    return f"{most_together:,} at most (max_sequences: {max_sequences:,})"


def job_document(
    outline: Outline, machine: Machine, job: Job, planned: JobPlan, advice: list[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The same for `--json`, with the configuration, ``given`` as it was written; seconds and bytes."""
    return {
        "model": outline.name,
        "machine": machine.name,
        "rows": job.num_rows,
        "zinfer": planned.keys(),
        "configuration": planned.configuration(given),
        "most_sequences_together": min(planned.rehearsed.most_together, planned.budget.max_sequences),
        "kv_bytes": planned.budget.kv_bytes,
        "blocks_by_home": {tier.name: planned.plan.num_blocks(tier) for tier in Tier},
        "streamed_bytes_per_pass": planned.plan.streamed_bytes,
        "tokens_per_pass": planned.rehearsed.tokens_per_pass,
        "tokens_per_s": planned.tokens_per_s,
        "seconds": planned.seconds,
        "bottleneck": planned.rehearsed.bottleneck,
        "advice": advice,
    }


def _mean(numbers: Any) -> float:
    return float(sum(numbers) / len(numbers))
