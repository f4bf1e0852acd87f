"""Between uses an engine's streamed weights are on the meta device, and every use of them says what to do; a module's
state has them all the same.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import ragged_models
import torch
from checkpoints import tiny_model
from engine_support import NUM_LAYERS, engine, folder, greedy, logits_of
from engines import engine_for, loaded
from loading_support import DISK
from safetensors.torch import load_file
from store_support import make_store
from torch import nn
from transformers import AutoModelForCausalLM

import zinfer
from zinfer.engine import hooks
from zinfer.engine.placeholder import PlaceholderParameter
from zinfer.errors import PlanError

__all__ = ["engine", "folder"]  # fixtures


def test_a_streamed_parameter_is_meta_between_uses(folder: Path) -> None:
    with engine_for(folder, "disk") as engine:
        for _ in range(2):
            assert all(parameter.is_meta for parameter in engine.module.parameters())
            greedy(engine)
        shapes = {name: parameter.shape for name, parameter in engine.module.named_parameters()}
        assert shapes["model.layers.0.mlp.up_proj.weight"] == (128, 64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", ["host", "disk", "mixed"])
@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_modules_state_has_the_weights(folder: Path, homes: str, num_slots: int) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    with engine_for(folder, homes, num_slots) as engine:
        tokens = greedy(engine)
        for _ in range(2):
            assert_equal_state(engine.module.state_dict(), expected)
            assert torch.equal(greedy(engine), tokens)
        name = "model.layers.1.mlp."
        part = engine.module.model.layers[1].mlp.state_dict()
        assert_equal_state(part, {key[len(name) :]: each for key, each in expected.items() if key.startswith(name)})
        assert all(parameter.is_meta for parameter in engine.layers[1].parameters())
    placeholders = engine.module.state_dict()
    with pytest.raises(RuntimeError, match="no weight is after destroy"):
        placeholders["lm_head.weight"].sum()


def assert_equal_state(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(expected)
    for name, tensor in state.items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_saved_module_is_the_model(family: str, tmp_path: Path) -> None:
    """Tied weights are written once, and joined experts apart, as transformers writes them of a module in memory."""
    tiny = ragged_models.tiny_model if family == "mixtral" else partial(tiny_model, tie=True)
    expected = tiny(family)
    expected.save_pretrained(tmp_path / "given")
    with loaded(tmp_path / "given", DISK) as engine:
        engine.module.save_pretrained(tmp_path / "saved")
    given, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("given", "saved"))
    assert set(given) == set(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in given.items())
    assert_equal_state(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), expected.state_dict())


@pytest.mark.parametrize("config", [{}, DISK], ids=["resident", "disk"])
def test_the_state_of_quantized_weights_is_what_products_take(
    folder: Path, config: dict[str, object], tmp_path: Path
) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "disk")} if config else {"device": "none"}
    quantized = {"zero_optimization": {"offload_param": offload}, "zinfer": {"quantization": {"bits": 8}}}
    with loaded(folder, quantized) as engine:
        expected = logits_of(engine)
        state = engine.module.state_dict()
        engine.module.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert_equal_state(saved.state_dict(), state)
    torch.testing.assert_close(logits_of(saved), expected)


def test_what_is_saved_of_a_quantized_folder_is_in_full(folder: Path, tmp_path: Path) -> None:
    make_store(folder, tmp_path / "store", bits=8)
    with loaded(tmp_path / "store", DISK) as engine:
        expected = logits_of(engine)
        engine.module.save_pretrained(tmp_path / "saved")
    with loaded(tmp_path / "saved", DISK) as engine:
        torch.testing.assert_close(logits_of(engine), expected)


def test_a_state_that_does_not_fit_in_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for(folder, "disk") as engine:
        monkeypatch.setattr(hooks, "free_host_bytes", lambda: 1000)
        with pytest.raises(
            PlanError, match=r"state_dict: it keeps a copy .* and 1\.00 kB are free\. Call state_dict\(\)"
        ):
            engine.module.state_dict()
        monkeypatch.undo()
        greedy(engine)
        engine.layers[0].register_forward_hook(lambda *_: engine.module.state_dict())
        with pytest.raises(RuntimeError, match=r"state_dict\(\) was called from within the model's forward"):
            greedy(engine)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, weight: weight.sum().item(),
        lambda layer, weight: weight.tolist(),
        lambda layer, weight: torch.ones(64, 64) * weight,
        lambda layer, weight: torch.ones(1, 64) @ weight.T,
        lambda layer, weight: nn.functional.linear(torch.ones(1, 64), weight),
        lambda layer, weight: torch.addmm(torch.zeros(64), torch.ones(1, 64), weight),
        lambda layer, weight: layer.self_attn.q_proj(torch.ones(1, 64)),
        lambda layer, weight: layer.mlp(torch.ones(1, 2, 64)),
    ],
    ids=["item", "tolist", "times", "matmul", "linear", "addmm", "projection", "mlp"],
)
def test_using_a_streamed_parameter_outside_its_block_is_an_error(
    engine: zinfer.InferenceEngine, use: Callable[[nn.Module, torch.Tensor], object]
) -> None:
    """torch's matrix products do not refuse a meta operand on the CPU: they return whatever lies in memory."""
    layer = engine.module.model.layers[NUM_LAYERS - 1]
    weight = layer.self_attn.q_proj.weight
    assert weight.is_meta
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        print(use(layer, weight))


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight @ torch.ones(4, 2),
        lambda weight: weight[torch.tensor([0, 2])],
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: setattr(weight, "data", torch.ones(3, 4)),
        lambda weight: weight.to(torch.float64),
        lambda weight: weight.view(12),
        lambda weight: weight.tolist(),
        lambda weight: weight + 1,
        lambda weight: torch.stack([weight, weight]),
        lambda weight: list(weight),
        lambda weight: weight.data_ptr(),
    ],
    ids=lambda use: str(use.__code__.co_names + tuple(map(str, use.__code__.co_consts[1:]))),
)
def test_less_common_uses_are_errors_too(use: Callable[[PlaceholderParameter], object]) -> None:
    weight = PlaceholderParameter.like(torch.ones(3, 4))
    with torch.no_grad(), pytest.raises(RuntimeError, match="there only while its block runs as a part of the model"):
        use(weight)
