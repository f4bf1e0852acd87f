"""Scores of prompts: transformers' log-probabilities, whatever the budgets and homes, and what is computed beside."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint
from engines import config_for
from jobs_support import ResidentEngine, letters_model, padded_by, read_rows, write_rows
from llm_support import SIZES, alone, by_ids, folder, prompts, token_bytes
from ragged_models import FAMILIES, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from zinfer import LLM, Completion, SamplingParams
from zinfer.batching import batcher
from zinfer.errors import ConfigError
from zinfer.jobs.job import run_job
from zinfer.offload.block import Tier

__all__ = ["alone", "folder", "prompts"]  # fixtures

NUM_TOP = 3
SCORED = SamplingParams(max_new_tokens=0, prompt_logprobs=NUM_TOP)


def check_scores(model: PreTrainedModel, prompt: Sequence[int], found: Completion, least: float = 1e-4) -> None:
    assert found.error is None
    assert found.prompt_logprobs is not None
    first, *scores = found.prompt_logprobs
    assert first is None
    with torch.no_grad():
        wanted = model(torch.tensor([list(prompt)])).logits[0].double().log_softmax(-1)
    assert len(scores) == len(prompt) - 1
    for own, token_id, row in zip(scores, prompt[1:], wanted, strict=False):
        assert own is not None
        assert own.chosen == pytest.approx(float(row[token_id]), abs=least)
        assert own.top == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=least)
        assert [float(row[each]) for each in own.top_ids] == pytest.approx(own.top, abs=least)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("tokens_per_pass", "num_pages", "page_size"), SIZES)
def test_scores_are_those_of_each_prompt_alone(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    model: PreTrainedModel,
    tokens_per_pass: int,
    num_pages: int,
    page_size: int,
) -> None:
    """Beside prompts that are continued, some twice, so that pages of their prefixes are there already."""
    batch = {"tokens_per_pass": tokens_per_pass, "kv_page_size": page_size}
    prompts, alone = prompts[::3], alone[::3]
    batch["kv_cache_memory"] = num_pages * page_size * token_bytes(folder)
    num_new = len(alone[0])
    both = SamplingParams(max_new_tokens=num_new, prompt_logprobs=NUM_TOP)
    params = [SamplingParams(max_new_tokens=num_new), SCORED, both] * len(prompts)
    several = [prompt for prompt in prompts for _ in range(3)]
    with (
        patch.object(batcher, "_PIECE_LOGITS", 7 * model.config.vocab_size),
        LLM(folder, device="cpu", **batch) as llm,
    ):
        found = llm.generate(by_ids(several), params)
        assert llm.num_new_tokens == 2 * num_new * len(prompts)
    for place, (prompt, own) in enumerate(zip(several, params, strict=True)):
        assert found[place].token_ids == (() if own is SCORED else alone[place // 3])
        assert found[place].finish_reason == "length"
        if own.prompt_logprobs is None:
            assert found[place].prompt_logprobs is None
        else:
            check_scores(model, prompt, found[place])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tie", [False, True])
def test_the_head_streams_once_for_all_pieces(tmp_path: Path, tie: bool) -> None:
    folder = tiny_checkpoint("llama", tmp_path, tie=tie)
    prompt = random_prompts(1, min_tokens=90, max_tokens=90)
    found = []
    for own in (SamplingParams(max_new_tokens=1), SCORED):
        with (
            patch.object(batcher, "_PIECE_LOGITS", 1),
            LLM(folder, config_for(folder, "disk", 2, "cpu"), tokens_per_pass=50, kv_cache_memory="200kB") as llm,
        ):
            assert {home.tier for home in llm.plan.homes} == {Tier.DISK}
            (completion,) = llm.generate(by_ids(prompt), own)
            found.append((llm.num_passes, llm.stats().bytes_to_device))
    assert found[0] == found[1]
    check_scores(AutoModelForCausalLM.from_pretrained(folder), prompt[0], completion)


def test_logits_that_are_not_finite_are_an_error(folder: Path) -> None:
    """Of a token that is scored, while the last one's, which are sampled, are finite."""

    def spoil(head: nn.Module, args: object, logits: torch.Tensor) -> None:
        logits[0, :-1] = torch.nan

    with LLM(folder, device="cpu", kv_cache_memory="1MB") as llm:
        hook = llm._model.module.get_output_embeddings().register_forward_hook(spoil)
        (broken,) = llm.generate(by_ids([[5, 9, 7]]), SamplingParams(max_new_tokens=3, prompt_logprobs=0))
        hook.remove()
        (sound,) = llm.generate(by_ids([[5, 9, 7]]), SamplingParams(max_new_tokens=3, prompt_logprobs=0))
    assert sound.error is None
    assert broken.token_ids == sound.token_ids
    assert (broken.finish_reason, broken.prompt_logprobs) == ("error", None)
    assert broken.error is not None
    assert "not finite" in broken.error


def test_nothing_new_without_scores() -> None:
    with pytest.raises(ConfigError, match="at least 1, not 0; 0 needs prompt_logprobs"):
        SamplingParams(max_tokens=0)


def test_rows_of_jobs(tmp_path: Path) -> None:
    folder = letters_model(tmp_path / "model")
    scores = {"max_new_tokens": 0, "prompt_logprobs": 2}
    write_rows(tmp_path / "in.jsonl", [{"id": "scored", "prompt": "hello", **scores}, {"id": "new", "prompt": "a"}])
    for padded in (False, True):
        with padded_by(ResidentEngine if padded else None):
            run_job(folder, tmp_path / "in.jsonl", tmp_path / f"{padded}.jsonl", device="cpu", max_new_tokens=3)
    scored, new = sorted(read_rows(tmp_path / "False.jsonl"), key=lambda row: str(row["id"]), reverse=True)
    assert new["num_output_tokens"] == 3
    assert "prompt_logprobs" not in new
    assert (scored["text"], scored["token_ids"], scored["num_output_tokens"]) == ("", [], 0)
    first, *others = scored["prompt_logprobs"]
    assert first is None
    assert len(others) == scored["num_prompt_tokens"] - 1
    assert all(each["logprob"] < 0 and len(each["top"]) == 2 for each in others)
    body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}
    write_rows(tmp_path / "batch.jsonl", [line])
    run_job(folder, tmp_path / "batch.jsonl", tmp_path / "rows.jsonl", device="cpu")
    (choice,) = read_rows(tmp_path / "rows.jsonl")[0]["response"]["body"]["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "hello"
    assert choice["logprobs"]["token_logprobs"][0] is None
    beside_another = pytest.approx([each["logprob"] for each in others], rel=1e-5)
    assert choice["logprobs"]["token_logprobs"][1:] == beside_another
    errors = {row["id"]: row.get("error") for row in read_rows(tmp_path / "True.jsonl")}
    assert errors["new"] is None
    assert "prompt_logprobs needs continuous batching" in errors["scored"]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    """Some scale, cap or cast their logits behind the head."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    several = random_prompts(2, min_tokens=10, max_tokens=40)
    with (
        patch.object(batcher, "_PIECE_LOGITS", 8 * model.config.vocab_size),
        LLM(tmp_path, device="cpu", kv_cache_memory="1MB") as llm,
    ):
        found = llm.generate(by_ids(several), SCORED)
    for prompt, completion in zip(several, found, strict=True):
        check_scores(model, prompt, completion, least=1e-3)
