"""What a call is given reaches the device in the containers that it came in."""

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from checkpoints import random_prompts
from engines import loaded
from family_models import family_model
from transformers import BatchEncoding, LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

import zinfer
from zinfer.engine.call_args import moved

META = torch.device("meta")
HERE = torch.device("cpu")
PROMPT = torch.tensor(random_prompts(1, seed=4, min_tokens=8, max_tokens=8))
Pair = namedtuple("Pair", ["hidden", "name"])
_FAMILIES = [("t5", "T5ForConditionalGeneration"), ("bart", "BartForConditionalGeneration")]


@pytest.fixture(scope="module", params=_FAMILIES, ids=lambda each: each[0])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[zinfer.InferenceEngine, PreTrainedModel]]:
    """An engine over an encoder-decoder, and the same model beside it."""
    with loaded(family_model(*request.param)) as engine:
        yield engine, family_model(*request.param)


def ones() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        [ones(), "text"],
        (ones(), None),
        Pair(ones(), "text"),
        {"a": ones()},
        OrderedDict(a=ones()),
        BatchEncoding({"a": ones()}),
        BaseModelOutput(last_hidden_state=ones()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_their_classes(value: Any) -> None:
    found = moved(value, META)
    assert type(found) is type(value)
    assert len(found) == len(value)
    first = next(iter(found.values())) if hasattr(found, "values") else found[0]
    before = next(iter(value.values())) if hasattr(value, "values") else value[0]
    assert first.is_meta
    assert not before.is_meta, "what the caller holds is left alone"


def test_an_outputs_attributes_are_its_items() -> None:
    given = Seq2SeqLMOutput(logits=ones(), encoder_hidden_states=(ones(), ones()))
    found = moved(given, META)
    assert found.logits is found["logits"]
    assert found.logits.is_meta
    assert [each.is_meta for each in found.encoder_hidden_states] == [True, True]
    assert found.loss is None


def test_mappings_that_cannot_be_written_become_dicts() -> None:
    found = moved(MappingProxyType({"a": ones(), "b": 1}), META)
    assert found["a"].is_meta
    assert found["b"] == 1


@pytest.mark.parametrize("value", [[ones()], {"a": (ones(),)}, BaseModelOutput(last_hidden_state=ones())])
def test_what_is_on_the_device_is_handed_on_as_it_is(value: Any) -> None:
    assert moved(value, HERE) is value


def test_lists_of_callables_are_handed_on_as_they_are() -> None:
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    assert moved(processors, META) is processors


def test_generate_with_encoder_outputs(pair: tuple[zinfer.InferenceEngine, PreTrainedModel]) -> None:
    engine, model = pair
    with torch.no_grad():
        given = model.get_encoder()(PROMPT)
    expected = model.generate(encoder_outputs=given, max_new_tokens=8, do_sample=False)
    assert len(set(expected[0].tolist())) >= 3
    assert torch.equal(engine.generate(encoder_outputs=given, max_new_tokens=8, do_sample=False), expected)


def test_generate_with_an_assistant(pair: tuple[zinfer.InferenceEngine, PreTrainedModel]) -> None:
    engine, model = pair
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    found = engine.generate(PROMPT, max_new_tokens=8, do_sample=False, assistant_model=model)
    assert torch.equal(found, expected)
