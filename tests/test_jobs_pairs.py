"""Jobs of encoder-decoders: padded batches, rows as transformers' `generate` gives them for each prompt alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_model
from jobs_support import letters_tokenizer, prompt_rows, read_rows, write_rows
from torch import nn
from transformers import PreTrainedModel

from zinfer.engine.finite_check import AFTER
from zinfer.errors import ConfigError
from zinfer.jobs.job import run_job

DISK = {"zero_optimization": {"offload_param": {"device": "nvme"}}}


def saved(model_type: str, class_name: str, folder: Path) -> PreTrainedModel:
    model = family_model(model_type, class_name)
    model.save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [("t5", "T5ForConditionalGeneration"), ("bart", "BartForConditionalGeneration")],
)
@pytest.mark.parametrize("forced_end", [None, 2])
def test_rows_equal_transformers_own(model_type: str, class_name: str, forced_end: int | None, tmp_path: Path) -> None:
    model = saved(model_type, class_name, tmp_path / "model")
    model.generation_config.forced_eos_token_id = forced_end
    model.generation_config.save_pretrained(tmp_path / "model")
    rows = [row for row in prompt_rows(13) if "temperature" not in row]
    write_rows(tmp_path / "in.jsonl", rows)
    summary = run_job(
        tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", config=DISK, device="cpu", batch_size=5
    )
    assert (summary.num_done, summary.num_failed) == (len(rows), 0)
    assert summary.stats is not None
    assert summary.stats.disk_bytes_per_pass > 0
    assert any("padded batches" in note for note in summary.notes)
    assert any(f"predicted: nothing: what a {class_name} takes" in note for note in summary.notes)
    tokenizer, found = letters_tokenizer(), {row["id"]: row["token_ids"] for row in read_rows(tmp_path / "out.jsonl")}
    for row in rows:
        ids = torch.tensor([tokenizer(row["prompt"]).input_ids])
        wanted = model.generate(ids, max_new_tokens=row["max_new_tokens"], do_sample=False, eos_token_id=2)[0, 1:]
        assert found[row["id"]] == wanted.tolist()
    assert len({token for tokens in found.values() for token in tokens}) > 6


def test_rows_say_which_tokens_may_come_and_where_they_end(tmp_path: Path) -> None:
    saved("t5", "T5ForConditionalGeneration", tmp_path / "model")
    few = {"prompt": "abc", "allowed_token_ids": [70, 71], "max_new_tokens": 6}
    rows: list[dict[str, Any]] = [
        {"id": "few", **few},
        {"id": "one", **few, "bad_words": [letters_tokenizer().decode([70])]},
        {"id": "ended", **few, "stop_token_ids": [70, 71], "include_stop_str_in_output": True},
        {"id": "bare", **few, "detokenize": False},
        {"id": "shown", **few, "allowed_token_ids": [1], "ignore_eos": True, "skip_special_tokens": False},
    ]
    write_rows(tmp_path / "in.jsonl", rows)
    run_job(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", device="cpu")
    found = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert set(found["few"]["token_ids"]) <= {70, 71}
    assert (found["bare"]["token_ids"], found["bare"]["text"]) == (found["few"]["token_ids"], "")
    assert found["one"]["token_ids"] == [71] * 6
    assert found["ended"]["stop_reason"] == found["few"]["token_ids"][0]
    assert found["ended"]["text"] == letters_tokenizer().decode(found["few"]["token_ids"][:1])
    assert (found["shown"]["text"], found["shown"]["stop_reason"]) == ("<pad>" * 6, None)


def test_prompt_and_answer_have_positions_each(tmp_path: Path) -> None:
    saved("bart", "BartForConditionalGeneration", tmp_path / "model")
    rows = [
        {"id": "fits", "prompt": "a" * 64, "max_new_tokens": 4},
        {"id": "too long", "prompt": "a" * 65, "max_new_tokens": 4},
        {"id": "too many", "prompt": "ab", "max_new_tokens": 64},
        {"id": "many", "prompt": "ab", "max_new_tokens": 63},
    ]
    write_rows(tmp_path / "in.jsonl", rows)
    run_job(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", device="cpu")
    found = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert len(found["fits"]["token_ids"]) == 4
    assert "token_ids" in found["many"]
    assert "the prompt's 65 tokens are more than 64 (the encoder's positions)" in found["too long"]["error"]
    assert "64 new tokens are more than 63 (the decoder's positions, less" in found["too many"]["error"]


def test_a_limit_that_is_stated_is_of_prompt_and_answer_together(tmp_path: Path) -> None:
    saved("bart", "BartForConditionalGeneration", tmp_path / "model")
    rows = [{"id": number, "prompt": "ab", "max_new_tokens": number} for number in (17, 18)]
    write_rows(tmp_path / "in.jsonl", rows)
    paths = [tmp_path / name for name in ("model", "in.jsonl", "out.jsonl")]
    run_job(*paths, config={"max_out_tokens": 20}, device="cpu")
    fits, too_many = sorted(read_rows(paths[2]), key=lambda row: row["id"])
    assert "token_ids" in fits
    assert "2 tokens and 18 new ones are more than 19 (max_out_tokens, less the decoder's first" in too_many["error"]


@pytest.mark.parametrize(
    ("model_type", "class_name", "message"),
    [
        ("bert", "BertModel", "a BertModel cannot generate text"),
        ("whisper", "WhisperForConditionalGeneration", "a WhisperForConditionalGeneration takes no text"),
    ],
)
def test_models_that_do_not_go_on_with_texts_are_refused(
    model_type: str, class_name: str, message: str, tmp_path: Path
) -> None:
    saved(model_type, class_name, tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", prompt_rows(2))
    with pytest.raises(ConfigError, match=message):
        run_job(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", device="cpu")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [{}, {"check_finite": True}], ids=["unasked", "asked"])
@pytest.mark.parametrize(
    ("model_type", "class_name", "named"),
    [
        ("gpt_neo", "GPTNeoForCausalLM", "what comes before the first layer"),
        ("t5", "T5ForConditionalGeneration", "what comes before encoder.block.0"),
    ],
)
def test_a_row_that_breaks_costs_no_other(
    model_type: str, class_name: str, named: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """A token has an embedding of NaN, but not in the head that chooses tokens; one row of five has it."""
    model = saved(model_type, class_name, tmp_path / "model")
    embedding = model.get_input_embeddings().weight
    if model.lm_head.weight is embedding:
        model.lm_head.weight = nn.Parameter(embedding.detach().clone())
        model.config.tie_word_embeddings = False
        model.save_pretrained(tmp_path / "model")
    rows = [{"id": text, "prompt": text, "max_new_tokens": 4} for text in ("ab", "hello", "bad", "x" * 20, "again")]
    write_rows(tmp_path / "in.jsonl", rows)
    options: dict[str, Any] = {"config": DISK | {"zinfer": config}, "device": "cpu"}
    run_job(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)
    whole = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert not {token for row in whole.values() for token in row["token_ids"]} & {letter("d")}
    embedding.data[letter("d")] = torch.nan
    model.save_pretrained(tmp_path / "model")
    summary = run_job(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options, restart=True)
    assert (summary.num_done, summary.num_failed) == (4, 1)
    found = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert found.pop("bad")["error"].endswith(f"the first non-finite numbers come from {named}")
    assert found == {name: row for name, row in whole.items() if name != "bad"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("weight", "named"),
    [
        ("decoder.block.1.layer.2.DenseReluDense.wo.weight", "decoder.block.1"),
        ("encoder.final_layer_norm.weight", "what comes before decoder.block.0"),
        ("lm_head.weight", AFTER),
    ],
)
def test_the_layer_that_broke_rows_is_named(weight: str, named: str, tmp_path: Path) -> None:
    model = saved("t5", "T5ForConditionalGeneration", tmp_path / "model")
    model.get_parameter(weight).data[0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", prompt_rows(5))
    run_job(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", device="cpu", batch_size=3)
    rows = read_rows(tmp_path / "out.jsonl")
    assert len(rows) == 5
    assert all(row["error"].endswith(f"the first non-finite numbers come from {named}") for row in rows)


def letter(character: str) -> int:
    found: int = letters_tokenizer()(character).input_ids[0]
    return found
