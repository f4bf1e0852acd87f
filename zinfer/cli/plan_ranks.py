"""The part of `zinfer plan` for several ranks: the ways to arrange them, and the one that is planned in full."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from zinfer.cli.ending import importing
from zinfer.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from zinfer.planning.job_plan import Job
    from zinfer.planning.memory import Request
    from zinfer.planning.mesh_plan import MeshPlan
    from zinfer.planning.plan import Case


def parse_parallel(text: str) -> dict[str, str] | str:
    """Return the value of `zinfer.parallel` that ``replicas=2,zero=4`` stands for; "auto" is itself.

    Raises:
        ConfigError: it is neither.
    """
    if text == "auto":
        return text
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    if not all(name and sign and size for name, sign, size in parts):
        raise ConfigError(f"--parallel = {text!r}: expected sizes of modes, such as replicas=2,zero=4, or auto")
    return {name: size for name, _, size in parts}


@dataclass(frozen=True)
class Arranged:
    """The ranks of a plan.

    Attributes:
        alone: the case of one process that has the machine for itself.
        case: that of one rank.
        several: the meshes that were compared, the fastest first; none for one rank.
        num_hosts: machines.
    """

    alone: "Case"
    case: "Case"
    several: "list[MeshPlan]"
    num_hosts: int

    @property
    def num_groups(self) -> int:
        """Groups of ranks with rows of their own."""
        return self.case.mesh.num_shares

    def table(self) -> "Table":
        """Return the table of the meshes."""
        from zinfer.planning.mesh_plan import mesh_table

        return mesh_table(self.several)

    def lines(self, tokens_per_s: float) -> list[str]:
        """Return what is printed below the tables; ``tokens_per_s`` are one rank's."""
        from zinfer.planning.mesh_plan import mesh_lines
        from zinfer.planning.step_time import speed

        mesh = self.case.mesh
        together = f"all together: {speed(self.num_groups * tokens_per_s)}"
        return [
            f"the table is for one of {mesh.size} ranks; {together} ({mesh})",
            *mesh_lines(self.alone, self.several, self.num_hosts, mesh),
        ]

    def document(self, tokens_per_s: float) -> dict[str, Any]:
        """Return the keys that several ranks add to a plan's document."""
        from zinfer.planning.mesh_plan import deepspeed_mp_size, mesh_documents

        return {
            "ranks": self.case.mesh.size,
            "nodes": self.num_hosts,
            "parallel": self.case.mesh.stated,
            "tokens_per_s_of_all_ranks": self.num_groups * tokens_per_s,
            "meshes": mesh_documents(self.several),
            "deepspeed_mp_size": deepspeed_mp_size(self.alone),
        }


def arrange(case: "Case", work: "Request | Job", num_ranks: int, num_hosts: int) -> Arranged:
    """Compare the meshes of these ranks, and choose the stated one or the fastest.

    Raises:
        ConfigError: the ranks do not divide among the hosts, the stated sizes do not multiply to their number, or the
            model's layers cannot be divided so.
    """
    with importing():
        from zinfer.ranks.mesh import Mesh

    if num_ranks % num_hosts:
        raise ConfigError(
            f"--ranks {num_ranks} do not divide among --nodes {num_hosts}; give the ranks of all machines together"
        )
    hosts = [str(rank * num_hosts // num_ranks) for rank in range(num_ranks)]
    stated = vars(case.settings.parallel)
    mesh = Mesh.of(stated, hosts)
    if num_ranks == 1:
        return Arranged(case, case, [], num_hosts)
    with importing():  # torch, which the plan of one process does without
        from zinfer.model.sharding.cut import Shard
        from zinfer.model.sharding.sharding import Sharding
        from zinfer.planning.memory import Request
        from zinfer.planning.mesh_plan import (
            batch_planner,
            every_mesh_of,
            fastest_mesh,
            job_planner,
            of_mesh,
            plan_meshes,
        )

    if mesh.num_dividing > 1:
        shard = Shard(0, mesh.num_dividing, mesh.expert)
        Sharding.of(case.outline.tree, shard, stated=case.settings.tensor_parallel)  # raises as the ranks would
    planner = batch_planner(work) if isinstance(work, Request) else job_planner(work, is_rough=True)
    meshes = [mesh] if any(stated.values()) else every_mesh_of(case, num_ranks, num_hosts)
    with Console(stderr=True).status(f"comparing {len(meshes)} ways to arrange {num_ranks} ranks"):  # if a terminal
        several = plan_meshes(case, meshes, num_hosts, planner)
    if not any(stated.values()):
        mesh = fastest_mesh(several, may_round=case.settings.optimize == "speed") or mesh
    return Arranged(case, of_mesh(case, mesh, num_hosts), several, num_hosts)
