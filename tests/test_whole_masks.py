"""Masks that hide nothing are left out while a graph is recorded, and no others."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import left_padded, random_prompts
from family_models import family_model
from graph_support import stand_in
from torch.utils import _pytree as pytree
from transformers import BertConfig, DynamicCache, LlamaConfig, masking_utils

import zinfer
from zinfer.graphs.masks import Padding, padding_of, spared

__all__ = ["stand_in"]  # a fixture

NAMES = ("is_tracing", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
IDS = torch.zeros(2, 7, dtype=torch.long)
ONES = torch.ones(2, 7, dtype=torch.long)
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("args", "kwargs", "padding"),
    [
        ((IDS,), {}, Padding.NOT_GIVEN),
        ((), {"attention_mask": None, "past_key_values": None}, Padding.NOT_GIVEN),
        ((), {"attention_mask": ONES}, Padding.NONE),
        ((), {"attention_mask": PADDED}, Padding.UNKNOWN),
        ((), {"attention_mask": ONES[:, None, None, :]}, Padding.UNKNOWN),
        ((), {"past_key_values": DynamicCache()}, Padding.UNKNOWN),
        ((IDS, PADDED), {}, Padding.UNKNOWN),
        ((), {"attention_mask": ONES, "decoder_attention_mask": PADDED}, Padding.UNKNOWN),
        ((), {"decoder_attention_mask": PADDED}, Padding.UNKNOWN),
        ((), {"attention_mask": ONES, "pixel_values": ONES}, Padding.UNKNOWN),
    ],
)
def test_what_is_known_of_padding(args: tuple[Any, ...], kwargs: dict[str, Any], padding: Padding) -> None:
    assert padding_of(args, kwargs) is padding


def mask_of(kind: str, mask: torch.Tensor | None) -> torch.Tensor | None:
    x = torch.zeros(2, 7, 64)
    if kind == "both ways":
        config = BertConfig(hidden_size=64, attn_implementation="sdpa")
        return masking_utils.create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=mask)
    config = LlamaConfig(hidden_size=64, attn_implementation="sdpa")
    return masking_utils.create_causal_mask(config=config, inputs_embeds=x, attention_mask=mask, past_key_values=None)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a graph is recorded."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("kind", ["both ways", "causal"])
def test_masks_are_left_out_as_far_as_that_is_known(kind: str) -> None:
    plain = [getattr(masking_utils, name) for name in NAMES]
    assert mask_of(kind, ONES) is not None, "transformers has another way by now"
    with spared(Padding.NONE):
        assert mask_of(kind, ONES) is None
        assert mask_of(kind, None) is None
    with spared(Padding.NOT_GIVEN):
        assert mask_of(kind, PADDED) is not None
        assert mask_of(kind, None) is None
    with spared(Padding.UNKNOWN):
        assert mask_of(kind, ONES) is not None
    with pytest.raises(OSError, match="broken"), spared(Padding.NONE):
        raise OSError("broken")
    assert [getattr(masking_utils, name) for name in NAMES] == plain


def test_other_threads_keep_their_padding() -> None:
    found: list[torch.Tensor | None] = []
    thread = threading.Thread(target=lambda: found.append(mask_of("causal", PADDED)))
    with spared(Padding.NONE):
        thread.start()
        thread.join()
    assert found[0] is not None
    assert not found[0].all()


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("family", "class_name", "how"),
    [
        ("llama", "LlamaForCausalLM", "by position"),
        ("bert", "BertModel", "by position"),
        ("llama", "LlamaForCausalLM", "by name"),
        ("bart", "BartForConditionalGeneration", "of the decoder"),
    ],
)
def test_padding_counts_in_every_call(family: str, class_name: str, how: str, device: str, tmp_path: Path) -> None:
    model = family_model(family, class_name)
    model.save_pretrained(tmp_path)
    ids, mask = (each.to(device) for each in left_padded(random_prompts(3)))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "by position": ((ids, mask), {}),
        "by name": ((), {"input_ids": ids, "attention_mask": mask}),
        "of the decoder": ((), {"input_ids": ids, "decoder_input_ids": ids, "decoder_attention_mask": mask}),
    }
    args, kwargs = calls[how]
    if model.can_generate():
        kwargs["use_cache"] = False
    engine = zinfer.init_inference(tmp_path, device=device, enable_cuda_graph=True)
    with torch.no_grad():
        first, *others = [engine(*args, **kwargs)[0] for _ in range(3)]
        whole = engine(
            input_ids=ids,
            **{name: value for name, value in kwargs.items() if name in ("use_cache", "decoder_input_ids")},
        )[0]
        shown = mask.bool()
        model.set_attn_implementation("sdpa")  # what is written out takes the softmax in float32
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs))
        exact = model.double()(*args, **kwargs)[0].to(device)[shown]
    assert engine.graphs.captured == 1
    # A replay may attend by another kernel than Python's launch, which rounds as much and otherwise.
    rounding = max(float((first[shown] - exact).abs().max()), 1e-5)
    assert (first[shown] - whole[shown]).abs().max() > 100 * rounding, "padding that is seen by nobody"
    for other in others:
        assert (other[shown] - exact).abs().max() <= 4 * rounding
    engine.destroy()
