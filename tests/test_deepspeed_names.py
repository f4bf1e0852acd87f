"""DeepSpeed's names: those that are here work, and each other one says what to use instead."""

import importlib
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_model
from torch import nn

import zinfer
from zinfer.config import resolve_settings
from zinfer.config.settings import Settings
from zinfer.errors import ConfigError
from zinfer.ops.transformer.inference import Config

MISSING = {
    "DeepSpeedEngine": "zinfer.InferenceEngine is what init_inference and initialize return",
    "DeepSpeedConfig": "give the configuration as a dict",
    "PipelineModule": "it trains, and nothing is trained here",
    "checkpointing": "it trains",
    "env_report": "zinfer probe",
    "module_inject": "replace_with_kernel_inject=True",
    "replace_transformer_layer": "replace_with_kernel_inject=True",
    "tp_model_init": "tensor_parallel={'tp_size': N}",
    "logger": 'logging.getLogger("zinfer")',
    "zero.GatheredParameters": "engine.module.state_dict()",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_name_says_what_to_use(name: str) -> None:
    *path, leaf = name.split(".")
    home = zinfer.zero if path else zinfer
    assert not hasattr(home, leaf)
    with pytest.raises(AttributeError) as attribute:
        getattr(home, leaf)
    assert str(attribute.value).startswith(f"zinfer has no {name}: ")
    assert MISSING[name] in str(attribute.value)
    if not path:
        with pytest.raises(ImportError) as imported:
            exec(f"from zinfer import {leaf}")
        assert str(imported.value) == str(attribute.value)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("module_inject.auto_tp", "tensor_parallel={'tp_size': N}"),
        ("runtime.zero.stage3", "zinfer.zero.Init"),
        ("inference.config", "zinfer.ops.transformer.inference.Config"),
        ("inference.v2.ragged", "zinfer.LLM"),
        ("runtime.engine", "zinfer.InferenceEngine"),
        ("ops.op_builder", "compiled by Triton"),
        ("ops.transformer.inference.config", "import Config from zinfer.ops.transformer.inference"),
        ("utils", "logging.getLogger"),
        ("compression.inference.quantization", "zinfer.quantize_transformer"),
    ],
)
def test_a_missing_module_says_what_to_use(module: str, words: str) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"zinfer.{module}")
    assert words in str(raised.value)


def test_other_names_are_missing_as_usual() -> None:
    with pytest.raises(AttributeError, match="module 'zinfer' has no attribute 'nothing'"):
        zinfer.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'zinfer'"):
        exec("from zinfer import nothing")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'zinfer\.nothing'"):
        importlib.import_module("zinfer.nothing")


def test_names_are_listed_and_imported_by_star() -> None:
    space: dict[str, object] = {}
    exec("from zinfer import *", space)
    assert set(zinfer.__all__) <= space.keys()
    assert {"torch", "ray", "ops", "runtime"}.isdisjoint(space)  # they would hide a script's own
    assert {*zinfer.__all__, "accelerator", "comm", "mii", "ops", "runtime", "zero"} <= {*dir(zinfer)}
    for name in set(dir(zinfer)) - {"ray"}:
        assert getattr(zinfer, name) is not None


def test_the_default_configuration_changes_nothing() -> None:
    config = zinfer.default_inference_config()
    assert (config["min_out_tokens"], config["dtype"], config["moe"]["enabled"]) == (1, None, True)
    assert resolve_settings(config) == Settings()
    assert resolve_settings(config, {"max_out_tokens": 8}).max_out_tokens == 8


def test_a_configuration_as_an_object(tmp_path: Path) -> None:
    config = Config(mp_size=1, max_out_tokens=64)
    config.max_out_tokens = 32
    assert (config.max_out_tokens, dict(config)) == (32, {"mp_size": 1, "max_out_tokens": 32})
    (tmp_path / "config.json").write_text('{"max_out_tokens": 32, "mp_size": 1}')
    assert Config.from_json_file(tmp_path / "config.json") == config == Config.from_dict({**config})
    assert not hasattr(config, "min_out_tokens")
    with pytest.raises(ConfigError, match="unknown key max_out_tokenz; did you mean max_out_tokens"):
        Config(max_out_tokenz=1)
    with pytest.raises(zinfer.DeepSpeedConfigError, match="max_out_tokens = 0: expected a whole number"):
        config.max_out_tokens = 0
    assert config.max_out_tokens == 32
    engine = zinfer.init_inference(tiny_model("llama", num_layers=1), config)
    assert engine.settings.max_out_tokens == 32
    engine.destroy()


def test_modules_built_in_zero_init_have_the_dtype() -> None:
    with zinfer.zero.Init(config={"bf16": {"enabled": True}}):
        layer = nn.Linear(4, 4)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.bfloat16, "cpu")
    with zinfer.zero.Init(dtype=torch.float16, enabled=False):
        assert nn.Linear(4, 4).weight.dtype == torch.float32
    zinfer.zero.Init(module=layer, dtype=torch.float16)
    assert layer.weight.dtype == torch.float16
    with zinfer.zero.Init():
        assert nn.Linear(4, 4).weight.dtype == torch.float32
    for keywords, words in (
        ({"config": {}, "config_dict_or_path": {}}, "config and config_dict_or_path are the same"),
        ({"config": {"bf16": {"enabled": True}}, "dtype": torch.float16}, "weights have one dtype"),
        ({"remote": "cpu"}, "unknown argument 'remote'; known are data_parallel_group, .*remote_device"),
    ):
        with pytest.raises(ConfigError, match=words):
            zinfer.zero.Init(**keywords)  # type: ignore[arg-type]


def test_the_arguments_of_the_command_line() -> None:
    parser = zinfer.add_config_arguments(ArgumentParser())
    assert vars(parser.parse_args([])) == {"deepspeed": False, "deepspeed_config": None}


def test_the_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    device = zinfer.get_accelerator()
    assert device is zinfer.accelerator.get_accelerator()
    on_gpu = torch.cuda.is_available()
    assert device.device_name() == ("cuda" if on_gpu else "cpu")
    assert torch.device(device.device_name(0)) == torch.device("cuda:0" if on_gpu else "cpu")
    assert device.communication_backend_name() == ("nccl" if on_gpu else "gloo")
    tensor = torch.ones(3, device=device.current_device_name())
    assert device.on_accelerator(tensor)
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory_stats()
    device.manual_seed(3)
    assert device.device_count() >= 1
    assert 0 < device.memory_allocated() <= device.max_memory_allocated() * 2
    assert 0 < device.available_memory() <= device.total_memory()
    assert torch.float32 in device.supported_dtypes()
    assert torch.equal(device.pin_memory(torch.ones(2)), torch.ones(2))
    with pytest.raises(AttributeError, match=r"get_accelerator\(\) has no 'fly' here; use the functions of torch\."):
        device.fly()
    zinfer.runtime.utils.see_memory_usage("quiet")
    zinfer.runtime.utils.see_memory_usage("after loading", force=True)
    assert capsys.readouterr().out.startswith("after loading: this process ")
