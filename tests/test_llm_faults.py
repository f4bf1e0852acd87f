"""`zinfer.LLM`: prompts, sizes and models that cannot be used, calls that are cut short, left or mixed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, tiny_checkpoint
from llm_support import NUM_NEW, alone, by_ids, folder, llm, prompts, token_bytes
from transformers import AutoModelForCausalLM

import zinfer
from zinfer import LLM, SamplingParams
from zinfer.batching.batcher import Batcher
from zinfer.batching.runner import PassRunner
from zinfer.errors import ConfigError
from zinfer.scheduling.scheduler import Scheduler
from zinfer.scheduling.waiting_queue import WaitingQueue
from zinfer.scheduling.workload import Workload

__all__ = ["alone", "folder", "llm", "prompts"]  # fixtures


def test_stream_gives_each_as_it_ends_and_may_be_left(llm: LLM, prompts: list[list[int]]) -> None:
    params = [SamplingParams(max_new_tokens=1 + 3 * (number % 3)) for number in range(6)]
    seen = [each.prompt_index for each in llm.stream(by_ids(prompts[:6]), params)]
    assert sorted(seen) == list(range(6))
    assert seen[:2] == [0, 3]
    for _ in llm.stream(by_ids(prompts), SamplingParams(max_new_tokens=8)):
        break
    again = llm.generate(by_ids(prompts[:6]), params)
    assert [len(each.token_ids) for each in again] == [1, 4, 7, 1, 4, 7]


def test_a_pass_that_is_cut_short_leaves_nothing_behind(
    llm: LLM, prompts: list[list[int]], alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that it was to fill hold something else, and must not be found by the same prompts."""

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    params = SamplingParams(max_new_tokens=NUM_NEW)
    with monkeypatch.context() as patched:
        patched.setattr(PassRunner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(by_ids(prompts), params)
    assert [each.token_ids for each in llm.generate(by_ids(prompts), params)] == alone


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ({"prompt_token_ids": []}, SamplingParams(), "no tokens"),
        ({"prompt_token_ids": [3, VOCAB_SIZE]}, SamplingParams(), f"from 0 to {VOCAB_SIZE - 1}, not {VOCAB_SIZE}"),
        ({"prompt_token_ids": [3, -1]}, SamplingParams(), "not -1"),
        ({"prompt_token_ids": [3, "4"]}, SamplingParams(), "not '4'"),
        ({"prompt_token_ids": None}, SamplingParams(), "list of whole numbers, not a NoneType"),
        ({"prompt_token_ids": "34"}, SamplingParams(), "list of whole numbers, not a str"),
        (None, SamplingParams(), "not a NoneType"),
        ({"prompt_token_ids": [3] * 130}, SamplingParams(max_new_tokens=9), "leaves no room for new ones within 128"),
        ({"tokens": [3]}, SamplingParams(), "'tokens'.*'prompt_token_ids' alone"),
        ("text", SamplingParams(), "no tokenizer"),
        ({"prompt_token_ids": [3]}, SamplingParams(max_new_tokens=2, stop=("x",)), "stop strings need a tokenizer"),
    ],
)
def test_a_bad_prompt_stops_no_other(
    llm: LLM,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    prompt: object,
    params: SamplingParams,
    message: str,
) -> None:
    own = SamplingParams(max_new_tokens=NUM_NEW)
    found = llm.generate([*by_ids(prompts[:1]), prompt, *by_ids(prompts[1:2])], [own, params, own])  # type: ignore[list-item]
    assert [each.finish_reason for each in found] == ["length", "error", "length"]
    assert found[1].error is not None
    assert [each.token_ids for each in found] == [alone[0], (), alone[1]]
    assert re.search(message, found[1].error)


def test_a_text_that_the_cache_cannot_hold(folder: Path) -> None:
    with LLM(folder, device="cpu", kv_page_size=8, kv_cache_memory=4 * 8 * token_bytes(folder)) as llm:
        long, full, short = llm.generate(by_ids([[3] * 40, [3] * 30, [3] * 20]), SamplingParams(max_new_tokens=3))
    assert long.error is not None
    assert len(full.token_ids) == 3, "the last new token needs no place"
    assert "6 pages of 8 tokens, but the KV cache has 4" in long.error
    assert len(short.token_ids) == 3


def test_damaged_weights_are_told(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    model.lm_head.weight.data[7] = float("nan")
    with LLM(model, device="cpu", kv_cache_memory="1MB") as llm:
        found = llm.generate({"prompt_token_ids": [3, 4]}, SamplingParams(max_new_tokens=2))
    assert [each.finish_reason for each in found] == ["error"]
    assert "not finite" in str(found[0].error)


def test_a_damaged_text_damages_no_other(folder: Path) -> None:
    """A prompt with the one token whose embedding is not a number, and one that begins like it, also in later calls."""
    good = [9 + place % 90 for place in range(24)]
    params = SamplingParams(max_new_tokens=4)
    with LLM(folder, device="cpu", kv_page_size=4, kv_cache_memory="1MB") as llm:
        wanted = llm.generate(by_ids([good]), params)[0].token_ids
    with LLM(model_with_nan(folder), device="cpu", kv_page_size=4, kv_cache_memory="1MB") as llm:
        bad = llm.generate(by_ids([[*good[:16], 7, *good[17:]]]), params)[0]
        assert bad.finish_reason == "error"
        after = llm.generate(by_ids([good, [*good[:12], 5, 6]]), params)
        assert after[0].token_ids == wanted
        assert after[1].error is None


def test_a_damaged_text_damages_no_other_that_begins_like_it_in_the_same_pass(folder: Path) -> None:
    begin = [9 + place % 90 for place in range(24)]
    good = [[*begin, 40 + number] for number in range(6)]
    params = SamplingParams(max_new_tokens=4)
    with LLM(folder, device="cpu", kv_page_size=4, kv_cache_memory="1MB") as llm:
        wanted = [each.token_ids for each in llm.generate(by_ids(good), params)]
    with LLM(model_with_nan(folder), device="cpu", kv_page_size=4, kv_cache_memory="1MB") as llm:
        found = llm.generate(by_ids([[*begin, 7, 8], *good[:3], [*begin[:9], 7], *good[3:]]), params)
        assert [each.finish_reason for each in found] == ["error", *["length"] * 3, "error", *["length"] * 3]
        assert [each.token_ids for each in found if each.error is None] == wanted
        assert [each.token_ids for each in llm.generate(by_ids(good), params)] == wanted


def model_with_nan(folder: Path) -> AutoModelForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.embed_tokens.weight.data[7] = float("nan")
    return model


def test_nothing_is_predicted_of_no_prompts(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no prompts to predict"):
        llm.predict([], 4)


def test_the_passes_of_the_last_call_are_predicted(folder: Path) -> None:
    with LLM(folder, device="cpu", kv_page_size=8, kv_cache_memory="1MB") as llm:
        with pytest.raises(ConfigError, match="no pass was computed yet"):
            llm.predict_passes()
        for lens in ([20, 30, 40], [50, 60]):
            own = [{"prompt_token_ids": [10 + index, *range(10, 9 + size)]} for index, size in enumerate(lens)]
            llm.reset_prefix_cache()
            llm.generate(own, SamplingParams(max_new_tokens=5, ignore_eos=True))
            found, expected = llm.predict_passes(), llm.predict(lens, 5)
            assert (found.num_passes, found.tokens_per_pass) == (expected.num_passes, expected.tokens_per_pass)
            assert found.seconds == pytest.approx(expected.seconds)
            assert found.busy_s == pytest.approx(expected.busy_s)


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(zinfer.errors.ConfigError, match="2 params for 1 prompts"):
        llm.generate([{"prompt_token_ids": [3]}], [SamplingParams(), SamplingParams()])


@pytest.mark.parametrize("params", [{"max_new_tokens": 3}, [None]], ids=["dict", "none"])
def test_params_of_another_type(llm: LLM, params: Any) -> None:
    with pytest.raises(zinfer.errors.ConfigError, match=r"params are SamplingParams, not a (dict|NoneType)"):
        llm.generate([{"prompt_token_ids": [3]}], params)


def test_calls_share_passes_and_each_gets_its_own(
    llm: LLM, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    params = SamplingParams(max_new_tokens=NUM_NEW)
    first = llm.stream(by_ids(prompts), params)
    found = [next(first)]
    second = llm.generate(tuple(by_ids(prompts[2:4])), params)
    assert [each.token_ids for each in second] == alone[2:4]
    found += first
    assert {each.prompt_index: each.token_ids for each in found} == dict(enumerate(alone))
    assert llm.generate([]) == []


def test_pages_are_not_forgotten_under_requests(llm: LLM, prompts: list[list[int]]) -> None:
    handle = llm.prepare(by_ids(prompts[:2]), SamplingParams(max_new_tokens=60, ignore_eos=True))
    llm.submit(handle)
    with pytest.raises(RuntimeError, match="requests of this LLM are under way; wait"):
        llm.reset_prefix_cache()
    llm.cancel(handle)
    llm.reset_prefix_cache()
    assert {each.finish_reason for each in handle} == {"cancelled"}  # type: ignore[union-attr]


def test_calls_from_a_hook_of_its_own_are_refused(llm: LLM, prompts: list[list[int]]) -> None:
    hook = llm._model.layers[1].register_forward_hook(lambda *_: llm.generate(by_ids(prompts[:1])))
    with pytest.raises(RuntimeError, match="called within a pass of its own"):
        llm.generate(by_ids(prompts[:1]))
    hook.remove()
    assert llm.generate(by_ids(prompts[:1]), max_new_tokens=1)[0].error is None


def test_closed_twice_and_used_after(folder: Path) -> None:
    llm = LLM(folder, device="cpu", kv_cache_memory="1MB")
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM was closed"):
        llm.generate({"prompt_token_ids": [3]}, SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_page_size": 48}, r"zinfer\.kv_page_size is 48; give a power of two"),
        ({"kv_cache_memory": 1000}, r"a page of the KV cache, 64 tokens, takes .* raise zinfer\.kv_cache_memory"),
        ({"kv_cache_dtype": "int4"}, r"kv_cache_dtype.*\"fp8\""),
        ({"tokens_per_pass": 0}, r"tokens_per_pass.* at least 1"),
    ],
)
def test_sizes_that_cannot_be(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder, device="cpu", **options)


def test_a_family_is_refused_before_a_quantized_copy_is_written(tmp_path: Path) -> None:
    folder, copies = tiny_checkpoint("llama", tmp_path / "model"), tmp_path / "copies"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "diffllama", "architectures": ["DiffLlamaForCausalLM"]})
    )
    copies.mkdir()
    offload = {"device": "nvme", "nvme_path": str(copies)}
    settings = {"zero_optimization": {"offload_param": offload}, "zinfer": {"quantization": {"bits": 8}}}
    with pytest.raises(zinfer.errors.ConfigError, match="a DiffLlamaForCausalLM cannot run in ragged batches"):
        LLM(folder, settings, device="cpu")
    assert list(copies.iterdir()) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("owner", "name"), [(Workload, "add"), (WaitingQueue, "add"), (Scheduler, "end")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_failure_around_a_pass_leaves_the_next_one_right(
    llm: LLM,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    error: type[BaseException],
) -> None:
    """While requests are added, and while some end: all that are under way end with it."""

    def failing(*args: object) -> None:
        raise error("of a test")

    params = [SamplingParams(max_new_tokens=1 if number == 0 else NUM_NEW) for number in range(len(prompts))]
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            with pytest.raises(error, match="of a test"):
                llm.generate(by_ids(prompts), [replace(each, stop_token_ids=tuple(range(100))) for each in params])
        found = llm.generate(by_ids(prompts), SamplingParams(max_new_tokens=NUM_NEW))
        assert [each.token_ids for each in found] == alone
    assert pages_used(llm) == 0


def pages_used(llm: LLM) -> int:
    scheduler = llm._batcher._scheduler
    return scheduler.pool.num_used + scheduler.num_wanted_pages


def test_a_failure_that_cannot_be_cleared_away_ends_the_loop(
    llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise OSError("the device is lost")

    monkeypatch.setattr(PassRunner, "run", failing)
    monkeypatch.setattr(Batcher, "abort", failing)
    with pytest.raises(OSError, match="the device is lost"):
        llm.generate(by_ids(prompts))
    with pytest.raises(RuntimeError, match="this LLM was closed"):
        llm.generate(by_ids(prompts))
    with pytest.raises(OSError, match="the device is lost"):
        llm.close()
    llm.close()


def test_a_stream_that_outlives_its_llm_says_so(folder: Path, prompts: list[list[int]]) -> None:
    with LLM(folder, device="cpu", kv_cache_memory="1MB") as made:
        params = [SamplingParams(max_new_tokens=1 if i == 0 else 60, ignore_eos=True) for i in range(len(prompts))]
        stream = made.stream(by_ids(prompts), params)
        next(stream)
    with pytest.raises(RuntimeError, match="this LLM was closed"):
        list(stream)
