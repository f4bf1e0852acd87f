"""A module is taken over with its weights, or filled from the checkpoint that is named."""

import gc
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import ragged_models
import torch
from accelerate import init_empty_weights
from checkpoints import VOCAB_SIZE, tiny_checkpoint, tiny_model
from engines import loaded
from family_models import family_inputs, family_model, forward_inputs
from loading_support import DISK, HOST, Tensors, batch, eager_logits, llama, refused, sharded
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, PreTrainedModel

from zinfer.errors import CheckpointError, ConfigError, ZinferError
from zinfer.model.matching import load_buffers

__all__ = ["batch", "llama", "sharded"]  # fixtures


def test_a_transformers_model_without_a_head(llama: Path) -> None:
    """It cannot generate, but it is a transformers module: forward works or the error says why not."""
    model = LlamaModel(tiny_model("llama").config)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model.eval()(ids).last_hidden_state
    with loaded(model, HOST) as engine:
        assert torch.equal(engine(ids).last_hidden_state, expected)


def meta_twin(folder: Path) -> PreTrainedModel:
    """As torch makes it: computed buffers are on the meta device too."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model


def empty_twin(folder: Path) -> PreTrainedModel:
    """As accelerate makes it: computed buffers (rotary frequencies) are real."""
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model


def test_a_meta_module_without_a_checkpoint(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"meta device.*checkpoint="):
        refused(meta_twin(llama))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [{}, HOST, DISK], ids=["free", "host", "disk"])
@pytest.mark.parametrize("twin", [meta_twin, empty_twin])
def test_a_meta_module_with_its_checkpoint(
    llama: Path, batch: Tensors, config: dict[str, object], twin: Callable[[Path], PreTrainedModel]
) -> None:
    expected = eager_logits(llama, batch)
    with loaded(twin(llama), config, checkpoint=str(llama)) as engine:
        assert torch.equal(engine(**batch).logits, expected)
    model = twin(llama)
    with loaded(model, config | {"checkpoint": str(llama)}) as engine:
        assert engine.module is model
        assert not engine.module.training
        assert torch.equal(engine(**batch).logits, expected)


def test_a_meta_module_with_anothers_checkpoint(llama: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint("gpt2", tmp_path / "gpt2", num_layers=2, shards=1)
    with pytest.raises(CheckpointError, match=r"weights are missing|no place"):
        refused(meta_twin(llama), checkpoint=str(other))


def test_a_module_half_on_the_meta_device(llama: Path) -> None:
    model = tiny_model("llama", num_layers=2)
    model.model.layers[1].mlp.up_proj.to("meta")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is on the meta device"):
        refused(model)


def test_the_named_checkpoint_goes_before_weights_in_memory(llama: Path, batch: Tensors) -> None:
    """As in DeepSpeed: the module is the tree, the checkpoint its weights."""
    model = tiny_model("llama", num_layers=4, seed=9)
    with loaded(model, HOST, checkpoint=str(llama)) as engine:
        assert torch.equal(engine(**batch).logits, eager_logits(llama, batch))


def test_a_checkpoint_goes_by_what_the_module_shares_before_what_its_family_ties(tmp_path: Path) -> None:
    """The head is one with an embedding of the decoder's own, and the checkpoint holds that under the head's name."""
    model = family_model("bart", "BartForConditionalGeneration")
    model.model.decoder.embed_tokens = nn.Embedding(VOCAB_SIZE, 64)
    model.lm_head.weight = model.model.decoder.embed_tokens.weight
    inputs = forward_inputs(model, family_inputs(model))
    with torch.no_grad():
        expected = model(**inputs).logits
    named = {name: value.contiguous() for name, value in model.state_dict().items()}
    for other in ("model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"):
        named.pop(other)
    save_file(named, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    with loaded(model, HOST, checkpoint=str(tmp_path)) as engine:
        assert torch.equal(engine(**inputs).logits, expected)


class Versioned(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


def test_state_that_is_no_tensor_is_refused_beside_a_checkpoint(tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(3, 3), "0.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"0\._extra_state: .*dict .*get_extra_state.*leave the checkpoint out"):
        refused(nn.Sequential(Versioned(3, 3)), checkpoint=str(tmp_path), injection_policy={Versioned: ()})


def test_a_folder_and_another_checkpoint_contradict_each_other(llama: Path, sharded: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint"):
        refused(llama, checkpoint=str(sharded))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("config", [{}, HOST], ids=["free", "host"])
def test_a_module_in_memory_is_taken_over(batch: Tensors, family: str, config: dict[str, object]) -> None:
    model = tiny_model(family, num_layers=3)
    expected = eager_logits(model, batch)
    before = list(model.parameters())
    with loaded(model, config) as engine:
        assert engine.module is model
        assert torch.equal(engine(**batch).logits, expected)
        assert torch.equal(engine(**batch).logits, expected)
        layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
        if config is HOST:
            assert all(parameter.is_meta for parameter in layer.parameters())
            assert engine.stats().blocks_by_home["HOST"] > 0
        assert not {id(parameter) for parameter in model.parameters()} & {id(parameter) for parameter in before}


@pytest.mark.parametrize("config", [{}, HOST], ids=["free", "host"])
def test_the_memory_of_a_module_is_let_go(batch: Tensors, config: dict[str, object]) -> None:
    """Each parameter lies over a mapping of its own, which dies with the last tensor that uses it."""
    model = tiny_model("llama", num_layers=3)
    mappings = []
    for parameter in model.parameters():
        mapping = mmap.mmap(-1, parameter.nbytes)
        values = torch.frombuffer(mapping, dtype=parameter.dtype).view(parameter.shape)
        parameter.data = values.copy_(parameter.data)
        mappings.append(weakref.ref(mapping))
        del mapping, values
    expected = eager_logits(model, batch)
    assert all(mapping() is not None for mapping in mappings)
    del parameter
    with loaded(model, config) as engine:
        gc.collect()
        assert [mapping() for mapping in mappings] == [None] * len(mappings)
        assert torch.equal(engine(**batch).logits, expected)


def test_a_refused_module_keeps_its_weights(batch: Tensors) -> None:
    model = tiny_model("llama", num_layers=3)
    expected = eager_logits(model, batch)
    with pytest.raises(ZinferError):
        refused(model, max_weight_memory=1)
    with pytest.raises(ZinferError):
        refused(model, max_weight_memory=400_000, max_host_memory=1)
    assert torch.equal(eager_logits(model, batch), expected)


def test_a_dtype_casts_a_module_in_memory_as_transformers_casts_a_folder(tmp_path: Path, batch: Tensors) -> None:
    """Rotary frequencies stay in fp32, which `module.to` would cast as well."""
    saved = tiny_checkpoint("llama", tmp_path / "saved", num_layers=3)
    expected = eager_logits(AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16), batch)
    for config in ({}, HOST):
        with loaded(tiny_model("llama", num_layers=3), config, dtype="bf16") as engine:
            assert torch.equal(engine(**batch).logits, expected)


def test_a_module_in_training_mode_drops_nothing_out(batch: Tensors) -> None:
    model = tiny_model("gpt2", num_layers=2)
    expected = eager_logits(model, batch)
    model.train()
    with loaded(model) as engine:
        assert torch.equal(engine(**batch).logits, expected)


def test_a_tied_module_in_memory(batch: Tensors) -> None:
    model = tiny_model("llama", num_layers=2, tie=True)
    expected = eager_logits(model, batch)
    for config in (HOST, HOST | {"zinfer": {"max_weight_memory": 2 * 148_480}}):
        model = tiny_model("llama", num_layers=2, tie=True)
        with loaded(model, config) as engine:
            assert torch.equal(engine(**batch).logits, expected)


def test_a_module_with_its_own_generation_settings_keeps_them() -> None:
    ids = torch.tensor([[5, 17, 40]])
    model = tiny_model("llama", num_layers=2)
    model.generation_config.max_new_tokens = 7
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, do_sample=False)
    assert expected.shape == (1, 10)
    with loaded(model, HOST) as engine:
        assert torch.equal(engine.generate(ids, do_sample=False), expected)


@pytest.mark.parametrize("config", [{}, HOST], ids=["free", "host"])
def test_a_module_has_one_engine_at_a_time(llama: Path, batch: Tensors, config: dict[str, object]) -> None:
    model = tiny_model("llama", num_layers=4)
    expected = eager_logits(model, batch)
    with loaded(model, config) as first:
        for again in ({}, {"checkpoint": str(llama)}):
            with pytest.raises(ConfigError, match=r"forward is wrapped already.*destroy that engine"):
                refused(model, config, **again)
        assert torch.equal(first(**batch).logits, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [{}, HOST], ids=["free", "host"])
def test_a_module_that_an_engine_has_emptied_needs_a_checkpoint(
    llama: Path, batch: Tensors, config: dict[str, object]
) -> None:
    model = tiny_model("llama", num_layers=4)
    with loaded(model, config):
        pass
    with pytest.raises(ConfigError, match=r"is on the meta device; say where its weights are: checkpoint="):
        refused(model, config)
    with loaded(model, config, checkpoint=str(llama)) as second:
        assert torch.equal(second(**batch).logits, eager_logits(llama, batch))


def test_buffers_go_to_the_device_and_stay_one_where_modules_share_them() -> None:
    """As the corrections of DeepSeek-V3's router do, whose code expects them beside its input."""
    model = ragged_models.tiny_model("deepseek_v3", num_layers=4)
    first, second = (layer.mlp.gate for layer in model.model.layers[2:])
    second.e_score_correction_bias = first.e_score_correction_bias
    load_buffers(model, {}, torch.device("meta"))
    assert {name.rpartition(".")[2] for name, _ in model.named_buffers()} >= {"e_score_correction_bias", "inv_freq"}
    assert all(buffer.is_meta for buffer in model.buffers())
    assert first.e_score_correction_bias is second.e_score_correction_bias
