"""A checkpoint's generation_config.json: one rule for all ways to complete a prompt, with transformers as the judge."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from family_models import family_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import zinfer
from zinfer import LLM, SamplingParams
from zinfer.errors import ConfigError
from zinfer.jobs.padded import complete
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import Row
from zinfer.requests.generation_config import GenerationDefaults
from zinfer.requests.mii_params import MIIParams
from zinfer.requests.openai_body import CompletionBody, read_body

IDS = [5, 9, 23, 77, 40, 9, 23]
DRAWN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


def write(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def plain_ids(folder: Path) -> list[int]:
    with LLM(folder, device="cpu", generation_config="none") as llm:
        return list(llm.generate({"prompt_token_ids": IDS}, max_new_tokens=20)[0].token_ids)


@contextmanager
def open_engine(folder: Path) -> Iterator[zinfer.InferenceEngine]:
    engine = zinfer.init_inference(folder, device="cpu")
    try:
        yield engine
    finally:
        engine.destroy()


def case(name: str, first: list[int]) -> dict[str, Any]:
    """Values that change the text that begins with these tokens."""
    return {
        "repetition_penalty": {"repetition_penalty": 1.7, **DRAWN},
        "suppress_tokens": {"suppress_tokens": first[:2]},
        "begin_suppress_tokens": {"begin_suppress_tokens": first[:1]},
        "bad_words_ids": {"bad_words_ids": [[IDS[-1], first[0]], first[1:3]]},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "forced_eos_token_id": {"forced_eos_token_id": 11},
        "several": {"repetition_penalty": 1.2, "suppress_tokens": first[:1], "no_repeat_ngram_size": 2},
    }[name]


CASES = ["repetition_penalty", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "no_repeat_ngram_size"]
CASES += ["forced_eos_token_id", "several"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_batches_and_padded_batches_are_as_transformers(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder)
    plain = plain_ids(folder)
    write(folder, **case(name, plain))
    judge = AutoModelForCausalLM.from_pretrained(folder).eval()
    input_ids = torch.tensor([IDS])
    wanted = judge.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=20, do_sample=False, eos_token_id=None
    )[0, len(IDS) :].tolist()
    assert wanted != plain
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with caplog.at_level(logging.WARNING), LLM(folder, device="cpu") as llm:
        found = llm.generate({"prompt_token_ids": IDS}, params)[0]
    assert list(found.token_ids) == wanted
    key = "repetition_penalty" if name == "several" else name
    (said,) = [each.message for each in caplog.records if "generation_config.json" in each.message]
    assert key in said
    assert "--generation-config none" in said
    with open_engine(folder) as engine:
        prompt = Prompt(Row(id=1, prompt_token_ids=tuple(IDS), params=params), tuple(IDS), 1)
        longer = Prompt(Row(id=2, prompt_token_ids=tuple(IDS * 2), params=params), tuple(IDS * 2), 2)
        defaults = GenerationDefaults.of(engine.module)
        rows = complete(engine, [prompt, longer], None, lambda num_running: None, defaults)
        assert list(rows[0][0].token_ids) == wanted
    assert plain_ids(folder) == plain


def test_guesses_change_nothing(folder: Path) -> None:
    write(folder, no_repeat_ngram_size=4, suppress_tokens=[3])
    params = SamplingParams(max_new_tokens=30, allowed_token_ids=[3, 9, 23], ignore_eos=True)
    found = []
    for speculate in ("off", "ngram"):
        with LLM(folder, device="cpu", speculate=speculate) as llm:
            found.append(llm.generate({"prompt_token_ids": IDS * 3}, params)[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 9])
def test_an_encoders_text_begins_and_ends_as_forced(tmp_path: Path, max_new_tokens: int) -> None:
    folder = tmp_path / "model"
    family_model("bart", "BartForConditionalGeneration").save_pretrained(folder)
    write(folder, forced_bos_token_id=7, forced_eos_token_id=8, no_repeat_ngram_size=2, decoder_start_token_id=2)
    judge = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    input_ids = torch.tensor([IDS])
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    wanted = judge.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)[0, 1:].tolist()
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    with open_engine(folder) as engine:
        prompt = Prompt(Row(id=1, prompt_token_ids=tuple(IDS), params=params), tuple(IDS), 1)
        rows = complete(engine, [prompt], None, lambda num_running: None, GenerationDefaults.of(engine.module))
    assert list(rows[0][0].token_ids) == wanted


def defaults_of(folder: Path, **values: Any) -> GenerationDefaults:
    write(folder, **values)
    return GenerationDefaults.of(AutoModelForCausalLM.from_pretrained(folder))


def test_sampling_values_are_for_requests_that_sample_and_what_is_stated_comes_first(folder: Path) -> None:
    defaults = defaults_of(folder, **DRAWN, repetition_penalty=1.3)
    greedy = defaults.fill(SamplingParams())
    assert (greedy.temperature, greedy.top_p, greedy.repetition_penalty) == (0, 1, 1.3)
    stated = defaults.fill(SamplingParams(temperature=1.0, top_k=0, repetition_penalty=1.0))
    assert (stated.temperature, stated.top_p, stated.top_k, stated.repetition_penalty) == (1, 0.8, 0, 1)
    body = {"prompt": "a", "max_tokens": 3, "top_p": 1}
    openai = defaults.fill(read_body(CompletionBody, body).params(None))
    assert (openai.temperature, openai.top_p, openai.top_k, openai.min_p) == (0.7, 1, 20, 0.01)
    assert defaults.fill(read_body(CompletionBody, {**body, "temperature": 0}).params(None)).is_greedy
    mii = defaults.fill(MIIParams.read({"temperature": 2.0}).sampling)
    assert (mii.temperature, mii.top_p) == (2, 0.8)
    assert defaults.fill(MIIParams.read({"do_sample": False}).sampling).is_greedy
    assert defaults.fill(greedy) == greedy, "twice is as once"


def test_what_cannot_be_honoured_is_named_and_what_is_wrong_refused(folder: Path) -> None:
    said = defaults_of(folder, num_beams=4, typical_p=0.5, max_length=9, top_k=7, temperature=1.0).notice
    assert "not supported: num_beams 4, typical_p 0.5" in said or "not supported: typical_p 0.5, num_beams 4" in said
    assert "where a request samples: top_k 7;" in said
    assert "max_length" not in said
    assert not defaults_of(folder, do_sample=False, num_beams=1, eos_token_id=2, repetition_penalty=1.0).notice
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p must be .*none"):
        defaults_of(folder, do_sample=True, top_p=3.0)
