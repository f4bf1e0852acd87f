"""Positions as each kind of model counts them: more tokens are refused, and as many as there are run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import loaded
from family_models import family_model

import zinfer


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    made: list[zinfer.InferenceEngine] = []

    def make(model_type: str, class_name: str, **options: Any) -> zinfer.InferenceEngine:
        made.append(zinfer.init_inference(family_model(model_type, class_name), device="cpu", **options))
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def ids(num_tokens: int) -> torch.Tensor:
    return torch.full((2, num_tokens), 7)


@pytest.mark.parametrize(
    ("model_type", "class_name", "positions"),
    [
        ("bert", "BertModel", 64),
        ("roberta", "RobertaForMaskedLM", 62),  # counted from behind the padding token's id, 1
        ("distilbert", "DistilBertModel", 64),
        ("electra", "ElectraModel", 64),
        ("clip", "CLIPTextModel", 64),
    ],
)
def test_an_encoder_has_positions_for_padding_too(
    engines: Any, model_type: str, class_name: str, positions: int
) -> None:
    engine = engines(model_type, class_name)
    engine(input_ids=ids(positions))
    with pytest.raises(
        ValueError, match=rf"{positions + 1} tokens are more than {positions} \(the model's positions\)"
    ):
        engine(input_ids=ids(positions + 1))
    mask = torch.ones(2, positions + 1, dtype=torch.long)
    mask[:, 10:] = 0
    if model_type == "roberta":
        padded = ids(positions + 1).masked_fill(mask == 0, 1)
        engine(input_ids=padded, attention_mask=mask)
    else:
        with pytest.raises(ValueError, match=r"more than .*the model's positions"):
            engine(input_ids=ids(positions + 1), attention_mask=mask)


def test_bart_has_positions_for_input_and_output_each(engines: Any) -> None:
    engine = engines("bart", "BartForConditionalGeneration")
    assert engine.generate(ids(64), max_new_tokens=20, do_sample=False).shape[1] == 21
    with pytest.raises(ValueError, match=r"65 tokens are more than 64 \(the encoder's positions\); shorten it"):
        engine.generate(ids(65), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"64 new tokens are more than 63 \(the decoder's positions, less"):
        engine.generate(input_ids=ids(4), max_new_tokens=64)
    with pytest.raises(ValueError, match="64 new tokens are more than 63"):
        engine.generate(input_ids=ids(4), max_length=65)
    engine(input_ids=ids(64), decoder_input_ids=ids(64))
    with pytest.raises(ValueError, match="64 new tokens"):
        engine(input_ids=ids(64), decoder_input_ids=ids(65))
    with pytest.raises(ValueError, match="65 tokens"):
        engine(ids(65), decoder_input_ids=ids(2))


def test_t5_has_positions_without_end(engines: Any) -> None:
    engine = engines("t5", "T5ForConditionalGeneration")
    assert engine.module.config.n_positions == 8
    assert engine.generate(ids(40), max_new_tokens=12, do_sample=False).shape[1] == 13


def test_a_stated_limit_is_of_input_and_output_together(engines: Any) -> None:
    engine = engines("t5", "T5ForConditionalGeneration", max_out_tokens=16)
    engine.generate(ids(8), max_new_tokens=7)
    with pytest.raises(ValueError, match=r"new ones are more than 15 \(max_out_tokens, less"):
        engine.generate(ids(8), max_new_tokens=8)


def test_sound_has_no_tokens(engines: Any) -> None:
    engine = engines("whisper", "WhisperForConditionalGeneration")
    sound = torch.randn(1, 8, 32)
    engine.generate(sound, max_new_tokens=20, do_sample=False)
    engine.generate(input_features=sound, max_new_tokens=20, do_sample=False)
    with pytest.raises(ValueError, match=r"32 new tokens are more than 31 \(the decoder's positions, less"):
        engine.generate(sound, max_new_tokens=32)


def test_pictures_have_none_either(engines: Any) -> None:
    engines("clip", "CLIPVisionModel", max_out_tokens=2)(torch.randn(2, 3, 16, 16))
    with (
        loaded(family_model("clip", "CLIPModel")) as engine,
        pytest.raises(ValueError, match="65 tokens are more than"),
    ):
        engine(input_ids=ids(65), pixel_values=torch.randn(2, 3, 16, 16))
