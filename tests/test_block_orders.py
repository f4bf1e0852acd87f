"""Blocks that are used in any order, several times, within each other or not at all: right results, and no hang."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from checkpoints import VOCAB_SIZE
from engine_support import settled
from engines import engine_for, loaded
from family_models import family_inputs, family_model
from odd_models import OddModel, odd_model
from safetensors.torch import save_model
from transformers import BartForConditionalGeneration

import zinfer
from zinfer.model.partition import partition_model

GENERATOR = torch.Generator().manual_seed(6)
INPUTS = [torch.randint(2, VOCAB_SIZE, (2, length), generator=GENERATOR) for length in (7, 3, 9, 5, 9)]
KINDS = {
    "in the input's order": {},
    "there and back": {"order": [0, 1, 2, 3, 4, 3, 2, 1, 0]},
    "one alone": {"order": [0] * 6, "num_layers": 1},
    "some left out": {"order": [4, 1]},
    "with a module of all": {"shares": "module"},
    "with a weight of all": {"shares": "weight"},
    "with a module of all, of one layer": {"shares": "module", "num_layers": 1, "order": [0, 0]},
}


def outputs(model: Any, device: str) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(ids.to(device)).last_hidden_state for ids in [*INPUTS, *INPUTS]]


def tight(model: OddModel, num_slots: int, device: str) -> dict[str, Any]:
    """A configuration that leaves room for the slots alone."""
    blocks = [block.block for block in partition_model(model, {})]
    largest, always = max(block.nbytes for block in blocks), sum(block.nbytes for block in blocks if block.encloses)
    return {"max_weight_memory": num_slots * largest + always, "num_slots": num_slots, "device": device}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_slots", [3, 4])
@pytest.mark.parametrize("synchronous", [False, True])
def test_outputs_are_those_of_the_model_alone(
    kind: str, num_slots: int, synchronous: bool, tmp_path: Path, device: str
) -> None:
    model = odd_model(**KINDS[kind]).to(device)
    model.config.save_pretrained(tmp_path)
    save_model(model, str(tmp_path / "model.safetensors"))  # each tensor once, whatever its names
    wanted = outputs(model, device)
    streaming = {"zinfer": tight(model, num_slots, device) | {"synchronous": synchronous}}
    with init_empty_weights():
        empty = OddModel(model.config)
    disk = {"zero_optimization": {"offload_param": {"device": "nvme"}}, "checkpoint": str(tmp_path)} | streaming
    host = {"zero_optimization": {"offload_param": {"device": "cpu"}}} | streaming
    for given, config in ((empty.eval(), disk), (model, host)):
        engine = zinfer.init_inference(given, config)
        assert engine.stats().streamed_bytes_per_pass > 0
        for found, each in zip(outputs(engine, device), wanted, strict=True):
            assert torch.equal(found, each)
        engine.destroy()


def test_shared_modules_are_blocks_of_their_own() -> None:
    blocks = {block.block.name: block for block in partition_model(odd_model(shares="module"), {})}
    layers = [f"layers.{number}" for number in range(5)]
    assert list(blocks) == ["OddModel", "embed", layers[0], "layers.0.mixer", *layers[1:], "head"]
    assert [name for name, block in blocks.items() if block.is_layer] == layers
    separate = sum(block.block.nbytes for block in partition_model(odd_model(), {}))
    assert sum(block.block.nbytes for block in blocks.values()) == separate - 4 * blocks["layers.0.mixer"].block.nbytes


def test_two_slots_are_enough_for_a_block_within_another(device: str) -> None:
    model = odd_model(shares="module").to(device)
    wanted = outputs(model, device)
    config = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "zinfer": tight(model, 2, device)}
    engine = zinfer.init_inference(model, config)
    assert engine.stats().blocks_by_home["DEVICE"] == 1, "the model's own weight, around all of them"
    for found, each in zip(outputs(engine, device), wanted, strict=True):
        assert torch.equal(found, each)
    engine.destroy()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("homes", ["host", "disk"])
@pytest.mark.parametrize("num_slots", [2, 3, 4])
@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [("bart", "BartForConditionalGeneration"), ("t5", "T5ForConditionalGeneration")],
)
def test_guesses_settle_where_encoder_layers_are_used_once(
    homes: str, num_slots: int, model_type: str, class_name: str, tmp_path: Path
) -> None:
    model = family_model(model_type, class_name)
    model.save_pretrained(tmp_path)

    with engine_for(tmp_path, homes, num_slots) as engine:
        used: list[int] = []
        for block in engine._blocks:
            for site in block.sites:
                site.register_forward_pre_hook(lambda *_, nbytes=block.block.nbytes: used.append(nbytes))
        for num_new in (8, 24, 8):
            used.clear()
            before = settled(engine).bytes_to_device
            engine.generate(**family_inputs(model), max_new_tokens=num_new, do_sample=False)
            wasted = settled(engine).bytes_to_device - before - sum(used)
            assert abs(wasted) <= 2 * num_slots * max(used), "a few at the beginning; in each step it would be more"


def test_layers_that_are_dropped(tmp_path: Path) -> None:
    """BART drops layers at random while it trains; here as the seed has it."""
    model = family_model("bart", "BartForConditionalGeneration")
    inputs = family_inputs(model)
    model.save_pretrained(tmp_path)

    def run(found: Any, module: BartForConditionalGeneration) -> list[torch.Tensor]:
        for stack in (module.model.encoder, module.model.decoder):
            stack.layerdrop, stack.training, stack.dropout = 0.5, True, 0.0
        torch.manual_seed(9)
        with torch.no_grad():
            return [found(**inputs).logits for _ in range(6)]

    wanted = run(model, model)
    assert len({float(each.sum()) for each in wanted}) > 3
    with loaded(tmp_path, {"zero_optimization": {"offload_param": {"device": "nvme"}}}) as engine:
        for found, each in zip(run(engine, engine.module), wanted, strict=True):
            torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["encoder", "decoder"])
def test_a_failure_within_a_stack_leaves_the_engine_in_order(place: str, tmp_path: Path) -> None:
    """`generate` calls the encoder outside of the model's own forward."""
    model = family_model("t5", "T5ForConditionalGeneration")
    model.save_pretrained(tmp_path)
    inputs = family_inputs(model)
    wanted = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    with engine_for(tmp_path, "disk", 2) as engine:
        part = engine.module.get_submodule(f"{place}.block.1.layer.0")

        def fail(*_: object) -> None:
            raise ArithmeticError("a hook of the caller's")

        for _ in range(2):
            handle = part.register_forward_pre_hook(fail)
            with pytest.raises(ArithmeticError):
                engine.generate(**inputs, max_new_tokens=6, do_sample=False)
            assert not engine._runtime._streamer.held()
            handle.remove()
            assert torch.equal(engine.generate(**inputs, max_new_tokens=6, do_sample=False), wanted)
