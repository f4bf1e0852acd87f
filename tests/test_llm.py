"""`zinfer.LLM`: completions beside each other equal those of each prompt alone, whatever the budgets and the homes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, random_prompts, tiny_checkpoint
from transformers import AutoModelForCausalLM

import zinfer
from zinfer import LLM, Completion, SamplingParams
from zinfer.batching.runner import PassRunner

DEMO = Path(__file__).parent.parent / "examples" / "demo"
NVME = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
NUM_NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [*random_prompts(9, max_tokens=60), *random_prompts(4, min_tokens=1, max_tokens=1, seed=5)]


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What transformers makes of each prompt by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)
        found.append(tuple(ids[0, len(prompt) :].tolist()))
    assert len({token for ids in found for token in ids}) > 20
    return found


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", kv_cache_memory="2MB") as made:
        yield made


def by_ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def token_bytes(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4)


@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize(
    ("tokens_per_pass", "num_pages", "page_size"), [(1, 80, 1), (7, 10, 8), (64, 9, 8), (1000, 64, 16), (50, 1, 128)]
)
def test_greedy_tokens_are_those_alone(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    device: str,
    home: str,
    tokens_per_pass: int,
    num_pages: int,
    page_size: int,
) -> None:
    config = {
        "zero_optimization": {"offload_param": {"device": home}},
        "zinfer": {
            "tokens_per_pass": tokens_per_pass,
            "kv_page_size": page_size,
            "kv_cache_memory": num_pages * page_size * token_bytes(folder),
        },
    }
    with LLM(folder, config, device=device) as llm:
        found = llm.generate(by_ids(prompts), SamplingParams(max_new_tokens=NUM_NEW))
        stats = llm.stats()
    assert [completion.token_ids for completion in found] == alone
    assert [completion.prompt_index for completion in found] == list(range(len(prompts)))
    assert {completion.finish_reason for completion in found} == {"length"}
    assert (stats.disk_bytes_per_pass > 0) == (home == "nvme")
    if home == "nvme":
        assert stats.bytes_to_device >= (stats.passes - 1) * stats.disk_bytes_per_pass


def test_pages_behind_the_window_are_given_back(tmp_path: Path) -> None:
    folder = tiny_checkpoint("mistral", tmp_path)
    prompt = random_prompts(1, min_tokens=90, max_tokens=90)[0]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, 90:].tolist()
    # A window of 16 lies in five pages of 4 tokens; the text alone would take 30.
    with LLM(folder, device="cpu", kv_page_size=4, kv_cache_memory=6 * 4 * token_bytes(folder)) as llm:
        found = llm.generate(by_ids([prompt, prompt]), SamplingParams(max_new_tokens=30))
    assert [list(each.token_ids) for each in found] == [wanted, wanted]


def test_sampled_tokens_are_those_alone(llm: LLM, prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(max_new_tokens=8, temperature=0.5 + number / 10, top_k=number, top_p=0.9, seed=number)
        for number in range(len(prompts))
    ]
    together = llm.generate(by_ids(prompts), params)
    single = [llm.generate([prompt], own)[0] for prompt, own in zip(by_ids(prompts), params, strict=True)]
    assert [each.token_ids for each in together] == [each.token_ids for each in single]
    other = llm.generate(by_ids(prompts), SamplingParams(max_new_tokens=8, temperature=5.0, seed=99))
    assert [each.token_ids for each in together] != [each.token_ids for each in other]


def test_samples_of_a_prompt_differ_and_repeat(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=3.0, n=4)
    first = llm.generate(by_ids(prompts[:2]), params)
    assert [(each.prompt_index, each.sample_index) for each in first] == [(p, s) for p in range(2) for s in range(4)]
    assert len({each.token_ids for each in first}) == 8
    assert llm.generate(by_ids(prompts[:2]), params) == first


def test_equal_prompts_are_computed_once(folder: Path) -> None:
    prompt = random_prompts(1, min_tokens=100, max_tokens=100)[0]
    with LLM(folder, device="cpu", kv_page_size=8, kv_cache_memory="2MB") as llm:
        found = llm.generate(by_ids([prompt] * 20), SamplingParams(max_new_tokens=2))
        assert len({each.token_ids for each in found}) == 1
        # Twelve whole pages of the first are the others' too; each computes the last four tokens and one new one.
        assert llm.num_tokens == 96 + 20 * (4 + 1)


def test_log_probabilities(llm: LLM, folder: Path, prompts: list[list[int]], alone: list[tuple[int, ...]]) -> None:
    found = llm.generate(by_ids(prompts[:1]), SamplingParams(max_new_tokens=3, logprobs=2))[0]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompts[0], *alone[0][:2]]])).logits[0, len(prompts[0]) - 1 :]
    wanted = torch.log_softmax(logits.double(), dim=-1)
    assert found.logprobs is not None
    assert len(found.logprobs) == 3
    for step, each in enumerate(found.logprobs):
        assert each.chosen == pytest.approx(float(wanted[step, alone[0][step]]), abs=1e-3)
        assert each.top_ids == wanted[step].topk(2).indices.tolist()


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
        ({"prompt_token_ids": [3] * 120}, SamplingParams(max_new_tokens=9), "more than 128; shorten"),
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
        long, short = llm.generate(by_ids([[3] * 40, [3] * 20]), SamplingParams(max_new_tokens=3))
    assert long.error is not None
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


def model_with_nan(folder: Path) -> AutoModelForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.embed_tokens.weight.data[7] = float("nan")
    return model


def test_a_window_that_nothing_heeds(tmp_path: Path, prompts: list[list[int]]) -> None:
    tiny_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    with LLM(tmp_path, device="cpu", kv_page_size=4, kv_cache_memory="100kB") as llm:
        params = SamplingParams(max_new_tokens=30)
        together = llm.generate(by_ids(prompts), params)
        assert [llm.generate([prompt], params)[0].token_ids for prompt in by_ids(prompts)] == [
            each.token_ids for each in together
        ]


def test_a_prompt_given_twice_is_drawn_twice(llm: LLM, prompts: list[list[int]]) -> None:
    found = llm.generate(by_ids([prompts[0]] * 4), SamplingParams(max_new_tokens=8, temperature=3.0))
    assert len({each.token_ids for each in found}) == 4


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(zinfer.errors.ConfigError, match="2 params for 1 prompts"):
        llm.generate([{"prompt_token_ids": [3]}], [SamplingParams(), SamplingParams()])


def test_calls_do_not_mix(llm: LLM, prompts: list[list[int]]) -> None:
    first = llm.stream(by_ids(prompts), SamplingParams(max_new_tokens=8))
    next(first)
    with pytest.raises(RuntimeError, match="another call of this LLM is under way"):
        llm.generate(by_ids(prompts))
    assert len(list(first)) == len(prompts) - 1
    assert len(llm.generate(tuple(by_ids(prompts[:2])), SamplingParams(max_new_tokens=1))) == 2
    assert llm.generate([]) == []


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


def test_positions_that_follow_the_longest_text_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(zinfer.errors.ConfigError, match="type dynamic, which depend on the longest text of a batch"):
        LLM(tmp_path, device="cpu")


def demo_answers(llm: LLM) -> list[Completion]:
    rows = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text().splitlines()]
    return llm.generate([row["prompt"] for row in rows], SamplingParams(max_new_tokens=8))


@pytest.mark.parametrize(("kv_cache_dtype", "least"), [("auto", 200), ("int8", 198), ("fp8", 190)])
def test_the_demo_from_disk(kv_cache_dtype: str, least: int) -> None:
    sums = [json.loads(line)["prompt"] for line in (DEMO / "prompts.jsonl").read_text().splitlines()]
    with LLM(DEMO / "model", NVME, device="cpu", kv_cache_dtype=kv_cache_dtype, tokens_per_pass=300) as llm:
        found = demo_answers(llm)
        assert llm.stats().disk_bytes_per_pass > 0
        assert llm.stats().passes < 20
    right = [
        sum(map(int, text.rstrip("=").split("+"))) == int(each.text) for text, each in zip(sums, found, strict=True)
    ]
    assert sum(right) >= least
    assert {each.finish_reason for each in found} == {"stop"}


def test_stop_strings_and_chats() -> None:
    with LLM(DEMO / "model", device="cpu", kv_cache_memory="8MB") as llm:
        whole = llm.generate("123+456=", SamplingParams(max_new_tokens=8))[0]
        assert whole.text == "579"
        cut = llm.generate("123+456=", SamplingParams(max_new_tokens=8, stop=("79",)))[0]
        assert (cut.text, cut.finish_reason) == ("5", "stop")
        chat = llm.generate([{"role": "user", "content": "123+456="}], SamplingParams(max_new_tokens=8))[0]
        template = llm.tokenizer.chat_template
        assert (chat.text == "579") if template else ("no chat template" in str(chat.error))
        llm.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
        refused = llm.generate([{"role": "user", "content": "1+1="}])[0]
        assert "the chat template refuses them: no such role" in str(refused.error)
