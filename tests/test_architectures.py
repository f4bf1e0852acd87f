"""Which class a config.json describes, and checkpoints as hubs have them: other heads beside, older names."""

from pathlib import Path

import pytest
import torch
from engines import loaded
from family_models import family_inputs, family_model
from loading_support import DISK, Tensors, changed, keep, refused
from transformers import AutoConfig, BertForMaskedLM, BertForPreTraining

from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.build import find_class


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("bart", "BartForConditionalGeneration"),
        ("bert", "BertForMaskedLM"),
        ("clip", "CLIPModel"),
        ("clip_text_model", "CLIPTextModel"),
        ("electra", "ElectraForMaskedLM"),
        ("llama", "LlamaForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTModel"),
        ("whisper", "WhisperForConditionalGeneration"),
    ],
)
def test_without_a_name_the_usual_class_of_the_family(model_type: str, class_name: str) -> None:
    assert find_class(AutoConfig.for_model(model_type)).__name__ == class_name


@pytest.mark.parametrize(
    ("model_type", "names", "class_name"),
    [
        ("bert", ["BertModel"], "BertModel"),
        ("bert", ["Nonesuch", "BertForSequenceClassification"], "BertForSequenceClassification"),
        ("bert", ["BertForTokenClassification"], "BertForTokenClassification"),
        ("llama", ["LlamaForCausalLMOfOurs"], "LlamaForCausalLM"),
        ("llama", ["BertModel"], "LlamaForCausalLM"),  # of another family
        ("llama", ["LlamaConfig", "nn", "load_tool"], "LlamaForCausalLM"),  # no model
    ],
)
def test_the_class_that_is_named(model_type: str, names: list[str], class_name: str) -> None:
    assert find_class(AutoConfig.for_model(model_type, architectures=names)).__name__ == class_name


@pytest.mark.parametrize("model_type", ["t5", "clip", "vit"])
def test_a_name_that_transformers_does_not_have(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, architectures=["Nonesuch"])
    with pytest.raises(ConfigError, match=f"architectures names Nonesuch, and there is none for a {model_type} model"):
        find_class(config)


def test_a_masked_language_model_beside_what_it_was_trained_with(tmp_path: Path) -> None:
    """As bert-base-uncased: a pooler and a next-sentence head that nobody asked for, and norms by their old names."""
    model = BertForPreTraining(family_model("bert", "BertModel").config).eval()
    model.save_pretrained(tmp_path / "new")

    def age(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".LayerNorm." in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
        assert "bert.pooler.dense.weight" in tensors
        assert "cls.seq_relationship.weight" in tensors

    old = changed(tmp_path / "new", tmp_path / "old", age, architectures=["BertForMaskedLM"])
    inputs = family_inputs(model)
    with torch.no_grad():
        wanted = BertForMaskedLM.from_pretrained(old).eval()(**inputs).logits
    for config in ({}, DISK):
        with loaded(old, config) as engine:
            torch.testing.assert_close(engine(**inputs).logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_head_that_the_file_lacks_is_not_made_up(tmp_path: Path) -> None:
    family_model("bert", "BertModel").save_pretrained(tmp_path / "base")
    named = changed(tmp_path / "base", tmp_path / "named", keep, architectures=["BertForSequenceClassification"])
    with pytest.raises(CheckpointError, match=r"2 weights are missing: classifier\.weight, classifier\.bias"):
        refused(named)
