"""A calibration sees what linear layers multiply with, and stores made with it lose less of a model with outliers."""

import io
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint
from jobs_support import letters_tokenizer, write_rows
from rich.console import Console
from store_support import Stopped, contents, document, formats_of, settings_of, stop_at
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from typer.testing import CliRunner

import zinfer
from zinfer.cli import app
from zinfer.config import resolve_settings
from zinfer.errors import CheckpointError, ConfigError
from zinfer.evaluation.calibrate import measure_squares
from zinfer.jobs.token_rows import by_length
from zinfer.store.files import CALIBRATION_NAME, Calibration
from zinfer.store.writing import write_store

SECTION: dict[str, object] = {"bits": 4, "group_size": 32}
PROMPTS = [{"prompt": text} for text in ("a b c", "the quick brown fox", "z", "one two three four five six", "hello")]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms let some channels through a hundred times as loud as others, as in trained models."""
    folder = tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model", num_layers=4, shards=1)
    module = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if "norm" in name or (".ln_" in name and name.endswith("weight")):
            parameter.data.copy_((1.5 * torch.randn(parameter.shape, generator=generator)).exp())
    shutil.rmtree(folder)
    module.save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return folder


def seen_by_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """Mean squares of the inputs of each linear layer, one prompt after the other."""
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = letters_tokenizer()
    inputs: dict[str, list[torch.Tensor]] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and name != "lm_head":
            kept = inputs.setdefault(f"{name}.weight", [])
            layer.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].flatten(0, 1)))  # type: ignore[misc]
    with torch.no_grad():
        for row in PROMPTS:
            module(**tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False))
    return {name: torch.cat(parts).square().mean(0) for name, parts in inputs.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_it_sees_what_the_layers_see(model: Path, prompts: Path, offload: str, device: str) -> None:
    config = {
        "zero_optimization": {"offload_param": {"device": offload}},
        "zinfer": {"device": device, "quantization": SECTION},
    }
    found, wanted = measure_squares(model, prompts, resolve_settings(config)), seen_by_transformers(model)
    assert found.keys() == wanted.keys()
    assert len(found) >= 4 * 4
    for name, squares in wanted.items():
        torch.testing.assert_close(found[name], squares, rtol=1e-3, atol=1e-6)
        assert squares.max() > 20 * squares.min()


def calibration(model: Path, prompts: Path, counts: list[int] | None = None) -> Calibration:
    def measure() -> Mapping[str, torch.Tensor]:
        if counts is not None:
            counts.append(1)
        return measure_squares(model, prompts, settings_of(**SECTION))

    return Calibration("ab" * 32, measure)


def begin(model: Path, output: Path, number: int, measured: Calibration) -> None:
    """Make a store up to the file of this number."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, number)
        with pytest.raises(Stopped):
            write_store(model, output, settings_of(**SECTION), calibration=measured)


@pytest.fixture(scope="module")
def store(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("store")
    write_store(model, output, settings_of(**SECTION), calibration=calibration(model, prompts))
    return output


def logits(model: Path, offload: str, device: str) -> torch.Tensor:
    config = {"zero_optimization": {"offload_param": {"device": offload}}, "zinfer": {"device": device}}
    engine = zinfer.init_inference(model, config)
    ids = torch.tensor([row[:8] for row in random_prompts(12, min_tokens=8, max_tokens=17, seed=5)])
    try:
        found = engine(input_ids=ids).logits
        assert isinstance(found, torch.Tensor)
        return found.float().cpu()
    finally:
        engine.destroy()


@pytest.mark.slow
def test_a_model_with_outliers_loses_less(model: Path, prompts: Path, tmp_path: Path, device: str) -> None:
    """By the geometric mean over formats: a single one may be lucky, with random layers."""
    full, ratios = logits(model, "none", device), []
    sections: tuple[dict[str, object], ...] = ({"bits": 8}, {"bits": 8, "group_size": 16}, SECTION)
    for number, section in enumerate(sections):
        plain, calibrated = tmp_path / f"plain-{number}", tmp_path / f"calibrated-{number}"
        write_store(model, plain, settings_of(**section))
        write_store(model, calibrated, settings_of(**section), calibration=calibration(model, prompts))
        errors = [float((logits(each, "none", device) - full).norm() / full.norm()) for each in (plain, calibrated)]
        print(f"{section}: relative error of the logits: {errors[0]:.4f} plain, {errors[1]:.4f} calibrated")
        ratios.append(errors[1] / errors[0])
    assert math.prod(ratios) ** (1 / len(ratios)) < 0.9


@pytest.mark.slow
def test_homes_agree_to_the_bit(store: Path, device: str) -> None:
    assert all(format["scales_columns"] for format in formats_of(store))
    resident = logits(store, "none", device)
    for offload in ("cpu", "nvme"):
        assert torch.equal(logits(store, offload, device), resident)


@pytest.mark.sampled(2)
def test_what_goes_on_rounds_alike_and_measures_once(model: Path, prompts: Path, store: Path, tmp_path: Path) -> None:
    output, counts = tmp_path / "store", list[int]()
    for number in (2, 3):
        begin(model, output, number, calibration(model, prompts, counts))
        assert (output / CALIBRATION_NAME).is_file()
    write_store(model, output, settings_of(**SECTION), calibration=calibration(model, prompts, counts))
    assert counts == [1]
    assert contents(output) == contents(store)


@pytest.mark.sampled(2)
def test_what_no_prompt_has_reached_is_said(model: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompt reaches a weight that is to be quantized"):
        write_store(model, tmp_path / "none", settings_of(**SECTION), calibration=Calibration("ab" * 32, dict))
    assert not (tmp_path / "none" / "zinfer_store.json").exists()
    screen = Console(file=io.StringIO(), width=300)

    def all_but_one() -> dict[str, torch.Tensor]:
        found = measure_squares(model, prompts, settings_of(**SECTION))
        del found[next(name for name in found if "mlp" in name)]
        return found

    some = Calibration("ab" * 32, all_but_one)
    write_store(model, tmp_path / "some", settings_of(**SECTION), calibration=some, console=screen)
    assert isinstance(screen.file, io.StringIO)
    said = screen.file.getvalue()
    assert re.search(r"1 of \d+ weights were reached by no prompt and are rounded plainly: .*mlp", said)


def test_batches_hold_like_lengths_and_no_more_tokens_than_fit() -> None:
    rows = [tuple(range(length)) for length in (1, 4000, 30, 30, 30, 5000, 2, 2000, 2000)]
    found = by_length(rows, len, 4096)
    assert sorted(row for batch in found for row in batch) == sorted(rows)
    assert all(len(batch) == 1 or len(batch) * max(map(len, batch)) <= 4096 for batch in found)
    assert len(found) == 4


@pytest.mark.slow
def test_other_prompts_are_another_store(model: Path, prompts: Path, store: Path, tmp_path: Path) -> None:
    other = Calibration("cd" * 32, lambda: measure_squares(model, prompts, settings_of(**SECTION)))
    with pytest.raises(ConfigError, match=r"settings.calibration_sha256: \"abab.* in the store, \"cdcd.* now"):
        write_store(model, store, settings_of(**SECTION), calibration=other)
    with pytest.raises(ConfigError, match=r"calibration_sha256: .* absent now"):
        write_store(model, store, settings_of(**SECTION))
    output = tmp_path / "begun"
    begin(model, output, 1, calibration(model, prompts))
    (output / CALIBRATION_NAME).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"\.zinfer_calibration: damaged .* delete it, and it is measured again"):
        write_store(model, output, settings_of(**SECTION), calibration=calibration(model, prompts))


@pytest.mark.sampled(2)
def test_the_command(model: Path, prompts: Path, store: Path, tmp_path: Path) -> None:
    made = ("quantize", "--model", str(model), "--output", str(tmp_path / "made"), "--bits", "4", "--group-size", "32")

    def quantize(calibrate: Path) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*made, "--device", "cpu", "--calibrate", str(calibrate)])
        return result.exit_code, result.stderr

    code, said = quantize(tmp_path / "absent.jsonl")
    assert code == 2
    assert "--calibrate" in said
    assert "absent.jsonl: no such file" in said
    bad = write_rows(tmp_path / "bad.jsonl", [{"prompt": "a"}, {"text": "b"}])
    code, said = quantize(bad)
    assert code == 2
    assert "line 2" in said
    code, said = quantize(prompts)
    assert code == 0, said
    assert "Measuring what the weights are multiplied with" in said
    names: list[dict[str, Any]] = [document(folder)["parameters"] for folder in (tmp_path / "made", store)]
    assert names[0] == names[1]
    assert json.loads((tmp_path / "made" / "zinfer_store.json").read_text())["identity"]["settings"][
        "calibration_sha256"
    ]
