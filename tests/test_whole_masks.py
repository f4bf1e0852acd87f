"""Masks that hide nothing are left out while a graph is recorded, and no others."""

from typing import Any

import pytest
import torch
from transformers import BertConfig, DynamicCache, LlamaConfig, masking_utils

from zinfer.graphs.whole_masks import hides_nothing, spared

ONES = torch.ones(2, 7, dtype=torch.long)
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("kwargs", "whole"),
    [
        ({}, True),
        ({"attention_mask": None, "past_key_values": None}, True),
        ({"attention_mask": ONES}, True),
        ({"attention_mask": PADDED}, False),
        ({"attention_mask": ONES[:, None, None, :]}, False),
        ({"past_key_values": DynamicCache()}, False),
    ],
)
def test_what_hides_nothing(kwargs: dict[str, Any], whole: bool) -> None:
    assert hides_nothing(kwargs) is whole


@pytest.mark.parametrize("mask", [None, ONES], ids=["none", "ones"])
@pytest.mark.parametrize("kind", ["both ways", "causal"])
def test_masks_are_left_out_as_they_are_without_a_capture(
    monkeypatch: pytest.MonkeyPatch, kind: str, mask: torch.Tensor | None
) -> None:
    def made() -> torch.Tensor | None:
        x = torch.zeros(2, 7, 64)
        if kind == "both ways":
            config = BertConfig(hidden_size=64, attn_implementation="sdpa")
            return masking_utils.create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=mask)
        config = LlamaConfig(hidden_size=64, attn_implementation="sdpa")
        return masking_utils.create_causal_mask(
            config=config, inputs_embeds=x, attention_mask=mask, past_key_values=None
        )

    names = ("is_tracing", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
    plain = [getattr(masking_utils, name) for name in names]
    assert made() is None
    with spared():
        assert made() is None
    assert [getattr(masking_utils, name) for name in names] == plain
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)  # as while a graph is recorded
    if mask is not None:
        assert made() is not None, "transformers has another way by now"
    with spared():
        assert made() is None
    with pytest.raises(OSError, match="broken"), spared():
        raise OSError("broken")
    assert masking_utils._ignore_causal_mask_sdpa is plain[1]
