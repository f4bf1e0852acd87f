"""How the ranks of a job are arranged: as stated, or in the way that is predicted to be the fastest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from zinfer.config import Settings
from zinfer.config.source import config_keys
from zinfer.errors import PlanError
from zinfer.jobs.request import JobRequest
from zinfer.model.outline import keeps_blocks, read_outline
from zinfer.planning.job_plan import Job
from zinfer.planning.mesh_plan import MeshPlan, every_mesh_of, fastest_mesh, job_planner, plan_meshes
from zinfer.planning.plan import Case
from zinfer.planning.presets import this_machine
from zinfer.probe.card import read_card
from zinfer.probe.findings import recall
from zinfer.probe.limits import choose_device
from zinfer.ranks.mesh import Mesh


def choose_mesh(
    request: JobRequest,
    settings: Settings,
    job: Callable[[], Job],
    hosts: Sequence[str],
    say: Callable[[str], object],
) -> Mesh:
    """Return the stated mesh, or the fastest one if `zinfer probe` has measured ranks of this machine.

    Otherwise, for models whose jobs are not predicted, and where hosts have unequal numbers of ranks, it is
    `Mesh.by_hosts`.

    Args:
        request: of the job.
        settings: of the job.
        job: returns its rows, by a sample.
        hosts: the host of each rank.
        say: called with what was chosen, and by what.
    """
    stated = vars(settings.parallel)
    usual, by_hosts = Mesh.of(stated, hosts), Mesh.by_hosts(hosts)
    num_hosts = len(set(hosts))
    found = recall(read_card(choose_device(settings).type))
    is_open = usual.size > 1 and not any(stated.values()) and by_hosts.replicas == num_hosts
    if not is_open or found is None or found.most_ranks is None:
        return usual
    may_round = settings.optimize == "speed" and request.generates
    try:
        in_blocks = keeps_blocks(settings, on_cuda=choose_device(settings).type == "cuda")
        outline = read_outline(request.model, settings.dtype, settings.quantization, in_blocks=in_blocks)
        case = Case(outline, this_machine(settings, outline.files), settings)
        several = plan_meshes(
            case,
            [mesh for mesh in every_mesh_of(case, usual.size, num_hosts) if may_round or mesh.num_in_step == 1],
            num_hosts,
            job_planner(job(), is_rough=True),
        )
    except PlanError:  # jobs of this model are not predicted
        return usual
    chosen = fastest_mesh(several, may_round=may_round) or usual
    say(f"ranks: {chosen}, the fastest of {_told(several)}")
    return chosen


def with_mesh(request: JobRequest, parallel: Mapping[str, int]) -> JobRequest:
    """Return the request with these sizes in its configuration."""
    given = config_keys(request.config)
    section = given.get("zinfer")
    own = dict(section) if isinstance(section, Mapping) else {}
    return replace(request, config={**given, "zinfer": {**own, "parallel": dict(parallel)}})


def _told(several: Sequence[MeshPlan]) -> str:
    return ", ".join(f"{each.mesh} ({each.tokens_per_s:,.1f} tokens/s)" for each in several)
