"""Every class of every family that `zinfer.model.families` lists says what transformers says, resident and streamed."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ragged_models
import torch
from accelerate import init_empty_weights
from engines import engine_for, loaded
from family_models import CASES, Tensors, family_inputs, family_model, forward_inputs, outputs_of
from loading_support import DISK, HOST
from transformers import PreTrainedModel
from typer.testing import CliRunner

import zinfer
from zinfer.cli import app
from zinfer.cli.families import families_markdown
from zinfer.config import resolve_settings
from zinfer.errors import ConfigError, PlanError
from zinfer.evaluation.calibrate import measure_squares
from zinfer.model.families import FAMILIES, Family
from zinfer.model.outline import read_outline
from zinfer.weights.slab_matrix import SlabMatrix

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
NUM_NEW_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """A class with its checkpoint, and what plain transformers makes of it."""

    family: Family
    folder: Path
    model: PreTrainedModel
    inputs: Tensors

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def outputs(self, model: Any) -> Tensors:
        with torch.no_grad():
            return outputs_of(model(**forward_inputs(self.model, self.inputs), output_hidden_states=True))

    def texts(self, model: Any, **options: Any) -> torch.Tensor:
        found: torch.Tensor = model.generate(**self.inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, **options)
        return found[:, -NUM_NEW_TOKENS:]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].model_type}-{case[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, class_name = request.param
    folder = tmp_path_factory.mktemp(class_name)
    model = family_model(family.model_type, class_name)
    model.save_pretrained(folder)
    return Case(family, folder, type(model).from_pretrained(folder).eval(), family_inputs(model))


@pytest.fixture(scope="module")
def streamed(case: Case) -> Iterator[zinfer.InferenceEngine]:
    with engine_for(case.folder, "disk") as engine:
        yield engine


def check(case: Case, engine: zinfer.InferenceEngine) -> None:
    wanted, found = case.outputs(case.model), case.outputs(engine)
    assert found.keys() == wanted.keys()
    assert any("hidden_states" in name for name in wanted) or "clip" in case.family.model_type
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def check_rounding(case: Case, engine: zinfer.InferenceEngine) -> None:
    """As near to what float64 says as transformers is: how far both are depends on the order of a CPU's sums."""
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in case.inputs.items()}
    exact = replace(case, inputs=inputs).outputs(deepcopy(case.model).double())
    wanted, found = case.outputs(case.model), case.outputs(engine)
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        scale = tensor.abs().max().clamp(min=1)
        own_error, error = ((each[name] - tensor).abs().max() / scale for each in (wanted, found))
        assert error <= 8 * own_error + 1e-5, name


@pytest.mark.sampled(6)
def test_outputs_and_texts_from_disk(case: Case, streamed: zinfer.InferenceEngine) -> None:
    assert type(streamed.module).__name__ == type(case.model).__name__
    stats = streamed.stats()
    assert stats.disk_bytes_per_pass > 0
    check(case, streamed)
    check(case, streamed)
    if not case.model.can_generate():
        with pytest.raises(ConfigError, match="has no such method"):
            streamed.generate(**case.inputs)
        return
    wanted = case.texts(case.model)
    assert len(set(wanted.flatten().tolist())) > 4, "a text that says nothing"
    read = streamed.stats().bytes_read_disk
    assert torch.equal(case.texts(streamed), wanted)
    assert streamed.stats().bytes_read_disk >= read + (NUM_NEW_TOKENS - 1) * stats.disk_bytes_per_pass / 2
    if case.is_encoder_decoder:
        assert torch.equal(case.texts(streamed, use_cache=False), wanted)
        beams = case.texts(case.model, num_beams=2)
        assert torch.equal(case.texts(streamed, num_beams=2), beams)
        assert torch.equal(case.texts(streamed), wanted), "after another order of blocks"


@pytest.mark.sampled(13)
def test_outputs_and_texts_resident_with_fused_kernels(case: Case) -> None:
    with engine_for(case.folder, "resident", replace_with_kernel_inject=True) as engine:
        kinds = {kind for kinds in engine.injected.values() for kind in kinds.split("; ")}
        assert {kind for kind in kinds if not kind.endswith("in one product")} == set(case.family.fused)
        assert engine.stats().streamed_bytes_per_pass == 0
        (check_rounding if case.is_encoder_decoder else check)(case, engine)
        if case.model.can_generate():
            assert torch.equal(case.texts(engine), case.texts(case.model))


@pytest.mark.sampled(10)
def test_a_row_of_a_padded_batch_equals_the_row_alone(case: Case, streamed: zinfer.InferenceEngine) -> None:
    if "attention_mask" not in case.inputs or "pixel_values" in case.inputs:
        pytest.skip("takes no padding")
    generates = case.model.can_generate()
    together = case.texts(streamed) if generates else case.outputs(streamed)
    for number, mask in enumerate(case.inputs["attention_mask"].bool()):
        alone = Case(case.family, case.folder, case.model, {"input_ids": case.inputs["input_ids"][number, mask][None]})
        if generates:
            assert torch.equal(alone.texts(streamed)[0], together[number])
            continue
        for name, found in alone.outputs(streamed).items():
            num_tokens = int(mask.sum())
            row = together[name][number]
            wanted = row[:num_tokens] if row.shape[:1] == mask.shape else row
            torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("class_name", ["BertForMaskedLM", "CLIPModel", "T5ForConditionalGeneration"])
def test_a_module_in_memory_and_one_without_its_weights(class_name: str, tmp_path: Path) -> None:
    [family] = [family for family in FAMILIES if class_name in family.classes]
    model = family_model(family.model_type, class_name)
    case = Case(family, tmp_path, model, family_inputs(model))
    model.save_pretrained(tmp_path)
    wanted, texts = case.outputs(model), case.texts(model) if model.can_generate() else None
    with init_empty_weights():
        empty = type(model)(model.config)
    for given, config in ((empty, DISK | {"checkpoint": str(tmp_path)}), (model, HOST)):
        with loaded(given, config) as engine:
            for name, tensor in case.outputs(engine).items():
                torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-4)
            if texts is not None:
                assert torch.equal(case.texts(engine), texts)


def test_t5_in_float16_keeps_what_overflows_wide(tmp_path: Path) -> None:
    model = family_model("t5", "T5ForConditionalGeneration")
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=torch.float16).eval()
    assert half.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    inputs = forward_inputs(model, family_inputs(model))
    with torch.no_grad():
        wanted = half(**inputs).logits
    with engine_for(tmp_path, "resident", dtype=torch.float16) as engine:
        torch.testing.assert_close(engine(**inputs).logits, wanted, rtol=1e-3, atol=1e-2)
    with loaded(tmp_path, DISK, dtype=torch.float16) as engine:
        torch.testing.assert_close(engine(**inputs).logits, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "class_name",
    [
        "AlbertForMaskedLM",
        "BertForSequenceClassification",
        "CLIPModel",
        "DistilBertForMaskedLM",
        "ElectraForMaskedLM",
        "T5ForConditionalGeneration",
        "WhisperForConditionalGeneration",
    ],
)
def test_quantized_layers_stream_as_they_compute_resident(class_name: str, tmp_path: Path) -> None:
    [family] = [family for family in FAMILIES if class_name in family.classes]
    model = family_model(family.model_type, class_name)
    model.save_pretrained(tmp_path / "model")
    case = Case(family, tmp_path / "model", model, family_inputs(model))
    disk = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with loaded(case.folder, {"zinfer": {"quantization": {"bits": 8}}}) as engine:
        for block in engine._blocks:
            held = {tensor.name for tensor in block.block.layout.tensors if isinstance(tensor, SlabMatrix)}
            assert bool(held) == block.is_layer, (block.block.name, held)
        wanted = case.outputs(engine)
    with loaded(case.folder, disk | {"zinfer": {"quantization": {"bits": 8}}}) as engine:
        assert engine.stats().disk_bytes_per_pass > 0
        found = case.outputs(engine)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("class_name", "message"),
    [("BertModel", "a BertModel takes"), ("BartForConditionalGeneration", "a BartForConditionalGeneration takes")],
)
def test_what_is_not_known_of_other_models_than_decoders_is_said(class_name: str, message: str, tmp_path: Path) -> None:
    [family] = [family for family in FAMILIES if class_name in family.classes]
    family_model(family.model_type, class_name).save_pretrained(tmp_path)
    with loaded(tmp_path, DISK) as engine, pytest.raises(PlanError, match=message):
        engine.predict(batch_size=1, prompt_len=4, new_tokens=4)
    with pytest.raises(PlanError, match=r"state zinfer\.max_weight_memory"):
        zinfer.init_inference(tmp_path, {"zinfer": {"batch_size": 1, "prompt_len": 4, "new_tokens": 4}}, device="cpu")
    with pytest.raises(PlanError, match=message):
        read_outline(tmp_path)
    with pytest.raises(ConfigError, match="cannot run in ragged batches"):
        zinfer.LLM(tmp_path, device="cpu")
    with pytest.raises(ConfigError, match=f"only generating decoders can be measured on prompts, and {class_name}"):
        measure_squares(tmp_path, tmp_path / "prompts.jsonl", resolve_settings({"zinfer": {"device": "cpu"}}))


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(FAMILIES) == sorted(FAMILIES, key=lambda family: family.name.lower().replace("-", " "))
    batched = {family.model_type for family in FAMILIES if family.is_batched}
    assert batched == {name.split("-")[0] for name in ragged_models.FAMILIES}
    for argument in ([], ["--markdown"]):
        result = CliRunner().invoke(app, ["families", *argument], env={"COLUMNS": "240"})
        assert result.exit_code == 0
        assert all(family.name in result.stdout for family in FAMILIES)
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = CliRunner().invoke(app, ["families"], env={"COLUMNS": "80"})
    assert max(map(len, piped.stdout.splitlines())) <= 80
    assert "Qwen 2, 2.5, QwQ" in piped.stdout
    assert all(name in piped.stdout for family in FAMILIES for name in family.classes)


def test_the_page_has_the_table() -> None:
    _, _, rest = PAGE.read_text().partition("<!-- zinfer families --markdown -->\n\n")
    table, _, _ = rest.partition("\n<!-- end of families -->\n")
    assert table == families_markdown(), "put the output of `zinfer families --markdown` between the page's markers"
