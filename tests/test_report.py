"""The report says of a store what can be measured: errors of its matrices, and how far its texts agree."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from rich.console import Console
from safetensors import safe_open

from zinfer.config import resolve_settings
from zinfer.errors import ConfigError
from zinfer.evaluation.compare import compare_models
from zinfer.evaluation.page import worst_first, write_page
from zinfer.evaluation.weight_error import MatrixError, measure_errors
from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantize import quantize
from zinfer.kernels.quantized import QuantFormat
from zinfer.store.writing import write_store
from zinfer.weights import Checkpoint

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"


def store_of(folder: Path, output: Path, section: dict[str, object]) -> Path:
    settings = resolve_settings({"zinfer": {"quantization": section, "device": "cpu"}})
    write_store(folder, output, settings, console=Console(quiet=True))
    return output


def weight_of(folder: Path, name: str) -> torch.Tensor:
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118  # a reader, no mapping
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    raise AssertionError(f"no file holds {name}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_errors_are_those_of_rounding(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path / "model", num_layers=3)
    store = store_of(folder, tmp_path / "store", {"bits": 4, "group_size": 32})
    errors = list(measure_errors(Checkpoint.open(folder), Checkpoint.open(store)))
    assert len(errors) == {"llama": 3 * 7, "gpt2": 3 * 4}[family]
    assert {each.layer for each in errors} == {0, 1, 2}
    for each in errors:
        weight = weight_of(folder, each.parameter)
        rows = weight.t() if family == "gpt2" else weight
        rounded = dequantize_ref(quantize(rows, QuantFormat(4, 32)))
        assert each.relative_error == pytest.approx(float((rounded - rows).norm() / rows.norm()), rel=1e-4)
        assert each.full_bytes == weight.nbytes
        assert each.nbytes == weight.numel() // 2 + weight.numel() // 32 * 4


@pytest.mark.slow
def test_more_bits_agree_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.evaluation.compare._NUM_NEW_TOKENS", 5)
    prompts = tmp_path / "prompts.jsonl"
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:12]
    prompts.write_text("\n".join(lines) + "\n")
    settings = resolve_settings({"zinfer": {"device": "cpu"}})
    found = {}
    for name, section in {"int8": {"bits": 8}, "int4": {"bits": 4}}.items():
        store = store_of(DEMO / "model", tmp_path / name, dict(section))
        found[name] = compare_models(DEMO / "model", store, prompts, settings)
        assert found[name].num_prompts == 12
        assert found[name].num_tokens > 12 * 4
        assert found[name].full_log_likelihood == found["int8"].full_log_likelihood < 0
    assert abs(found["int8"].change) < abs(found["int4"].change)
    assert found["int8"].equal_tokens >= found["int4"].equal_tokens
    assert found["int8"].equal_tokens > 0.95
    same = compare_models(DEMO / "model", DEMO / "model", prompts, settings)
    assert (same.change, same.equal_tokens, same.perplexity_ratio) == (0, 1, 1)


@pytest.mark.slow
def test_a_model_that_runs_no_ragged_batches_gives_the_figures_of_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=3)
    store = store_of(folder, tmp_path / "store", {"bits": 4, "group_size": 32})
    prompts = tmp_path / "prompts.jsonl"
    rows = [[5, 9, 23, 77, 40], [7], [8] * 20]
    prompts.write_text("".join(json.dumps({"id": len(row), "prompt_token_ids": row}) + "\n" for row in rows))
    settings = resolve_settings({"zinfer": {"device": "cpu"}})
    together = compare_models(folder, store, prompts, settings)
    monkeypatch.setattr("zinfer.evaluation.compare.check_family", refuse)
    alone = compare_models(folder, store, prompts, settings)
    assert (together.num_prompts, together.num_tokens) == (alone.num_prompts, alone.num_tokens) == (3, 4 + 0 + 19)
    assert together.full_log_likelihood == pytest.approx(alone.full_log_likelihood, rel=1e-4)
    assert together.quantized_log_likelihood == pytest.approx(alone.quantized_log_likelihood, rel=1e-4)
    assert together.equal_tokens == alone.equal_tokens < 1


def refuse(model: object) -> str:
    raise ConfigError("not in ragged batches")


def test_a_row_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": "1+2="}) + "\n" + json.dumps({"id": "b", "promt": "x"}) + "\n")
    settings = resolve_settings({"zinfer": {"device": "cpu"}})
    with pytest.raises(ConfigError, match="line 2"):
        compare_models(DEMO / "model", DEMO / "model", prompts, settings)


def test_the_page_shows_every_matrix_and_the_worst_first(tmp_path: Path) -> None:
    errors = [
        MatrixError(f"model.layers.{layer}.<{name}>", layer, QuantFormat(4, 64), 10, 40, error)
        for layer, (name, error) in enumerate([("a", 0.01), ("b", 0.3), ("c", 0.02)])
    ]
    assert [each.layer for each in worst_first(errors)] == [1, 2, 0]
    write_page(tmp_path / "report.html", "a <store>", errors, None)
    text = (tmp_path / "report.html").read_text()
    assert "a &lt;store&gt;" in text
    assert "<b>" not in text
    assert text.count("<rect") == 3
    assert text.index("model.layers.1") < text.index("model.layers.2") < text.index("model.layers.0")
    assert "INT4, groups of 64" in text
    assert "4.00 times smaller" in text
