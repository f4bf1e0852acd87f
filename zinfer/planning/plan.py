"""Plans one batch: from a model, a machine and a configuration to homes, memory and seconds. Pure."""

from dataclasses import dataclass, replace

from zinfer.config import Settings
from zinfer.errors import ConfigError, PlanError
from zinfer.model.outline import Outline
from zinfer.offload.block import Tier
from zinfer.planning.memory import Footprint, Request, beside_request, find_footprint, weight_budget
from zinfer.planning.placement import Plan, make_plan
from zinfer.planning.presets import Machine
from zinfer.planning.step_time import PassClock, Prediction, find_work
from zinfer.probe.limits import MachineLimits
from zinfer.units import human_bytes


@dataclass(frozen=True)
class Case:
    """What is planned for: a model on a machine, under a configuration."""

    outline: Outline
    machine: Machine
    settings: Settings

    def check_length(self, prompt_len: int, new_tokens: int) -> None:
        """Raise ConfigError where such sequences are longer than the model or the configuration allows."""
        if problem := self.outline.limits(self.settings).problem(prompt_len, new_tokens):
            raise ConfigError(problem)

    def limits_beside(self, footprint: Footprint) -> MachineLimits:
        """The machine's budgets, less what a request takes; raises as `beside_request`."""
        return beside_request(self.machine.limits, self.machine.device_memory_bytes, self.settings, footprint)

    def place(self, limits: MachineLimits) -> Plan:
        """Homes for all blocks; raises as `make_plan`."""
        return make_plan(self.outline.plain_blocks, self.outline.layers, limits, self.settings)

    def clock(self, plan: Plan, *, is_fused: bool = False) -> PassClock:
        """Seconds of passes under a plan; ``is_fused`` as of a `ModelSpec`."""
        work = find_work(self.outline.blocks, replace(self.outline.spec, is_fused=is_fused))
        return PassClock(plan, work, self.machine.rates)


@dataclass(frozen=True)
class BatchPlan:
    """A plan for one batch.

    Attributes:
        case: that was planned for.
        request: likewise.
        limits: budgets that the plan keeps; ``device_bytes`` is what the request leaves for weights and slots.
        footprint: of the request.
        plan: homes and buffers.
        prediction: seconds and tokens.
    """

    case: Case
    request: Request
    limits: MachineLimits
    footprint: Footprint
    plan: Plan
    prediction: Prediction

    @property
    def tier_bytes(self) -> dict[Tier, int]:
        """Bytes of the slabs whose home is the tier; together the model."""
        homed = list(zip(self.case.outline.plain_blocks, self.plan.homes, strict=True))
        return {tier: sum(block.nbytes for block, home in homed if home.tier is tier) for tier in Tier}


def plan_batch(case: Case, request: Request) -> BatchPlan:
    """Plan a request so that weights, cache and activations fit together, and predict it.

    Raises:
        ConfigError: the sequences are longer than the model or the configuration allows.
        PlanError: a budget is too small, or the request leaves too little for the weights.
    """
    outline, machine = case.outline, case.machine
    case.check_length(request.prompt_len, request.new_tokens)
    footprint = find_footprint(outline.spec, outline.dtype, request, on_cuda=machine.limits.on_cuda)
    footprint = footprint.dequantizing(outline.plain_blocks)
    limits = case.limits_beside(footprint)
    plan = _place(case, limits, footprint)
    return BatchPlan(
        case=case,
        request=request,
        limits=limits,
        footprint=footprint,
        plan=plan,
        prediction=case.clock(plan).predict(request, footprint),
    )


def _place(case: Case, limits: MachineLimits, footprint: Footprint) -> Plan:
    """Where the budgets would do but for the request, the request is what to change."""
    try:
        return case.place(limits)
    except PlanError as error:
        machine = case.machine
        if limits.device_bytes == machine.limits.device_bytes:
            raise
        # Raises for whatever else is too small: other memory, or the device itself, whatever is asked of the model.
        alone_bytes = weight_budget(machine.device_memory_bytes, Footprint(0, 0, 0), on_cuda=machine.limits.on_cuda)
        case.place(replace(machine.limits, device_bytes=min(machine.limits.device_bytes, alone_bytes)))
        raise PlanError(
            f"the request does not fit: it leaves {human_bytes(limits.device_bytes)} of "
            f"{human_bytes(machine.device_memory_bytes)} device memory for weights, too little to stream through "
            f"({footprint}); lower the batch size first, then the lengths of prompts and outputs"
        ) from error
