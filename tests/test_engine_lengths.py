"""More tokens than the model or the configuration has room for are refused before any compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MAX_POSITIONS, tiny_checkpoint
from engine_support import PROMPT, eager, engine, folder, greedy, moved
from engines import engine_for
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import zinfer

__all__ = ["eager", "engine", "folder"]  # fixtures


@pytest.fixture
def long_prompt() -> torch.Tensor:
    return torch.randint(2, 131, (2, MAX_POSITIONS - 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 9},
        {"max_length": MAX_POSITIONS + 1},
        {"generation_config": GenerationConfig(max_new_tokens=9)},
        {"generation_config": GenerationConfig(max_length=MAX_POSITIONS + 1)},
        {"min_new_tokens": 9, "max_new_tokens": 9},
        {"max_new_tokens": 9, "num_beams": 2},
        {"generation_config": GenerationConfig(max_new_tokens=2), "max_new_tokens": 9},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("with_mask", [True, False])
def test_more_tokens_than_positions_are_refused_before_any_compute(
    engine: zinfer.InferenceEngine, long_prompt: torch.Tensor, options: dict[str, Any], with_mask: bool
) -> None:
    before = moved(engine)
    mask = {"attention_mask": torch.ones_like(long_prompt)} if with_mask else {}
    with pytest.raises(ValueError, match=r"120 tokens and 9 new ones are more than 128 \(the model's positions\)"):
        engine.generate(input_ids=long_prompt, do_sample=False, **mask, **options)
    with pytest.raises(ValueError, match="120 tokens and 9 new ones"):
        engine.generate(long_prompt, do_sample=False, **mask, **options)
    assert moved(engine) == before


def test_a_generation_config_by_position_counts(engine: zinfer.InferenceEngine, long_prompt: torch.Tensor) -> None:
    before = moved(engine)
    with pytest.raises(ValueError, match="120 tokens and 9 new ones"):
        engine.generate(long_prompt, GenerationConfig(max_new_tokens=9, do_sample=False))
    assert moved(engine) == before


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_without_a_length_transformers_own_default_counts(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, long_prompt: torch.Tensor
) -> None:
    """Its 20 new tokens would not fit; it stops at the last position itself, or the call is refused."""
    mask = torch.ones_like(long_prompt)
    short = engine.generate(long_prompt[:, :30], attention_mask=mask[:, :30], do_sample=False)
    assert torch.equal(short, eager.generate(long_prompt[:, :30], attention_mask=mask[:, :30], do_sample=False))
    refused, tokens = False, long_prompt
    try:
        tokens = engine.generate(long_prompt, attention_mask=mask, do_sample=False)
    except ValueError:
        refused = True
    assert refused or tokens.shape[1] <= MAX_POSITIONS


def test_embeddings_are_counted_as_tokens(engine: zinfer.InferenceEngine) -> None:
    before = moved(engine)
    with pytest.raises(ValueError, match="120 tokens and 9 new ones"):
        engine.generate(inputs_embeds=torch.zeros(1, 120, 64), max_new_tokens=9)
    assert moved(engine) == before


def test_the_last_position_is_usable(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, long_prompt: torch.Tensor
) -> None:
    options = {"attention_mask": torch.ones_like(long_prompt), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(engine.generate(long_prompt, **options), eager.generate(long_prompt, **options))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(engine: zinfer.InferenceEngine, eager: PreTrainedModel, side: str) -> None:
    """122 columns, at most 118 of them text."""
    ids = torch.randint(2, 131, (2, 122), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    padding = slice(None, 4) if side == "left" else slice(-4, None)
    ids[:, padding], mask[:, padding] = 1, 0
    options = {"input_ids": ids, "attention_mask": mask, "do_sample": False}
    assert torch.equal(engine.generate(**options, max_new_tokens=10), eager.generate(**options, max_new_tokens=10))
    with pytest.raises(ValueError, match="118 tokens and 11 new ones"):
        engine.generate(**options, max_new_tokens=11)


def test_max_out_tokens(folder: Path, eager: PreTrainedModel) -> None:
    with engine_for(folder, "disk", max_out_tokens=12) as engine:
        before = moved(engine)
        with pytest.raises(ValueError, match=r"5 tokens and 8 new ones are more than 12 \(max_out_tokens\)"):
            greedy(engine, max_new_tokens=8)
        with pytest.raises(ValueError, match=r"has 13 tokens, which leaves no room .* 12 \(max_out_tokens\)"):
            engine.generate(torch.full((1, 13), 5), max_new_tokens=1)
        assert moved(engine) == before
        assert torch.equal(greedy(engine, max_new_tokens=7), greedy(eager, max_new_tokens=7))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("rope", "stretched"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4 * MAX_POSITIONS),
        ({"rope_type": "dynamic", "factor": 2.0}, 2 * MAX_POSITIONS),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 4 * 64),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, MAX_POSITIONS),
    ],
    ids=lambda value: str(value),
)
def test_positions_that_rotations_are_scaled_to_are_usable(
    folder: Path, tmp_path: Path, rope: dict[str, Any], stretched: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.rope_parameters = {"rope_theta": 10000.0, **rope}
    model.save_pretrained(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(2, 131, (1, stretched - 8), generator=torch.Generator().manual_seed(1))
    with engine_for(tmp_path, "disk") as engine:
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
        wanted = eager.generate(ids, max_new_tokens=8, **options)
        assert torch.equal(engine.generate(ids, max_new_tokens=8, **options), wanted)
        with pytest.raises(ValueError, match=rf"9 new ones are more than {stretched} \(the model's positions\)"):
            engine.generate(ids, max_new_tokens=9, **options)


def test_gpt2_has_an_end_too(tmp_path: Path) -> None:
    """Learned positions: one more would be an index out of range."""
    folder = tiny_checkpoint("gpt2", tmp_path / "gpt2", num_layers=2)
    with engine_for(folder, "disk") as engine:
        ids = torch.full((1, 120), 7)
        with pytest.raises(ValueError, match=r"120 tokens and 9 new ones are more than 128 \(the model's positions\)"):
            engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9)
        assert engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8).shape == (1, 128)


def test_a_forward_past_the_last_position_is_refused(engine: zinfer.InferenceEngine, long_prompt: torch.Tensor) -> None:
    before = moved(engine)
    ids = torch.cat([long_prompt, long_prompt[:, :9]], dim=1)
    for call in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        with pytest.raises(ValueError, match=r"129 tokens are more than 128 \(the model's positions\)"):
            engine(**call)
    with pytest.raises(ValueError, match="129 tokens are more than"):
        engine(ids)
    with pytest.raises(ValueError, match="129 tokens are more than"):
        engine(inputs_embeds=torch.zeros(1, 129, 64))
    assert moved(engine) == before


def test_a_forward_counts_what_its_cache_holds(engine: zinfer.InferenceEngine, long_prompt: torch.Tensor) -> None:
    cache = engine(long_prompt, use_cache=True).past_key_values
    before = moved(engine)
    more = long_prompt[:, :9]
    with pytest.raises(ValueError, match=r"129 tokens are more than 128 \(the model's positions\)"):
        engine(more, past_key_values=cache)
    with pytest.raises(ValueError, match="129 tokens are more than"):
        engine(more, past_key_values=cache, attention_mask=torch.ones(2, 129, dtype=torch.int64))
    assert moved(engine) == before
    assert engine(more[:, :8], past_key_values=cache).logits.shape[:2] == (2, 8)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_max_out_tokens_holds_for_forward_and_for_the_default_length(folder: Path, eager: PreTrainedModel) -> None:
    """transformers makes 20 new tokens where nothing says how many."""
    with engine_for(folder, "disk", max_out_tokens=24) as engine:
        cache = engine(torch.full((1, 20), 5), use_cache=True).past_key_values
        before = moved(engine)
        with pytest.raises(ValueError, match=r"25 tokens are more than 24 \(max_out_tokens\)"):
            engine(torch.full((1, 25), 5))
        with pytest.raises(ValueError, match=r"25 tokens are more than 24 \(max_out_tokens\)"):
            engine(PROMPT, past_key_values=cache)
        with pytest.raises(ValueError, match=r"5 tokens and 20 new ones are more than 24 \(max_out_tokens\)"):
            engine.generate(PROMPT, do_sample=False)
        assert moved(engine) == before
        assert torch.equal(
            engine.generate(PROMPT[:, :4], do_sample=False), eager.generate(PROMPT[:, :4], do_sample=False)
        )
