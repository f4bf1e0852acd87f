"""What DeepSpeed's engine has beside `forward` and `generate`, and the ways to one."""

import copy
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import PROMPT, batch, eager, engine, folder, greedy, logits_of
from engines import loaded
from loading_support import HOST
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import zinfer
from zinfer.errors import ConfigError, LengthError, NotProfiledError

__all__ = ["batch", "eager", "engine", "folder"]  # fixtures


def initialized(*args: Any, **kwargs: Any) -> zinfer.InferenceEngine:
    engine, optimizer, loader, scheduler = zinfer.initialize(*args, **kwargs)
    assert optimizer is loader is scheduler is None
    return engine


def test_the_four_patterns(folder: Path, eager: PreTrainedModel, tmp_path: Path) -> None:
    expected = greedy(eager)
    config = {
        "dtype": "fp32",
        "zero": {"offload_param": {"device": "cpu"}},
        "max_tokens": 20,
        "zinfer": {"num_slots": 2},
    }
    before = copy.deepcopy(config)
    (tmp_path / "ds.json").write_text(json.dumps(config))
    for args, kwargs in (
        ((), {}),
        ((config,), {}),
        ((str(tmp_path / "ds.json"),), {}),
        ((), config),
        ((), config | {"num_slots": 2, "zinfer": {}}),
        ((config,), {"max_out_tokens": 20, "dtype": torch.float32}),
    ):
        engine = zinfer.init_inference(AutoModelForCausalLM.from_pretrained(folder), *args, **kwargs)
        assert torch.equal(greedy(engine), expected)
        assert engine.settings.max_out_tokens == (20 if args or kwargs else None)
        engine.destroy()
    assert config == before
    with pytest.raises(ConfigError, match="dtype is given twice with different values"):
        zinfer.init_inference(folder, config, dtype="bf16")
    with pytest.raises(ConfigError, match=r"max_tokens and max_out_tokens are the same key"):
        zinfer.init_inference(folder, {"max_tokens": 20, "max_out_tokens": 20})


@pytest.mark.parametrize(
    "kwargs", [{"mp_size": 2}, {"tensor_parallel": {"tp_size": 2}}, {"tp": {"tp_size": 4}}], ids=str
)
def test_one_process_does_not_divide_layers(folder: Path, kwargs: dict[str, Any]) -> None:
    stated = r'zinfer\.parallel = \{"tensor": (\d)\} \(tensor_parallel\.tp_size\)'
    wanted = stated + r" needs \1 ranks, and there is 1; start \1 ranks \(--ranks \1, or torchrun\)"
    with pytest.raises(ConfigError, match=wanted):
        zinfer.init_inference(folder, **kwargs)


def test_initialize(folder: Path, eager: PreTrainedModel, tmp_path: Path) -> None:
    config = HOST | {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zinfer": {"device": "cpu"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    ways = [{"config": config}, {"config_params": path}, {"args": Namespace(deepspeed_config=str(path), local_rank=0)}]
    for way in ways:
        model = AutoModelForCausalLM.from_pretrained(folder)
        engine = initialized(model=model, model_parameters=model.parameters(), **way)
        assert engine.module.eval() is model
        assert engine.stats().blocks_by_home["HOST"] > 0
        assert torch.equal(greedy(engine.module), greedy(eager))
        idle = [ignored.path for ignored in engine.settings.without_effect]
        assert idle == ["train_batch_size", "optimizer", "model_parameters"]
        engine.destroy()
    engine = initialized(None, folder, config={}, device="cpu")
    assert torch.equal(greedy(engine), greedy(eager))
    engine.destroy()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"optimizer": object()}, "optimizer asks for training"),
        ({"lr_scheduler": object()}, "lr_scheduler asks for training"),
        ({"training_data": [1]}, "training_data asks for training"),
        ({"model": None}, "model is missing"),
        ({"config": {}, "config_params": {}}, "configuration is given twice"),
        ({"mpu": object()}, "mpu = .*: expected an object with get_model_parallel_world_size"),
        ({"modle_parameters": []}, "unknown key modle_parameters"),
    ],
)
def test_what_initialize_refuses(folder: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zinfer.initialize(**({"model": folder} | kwargs))


@pytest.mark.parametrize("use_cuda_events", [True, False])
def test_times_of_passes(folder: Path, use_cuda_events: bool) -> None:
    with loaded(folder, HOST) as engine:
        with pytest.raises(AssertionError, match="model profiling is not enabled"):
            engine.model_times()
        with pytest.raises(NotProfiledError):
            engine.model_times()
        greedy(engine)
        for _ in range(2):  # a second call starts anew
            engine.profile_model_time(use_cuda_events=use_cuda_events)
        assert engine.model_times() == []
        greedy(engine, max_new_tokens=4)
        logits_of(engine)
        logits_of(engine.module)
        with pytest.raises(LengthError):
            engine(torch.full((1, 1000), 5))
        times = engine.model_times()
        assert len(times) == 6
        assert 0 < sum(times) < 1e3 * engine.stats().wall_s + 1e3, "milliseconds"
        assert engine.model_times() == []
    assert not engine.module._forward_hooks
    assert not engine.module._forward_pre_hooks


def test_what_the_engine_has_not_its_module_has(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    assert engine.config is engine.module.config
    assert engine.generation_config is engine.module.generation_config
    assert engine.can_generate()
    assert engine.get_input_embeddings() is engine.module.model.embed_tokens
    assert engine.device == engine.module.device == torch.device("cpu")
    assert engine.dtype is torch.float32
    assert engine.eval() is engine
    assert not engine.is_compiled
    assert isinstance(engine, nn.Module)
    assert not hasattr(engine, "backward")
    with pytest.raises(AttributeError, match="'LlamaForCausalLM' object has no attribute 'backward'"):
        engine.backward  # noqa: B018
    assert torch.equal(greedy(engine), greedy(eager))


def test_moving_and_casting_are_refused_unless_they_change_nothing(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel
) -> None:
    for same in (
        engine.to("cpu"),
        engine.cpu(),
        engine.float(),
        engine.to(torch.float32),
        engine.to(torch.device("cpu")),
    ):
        assert same is engine
    for change in (engine.half, engine.bfloat16, lambda: engine.to("meta"), lambda: engine.to(torch.float16)):
        with pytest.raises(ConfigError, match=r"computes on cpu in torch\.float32.*zinfer\.device and dtype"):
            change()
    assert torch.equal(greedy(engine), greedy(eager))


def test_a_limit_is_an_error_that_deepspeeds_scripts_catch(folder: Path) -> None:
    with loaded(folder, max_out_tokens=6) as engine:
        for kind in (RuntimeError, ValueError, LengthError):
            with pytest.raises(kind, match=r"5 tokens and 2 new ones are more than 6 \(max_out_tokens\)"):
                engine.generate(PROMPT, max_new_tokens=2)
        assert engine.stats().passes == 0


def test_a_policy_beside_what_transformers_says(folder: Path, eager: PreTrainedModel) -> None:
    """It was written for DeepSpeed; the layers are the same ones."""
    policy = {type(eager.model.layers[0]): ("self_attn.o_proj", "mlp.down_proj")}
    for model in (folder, AutoModelForCausalLM.from_pretrained(folder)):
        with loaded(model, HOST, injection_policy=policy) as engine:
            assert len(engine.layers) == len(eager.model.layers)
            assert torch.equal(greedy(engine), greedy(eager))
    with pytest.raises(ConfigError, match=r"'mlp\.fc2' is the end of no module's name in LlamaForCausalLM"):
        zinfer.init_inference(folder, injection_policy={"LlamaDecoderLayer": "mlp.fc2"})
