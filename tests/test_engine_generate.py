"""An engine in use has transformers' own semantics: `generate`, `forward`, parts of the module."""

from typing import Any

import pytest
import torch
from checkpoints import left_padded, random_prompts
from engine_support import NUM_LAYERS, PROMPT, Tensors, batch, eager, engine, folder, greedy, logits_of, resident
from engines import distinct_tokens
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

import zinfer

__all__ = ["batch", "eager", "engine", "folder", "resident"]  # fixtures


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 26, "do_sample": False},
        {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False},
        {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=1)},
        {"generation_config": GenerationConfig(max_length=24, do_sample=False, pad_token_id=1)},
        {"max_new_tokens": 8, "num_beams": 2, "do_sample": False},
        {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3},
        {"max_new_tokens": 8, "do_sample": True, "num_beams": 2},
        {"max_new_tokens": 8, "do_sample": False, "repetition_penalty": 1.4},
        {"max_new_tokens": 8, "do_sample": False, "use_cache": False},
        {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 9},
    ],
    ids=lambda options: " ".join(options),
)
def test_generate_options(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, batch: Tensors, options: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    expected = eager.generate(**batch, **options)
    torch.manual_seed(5)
    tokens = engine.generate(**batch, **options)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, expected)
    assert distinct_tokens(tokens) >= 4


def test_generate_with_scores(
    engine: zinfer.InferenceEngine, resident: zinfer.InferenceEngine, eager: PreTrainedModel
) -> None:
    """Bit-equal to the resident engine; to transformers' as far as a sum depends on where in memory its terms lie."""
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 5, "do_sample": False}
    expected, twin, found = (model.generate(PROMPT, **options) for model in (eager, resident, engine))
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, twin.scores, strict=True))
    for a, b in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
def test_inputs_by_position_by_name_and_as_inputs(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    expected = greedy(eager)
    assert torch.equal(engine.generate(PROMPT, max_new_tokens=10, do_sample=False), expected)
    assert torch.equal(engine.generate(inputs=PROMPT, max_new_tokens=10, do_sample=False), expected)
    assert torch.equal(engine.module.generate(PROMPT, max_new_tokens=10, do_sample=False), expected)
    settings = GenerationConfig(max_new_tokens=10, do_sample=False)
    assert torch.equal(engine.generate(PROMPT, settings), expected)


def test_embeddings_in_place_of_ids(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    embeddings = eager.get_input_embeddings()(PROMPT).detach()
    expected = greedy(eager, input_ids=None, inputs_embeds=embeddings)
    assert torch.equal(greedy(engine, input_ids=None, inputs_embeds=embeddings), expected)


def test_either_padding_side_gives_each_prompts_own_logits(engine: zinfer.InferenceEngine) -> None:
    prompts = random_prompts(3, seed=21)
    alone = [logits_of(engine, input_ids=torch.tensor([prompt]))[0, -1] for prompt in prompts]
    input_ids, mask = left_padded(prompts)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    left = logits_of(engine, input_ids=input_ids, attention_mask=mask, position_ids=positions)[:, -1]
    right_ids, right_mask = input_ids.clone(), mask.clone()
    for row, prompt in enumerate(prompts):
        right_ids[row] = torch.tensor(prompt + [1] * (input_ids.shape[1] - len(prompt)))
        right_mask[row] = torch.tensor([1] * len(prompt) + [0] * (input_ids.shape[1] - len(prompt)))
    right = logits_of(engine, input_ids=right_ids, attention_mask=right_mask)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(left[row], alone[row], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(right[row, len(prompt) - 1], alone[row], rtol=1e-4, atol=1e-4)


def test_forward_with_labels_hidden_states_and_tuples(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, batch: Tensors
) -> None:
    with torch.no_grad():
        expected = eager(**batch, labels=batch["input_ids"], output_hidden_states=True)
    found = engine(**batch, labels=batch["input_ids"], output_hidden_states=True)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    assert len(found.hidden_states) == NUM_LAYERS + 1
    assert all(torch.equal(a, b) for a, b in zip(found.hidden_states, expected.hidden_states, strict=True))
    assert torch.equal(engine(batch["input_ids"], batch["attention_mask"], return_dict=False)[0], expected.logits)
    assert not found.logits.requires_grad


def test_forward_goes_on_from_a_cache(
    engine: zinfer.InferenceEngine, resident: zinfer.InferenceEngine, eager: PreTrainedModel
) -> None:
    with torch.no_grad():
        start = eager(PROMPT, use_cache=True)
        expected = eager(torch.tensor([[8]]), past_key_values=start.past_key_values).logits
    found = []
    for model in (resident, engine):
        start = model(PROMPT, use_cache=True)
        found.append(model(torch.tensor([[8]]), past_key_values=start.past_key_values).logits)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
def test_a_logits_processor_may_ask_the_engine(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    """As classifier-free guidance does: a forward between two passes of `generate`, in the same thread."""

    def guided(model: Any) -> torch.Tensor:
        def guide(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 2 * logits_of(model, input_ids=input_ids[:, 1:])[:, -1]

        return greedy(model, logits_processor=LogitsProcessorList([guide]))

    expected = guided(eager)
    assert not torch.equal(expected, greedy(eager))
    assert torch.equal(guided(engine), expected)


def test_the_module_says_where_it_computes(engine: zinfer.InferenceEngine) -> None:
    assert engine.device == engine.module.device == torch.device("cpu")
    assert engine.module.dtype == torch.float32
    assert not engine.module.training
    assert isinstance(engine, nn.Module)


def test_parts_of_the_module_may_be_called(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    with torch.no_grad():
        expected = eager.model(PROMPT).last_hidden_state
        assert torch.equal(engine.module.model(PROMPT).last_hidden_state, expected)
        assert torch.equal(engine.module.get_input_embeddings()(PROMPT), eager.get_input_embeddings()(PROMPT))
        assert torch.equal(engine.module.lm_head(expected), eager.lm_head(expected))
    assert torch.equal(greedy(engine), greedy(eager))
