"""The sizes that ranks agree on before they make the same passes."""

from collections.abc import Sequence
from dataclasses import replace

from zinfer.errors import ConfigError
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.units import name_values


def agree(ranks: ModelRanks, members: Sequence[int], budget: BatchingBudget) -> BatchingBudget:
    """Return this rank's budget with the least sizes of all members; called by all processes of a job.

    The first member chooses whether to swap to disk. Pages are not lent to weights: which blocks fit there depends on a
    rank's own memory.

    Args:
        members: the ranks that make the same passes as this one, itself among them.

    Raises:
        ConfigError: what cannot be lowered differs: the size of a page, its place, dtype or swap space, or the order.
        RankError: a rank failed.
    """
    budgets = ranks.exchange(budget)
    several = [budgets[rank] for rank in members]
    num_sets, swaps = ranks.mesh.pipeline, several[0].swaps_to_disk
    agreed = [replace(_least(each, several), num_sets=num_sets, swaps_to_disk=swaps, lends=False) for each in several]
    ours = _sizes(agreed[0])
    for rank, each in zip(members, agreed, strict=True):
        if (theirs := _sizes(each)) != ours:
            raise ConfigError(
                f"{ranks.name_of(rank)} has other sizes than {ranks.name_of(members[0])} ({name_values(theirs)}; "
                f"{name_values(ours)}); give all ranks the same configuration and model"
            )
    return agreed[members.index(ranks.group.rank)]


def _least(budget: BatchingBudget, several: Sequence[BatchingBudget]) -> BatchingBudget:
    """Return a budget with no more tokens, sequences and pages than any of several."""
    num_pages = min(each.num_pages for each in several)
    own = budget.footprint
    bytes_before = {"kv_bytes": own.kv_bytes, "decode_kv_bytes": own.decode_kv_bytes, "host_bytes": own.host_bytes}
    pages_bytes = {name: nbytes * num_pages // budget.num_pages for name, nbytes in bytes_before.items()}
    return replace(
        budget,
        tokens_per_pass=min(each.tokens_per_pass for each in several),
        most_part_tokens=min(each.most_part_tokens for each in several),
        max_sequences=min(each.max_sequences for each in several),
        num_pages=num_pages,
        footprint=replace(own, **pages_bytes),
        most_parked=min(each.most_swapped_in_memory for each in several),
    )


def _sizes(budget: BatchingBudget) -> dict[str, int | str]:
    """Return all that decides, with the requests, which passes are made."""
    return {
        "tokens_per_pass": budget.tokens_per_pass,
        "max_sequences": budget.max_sequences,
        "pages": budget.num_pages,
        "passes under way": budget.num_sets,
        "kv_page_size": budget.page_size,
        "most swapped pages": budget.most_swapped_pages,
        "admission_order": budget.order,
        "kv_cache_dtype": str(budget.kv_dtype),
        "kv_cache_tier": "host" if budget.is_hosted else "device",
    }
