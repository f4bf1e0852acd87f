"""Decode passes compute experts as prefill does: the weights of no expert are copied for each token."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE
from ragged_models import tiny_model
from torch import nn
from transformers import GenerationMixin
from transformers.integrations import moe

import zinfer
from zinfer.model.build import report_device

IDS = torch.randint(2, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))


PLAIN = GenerationMixin._optimize_model_for_decode


@contextmanager
def on_an_accelerator(model: Any) -> Iterator[None]:
    """What transformers does before decode passes on another device than a CPU, and after them."""
    computes_on = model.device
    report_device(model, torch.device("cuda"))
    with PLAIN(model):
        report_device(model, computes_on)
        yield


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_no_weights_are_copied_for_each_token(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would on an accelerator."""
    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", on_an_accelerator)
    implementations: set[str] = set()
    for name in ("batched_mm", "grouped_mm"):
        plain = moe.ALL_EXPERTS_FUNCTIONS[name]

        def noted(module: nn.Module, *args: object, name: str = name, plain: object = plain) -> object:
            implementations.add(name)
            assert callable(plain)
            return plain(module, *args)

        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, name, noted)
    tiny_model(family).save_pretrained(tmp_path)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    engine = zinfer.init_inference(tmp_path, device="cpu")
    try:
        tokens = engine.generate(input_ids=IDS, **options)
        assert implementations == {"grouped_mm"}
        assert engine.module.config._experts_implementation == "grouped_mm"
    finally:
        engine.destroy()
    assert "_optimize_model_for_decode" not in engine.module.__dict__
    model = tiny_model(family)
    assert torch.equal(model.generate(input_ids=IDS, **options), tokens)
    assert implementations == {"grouped_mm", "batched_mm"}
