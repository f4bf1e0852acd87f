"""`zinfer.max_device_memory` bounds all that is taken of the device: a cap is a smaller card."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import loaded
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from plan_support import CONFIGS, SMALL_LLAMA, machine_with, outline_of, search_less, write_config
from test_footprint import measured_peak_bytes
from transformers import LlamaConfig, LlamaForCausalLM

import zinfer
from zinfer import LLM, SamplingParams
from zinfer.batching.batcher import Batcher
from zinfer.batching.draft_model import own_bytes
from zinfer.config import resolve_settings
from zinfer.errors import PlanError
from zinfer.model.outline import Outline
from zinfer.planning.device_cap import DeviceParts
from zinfer.planning.job_plan import Job, SizedJob
from zinfer.planning.job_search import plan_job
from zinfer.planning.memory import Request
from zinfer.planning.plan import Case, plan_batch
from zinfer.units import human_bytes

CARD_BYTES = 80 * 10**9
LENGTHS = (16, 400, 33, 120, 16, 250, 64, 380, 20, 90)
"""Tokens of a job's prompts: of 16 to 4,000, a tenth where they are long."""


def least_bytes(error: PlanError) -> int:
    found = re.search(r"zinfer\.max_device_memory is [^,]+, too little: at least (\d+) bytes", str(error))
    assert found, error
    return int(found[1])


def capped(outline: Outline, cap: int | None, **keys: Any) -> Case:
    settings = resolve_settings({"zinfer": {"max_device_memory": cap, **keys}})
    machine = machine_with(CARD_BYTES, 10**11)
    return Case(outline, replace(machine, limits=machine.limits.stated(settings.memory, CARD_BYTES, 10**11)), settings)


def batch_parts(outline: Outline, cap: int | None) -> DeviceParts:
    return plan_batch(capped(outline, cap), Request(4, 256, 32)).parts


def job_parts(outline: Outline, cap: int | None) -> DeviceParts:
    """The sizes that an `LLM` chooses by itself."""
    case = capped(outline, cap)
    return SizedJob.of(case, case.settings.batching, Job(64, [256], [32]), None).parts


@pytest.fixture(scope="module", params=["a quarter of Llama-3-70B", "small"])
def outline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outline:
    config = SMALL_LLAMA if request.param == "small" else CONFIGS["Llama-3-70B"] | {"num_hidden_layers": 20}
    return outline_of(write_config(tmp_path_factory.mktemp("outline"), config))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts_of", [batch_parts, job_parts])
@given(share=st.floats(0.0, 1.2))
@examples(max_examples=12)
def test_a_plan_fits_its_cap_or_is_refused(
    outline: Outline, parts_of: Callable[[Outline, int | None], DeviceParts], share: float
) -> None:
    cap = 1 + int(share * share * CARD_BYTES)  # small ones more often
    try:
        parts = parts_of(outline, cap)
    except PlanError:
        assert cap < CARD_BYTES / 2, "half a card holds each of these models' slots"
        return
    assert parts.total <= min(cap, CARD_BYTES)
    assert min(parts.kv_cache, parts.activations, parts.reserve) > 0


@pytest.mark.sampled(2)
def test_a_cap_is_a_smaller_card(outline: Outline, monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch)
    case, job = capped(outline, 24 * 10**9), Job(64, [256], [32])
    machine = machine_with(24 * 10**9, 10**11)
    assert (
        plan_batch(case, Request(4, 256, 32)).plan
        == plan_batch(Case(outline, machine, case.settings), Request(4, 256, 32)).plan
    )
    planned, smaller = (plan_job(each, job, is_rough=True) for each in (case, replace(case, machine=machine)))
    assert (planned.keys(), planned.plan, planned.parts) == (smaller.keys(), smaller.plan, smaller.parts)
    assert planned.parts.total <= 24 * 10**9


@pytest.mark.sampled(2)
def test_the_least_cap_is_named_and_enough(outline: Outline, monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch)
    with pytest.raises(PlanError, match=r"for weights .*, slots .*, KV cache .*, activations .*, reserve ") as refused:
        plan_batch(capped(outline, 8 * 10**8), Request(4, 256, 32))
    least = least_bytes(refused.value)
    assert batch_parts(outline, least).total <= least
    with pytest.raises(PlanError) as refused:
        batch_parts(outline, least - 1)
    assert least_bytes(refused.value) == least
    with pytest.raises(PlanError) as refused:
        plan_job(capped(outline, 8 * 10**8), Job(64, [256], [32]), is_rough=True)
    least = least_bytes(refused.value)
    assert plan_job(capped(outline, least), Job(64, [256], [32]), is_rough=True).parts.total <= least


def test_a_cap_that_no_card_could_raise_enough_gives_the_first_reason(outline: Outline) -> None:
    with pytest.raises(PlanError, match=r"^the request does not fit") as refused:
        plan_batch(capped(outline, CARD_BYTES), Request(100_000, 256, 32))
    assert "at least" not in str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights, logits and activations all show: 6.6 MB, 1,000 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("capped")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def peaks() -> Iterator[list[int]]:
    """The most bytes that each pass of any `LLM` takes above what is held before it."""
    found: list[int] = []
    step = Batcher.step

    def measured(self: Batcher, *args: Any) -> Any:
        events: list[Any] = []
        found.append(measured_peak_bytes(lambda: events.append(step(self, *args))))
        return events[0]

    with patch.object(Batcher, "step", measured):
        yield found


PARAMS = (
    SamplingParams(max_new_tokens=6, ignore_eos=True),
    SamplingParams(max_new_tokens=3, ignore_eos=True, temperature=1.0, top_p=0.9, top_k=50, seed=1, logprobs=3),
    SamplingParams(max_new_tokens=4, ignore_eos=True, repetition_penalty=1.2, prompt_logprobs=2),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cap", [26 * 10**6, 40 * 10**6])
def test_all_that_a_job_takes_is_below_the_cap(folder: Path, cap: int) -> None:
    drawn = torch.randint(3, 1000, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in drawn.split(list(LENGTHS))]
    params = [PARAMS[number % len(PARAMS)] for number in range(len(prompts))]
    with peaks() as measured, LLM(folder, device="cpu", max_device_memory=cap) as llm:
        found = llm.generate(prompts, params)
        parts, stats, cache = llm.device_parts, llm.stats(), llm._cache
        assert isinstance(cache, zinfer.kv_cache.device.KVCache)
        kv_bytes = sum(part.nbytes for part in cache._parts)
    assert all(completion.error is None for completion in found)
    assert parts.total <= cap
    assert stats.device_bytes <= parts.weights + parts.slots
    assert kv_bytes == parts.kv_cache
    assert len(measured) > 5
    assert 0 < max(measured) <= parts.activations
    assert (stats.streamed_bytes_per_pass > 0) == (cap < 30 * 10**6)


def test_an_engine_leaves_room_for_passes_of_unknown_size(folder: Path) -> None:
    cap = 5 * 10**6
    with loaded(folder, max_device_memory=cap) as engine:
        parts = engine.device_parts
        assert engine.stats().device_bytes <= parts.weights + parts.slots <= 0.8 * cap
        assert parts.activations >= 0.2 * cap - 1
        assert engine.stats().streamed_bytes_per_pass > 0
    batch = {"batch_size": 2, "prompt_len": 16, "new_tokens": 4}
    with loaded(folder, max_device_memory=cap, **batch) as engine:
        assert engine.device_parts.total <= cap
        ids = torch.randint(3, 1000, (2, 16), generator=torch.Generator().manual_seed(0))
        peak = measured_peak_bytes(lambda: engine.generate(ids, max_new_tokens=4, do_sample=False))
        assert peak <= engine.device_parts.activations + engine.device_parts.kv_cache
    with pytest.raises(PlanError) as refused:
        zinfer.init_inference(folder, device="cpu", max_device_memory=10**5)
    least = least_bytes(refused.value)
    with loaded(folder, max_device_memory=least) as engine:
        assert engine.device_parts.total <= least


def test_a_draft_model_takes_part_of_the_same_caps(folder: Path) -> None:
    cap, host = 3 * 10**9, 10**9
    with LLM(folder, device="cpu", max_device_memory=cap, max_host_memory=host, draft_model=str(folder)) as llm:
        assert llm._draft is not None
        parts, draft = llm.device_parts, llm._draft.device_parts
        assert parts.total + draft.total <= cap
        assert min(parts.kv_cache, draft.kv_cache) > 0
        assert llm.host_bytes + llm._draft.host_bytes <= host
    with pytest.raises(PlanError, match=r"zinfer\.max_device_memory is 1\.20 GB, too little: at least"):
        LLM(folder, device="cpu", max_device_memory="1.2GB", draft_model=str(folder))


def test_a_refusal_beside_a_draft_model_says_what_that_takes(folder: Path) -> None:
    with LLM(folder, device="cpu", max_device_memory="3GB", draft_model=str(folder)) as llm:
        assert llm._draft is not None
        taken = own_bytes(llm._draft.device_parts)
    cap = taken + 10**6
    shares = rf"zinfer\.draft_model takes .* of zinfer\.max_device_memory, {human_bytes(cap)}; with the rest: "
    with pytest.raises(PlanError, match=shares + r"zinfer\.max_device_memory is 1\.00 MB, too little"):
        LLM(folder, device="cpu", max_device_memory=cap, draft_model=str(folder), tokens_per_pass=64, max_sequences=2)


def test_a_cap_above_what_is_free_is_allowed_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(folder, device="cpu", max_device_memory="800TB") as llm:
        assert llm.device_parts.total < 800 * 10**12
    assert "zinfer.max_device_memory is 800.00 TB, more than the" in caplog.text
    with loaded(folder, max_device_memory="30MB"):
        assert caplog.text.count("more than the") == 1


def test_weights_alone_can_be_bounded(folder: Path) -> None:
    with loaded(folder, max_weight_memory=3 * 10**6) as engine:
        assert engine.stats().device_bytes <= 3 * 10**6
    with pytest.raises(PlanError, match=r"zinfer\.max_weight_memory is 30\.00 MB, but beside the request only"):
        LLM(folder, device="cpu", max_device_memory=26 * 10**6, max_weight_memory=30 * 10**6)
