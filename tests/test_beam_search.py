"""`LLM.beam_search`: the sequences of transformers' `generate(num_beams=...)`, also where some end early."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_prompts
from llm_support import by_ids, folder
from transformers import AutoModelForCausalLM

from zinfer import LLM, BeamSearchParams
from zinfer.errors import ConfigError

DEMO = Path(__file__).parent.parent / "examples" / "demo" / "model"
PROMPTS = [*random_prompts(3, min_tokens=5, max_tokens=40), [7]]
NUM_NEW = 10

__all__ = ["folder"]  # a fixture


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def transformers_beams(
    model: Any, prompt: list[int], end_token_ids: list[int], **options: Any
) -> list[tuple[list[int], float]]:
    """The tokens and scores of one prompt's beams."""
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 1, **options}
    width = options["num_beams"]
    found = model.generate(
        torch.tensor([prompt]),
        eos_token_id=end_token_ids or None,
        num_return_sequences=width,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    if width == 1:
        return [(found.sequences[0].tolist(), 0.0)]
    lengths = len(prompt) + (found.beam_indices >= 0).sum(dim=1)
    pairs = zip(found.sequences.tolist(), lengths.tolist(), strict=True)
    return list(zip([ids[:length] for ids, length in pairs], found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (2, 1.0), (3, 0.0), (4, 2.0), (5, -1.0)])
@pytest.mark.parametrize("num_ends", [0, 1, 2])
def test_beams_are_those_of_transformers(
    folder: Path, model: Any, tmp_path: Path, num_ends: int, width: int, penalty: float
) -> None:
    options = {"num_beams": width, "length_penalty": penalty}
    longest = [transformers_beams(model, prompt, [], **options)[0][0][-NUM_NEW:] for prompt in PROMPTS[:num_ends]]
    ends = [ids[place] for ids, place in zip(longest, (2, 4), strict=False)]
    copied = shutil.copytree(folder, tmp_path / "model")
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": ends or None}))
    with LLM(copied, device="cpu", kv_page_size=8, kv_cache_memory="2MB") as llm:
        params = BeamSearchParams(beam_width=width, max_tokens=NUM_NEW, length_penalty=penalty)
        found = llm.beam_search(by_ids(PROMPTS), params)
        for again, before in zip(llm.beam_search(by_ids(PROMPTS), params), found, strict=True):
            pairs = list(zip(again.sequences, before.sequences, strict=True))
            assert all(one.tokens == other.tokens for one, other in pairs)
            assert all(one.cum_logprob == pytest.approx(other.cum_logprob, rel=1e-5) for one, other in pairs)
    is_early = False
    for prompt, output in zip(PROMPTS, found, strict=True):
        wanted = transformers_beams(model, prompt, ends, **options)
        assert [each.tokens for each in output.sequences] == [ids for ids, _ in wanted]
        for each, (ids, score) in zip(output.sequences, wanted, strict=True):
            num_new = len(ids) - len(prompt)
            assert width == 1 or each.cum_logprob / num_new**penalty == pytest.approx(score, rel=1e-3)
            assert (each.finish_reason == "stop") == (ids[-1] in ends)
            is_early |= each.finish_reason == "stop" and num_new < NUM_NEW
    if penalty < 1 or width == 1:  # else longer ones may displace those
        assert is_early == (num_ends > 0)


def test_a_search_ends_where_the_context_does(folder: Path) -> None:
    prompts = [{"prompt_token_ids": [3] * length} for length in (125, 128)]
    with LLM(folder, device="cpu", kv_cache_memory="2MB") as llm:
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=1000))
    assert [(len(each.tokens), each.finish_reason) for each in found[0].sequences] == [(128, "length")] * 2
    assert found[1].sequences == []
    assert "leaves no room for new ones within 128" in str(found[1].error)


def test_steps_compute_no_more_than_a_page_of_each_sequence(folder: Path) -> None:
    width, page = 2, 8
    with LLM(folder, device="cpu", kv_page_size=page, kv_cache_memory="2MB") as llm:
        llm.beam_search({"prompt_token_ids": [5, 6] * 40}, BeamSearchParams(beam_width=width, max_tokens=NUM_NEW))
        assert 80 + (NUM_NEW - 1) * width <= llm.num_tokens <= 80 + (NUM_NEW - 1) * width * page


def test_texts_of_beams() -> None:
    with LLM(DEMO, device="cpu", kv_cache_memory="8MB") as llm:
        params = {"beam_width": 2, "max_tokens": 8}
        (plain,) = llm.beam_search([{"prompt": "123+456="}], BeamSearchParams(**params))
        assert plain == llm.beam_search("123+456=", BeamSearchParams(**params, temperature=0.7))[0]
        best, second = plain.sequences
        assert (best.text, best.finish_reason) == (llm.tokenizer.decode(best.tokens[:-1]), "stop")
        assert best.text.endswith("123+456=579")
        assert best.cum_logprob > second.cum_logprob
        shown = llm.beam_search("123+456=", BeamSearchParams(**params, include_stop_str_in_output=True))[0]
        assert shown.sequences[0].text == best.text + llm.tokenizer.eos_token
        on = llm.beam_search("123+456=", BeamSearchParams(**params, ignore_eos=True))[0].sequences
        assert {(each.finish_reason, len(each.tokens)) for each in on} == {("length", len(best.tokens[:-4]) + 8)}
        with pytest.raises(ConfigError, match="params are BeamSearchParams, not a Completion"):
            llm.beam_search("1+1=", llm.generate("1+1=")[0])  # type: ignore[arg-type]


def test_what_beams_do_not_heed_is_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"suppress_tokens": [5], "top_p": 0.5}))
    with LLM(model, device="cpu", kv_cache_memory="2MB") as llm, caplog.at_level(logging.WARNING, "zinfer"):
        llm.beam_search(by_ids(PROMPTS[:1]), BeamSearchParams(beam_width=1, max_tokens=1))
    assert "beam_search: suppress_tokens of generation_config.json has no effect on beams" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be a whole number from 1 to 1024, not 0"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, not 0"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"temperature": -1}, "temperature must be a finite number of at least 0, not -1"),
        ({"length_penalty": 11}, "length_penalty must be a number from -10 to 10, not 11"),
        ({"lenght_penalty": 1}, "unknown field 'lenght_penalty'; did you mean 'length_penalty'?"),
    ],
)
def test_mistakes_in_params(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
    assert str(caught.value) == message
