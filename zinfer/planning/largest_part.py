"""How much of a model the fullest of the ranks holds that divide it: its layers, or each layer."""

from zinfer.config import Settings
from zinfer.errors import ConfigError
from zinfer.model.outline import Outline
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.heads import can_divide
from zinfer.model.sharding.plans import EVERYTHING_ELSE, divides_experts, find_plan, is_divided
from zinfer.model.spec import check_ranks
from zinfer.model.stage import Stage
from zinfer.ranks.mesh import Mesh


def is_predicted(outline: Outline, mesh: Mesh) -> bool:
    """Whether `num_devices` is known for ranks that divide the model's experts."""
    experts, kind = outline.spec.experts, outline.spec.model_type
    if experts is None or experts.num_experts < mesh.expert or not divides_experts(kind):
        return False
    return is_divided(kind) and can_divide(outline.tree.config.get_text_config(), mesh.num_dividing)


def largest_stage(outline: Outline, settings: Settings, count: int) -> Outline:
    """Return the stage with the most bytes, of so many; the outline itself for one.

    Raises:
        ConfigError: as `Outline.of_stage`.
    """
    if count == 1:
        return outline
    stages = [outline.of_stage(Stage(number, count), settings.quantization) for number in range(count)]
    return max(stages, key=lambda stage: stage.nbytes)


def num_devices(outline: Outline, mesh: Mesh) -> float:
    """Return how many ranks like the fullest of those that divide each layer would hold the whole model.

    Matrices are divided evenly, those of an expert among the ranks that have it. Of experts the fullest rank has one
    more than others if their number is not a multiple of the groups'.

    Raises:
        ConfigError: the model's experts cannot be divided, or what the ranks would hold is not known.
    """
    if mesh.expert == 1:
        return mesh.tensor
    shard = Shard(0, mesh.num_dividing, mesh.expert)
    if EVERYTHING_ELSE in find_plan(outline.tree, shard):
        raise ConfigError(
            f"{shard.key} = {shard.size}: ranks that hold attention whole, because its heads are not divided, are not "
            "predicted; choose a size that divides them, or leave it out to plan the other modes"
        )
    experts = outline.spec.experts
    num_experts = experts.num_experts if experts else 0
    check_ranks(num_experts, shard, outline.name)
    tensors = [tensor for block in outline.plain_blocks for tensor in block.layout.tensors]
    in_experts = sum(tensor.nbytes for tensor in tensors if "experts" in tensor.name.split("."))
    share = in_experts / sum(tensor.nbytes for tensor in tensors)
    _, most = shard.by_number.bounds(num_experts)
    return 1 / (share * most / num_experts / shard.within.size + (1 - share) / shard.size)
