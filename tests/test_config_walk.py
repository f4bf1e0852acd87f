"""Plans of every type of model that transformers knows: an answer from the config alone, or a refusal."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from typer.testing import CliRunner

from zinfer.cli import app
from zinfer.errors import CheckpointError, ConfigError, PlanError
from zinfer.model.outline import read_outline
from zinfer.model.spec import ModelSpec

SMALL: Final = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "d_model": 64},
    **{"ffn_dim": 96, "vocab_size": 300, "num_hidden_layers": 2},
}
DECODERS: Final = sorted(MODEL_FOR_CAUSAL_LM_MAPPING._model_mapping)  # no public list of them


def small_config(model_type: str) -> Any:
    """A config with small widths where its class takes them, else its usual ones."""
    usual = CONFIG_MAPPING[model_type]()
    stated = usual.to_dict()
    try:
        return type(usual)(**{name: size for name, size in SMALL.items() if stated.get(name) is not None})
    except Exception:  # widths that do not fit each other, which each class refuses in its own way
        return usual


@pytest.mark.slow
def test_widths_are_read_or_refused_for_every_config() -> None:
    num_read = 0
    for model_type in sorted(CONFIG_MAPPING):
        try:
            config = small_config(model_type)
        except Exception:  # a class without usual widths, or that needs an absent package
            continue
        for read in (ModelSpec.read, ModelSpec.read_encoder):
            try:
                spec = read(config)
            except PlanError:
                continue
            num_read += 1
            assert spec.hidden > 0, model_type
            assert spec.num_heads > 0, model_type
    assert num_read > 200


def write_config(model_type: str, folder: Path) -> bool:
    try:
        document = small_config(model_type).to_dict()
    except Exception:  # as above
        return False
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**document, "dtype": "float32"}, default=str))
    return True


def check_outline(model_type: str, folder: Path) -> None:
    if write_config(model_type, folder):
        with suppress(CheckpointError, ConfigError, PlanError):
            assert read_outline(folder).nbytes > 0, model_type


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma3n_text", "rwkv", "mamba", "bamba", "xlnet", "xlm"])
def test_plans_of_odd_decoders_are_answers_or_sentences(model_type: str, tmp_path: Path) -> None:
    check_outline(model_type, tmp_path / "model")
    lengths = ["--rows", "10", "--prompt-len", "5", "--new-tokens", "5"]
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path / "model"), *lengths])
    assert result.exit_code in (0, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_outlines_of_every_decoder_are_answers_or_sentences(part: int, tmp_path: Path) -> None:
    for model_type in DECODERS[part::8]:
        check_outline(model_type, tmp_path / model_type)
