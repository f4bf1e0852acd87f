"""Masks as numbers: what torch makes of boolean ones, once a forward instead of once a layer."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_support import stand_in
from ragged_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import zinfer
from zinfer.graphs.masks import float_masks

__all__ = ["stand_in"]  # a fixture

OF_MASKS = ("where", "masked_fill", "logical_not", "bitwise_not", "fill", "scalar_tensor", "zeros")


class Counted(TorchDispatchMode):
    """Counts what is launched, by its name without `_` and variants."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


class Module(torch.nn.Module):
    """What transformers asks of an attention module."""

    num_key_value_groups = 2
    is_causal = True


def attention(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, **others: Any) -> torch.Tensor:
    attend = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
    found: torch.Tensor = attend(Module(), query, key, key, mask, **others)[0]
    return found


def states(device: str, dtype: torch.dtype, tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys of three rows: without padding, with some, and with nothing but the last token."""
    torch.manual_seed(0)
    query, key = (torch.randn(3, heads, n, 32, device=device).to(dtype) for heads, n in ((4, tokens), (2, 512)))
    mask = torch.zeros(3, 1, tokens, 512, dtype=torch.bool, device=device)
    for row, first in enumerate((0, 40, 299)):
        mask[row, :, :, first:300] = True
    return query, key, mask


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_results_are_those_of_boolean_masks(device: str, dtype: torch.dtype) -> None:
    query, key, mask = states(device, dtype)
    wanted = attention(query, key, mask)
    key[:, :, 300:] = 1000.0  # what is hidden has no weight, not a small one
    with float_masks():
        for _ in range(3):
            torch.testing.assert_close(attention(query, key, mask), wanted)


def test_a_mask_is_made_once() -> None:
    query, key, mask = states("cpu", torch.float32)
    with float_masks(), Counted() as counted:
        first = attention(query, key, mask)
        once = {name: counted.ops[name] for name in OF_MASKS}
        assert sum(once.values()) > 0
        attention(query, key, mask)
        assert {name: counted.ops[name] for name in OF_MASKS} == once
        mask[:, :, :, :299] = False  # another mask in the same place
        assert not torch.equal(attention(query, key, mask), first)
        half = attention(query.half(), key.half(), mask)
        assert half.dtype == torch.float16


def test_rows_that_see_nothing_are_left_to_torch(device: str) -> None:
    query, key, mask = states(device, torch.float32, tokens=5)
    mask[1, :, :3] = False
    wanted = attention(query, key, mask)
    with float_masks():
        found = attention(query, key, mask)
    assert torch.isfinite(found).all()
    assert torch.equal(found, wanted)


def test_other_threads_and_later_calls_have_transformers_own() -> None:
    query, key, mask = states("cpu", torch.float32)
    seen: list[Counter[str]] = []

    def elsewhere() -> None:
        with Counted() as counted:
            attention(query, key, mask)
            attention(query, key, mask)
        seen.append(counted.ops)

    def broken_off() -> None:
        with float_masks():
            attention(query, key, mask)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            raise RuntimeError("broken off")

    elsewhere()
    with pytest.raises(RuntimeError, match="broken off"):
        broken_off()
    assert seen[0] == seen[1]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "mistral", "qwen3", "phi"])
def test_masks_of_a_pass_do_not_grow_with_layers(family: str, tmp_path: Path) -> None:
    found = []
    for num_layers in (2, 5):
        folder = tmp_path / str(num_layers)
        tiny_model(family, num_layers).save_pretrained(folder)
        engine = zinfer.init_inference(folder, device="cpu", enable_cuda_graph=True)
        assert engine.module.config._attn_implementation == "sdpa"
        engine.generate(input_ids=torch.arange(2, 11)[None], max_new_tokens=4, do_sample=False, pad_token_id=1)
        assert engine._acceleration._graphs is not None
        (graph,) = engine._acceleration._graphs._graphs.values()
        with Counted() as counted, torch.no_grad():
            for step in graph._steps:
                step()
        found.append({name: counted.ops[name] for name in OF_MASKS})
        attended = sum(count for name, count in counted.ops.items() if "attention" in name)
        assert attended == num_layers, counted.ops
        assert engine.module.config._attn_implementation == "sdpa"
        engine.destroy()
    assert found[0] == found[1]
