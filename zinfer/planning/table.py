"""A forecast as a table for people and as a document for programs."""

from typing import Any

from rich.table import Table

from zinfer.offload.block import Tier
from zinfer.planning.advice import Advice
from zinfer.planning.forecast import Forecast
from zinfer.planning.outline import Outline
from zinfer.planning.prediction import PassTime, speed
from zinfer.planning.presets import PRESETS, Machine
from zinfer.units import duration, human_bytes


def plan_table(outline: Outline, machine: Machine, forecast: Forecast) -> Table:
    """Homes, memory by kind, seconds a pass by resource, and what comes of it."""
    plan, prediction = forecast.plan, forecast.prediction
    table = Table(title=f"zinfer plan: {outline.name} on {machine.name}", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    source = "the checkpoint" if outline.files else "config.json alone"
    table.add_row("model", f"{human_bytes(outline.nbytes)} of weights in {len(outline.blocks)} blocks, from {source}")
    table.add_row("request", str(forecast.request))
    table.add_row("rates", prediction.origin)
    table.add_section()
    for tier in Tier:
        weights = human_bytes(forecast.tier_bytes[tier])
        table.add_row(f"home {tier.name}", f"{plan.num_blocks(tier)} blocks, {weights}")
    table.add_row("device slots", f"{plan.num_slots} of {human_bytes(plan.slot_bytes)}")
    table.add_row("staging slots", f"{plan.num_staging} of {human_bytes(plan.staging_bytes)}")
    _add_memory(table, machine, forecast)
    _add_pass(table, "prefill", prediction.prefill)
    _add_pass(table, "decode", prediction.decode)
    table.add_section()
    table.add_row("new tokens", speed(prediction.tokens_per_s))
    table.add_row("whole request", duration(prediction.seconds))
    table.add_row("free tokens a pass", f"{prediction.free_tokens:,}")
    table.add_row("bottleneck", f"{prediction.decode.bottleneck} (prefill: {prediction.prefill.bottleneck})")
    return table


def _add_memory(table: Table, machine: Machine, forecast: Forecast) -> None:
    plan, footprint = forecast.plan, forecast.footprint
    table.add_section()
    device = {
        "weights": forecast.tier_bytes[Tier.DEVICE],
        "slots": plan.num_slots * plan.slot_bytes,
        "KV cache": footprint.kv_bytes,
        "activations": footprint.activation_bytes,
    }
    free = f"{human_bytes(sum(device.values()))} of {human_bytes(machine.device_memory_bytes)}"
    table.add_row("device memory", f"{_listed(device)}: {free}")
    host = {"weights": forecast.tier_bytes[Tier.HOST], "staging": plan.num_staging * plan.staging_bytes}
    free = f"{human_bytes(plan.host_bytes)} of {human_bytes(forecast.limits.host_bytes)}"
    table.add_row("host memory", f"{_listed(host)}: {free}, {human_bytes(plan.pinned_bytes)} pinned")


def _add_pass(table: Table, name: str, time: PassTime) -> None:
    table.add_section()
    table.add_row(f"{name} pass", f"{duration(time.seconds)} ({time.bottleneck}), {time.num_tokens:,} tokens")
    for term, seconds in time.terms.items():
        table.add_row(f"  {term}", duration(seconds))


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in parts.items())


def preset_table() -> Table:
    """The machines of `--machine`."""
    table = Table("machine", "device", "host budget", "link", "disk", "device memory", "matrix work")
    for name, machine in PRESETS.items():
        rates = machine.rates
        rows = (rates.link_bytes_per_s, rates.disk_bytes_per_s, rates.device_bytes_per_s)
        speeds = [f"{human_bytes(int(rate))}/s" for rate in rows]
        memory = [human_bytes(machine.device_memory_bytes), human_bytes(machine.limits.host_bytes)]
        table.add_row(name, *memory, *speeds, f"{rates.flops_per_s / 1e12:,.0f} TFLOP/s")
    return table


def plan_document(outline: Outline, machine: Machine, forecast: Forecast, advice: tuple[Advice, ...]) -> dict[str, Any]:
    """All of it as JSON has it: bytes, seconds and tokens as plain numbers."""
    plan, footprint, prediction = forecast.plan, forecast.footprint, forecast.prediction
    return {
        "model": {"name": outline.name, "bytes": outline.nbytes, "blocks": len(outline.blocks)},
        "machine": {"name": machine.name, "device_memory_bytes": machine.device_memory_bytes, **vars(machine.rates)},
        "request": vars(forecast.request),
        "budgets": {
            "device_bytes": forecast.limits.device_bytes,
            "host_bytes": forecast.limits.host_bytes,
            "pinned_bytes": forecast.limits.pinned_bytes,
        },
        "homes": [home.tier.value for home in plan.homes],
        "tier_bytes": {tier.value: nbytes for tier, nbytes in forecast.tier_bytes.items()},
        "memory": {
            "num_slots": plan.num_slots,
            "slot_bytes": plan.slot_bytes,
            "num_staging": plan.num_staging,
            "staging_bytes": plan.staging_bytes,
            "device_bytes": plan.device_bytes,
            "host_bytes": plan.host_bytes,
            "pinned_bytes": plan.pinned_bytes,
            "kv_bytes": footprint.kv_bytes,
            "activation_bytes": footprint.activation_bytes,
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
    return {**vars(time), "seconds": time.seconds, "bottleneck": time.bottleneck}
