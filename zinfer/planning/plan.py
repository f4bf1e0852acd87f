"""Plan one batch: from a model, a machine and a configuration to homes, memory and seconds. Pure."""

from dataclasses import dataclass, replace
from functools import cached_property

from zinfer.config import Settings
from zinfer.config.settings import Batching
from zinfer.errors import ConfigError, PlanError
from zinfer.model.outline import Outline
from zinfer.offload.block import Tier
from zinfer.offload.partition import Partition
from zinfer.planning.block_work import BlockWork, find_work
from zinfer.planning.device_cap import DeviceParts, naming_least_cap
from zinfer.planning.kv_budget import WeightSizes
from zinfer.planning.memory import Footprint, Request, beside_request, find_footprint, weight_budget
from zinfer.planning.placement import Placer, Plan
from zinfer.planning.presets import Machine
from zinfer.planning.step_time import PassClock, Prediction
from zinfer.probe.limits import MachineLimits
from zinfer.ranks.mesh import ALONE, Mesh
from zinfer.units import human_bytes


@dataclass(frozen=True)
class Case:
    """The input of a plan: a model, a machine and a configuration.

    ``mesh``: the ranks of the job; ``machine`` is then what one of them has (`Machine.of_mesh`).
    """

    outline: Outline
    machine: Machine
    settings: Settings
    mesh: Mesh = ALONE

    @property
    def partition(self) -> Partition:
        """The division of slabs among the ranks that share them."""
        return Partition(0, self.mesh.zero)

    def check_length(self, prompt_len: int, new_tokens: int) -> None:
        """Raise ConfigError if such sequences are longer than the model or the configuration allows."""
        if problem := self.outline.limits(self.settings).problem(prompt_len, new_tokens):
            raise ConfigError(problem)

    def limits_beside(self, footprint: Footprint) -> MachineLimits:
        """Return the machine's budgets less the memory of a request; raises like `beside_request`."""
        return beside_request(self.machine.limits, self.machine.device_memory_bytes, self.settings, footprint)

    def within(self, limits: MachineLimits) -> "Case":
        """Return the case for other budgets of the machine."""
        return replace(self, machine=replace(self.machine, limits=limits))

    def with_batching(self, batching: Batching) -> "Case":
        """Return the case with other sizes of batches; both keep what depends on the weights alone in one place."""
        other = replace(self, settings=replace(self.settings, batching=batching))
        vars(other).update(weights=self.weights, _placer=self._placer, _work=self._work, _clocks=self._clocks)
        return other

    def place(self, limits: MachineLimits) -> Plan:
        """Place all blocks; raises like `zinfer.planning.placement.make_plan`."""
        return self._placer.place(limits)

    def clock(self, plan: Plan, *, is_fused: bool = False) -> PassClock:
        """Return the clock that predicts passes under a plan; ``is_fused`` as in `ModelSpec`."""
        if is_fused not in self._work:
            self._work[is_fused] = find_work(self.outline.blocks, replace(self.outline.spec, is_fused=is_fused))
        known, clock = self._clocks.get((id(plan), is_fused), (None, None))
        if known is not plan or clock is None:
            clock = PassClock(plan, self._work[is_fused], self.machine.rates, reduced_bytes=self._reduced_bytes)
            self._clocks[id(plan), is_fused] = plan, clock
        return clock

    def footprint(self, request: Request) -> Footprint:
        """Return the memory of a request beside the weights."""
        found = find_footprint(self.outline.spec, self.outline.dtype, request, on_cuda=self.machine.limits.on_cuda)
        return self.dequantizing(found)

    def dequantizing(self, footprint: Footprint) -> Footprint:
        """Add the largest quantized matrix in dequantized form, which products of many tokens need."""
        return replace(footprint, activation_bytes=footprint.activation_bytes + self.weights.dequantized_bytes)

    def predict(self, plan: Plan, request: Request) -> Prediction:
        """Predict a batch. Stages compute as many parts of it in turn as there are stages, so none of them waits."""
        num_parts = self.mesh.pipeline
        part = request.part(num_parts)
        found = self.clock(plan).predict(part, self.footprint(part))
        return replace(found, seconds=num_parts * found.seconds)

    @cached_property
    def weights(self) -> WeightSizes:
        """Bytes of the model's weights."""
        return WeightSizes.of(self.outline.blocks)

    @cached_property
    def _clocks(self) -> dict[tuple[int, bool], tuple[Plan, PassClock]]:
        """Clocks by the plan's identity and ``is_fused``; many sizes of a job share a plan."""
        return {}

    @cached_property
    def _placer(self) -> Placer:
        """Places the blocks within many budgets."""
        return Placer(self.outline.plain_blocks, self.outline.layers, self.settings, self.partition)

    @cached_property
    def _work(self) -> dict[bool, tuple[BlockWork, ...]]:
        """The work of a pass by ``is_fused``, for many plans of one case."""
        return {}

    @property
    def _reduced_bytes(self) -> int:
        """Bytes of the sums over ranks, per token: of the attention's output and the MLP's, in each layer."""
        if self.mesh.num_dividing == 1:
            return 0
        return 2 * len(self.outline.layers) * self.outline.spec.hidden * self.outline.dtype.itemsize


@dataclass(frozen=True)
class BatchPlan:
    """A plan for one batch.

    Attributes:
        case: the planned case.
        request: the planned request.
        limits: budgets of the plan; ``device_bytes`` is for weights and slots, without the request.
        footprint: memory of the request.
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
    def parts(self) -> DeviceParts:
        """What takes the device's memory."""
        return DeviceParts.of(self.plan, self.footprint, self.limits, self.case.machine.usable_bytes)

    @property
    def tier_bytes(self) -> dict[Tier, int]:
        """Bytes of the slabs by home."""
        homed = list(zip(self.case.outline.plain_blocks, self.plan.homes, strict=True))
        return {tier: sum(block.nbytes for block, home in homed if home.tier is tier) for tier in Tier}


def plan_batch(case: Case, request: Request) -> BatchPlan:
    """Plan a request so that weights, KV cache and activations fit together, and predict it.

    Raises:
        ConfigError: the sequences are longer than the model or the configuration allows.
        PlanError: a budget is too small, or the request leaves too little for the weights.
    """
    case.check_length(request.prompt_len, request.new_tokens)
    machine = case.machine

    def parts_within(limits: MachineLimits) -> DeviceParts:
        return fit_batch(case.within(limits), request).parts

    with naming_least_cap(machine.limits, machine.device_memory_bytes, parts_within):
        return fit_batch(case, request)


def fit_batch(case: Case, request: Request) -> BatchPlan:
    """As `plan_batch`, for lengths that were checked; its PlanError names no least cap, which takes long to find."""
    footprint = case.footprint(request)
    limits = case.limits_beside(footprint)
    plan = _place(case, limits, footprint)
    return BatchPlan(
        case=case,
        request=request,
        limits=limits,
        footprint=footprint,
        plan=plan,
        prediction=case.predict(plan, request),
    )


def _place(case: Case, limits: MachineLimits, footprint: Footprint) -> Plan:
    """Place all blocks. If they would fit without the request, the error says to reduce the request."""
    try:
        return case.place(limits)
    except PlanError as error:
        machine = case.machine
        if limits.device_bytes == machine.limits.device_bytes:
            raise
        # Raises if other memory is too small, or the device even without a request.
        alone_bytes = weight_budget(machine.usable_bytes, Footprint(0, 0, 0), on_cuda=machine.limits.on_cuda)
        case.place(replace(machine.limits, device_bytes=min(machine.limits.device_bytes, alone_bytes)))
        raise PlanError(
            f"the request does not fit: it leaves {human_bytes(limits.device_bytes)} of "
            f"{human_bytes(machine.usable_bytes)} device memory for weights, too little to stream through "
            f"({footprint}); lower the batch size first, then the lengths of prompts and outputs"
        ) from error
