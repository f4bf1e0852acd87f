"""`engine.compile`: equal tokens, resident and streamed, and compiled once for all layers."""

from pathlib import Path

import pytest
import torch
from graph_support import stand_in
from ragged_models import VOCAB_SIZE, tiny_model
from torch._dynamo.utils import counters

import zinfer
from zinfer.graphs import forward_graphs
from zinfer.graphs.forward_graphs import FIRST

__all__ = ["stand_in"]  # a fixture

NEW = 12


@pytest.mark.sampled(6)
@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "falcon"])
def test_tokens_are_those_of_transformers(family: str, home: str, tmp_path: Path) -> None:
    model = tiny_model(family, num_layers=4)
    ids = torch.randint(2, VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(1))
    wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()
    model.save_pretrained(tmp_path)
    config = {"zero_optimization": {"offload_param": {"device": home}}}
    engine = zinfer.init_inference(tmp_path, config, device="cpu")
    assert not engine.is_compiled
    torch._dynamo.reset()
    counters.clear()
    engine.compile(backend="eager")  # traces and guards as any other does, and needs no compiler
    assert engine.is_compiled
    for _ in range(2):
        assert engine.generate(ids, max_new_tokens=NEW, do_sample=False).tolist() == wanted
    graphs = counters["stats"]["unique_graphs"]
    assert 2 <= graphs <= 9, "parts of two lengths, and not each layer's own"
    with pytest.raises(RuntimeError, match="compiled already"):
        engine.compile()
    module = engine.module
    engine.destroy()
    assert not any("forward" in vars(part) for part in module.modules())


def test_quantized_weights_and_fused_kernels(tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=3)
    ids = torch.randint(2, VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path)
    config = {"replace_with_kernel_inject": True, "zinfer": {"quantization": {"bits": 8}}}
    engine = zinfer.init_inference(tmp_path, config, device="cpu")
    wanted = engine.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()
    engine.compile(backend="eager")
    assert engine.generate(ids, max_new_tokens=NEW, do_sample=False).tolist() == wanted
    assert engine.injected
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.compile()


@pytest.mark.usefixtures("stand_in")
def test_what_was_recorded_before_is_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And recorded anew without a mode for dispatching, within which torch runs nothing compiled."""
    model = tiny_model("llama", num_layers=2)
    ids = torch.randint(2, VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(1))
    wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()
    model.save_pretrained(tmp_path)
    engine = zinfer.init_inference(tmp_path, device="cpu", enable_cuda_graph=True)

    def counted() -> tuple[int, int]:
        assert engine.generate(ids, max_new_tokens=NEW, do_sample=False).tolist() == wanted
        return engine.graphs.captured, engine.graphs.eager[FIRST]

    assert [counted(), counted()] == [(1, 1), (1, 2)]
    engine.compile(backend="eager")
    monkeypatch.setattr(forward_graphs, "DependentLaunchAdds", lambda: pytest.fail("a mode"))
    assert counted() == (2, 4), "computed once by Python, and so compiled, before it is recorded"
    engine.destroy()
