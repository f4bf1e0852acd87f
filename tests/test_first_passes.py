"""What a server computes before its first request: the forms that requests have, often enough to be captured."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_checkpoint

from zinfer import LLM, SamplingParams
from zinfer.batching.pass_bucket import PassBucket, find_bucket
from zinfer.batching.ragged import BatchBuilder
from zinfer.scheduling.schedule import Chunks
from zinfer.serve.first_passes import compute_first_passes, compute_twice

MOST_TOKENS = 1024
DECODES = [1, 2, 4, *range(8, 65, 8), 80, 96, 112, 128]
BESIDE = [(size, segments) for size in (64, 128, 256, 512, 1024) for segments in (16, 64, 128) if segments <= size]
ENOUGH = 2
"""The first pass of a form is launched, the second captured."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=2)


def opened(model: Path, device: str = "cpu") -> LLM:
    options: dict[str, Any] = {"device": device, "kv_cache_memory": "8MB", "speculate": "off"}
    return LLM(model, {"zinfer": {"tokens_per_pass": MOST_TOKENS, **options}}, interactive=True)


def rows(number: int) -> tuple[list[Any], SamplingParams]:
    prompts = [{"prompt_token_ids": [5 + each, 9, 4]} for each in range(number)]
    return prompts, SamplingParams(max_new_tokens=6, ignore_eos=True)


def test_each_form_is_computed_until_it_is_captured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms, build = Counter[PassBucket | None](), BatchBuilder.build

    def noted(self: BatchBuilder, chunks: Chunks, *given: Any) -> Any:
        forms[find_bucket(chunks, page_size, MOST_TOKENS)] += 1
        return build(self, chunks, *given)

    with opened(model) as llm:
        page_size = llm.batching.page_size
        with monkeypatch.context() as patch:
            patch.setattr(BatchBuilder, "build", noted)
            compute_twice(llm)
        seen = {(form.num_tokens, form.num_segments, form.num_decodes): times for form, times in forms.items() if form}
        assert seen == dict.fromkeys(
            [*((size, size, size) for size in DECODES), *((*each, None) for each in BESIDE)], ENOUGH
        )
        assert llm.num_used_pages == 0
        before = llm.num_tokens
        llm.generate(*rows(2))
        assert llm.num_tokens - before == 2 * (3 + 5), "no prefix is left over"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zinfer", [{"max_sequences": 3}, {"tokens_per_pass": 100}, {"kv_cache_memory": "200KB"}])
def test_small_passes_are_computed_alike(model: Path, zinfer: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with LLM(model, {"zinfer": {"device": "cpu", "speculate": "off", **zinfer}}, interactive=True) as llm:
        compute_twice(llm)
        assert llm.num_passes > 0
        assert caplog.text == ""


def test_nothing_is_computed_on_a_cpu(model: Path) -> None:
    with opened(model) as llm:
        compute_first_passes(llm)
        assert llm.num_passes == 0


def test_a_model_that_fails_is_served_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(model) as llm:
        broken = llm._model.module.model.norm.weight
        before = broken.detach().clone()
        broken.data.fill_(float("nan"))
        with caplog.at_level(logging.WARNING):
            compute_twice(llm)
        assert "kernels are compiled by the first requests, not before them: " in caplog.text
        broken.data.copy_(before)
        assert all(len(each.token_ids) == 6 for each in llm.generate(*rows(2)))


@pytest.mark.gpu
def test_first_requests_are_replayed(model: Path) -> None:
    with opened(model, "cuda") as llm:
        compute_first_passes(llm)
        for number in (1, 5, 40, 64):
            counts, passes = llm.graphs, llm.num_passes
            captured, replayed = counts.captured, counts.replayed
            llm.generate(*rows(number))
            assert llm.graphs.captured == captured, number
            assert llm.graphs.replayed - replayed == llm.num_passes - passes, number
