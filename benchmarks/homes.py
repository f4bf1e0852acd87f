"""Configurations that put a checkpoint's layers into chosen homes, by offload keys and budgets."""

from pathlib import Path

from zinfer.model.build import build_meta_model
from zinfer.model.matching import match_weights
from zinfer.model.partition import ModelBlock, partition_model
from zinfer.offload.block import Block
from zinfer.weights import Checkpoint

CASES = ("host", "disk", "half", "resident-0", "resident-25", "resident-50", "resident-75", "overhead")


def model_blocks(folder: Path) -> list[ModelBlock]:
    checkpoint = Checkpoint.open(folder)
    model = build_meta_model(checkpoint)
    return partition_model(model, match_weights(model, checkpoint))


def blocks_of(folder: Path) -> list[Block]:
    return [block.block for block in model_blocks(folder)]


def config_for(folder: Path, case: str, num_slots: int | None = None) -> dict[str, object]:
    """The configuration of a case; what lies outside the layers is always resident."""
    slots = {} if num_slots is None else {"num_slots": num_slots}
    if case in ("host", "disk"):
        return {
            "zero_optimization": {"offload_param": {"device": {"host": "cpu", "disk": "nvme"}[case]}},
            "zinfer": slots,
        }
    layers = [block.block for block in model_blocks(folder) if block.is_layer]
    if case == "half":
        most = len(layers) // 2 * layers[0].layout.numel
        return {"zero_optimization": {"offload_param": {"device": "cpu", "max_in_cpu": most}}, "zinfer": slots}
    share = int(case.removeprefix("resident-"))
    outside = sum(block.nbytes for block in blocks_of(folder)) - sum(layer.nbytes for layer in layers)
    num_resident = len(layers) * share // 100
    budget = outside + (num_resident + (num_slots or 2) * (share < 100)) * layers[0].nbytes
    return {"zinfer": {"max_weight_memory": budget, **slots}}
