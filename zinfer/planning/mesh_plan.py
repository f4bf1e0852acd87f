"""Compare the ways to arrange ranks: each mesh is planned and predicted by the same arithmetic as one process. Pure."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.table import Table

from zinfer.errors import ConfigError, PlanError
from zinfer.model.sharding.heads import can_divide
from zinfer.model.sharding.plans import is_divided
from zinfer.model.stage import Stage
from zinfer.planning.job_plan import Job, JobPlan
from zinfer.planning.job_search import plan_job
from zinfer.planning.largest_part import is_predicted, largest_stage, num_devices
from zinfer.planning.memory import Footprint, Request
from zinfer.planning.plan import BatchPlan, Case, plan_batch
from zinfer.ranks.mesh import Mesh
from zinfer.units import human_bytes

_MOST_ROWS: Final = 12

PlanFor = Callable[[Case, int], BatchPlan | JobPlan]
"""Plans the part of one group of ranks with rows of its own, of so many groups."""


@dataclass(frozen=True)
class MeshPlan:
    """The plan of one rank under one mesh.

    Attributes:
        mesh: the arrangement.
        planned: for a group of ranks that make the same passes, with its part of the rows; None if that does not fit.
        failure: why it does not fit.
        num_devices: as how many devices ranks count that divide each layer.
    """

    mesh: Mesh
    planned: BatchPlan | JobPlan | None
    failure: str = ""
    num_devices: float = 1

    @property
    def num_groups(self) -> int:
        """Groups of ranks with rows of their own."""
        return self.mesh.num_shares

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of all ranks; 0 if it does not fit."""
        if self.planned is None:
            return 0.0
        of_one = self.planned.prediction if isinstance(self.planned, BatchPlan) else self.planned
        return self.num_groups * of_one.tokens_per_s

    @property
    def bottleneck(self) -> str:
        """The resource that limits most passes."""
        if self.planned is None:
            return "does not fit"
        if isinstance(self.planned, BatchPlan):
            return self.planned.prediction.decode.bottleneck
        return self.planned.simulated.bottleneck

    @property
    def device_bytes(self) -> int:
        """Device memory of each rank, or of the fullest: weights, slots, KV cache and activations."""
        used = 0 if self.planned is None else self.planned.plan.device_bytes
        return int((used + self._footprint.kv_bytes + self._footprint.activation_bytes) / self.num_devices)

    @property
    def host_bytes(self) -> int:
        """Host memory of each rank."""
        used = 0 if self.planned is None else self.planned.plan.host_bytes
        return int((used + self._footprint.host_bytes) / self.num_devices)

    @property
    def _footprint(self) -> Footprint:
        if self.planned is None:
            return Footprint(0, 0, 0)
        return self.planned.footprint if isinstance(self.planned, BatchPlan) else self.planned.budget.footprint


def meshes_of(num_ranks: int, num_hosts: int = 1) -> Iterator[Mesh]:
    """Yield the meshes of replicas, ZeRO and tensor ranks whose exchanges stay within a host."""
    num_local = num_ranks // num_hosts
    for within in _divisors(num_local):
        for tensor in _divisors(within):
            yield Mesh(replicas=num_ranks // within, zero=within // tensor, tensor=tensor)


def expert_meshes_of(case: Case, num_ranks: int, num_hosts: int = 1) -> Iterator[Mesh]:
    """Yield the meshes of replicas, ZeRO and ranks that divide a mixture's experts, of those that are predicted.

    Groups of ranks may divide each expert too.
    """
    for mesh in meshes_of(num_ranks, num_hosts):
        for expert in _divisors(mesh.tensor)[1:]:
            divided = replace(mesh, expert=expert, tensor=mesh.tensor // expert)
            if is_predicted(case.outline, divided):
                yield divided


def pipeline_meshes_of(case: Case, num_ranks: int, num_hosts: int = 1) -> Iterator[Mesh]:
    """Yield the meshes of `meshes_of` with stages of a pipeline for some of the replicas, also across hosts."""
    try:
        case.outline.of_stage(Stage(0, 2))
    except ConfigError:  # a model that stages cannot divide
        return
    for mesh in meshes_of(num_ranks, num_hosts):
        for pipeline in _divisors(mesh.replicas)[1:]:
            if pipeline <= len(case.outline.layers):
                yield replace(mesh, replicas=mesh.replicas // pipeline, pipeline=pipeline)


def every_mesh_of(case: Case, num_ranks: int, num_hosts: int = 1) -> list[Mesh]:
    """Return the meshes of all modes that the model's layers can be divided by."""
    kind, config = case.outline.spec.model_type, case.outline.tree.config.get_text_config()
    return [
        *(
            mesh
            for mesh in meshes_of(num_ranks, num_hosts)
            if mesh.tensor == 1 or (is_divided(kind) and can_divide(config, mesh.tensor))
        ),
        *expert_meshes_of(case, num_ranks, num_hosts),
        *pipeline_meshes_of(case, num_ranks, num_hosts),
    ]


def of_mesh(case: Case, mesh: Mesh, num_hosts: int = 1) -> Case:
    """Return the case of one rank of a mesh on machines as the case's: of stages, that with the most bytes.

    Raises:
        ConfigError: as `largest_stage` and `num_devices`.
    """
    outline = largest_stage(case.outline, case.settings, mesh.pipeline)
    machine = case.machine.of_mesh(mesh, num_hosts, case.settings.memory, num_devices(outline, mesh))
    return replace(case, outline=outline, machine=machine, mesh=mesh)


def plan_meshes(case: Case, meshes: Iterable[Mesh], num_hosts: int, plan: PlanFor) -> list[MeshPlan]:
    """Plan meshes, the fastest first; those that do not fit come last.

    Ranks that divide each layer are left out where the rate of their sums is not known.

    Args:
        case: of one process alone on the machine.
        meshes: of `meshes_of`, all or some.
        num_hosts: machines.
        plan: plans the part of one group of ranks.
    """
    found = []
    for mesh in meshes:
        if mesh.num_dividing > 1 and case.machine.rates.all_reduce_bytes_per_s is None:
            continue
        own = of_mesh(case, mesh, num_hosts)
        try:
            found.append(MeshPlan(mesh, plan(own, mesh.num_shares), num_devices=num_devices(own.outline, mesh)))
        except PlanError as error:
            found.append(MeshPlan(mesh, None, str(error)))
    return sorted(found, key=lambda each: (-each.tokens_per_s, each.mesh.num_dividing, each.mesh.replicas))


def fastest_mesh(found: Sequence[MeshPlan], *, may_round: bool = False) -> Mesh | None:
    """Return the fastest mesh that fits; None if none does.

    Args:
        may_round: whether ranks may divide layers, or the model (``zinfer.optimize`` "speed"). Their sums in another
            order, and their passes of fewer rows, round otherwise than those of one process.
    """
    most = max((each.mesh.num_in_step for each in found), default=1) if may_round else 1
    return next((each.mesh for each in found if each.mesh.num_in_step <= most and each.planned is not None), None)


def batch_planner(request: Request) -> PlanFor:
    """Return what plans a group's part of a batch."""
    return lambda case, count: plan_batch(case, request.part(count))


def job_planner(job: Job, *, is_rough: bool = False) -> PlanFor:
    """Return what plans a group's part of a job; ``is_rough`` as for `plan_job`."""
    return lambda case, count: plan_job(case, job.part(count), is_rough=is_rough)


def deepspeed_mp_size(case: Case) -> int:
    """Return the GPUs that DeepSpeed's guide would split the model over: those that hold all weights at once."""
    return -(-case.outline.nbytes // case.machine.usable_bytes)


def mesh_table(found: Sequence[MeshPlan]) -> Table:
    """Return a table of the meshes, in at most 80 columns."""
    table = Table(title="ways to arrange the ranks", title_justify="left")
    for name in ("ranks", "tokens/s", "bound by", "GPU, each", "host, each"):
        table.add_column(name, justify="left" if name in ("ranks", "bound by") else "right")
    for each in found[:_MOST_ROWS]:
        fits = each.planned is not None
        held = [human_bytes(nbytes) if fits else "" for nbytes in (each.device_bytes, each.host_bytes)]
        table.add_row(str(each.mesh), f"{each.tokens_per_s:,.1f}" if fits else "", each.bottleneck, *held)
    return table


def mesh_lines(case: Case, found: Sequence[MeshPlan], num_hosts: int, chosen: Mesh) -> list[str]:
    """Return what the table leaves unsaid; ``chosen`` is the mesh of the plan."""
    outline, memory = case.outline, case.machine.usable_bytes
    sizes = f"{human_bytes(outline.nbytes)} of weights, {human_bytes(memory)} a GPU"
    lines = [f"GPUs that hold all weights at once, DeepSpeed's mp_size: {deepspeed_mp_size(case)} ({sizes})"]
    if found and found[0].mesh.num_in_step > chosen.num_in_step:
        key = json.dumps({"zinfer": {"parallel": found[0].mesh.stated}})
        lines.append(
            f'{found[0].mesh} is chosen if stated, {key}, or with zinfer.optimize "speed" (zinfer run --fast): its '
            "passes round otherwise than those of one process"
        )
    unknown = {"gathers": case.machine.rates.gather_bytes_per_s, "sums": case.machine.rates.all_reduce_bytes_per_s}
    if names := [name for name, rate in unknown.items() if rate is None]:
        taken = "gathers count as hidden" + (", ranks that divide layers are left out" if "sums" in names else "")
        lines.append(
            f"no rates of {' and '.join(names)} among these ranks, so {taken}; `zinfer probe --ranks` measures"
        )
    if any(each.mesh.pipeline > 1 for each in found):
        lines.append("stages of a pipeline: what they send each other is not counted")
    if num_hosts > 1:
        lines.append("between machines only replicas and stages are compared: the rate of the network is not known")
    return lines


def mesh_documents(found: Sequence[MeshPlan]) -> list[dict[str, Any]]:
    """Return the meshes for `--json`."""
    return [
        {
            "parallel": each.mesh.stated,
            "tokens_per_s": each.tokens_per_s,
            "bottleneck": each.bottleneck,
            "device_bytes_per_rank": each.device_bytes,
            "host_bytes_per_rank": each.host_bytes,
            "failure": each.failure,
        }
        for each in found
    ]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
