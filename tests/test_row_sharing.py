"""Rows of padded batches and of encoding passes get what each gets alone, whatever class and options a model has."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from checkpoints import VOCAB_SIZE
from transformers import PreTrainedModel

from zinfer.config import resolve_settings
from zinfer.jobs import run_job
from zinfer.jobs.execution_mode import job_limits, why_padded
from zinfer.model.padding import RowSharing, Sharing, find_row_sharing

_TEXT: Final = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_PAIR: Final = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_LONGROPE: Final = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
_DYNAMIC: Final = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_LAYERS: Final = ["sliding_attention", "full_attention", "sliding_attention"]
DECODERS: Final[dict[str, tuple[str, dict[str, Any], Sharing]]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 3, "n_head": 4}, Sharing.ANY),
    "bart": ("BartForCausalLM", _PAIR, Sharing.EQUAL),
    "bart-pair": ("BartForConditionalGeneration", _PAIR | {"decoder_start_token_id": 2}, Sharing.ANY),
    "roformer": ("RoFormerForCausalLM", _TEXT | {"is_decoder": True}, Sharing.EQUAL),
    "rwkv": (
        "RwkvForCausalLM",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 128},
        Sharing.ALONE,  # its steps mix the rows of a batch
    ),
    "windows": ("Gemma3ForCausalLM", _TEXT | {"head_dim": 8, "layer_types": _LAYERS}, Sharing.ANY),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        _TEXT | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
        Sharing.ANY,
    ),
    "llama-dynamic": (
        "LlamaForCausalLM",
        _TEXT | {"rope_parameters": _DYNAMIC, "max_position_embeddings": 32},
        Sharing.ANY,
    ),
}
ENCODERS: Final[dict[str, tuple[str, dict[str, Any], Sharing]]] = {
    "bert": ("BertModel", _TEXT, Sharing.ANY),
    "fnet": ("FNetModel", _TEXT, Sharing.EQUAL),
    "phi3-longrope": DECODERS["phi3-longrope"],
    "llama-dynamic": DECODERS["llama-dynamic"],
}
LENGTHS: Final = (5, 26, 9, 60, 5, 29, 44, 60, 2)
"""Some cross the border of 32 while they are generated, some lie past it, and some are equal."""
NUM_NEW: Final = 5


def tiny(case: tuple[str, dict[str, Any], Sharing]) -> PreTrainedModel:
    """A random model whose outputs depend on all of its input."""
    name, options, _ = case
    model_class: Any = getattr(transformers, name)
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(model_class.config_class(**options)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.3)
    if model.can_generate():
        start = options.get("decoder_start_token_id")
        model.generation_config = transformers.GenerationConfig(pad_token_id=0, decoder_start_token_id=start)
    return model


def run(folder: Path, rows: Sequence[Sequence[int]], **options: Any) -> dict[int, dict[str, Any]]:
    source = folder.parent / "in.jsonl"
    source.write_text(
        "".join(json.dumps({"id": n, "prompt_token_ids": list(row)}) + "\n" for n, row in enumerate(rows))
    )
    run_job(folder, source, folder.parent / "out.jsonl", device="cpu", **options)
    return {row["id"]: row for row in map(json.loads, (folder.parent / "out.jsonl").read_text().splitlines())}


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist() for num in LENGTHS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DECODERS)
def test_generated_rows_equal_each_alone(name: str, tmp_path: Path) -> None:
    case = DECODERS[name]
    tiny(case).save_pretrained(tmp_path / "model")
    found = run(tmp_path / "model", rows(), max_new_tokens=NUM_NEW)
    for number, row in enumerate(rows()):
        fresh = getattr(transformers, case[0]).from_pretrained(tmp_path / "model").eval()
        ids = torch.tensor([row])
        new = fresh.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=[VOCAB_SIZE]
        )
        assert found[number]["token_ids"] == new[0, -NUM_NEW:].tolist(), len(row)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ENCODERS)
def test_embedded_rows_equal_each_alone(name: str, tmp_path: Path) -> None:
    case = ENCODERS[name]
    tiny(case).save_pretrained(tmp_path / "model")
    found = run(tmp_path / "model", rows(), task="embed")
    for number, row in enumerate(rows()):
        fresh = getattr(transformers, case[0]).from_pretrained(tmp_path / "model").eval()
        with torch.no_grad():
            hidden = fresh.base_model(torch.tensor([row])).last_hidden_state[0].mean(dim=0)
        close = torch.nn.functional.cosine_similarity(torch.tensor(found[number]["embedding"]), hidden, dim=0)
        assert close > 1 - 1e-5, len(row)


@pytest.mark.parametrize("cases", [DECODERS, ENCODERS])
def test_what_padding_changes_is_measured_and_said(cases: dict[str, tuple[str, dict[str, Any], Sharing]]) -> None:
    for name, case in cases.items():
        model = tiny(case)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        found = find_row_sharing(model, 0, generates=cases is DECODERS)
        assert found.sharing is case[2], name
        assert (found.why is None) == (found.sharing is Sharing.ANY and found.border is None), name
        assert found.border == (32 if "-" in name and "pair" not in name else None)
        assert model.config.get_text_config().to_dict() == tiny(case).config.get_text_config().to_dict()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "sharing",
    [
        RowSharing(),
        RowSharing(Sharing.EQUAL),
        RowSharing(Sharing.ALONE),
        RowSharing(border=20),
        RowSharing(border=20, grows=True),
    ],
    ids=str,
)
def test_groups_hold_each_row_once_and_mix_no_lengths_they_must_not(sharing: RowSharing) -> None:
    lengths = [*range(1, 40), 7, 7, 30, 30]
    groups = sharing.groups(list(enumerate(lengths)), lambda row: row[1], lambda row: 4)
    assert sorted(row for group, _ in groups for row in group) == list(enumerate(lengths))
    for group, limit in groups:
        own = {length for _, length in group}
        assert sharing.sharing is not Sharing.ALONE or len(group) == 1
        assert sharing.sharing is not Sharing.EQUAL or len(own) == 1
        if sharing.border is not None:
            within, past = max(own) + 4 <= sharing.border, min(own) > sharing.border
            assert len(own) == 1 or within or (past and not sharing.grows)
            assert limit == (sharing.border if within else None)


def test_rows_within_the_border_of_rotary_positions_may_share_ragged_passes() -> None:
    model = tiny(DECODERS["phi3-longrope"])
    free, within = resolve_settings({}), resolve_settings({"max_out_tokens": 32})
    assert "change beyond 32 tokens; if rows stay within them, state max_out_tokens 32" in str(why_padded(model, free))
    assert why_padded(model, within) is None
    assert job_limits(model, within, generates=True).most_tokens == 32
    assert job_limits(model, free, generates=True).most_tokens == 128
    assert "cannot run in ragged batches: sequences that share a pass" in str(why_padded(tiny(DECODERS["bart"]), free))
