"""A plan for one request on one machine, and what it predicts: the way from an outline to figures. Pure."""

from dataclasses import dataclass, replace

from zinfer.config import Settings
from zinfer.errors import ConfigError, PlanError
from zinfer.offload.block import Block, Tier
from zinfer.planning.block_work import find_work
from zinfer.planning.footprint import Footprint, find_footprint, weight_budget
from zinfer.planning.outline import Outline
from zinfer.planning.planner import Plan, make_plan
from zinfer.planning.prediction import Prediction, predict
from zinfer.planning.presets import Machine
from zinfer.planning.request import Request
from zinfer.probe.limits import MachineLimits
from zinfer.quantization.slab_matrix import most_dequantized_bytes
from zinfer.units import human_bytes


@dataclass(frozen=True)
class Forecast:
    """What came out.

    Attributes:
        request: that was planned for.
        limits: budgets that the plan keeps; ``device_bytes`` is what the request leaves for weights and slots.
        footprint: of the request.
        plan: homes and buffers.
        tier_bytes: of the slabs whose home is the tier; together the model.
        prediction: seconds and tokens.
    """

    request: Request
    limits: MachineLimits
    footprint: Footprint
    plan: Plan
    tier_bytes: dict[Tier, int]
    prediction: Prediction


def make_forecast(outline: Outline, machine: Machine, settings: Settings, request: Request) -> Forecast:
    """Plan a request so that weights, cache and activations fit together, and predict it.

    Raises:
        ConfigError: the sequences are longer than the model or the configuration allows.
        PlanError: a budget is too small, or the request leaves too little for the weights.
    """
    check_length(outline, settings, request.prompt_len, request.new_tokens)
    on_cuda = machine.limits.device.type == "cuda"
    dequantized_bytes = most_dequantized_bytes(block.block for block in outline.blocks)
    footprint = find_footprint(
        outline.spec, outline.dtype, request, on_cuda=on_cuda, dequantized_bytes=dequantized_bytes
    )
    limits = beside_request(machine.limits, machine.device_memory_bytes, settings, footprint)
    plan = _plan(outline, machine, settings, limits, footprint)
    blocks = [block.block for block in outline.blocks]
    return Forecast(
        request=request,
        limits=limits,
        footprint=footprint,
        plan=plan,
        tier_bytes={tier: _tier_bytes(blocks, plan, tier) for tier in Tier},
        prediction=predict(plan, find_work(outline.blocks, outline.spec), machine.rates, request, footprint),
    )


def check_length(outline: Outline, settings: Settings, prompt_len: int, new_tokens: int) -> None:
    """Raises ConfigError where such texts are longer than the model or the configuration allows."""
    if problem := outline.limits(settings).problem(prompt_len, new_tokens):
        raise ConfigError(problem)


def beside_request(
    limits: MachineLimits, device_memory_bytes: int, settings: Settings, footprint: Footprint
) -> MachineLimits:
    """The budgets, less what a request takes of device and host.

    Args:
        limits: budgets that know of no request.
        device_memory_bytes: free for everything.
        settings: a stated budget is kept, or refused where it does not leave room for the request.
        footprint: of the request.

    Raises:
        PlanError: the request leaves too little.
    """
    left_bytes = weight_budget(device_memory_bytes, footprint, on_cuda=limits.on_cuda)
    stated_bytes = settings.memory.max_device_memory
    if stated_bytes is not None and stated_bytes > left_bytes:
        raise PlanError(
            f"zinfer.max_device_memory is {human_bytes(stated_bytes)}, but beside the request only {left_bytes} bytes "
            f"({human_bytes(left_bytes)}) of {human_bytes(device_memory_bytes)} are left for weights "
            f"({_taken(footprint)}); lower it, or the batch size"
        )
    return replace(
        limits,
        device_bytes=min(limits.device_bytes, left_bytes),
        host_bytes=max(0, limits.host_bytes - footprint.host_bytes),
        pinned_bytes=max(0, limits.pinned_bytes - footprint.host_bytes),
        host_kv_bytes=footprint.host_bytes,
    )


def _plan(outline: Outline, machine: Machine, settings: Settings, limits: MachineLimits, footprint: Footprint) -> Plan:
    """Where the budgets would do but for the request, the request is what to change."""
    blocks, layers = [block.block for block in outline.blocks], outline.layers
    try:
        return make_plan(blocks, layers, limits, settings)
    except PlanError as error:
        if limits.device_bytes == machine.limits.device_bytes:
            raise
        # Raises for whatever else is too small: other memory, or the device itself, whatever is asked of the model.
        make_plan(blocks, layers, replace(machine.limits, device_bytes=_device_bytes_alone(machine)), settings)
        raise PlanError(
            f"the request does not fit: it leaves {human_bytes(limits.device_bytes)} of "
            f"{human_bytes(machine.device_memory_bytes)} device memory for weights, too little to stream through "
            f"({_taken(footprint)}); lower the batch size first, then the lengths of prompts and outputs"
        ) from error


def _device_bytes_alone(machine: Machine) -> int:
    """For weights, where no request takes anything."""
    left_bytes = weight_budget(machine.device_memory_bytes, Footprint(0, 0, 0), on_cuda=machine.limits.on_cuda)
    return min(machine.limits.device_bytes, left_bytes)


def _taken(footprint: Footprint) -> str:
    return f"KV cache {human_bytes(footprint.kv_bytes)}, activations {human_bytes(footprint.activation_bytes)}"


def _tier_bytes(blocks: list[Block], plan: Plan, tier: Tier) -> int:
    return sum(block.nbytes for block, home in zip(blocks, plan.homes, strict=True) if home.tier is tier)
