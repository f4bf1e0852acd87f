"""The sizes of a job's passes and KV cache that its configuration leaves open, chosen by the planner. On a GPU."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from zinfer.config import Settings
from zinfer.errors import ConfigError, PlanError
from zinfer.model.outline import keeps_blocks, read_outline
from zinfer.planning.job_plan import Job, JobPlan, plan_sizes
from zinfer.planning.job_search import plan_forms
from zinfer.planning.largest_part import num_devices
from zinfer.planning.mesh_plan import of_mesh
from zinfer.planning.plan import Case
from zinfer.planning.presets import this_machine
from zinfer.probe.card import read_card
from zinfer.probe.findings import recall
from zinfer.probe.limits import choose_device, find_limits
from zinfer.ranks.mesh import ALONE, Mesh
from zinfer.scheduling.page_allocator import pages_alone
from zinfer.scheduling.speculation import choose_kind
from zinfer.units import duration, human_bytes

Sizes: TypeAlias = Mapping[str, int | str]
"""Keys of the section `zinfer` that a job keeps in its manifest, because its rows' bytes depend on them."""
SWAPS: Final = "swaps_to_disk"
"""Beside those keys: whether preempted sequences are swapped to disk."""
PAGES: Final = "num_pages"
"""Of the KV cache, in place of its bytes, which differ among ranks that have parts of a model."""
MOST_SWAPPED: Final = "most_swapped_pages"
"""As `BatchingBudget.most_swapped_pages`, which follows from the memory; kept to be compared."""

_BYTES: Final = "kv_cache_memory"


def plans_sizes(settings: Settings) -> bool:
    """Whether sizes of a job are planned here: on a GPU."""
    return find_limits(settings).on_cuda


def choose_sizes(
    model: str | os.PathLike[str],
    settings: Settings,
    job: Job,
    say: Callable[[str], object],
    mesh: Mesh = ALONE,
    num_hosts: int = 1,
    files: Sequence[Path] = (),
) -> dict[str, int | str]:
    """Return the sizes with which the job is predicted to be the fastest; none on a CPU, where one memory holds all.

    What is stated is left out. Whether tokens are guessed is chosen here too, since it depends on measured rates and
    decides the passes. For ranks that divide layers or the model nothing is guessed unless that is stated. Beside a
    draft model nothing is planned, and where nothing is predicted to fit, which is said.

    Args:
        model: a checkpoint folder, one with config.json alone, or the name of a published model.
        settings: of the job.
        job: all rows, by a sample of at least one.
        say: called with what was chosen, and with the next best.
        mesh: how the ranks are arranged.
        num_hosts: that they are on.
        files: on the disk that is read, for a model without files; without any the disk is as `zinfer probe` found it,
            or counts as infinitely fast.
    """
    if not plans_sizes(settings):
        return {}
    stated = settings.batching
    chooses_guesses = stated.speculate == "auto" and stated.draft_model is None
    unplanned: dict[str, int | str] = {"speculate": "off"} if chooses_guesses else {}
    if stated.draft_model is not None and stated.speculate != "off":
        say("the usual sizes, since the memory beside zinfer.draft_model is known once that is loaded")
        return unplanned
    in_blocks = keeps_blocks(settings, on_cuda=choose_device(settings).type == "cuda")
    outline = read_outline(model, settings.dtype, settings.quantization, in_blocks=in_blocks)
    read, is_probed = outline.files or files, recall(read_card("cuda")) is not None
    machine = this_machine(settings, read if read or is_probed else None)
    try:
        plans = plan_forms(of_mesh(Case(outline, machine, settings), mesh, num_hosts), job.part(mesh.num_shares))
    except (PlanError, ConfigError) as error:
        say(f"the usual sizes, since no plan was found: {error}")
        return unplanned
    say(told(plans))
    best = plans[0] if mesh.num_dividing == 1 else _as_large_as_passes(plans[0])
    found: dict[str, int | str] = {
        name: size for name, size in best.keys().items() if getattr(stated, name) in (None, "auto")
    }
    if best.budget.swaps_to_disk:
        found[SWAPS] = 1
    if mesh.num_in_step > 1:
        found |= unplanned
        if found.pop(_BYTES, None) is not None:
            found[PAGES] = _pages_of_ranks(best, mesh)
    elif chooses_guesses:
        found["speculate"] = choose_kind(best.plan.streamed_bytes > 0, best.estimator.free_tokens)
    return found


def _as_large_as_passes(planned: JobPlan) -> JobPlan:
    """Return the plan with no more tokens a pass than its passes have: activations of more take memory for nothing."""
    most = planned.passes.most_tokens
    if most >= planned.budget.tokens_per_pass:
        return planned
    batching = replace(planned.batching, tokens_per_pass=most, kv_cache_memory=planned.budget.kv_bytes)
    return plan_sizes(planned.case, batching, planned.job, planned.simulations)


def _pages_of_ranks(planned: JobPlan, mesh: Mesh) -> int:
    """Return the pages that fit each of the ranks.

    Ranks that divide layers were planned as one device with the memory of all, and each has the activations between
    its parts of the layers whole.
    """
    budget, count = planned.budget, num_devices(planned.case.outline, mesh)
    repeated = (count - 1) * budget.footprint.activation_bytes
    return max(
        int(budget.num_pages * (1 - repeated / budget.kv_bytes)), pages_alone(*planned.job.longest, budget.page_size)
    )


def split(sizes: Sizes) -> tuple[dict[str, int | str], dict[str, Any]]:
    """Return the keys of the section `zinfer`, and the arguments of `LLM` that are no keys."""
    keys = {name: size for name, size in sizes.items() if name not in (SWAPS, PAGES, MOST_SWAPPED)}
    return keys, {SWAPS: find_swaps(sizes), PAGES: sizes.get(PAGES)}


def find_swaps(sizes: Sizes) -> bool | None:
    """Return whether preempted sequences are swapped to disk; None if nothing was planned that decides it."""
    return SWAPS in sizes if sizes.keys() - {"speculate"} else None


def told(plans: Sequence[JobPlan]) -> str:
    """Return one line on the best plan and the next best."""
    best, *others = plans
    line = f"plan: {_words(best)}: {duration(best.seconds)}"
    if not others:
        return line
    return f"{line}; next best, {_words(others[0], best)}: {duration(others[0].seconds)}"


def _words(planned: JobPlan, other: JobPlan | None = None) -> str:
    """Return the sizes of a plan, those alone that differ from another's."""
    parts = [_parts(each) for each in (planned, other) if each is not None]
    return ", ".join(part for place, part in enumerate(parts[0]) if len(parts) == 1 or part != parts[1][place])


def _parts(planned: JobPlan) -> tuple[str, str, str, str]:
    budget, where = planned.budget, "host memory" if planned.budget.is_hosted else "GPU memory"
    form = f" in {planned.batching.kv_cache_dtype.upper()}" if planned.batching.kv_cache_dtype != "auto" else ""
    order = "longest rows first" if budget.order == "longest_first" else "rows in their order"
    return (
        f"passes of {budget.tokens_per_pass:,} tokens",
        f"{budget.max_sequences:,} sequences",
        f"{human_bytes(budget.kv_bytes)} of {where} for the KV cache{form}",
        order,
    )
