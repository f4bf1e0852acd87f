"""Where blocks that ranks gather lie between blocks that stream, there are slots enough to keep the link busy."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_support import GPU, SMALL_LLAMA, outline_of, write_config

from zinfer.config import resolve_settings
from zinfer.errors import PlanError
from zinfer.offload.block import Tier
from zinfer.offload.partition import Partition
from zinfer.planning.placement import Placer, Plan, make_plan
from zinfer.probe.limits import MachineLimits

_MOST_SLOTS = 5


class Model:
    """A model of 48 layers, planned for ranks of which each has memory for a share of it."""

    def __init__(self, folder: Path) -> None:
        outline = outline_of(folder)
        self._blocks, self._layers = [block.block for block in outline.blocks], outline.layers

    def planned(self, size: int, share: float, **config: object) -> Plan:
        limits = self.limits(share, 2, 2)
        try:
            return make_plan(self._blocks, self._layers, limits, resolve_settings(config), Partition(0, size))
        except PlanError:
            assume(False)
            raise

    def limits(self, *shares: float) -> MachineLimits:
        """Budgets of the device, the host and what may be pinned of it, as shares of the weights."""
        total_bytes = sum(block.nbytes for block in self._blocks)
        return MachineLimits(GPU, *(int(share * total_bytes) for share in shares))

    def placer(self, size: int) -> Placer:
        return Placer(self._blocks, self._layers, resolve_settings({}), Partition(0, size))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_config(tmp_path_factory.mktemp("llama"), SMALL_LLAMA | {"num_hidden_layers": 48}))


def runs(plan: Plan) -> list[int]:
    """The numbers of blocks to gather between two that stream, in an endless series of passes; [0] if none streams."""
    passing = [home.shared for home in plan.homes if home.tier is not Tier.DEVICE or home.shared]
    streaming = [place for place, is_gathered in enumerate(passing) if not is_gathered]
    following = [*streaming[1:], *(len(passing) + each for each in streaming[:1])]
    return [two - one - 1 for one, two in zip(streaming, following, strict=True)] or [0]


def usual_run(plan: Plan) -> int:
    return sum(runs(plan)) // len(runs(plan))


@given(size=st.integers(2, 4), share=st.floats(0.05, 1.2))
def test_a_streaming_block_has_a_slot_while_the_one_before_is_used(model: Model, size: int, share: float) -> None:
    plan = model.planned(size, share)
    if plan.streamed_bytes == 0 or plan.num_slots == 0:
        assert plan.num_slots in (0, 2)
    elif plan.num_slots < _MOST_SLOTS and plan.num_slots < 2 + usual_run(plan):
        # Another slot would take the memory of blocks that it is to be there for.
        deeper = model.planned(size, share, zinfer={"num_slots": plan.num_slots + 1})
        assert plan.num_slots >= 2 + usual_run(deeper)
    assert plan.num_slots <= 2 + max(runs(plan))


@given(
    size=st.sampled_from([1, 1, 2]),
    shares=st.lists(st.tuples(*[st.sampled_from([0.02, 0.1, 0.4, 0.7, 1.01, 1.2])] * 3), min_size=2, max_size=8),
)
def test_placed_again_in_other_budgets_it_is_placed_as_anew(
    model: Model, size: int, shares: list[tuple[float, float, float]]
) -> None:
    """What is kept from one budget to the next, for a search for sizes, changes no plan and no error."""
    placer, anew = model.placer(size), model.placer
    for each in shares:
        limits = model.limits(*each)
        assert outcome(placer, limits) == outcome(anew(size), limits)


def outcome(placer: Placer, limits: MachineLimits) -> Plan | str:
    try:
        return placer.place(limits)
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize("stated", [2, 4])
def test_a_stated_number_of_slots_is_kept(model: Model, stated: int) -> None:
    assert model.planned(2, 0.25, zinfer={"num_slots": stated}).num_slots == stated
    assert model.planned(2, 0.25).num_slots == 3
