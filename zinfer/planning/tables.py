"""Format plans and machines as tables, and plans as JSON documents with plain numbers."""

from collections.abc import Mapping, Sequence
from statistics import fmean as mean
from typing import Any, Final

from rich.table import Table

from zinfer.offload.block import Tier
from zinfer.planning.advice import Advice, JobAdvice
from zinfer.planning.data_sheets import DATA_SHEETS
from zinfer.planning.device_cap import DeviceParts
from zinfer.planning.job_plan import Job, JobPlan
from zinfer.planning.latency import ServingLatency, describe_latency, predict_latency
from zinfer.planning.plan import BatchPlan, Case
from zinfer.planning.presets import PRESETS, Machine
from zinfer.planning.step_time import LAUNCHING, PassTime, resource_name, speed
from zinfer.units import duration, human_bytes

_BOUND_BY: Final = {
    "disk": "the disk",
    "link": "the link to the GPU",
    "host copies": "copies in host memory",
    "device memory": "the GPU's memory",
    "gathers": "copies among ranks",
    LAUNCHING: "Python, which launches the kernels",
}
"""The resources of `PassTime.terms` in a sentence; others as they are."""


def batch_answer(planned: BatchPlan, advice: Sequence[Advice], num_groups: int = 1) -> str:
    """Return the plan in one sentence.

    Args:
        num_groups: groups of ranks that each compute such a batch.
    """
    prediction, request = planned.prediction, planned.request
    smaller = next((each for each in advice if each.weights), None)
    faster = f"; with {smaller.weights} {speed(num_groups * smaller.tokens_per_s)}" if smaller else ""
    return (
        f"{_where(planned.case)}: {speed(num_groups * prediction.tokens_per_s)}, "
        f"{duration(prediction.seconds)} for {num_groups * request.batch_size:,} prompts, bound by "
        f"{_bound_by(prediction.decode.bottleneck)}{faster}"
    )


def job_answer(num_rows: int, planned: JobPlan, advice: Sequence[JobAdvice]) -> str:
    """Return the plan of a job of so many rows in one sentence."""
    smaller = next((each for each in advice if each.weights), None)
    faster = f"; with {smaller.weights} {duration(smaller.seconds)}" if smaller else ""
    rows = f"{num_rows:,} {'rows' if num_rows > 1 else 'row'}"
    bound = _bound_by(planned.simulated.bottleneck)
    return f"{_where(planned.case)}: {duration(planned.seconds)} for {rows}, bound by {bound}{faster}"


def _where(case: Case) -> str:
    return f"{case.outline.name} on {case.machine.title}"


def _bound_by(bottleneck: str) -> str:
    return _BOUND_BY.get(bottleneck, bottleneck)


def plan_table(planned: BatchPlan) -> Table:
    """Return a table of homes, memory by kind, seconds per pass by resource, and speed."""
    plan, prediction, outline = planned.plan, planned.prediction, planned.case.outline
    table = _titled(planned.case)
    source = "the checkpoint" if outline.files else "config.json alone"
    table.add_row("model", f"{human_bytes(outline.nbytes)} of weights in {len(outline.blocks)} blocks, from {source}")
    table.add_row("request", str(planned.request))
    table.add_row("rates", prediction.origin)
    table.add_section()
    for tier in Tier:
        weights = human_bytes(planned.tier_bytes[tier])
        table.add_row(f"home {tier.name}", f"{plan.num_blocks(tier)} blocks, {weights}")
    table.add_row("device slots", f"{plan.num_slots} of {human_bytes(plan.slot_bytes)}")
    table.add_row("staging slots", f"{plan.num_staging} of {human_bytes(plan.staging_bytes)}")
    _add_memory(table, planned)
    _add_pass(table, "prefill", prediction.prefill)
    _add_pass(table, "decode", prediction.decode)
    table.add_section()
    table.add_row("new tokens", speed(prediction.tokens_per_s))
    table.add_row("whole request", duration(prediction.seconds))
    table.add_row("free tokens a pass", f"{prediction.free_tokens:,}")
    table.add_row("bottleneck", f"{prediction.decode.bottleneck} (prefill: {prediction.prefill.bottleneck})")
    return table


def _titled(case: Case) -> Table:
    title = f"zinfer plan: {case.outline.name} on {case.machine.name}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    return table


def _add_memory(table: Table, planned: BatchPlan) -> None:
    plan, tier_bytes = planned.plan, planned.tier_bytes
    staging = plan.num_staging * plan.staging_bytes
    # Of several ranks each has its ranges.
    host_weights = plan.host_bytes - staging if plan.num_ranks > 1 else tier_bytes[Tier.HOST]
    table.add_section()
    _add_device_memory(table, planned.parts, planned.case)
    host = {"weights": host_weights, "staging": staging}
    free = f"{human_bytes(plan.host_bytes)} of {human_bytes(planned.limits.host_bytes)}"
    table.add_row("host memory", f"{_listed(host)}: {free}, {human_bytes(plan.pinned_bytes)} pinned")


def _add_device_memory(table: Table, parts: DeviceParts, case: Case) -> None:
    machine = case.machine
    name = "device memory" if machine.limits.on_cuda else "memory"
    table.add_row(name, f"{parts}: {human_bytes(parts.total)} of {human_bytes(machine.usable_bytes)}")
    if machine.limits.cap_bytes is not None:
        num = machine.limits.num_devices
        cap = human_bytes(round(machine.limits.cap_bytes / num)) + (
            f" of each of {num:.3g} devices" if num != 1 else ""
        )
        table.add_row("zinfer.max_device_memory", f"{cap}, {_beside_cap(machine)}")


def _beside_cap(machine: Machine) -> str:
    """Say what a cap does not count, or that it is larger than the device's memory."""
    if machine.usable_bytes == machine.device_memory_bytes:
        return f"more than the {human_bytes(machine.device_memory_bytes)} that there are"
    return "beside CUDA's context of about 0.5 GB" if machine.limits.on_cuda else "on a CPU of its memory"


def _add_pass(table: Table, name: str, time: PassTime) -> None:
    table.add_section()
    table.add_row(f"{name} pass", f"{duration(time.seconds)} ({time.bottleneck}), {time.num_tokens:,} tokens")
    for term, seconds in time.terms.items():
        table.add_row(f"  {resource_name(term, on_host=time.shares_host)}", duration(seconds))


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in parts.items())


def preset_table() -> Table:
    """Return a table of the presets of `--machine`."""
    table = Table("machine")
    for name in ("GPU\nGB", "host\nGB", "link\nGB/s", "disk\nGB/s", "GPU memory\nGB/s", "matrix work\nTFLOP/s"):
        table.add_column(name, justify="right")
    for name, machine in PRESETS.items():
        rates = machine.rates
        sizes = (machine.device_memory_bytes, DATA_SHEETS[name].host_bytes)
        speeds = (rates.link_bytes_per_s, rates.disk_bytes_per_s, rates.device_bytes_per_s)
        cells = [f"{number / 1e9:,.4g}" for number in (*sizes, *speeds)]
        table.add_row(name, *cells, f"{rates.flops_per_s / 1e12:,.0f}")
    return table


def plan_document(planned: BatchPlan, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return a batch's plan for `--json`."""
    plan, footprint, prediction = planned.plan, planned.footprint, planned.prediction
    outline, machine = planned.case.outline, planned.case.machine
    return {
        "model": {"name": outline.name, "bytes": outline.nbytes, "blocks": len(outline.blocks)},
        "machine": {"name": machine.name, "device_memory_bytes": machine.usable_bytes, **vars(machine.rates)},
        "request": vars(planned.request),
        "budgets": {key: getattr(planned.limits, key) for key in ("device_bytes", "host_bytes", "pinned_bytes")},
        "homes": [home.tier.value for home in plan.homes],
        "tier_bytes": {tier.value: nbytes for tier, nbytes in planned.tier_bytes.items()},
        "memory": {
            **{key: value for key, value in vars(plan).items() if key not in ("homes", "streamed_bytes")},
            "kv_bytes": footprint.kv_bytes,
            "activation_bytes": footprint.activation_bytes,
            "reserve_bytes": planned.parts.reserve,
        },
        "streamed_bytes": plan.streamed_bytes,
        "prefill": _pass_document(prediction.prefill),
        "decode": _pass_document(prediction.decode),
        "tokens_per_s": prediction.tokens_per_s,
        "seconds": prediction.seconds,
        "free_tokens": prediction.free_tokens,
        "bottleneck": prediction.decode.bottleneck,
        "advice": [vars(each) for each in advice],
    }


def _pass_document(time: PassTime) -> dict[str, Any]:
    return {**time._asdict(), "seconds": time.seconds, "bottleneck": time.bottleneck}


def job_table(job: Job, planned: JobPlan) -> Table:
    """Return a table of sizes, homes, memory and time of a job."""
    budget, plan, simulated = planned.budget, planned.plan, planned.simulated
    table = _titled(planned.case)
    each = "each" if job.has_equal_rows else "on average"
    lengths = f"{mean(job.prompt_lens):,.0f} tokens, {mean(job.new_tokens):,.0f} new ones {each}"
    table.add_row("job", f"{job.num_rows:,} rows of {lengths}")
    table.add_row("rates", planned.case.machine.rates.origin)
    table.add_section()
    table.add_row("tokens a pass", f"{budget.tokens_per_pass:,} at most, {simulated.tokens_per_pass:,.0f} on average")
    table.add_row("sequences", _together(simulated.most_together, budget.max_sequences))
    dtype = str(budget.kv_dtype).removeprefix("torch.")
    pages = f"{budget.num_pages:,} pages of {budget.page_size} tokens in {dtype}"
    where = f" of host memory, {human_bytes(budget.footprint.kv_bytes)} of the device" if budget.is_hosted else ""
    table.add_row("KV cache", f"{pages}, {human_bytes(budget.kv_bytes)}{where}")
    table.add_row("activations", human_bytes(budget.footprint.activation_bytes))
    _add_device_memory(table, planned.parts, planned.case)
    homes = ", ".join(f"{plan.num_blocks(tier)} {tier.name}" for tier in Tier)
    table.add_row("blocks by home", f"{homes}; {human_bytes(plan.streamed_bytes)} streamed a pass")
    table.add_section()
    table.add_row("predicted", str(planned.predicted))
    return table


def served_line(job: Job, planned: JobPlan) -> str:
    """Return a line on the times of answers if such rows arrived as requests."""
    return f"served: {describe_latency(_served(job, planned), *_typical(job))}"


def _served(job: Job, planned: JobPlan) -> list[ServingLatency]:
    return predict_latency(planned.estimator, *_typical(job))


def _typical(job: Job) -> tuple[int, int]:
    return round(mean(job.prompt_lens)), max(round(mean(job.new_tokens)), 1)


def _together(most_together: int, max_sequences: int) -> str:
    """Format the maximum running sequences; below `max_sequences` if the cache holds fewer."""
    if most_together >= max_sequences:
        return f"{max_sequences:,} at most"
    return f"{most_together:,} at most (max_sequences: {max_sequences:,})"


def job_document(job: Job, planned: JobPlan, advice: Sequence[JobAdvice], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's plan for `--json`; ``given`` is the configuration as written."""
    return {
        "model": planned.case.outline.name,
        "machine": planned.case.machine.name,
        "rows": job.num_rows,
        "zinfer": planned.keys(),
        "configuration": planned.configuration(given),
        "most_sequences_together": min(planned.simulated.most_together, planned.budget.max_sequences),
        "kv_bytes": planned.budget.kv_bytes,
        "device_memory": vars(planned.parts),
        "blocks_by_home": {tier.name: planned.plan.num_blocks(tier) for tier in Tier},
        "streamed_bytes_per_pass": planned.plan.streamed_bytes,
        "tokens_per_pass": planned.simulated.tokens_per_pass,
        "tokens_per_s": planned.tokens_per_s,
        "seconds": planned.seconds,
        "bottleneck": planned.simulated.bottleneck,
        "served": [vars(each) for each in _served(job, planned)],
        "advice": [str(each) for each in advice],
    }
