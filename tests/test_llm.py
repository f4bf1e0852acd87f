"""`zinfer.LLM`: completions beside each other equal those of each prompt alone, whatever the budgets and the homes."""

import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint
from jobs_support import letters_model
from llm_support import NUM_NEW, SIZES, alone, by_ids, folder, llm, prompts, token_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer

from zinfer import LLM, Completion, SamplingParams
from zinfer.errors import ConfigError
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.prompt_encoder import PromptEncoder

DEMO = Path(__file__).parent.parent / "examples" / "demo"
NVME = {"zero_optimization": {"offload_param": {"device": "nvme"}}}

__all__ = ["alone", "folder", "llm", "prompts"]  # fixtures


@pytest.mark.sampled(6)
@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize(("tokens_per_pass", "num_pages", "page_size"), SIZES)
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
        # Only the largest cache has pages to lend.
        has_streamed_always = stats.bytes_to_device >= (stats.passes - 1) * stats.disk_bytes_per_pass
        assert has_streamed_always == (num_pages * page_size < 1000)


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [None, 7])
def test_samples_differ_and_their_seeds_repeat_them(llm: LLM, prompts: list[list[int]], seed: int | None) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=3.0, n=4, seed=seed)
    first = llm.generate(by_ids(prompts[:2]), params)
    assert [(each.prompt_index, each.sample_index) for each in first] == [(p, s) for p in range(2) for s in range(4)]
    assert len({each.token_ids for each in first}) == 8
    assert (llm.generate(by_ids(prompts[:2]), params) == first) == (seed is not None)
    for each in first:
        again = llm.generate(by_ids(prompts)[each.prompt_index], replace(params, n=1, seed=each.seed))[0]
        assert (again.token_ids, again.seed) == (each.token_ids, each.seed)
        assert list(each.prompt_token_ids) == prompts[each.prompt_index]
    assert llm.generate(by_ids(prompts[:1]), SamplingParams(max_new_tokens=1))[0].seed is None, "nothing is drawn"


def test_a_negative_seed_is_that_plus_two_to_the_64(llm: LLM, prompts: list[list[int]]) -> None:
    texts = [
        [
            each.token_ids
            for each in llm.generate(by_ids(prompts[:1]), temperature=3.0, max_new_tokens=8, n=2, seed=seed)
        ]
        for seed in (-1, 2**64 - 1, -(2**63), 2**63, 1)
    ]
    assert (texts[0], texts[2]) == (texts[1], texts[3])
    assert len({found[0] for found in texts}) == 3


def test_equal_prompts_are_computed_once(folder: Path) -> None:
    prompt = random_prompts(1, min_tokens=100, max_tokens=100)[0]
    with LLM(folder, device="cpu", kv_page_size=8, kv_cache_memory="2MB") as llm:
        found = llm.generate(by_ids([prompt] * 20), SamplingParams(max_new_tokens=2))
        assert len({each.token_ids for each in found}) == 1
        # Twelve whole pages of the first are the others' too; each computes the last four tokens and one new one.
        assert llm.num_tokens == 96 + 20 * (4 + 1)


def test_prefixes_are_found_until_they_are_forgotten(folder: Path) -> None:
    prompt = {"prompt_token_ids": list(range(10, 50))}
    with LLM(folder, device="cpu", kv_page_size=8, kv_cache_memory="2MB") as llm:
        counts = []
        for forgets in (False, False, True):
            if forgets:
                llm.reset_prefix_cache()
            before = llm.num_tokens
            llm.generate(prompt, SamplingParams(max_new_tokens=1))
            counts.append(llm.num_tokens - before)
        assert counts == [40, 8, 40]
        assert llm.num_new_tokens == 3


@pytest.mark.slow
def test_the_longest_begin_first_if_asked(folder: Path, prompts: list[list[int]], alone: list[tuple[int, ...]]) -> None:
    """Two at a time: what is complete first is not what came first."""
    ends: dict[str, list[int]] = {}
    for order in ("arrival", "longest_first"):
        with LLM(folder, device="cpu", admission_order=order, max_sequences=2, kv_cache_memory="2MB") as llm:
            found = list(llm.stream(by_ids(prompts), SamplingParams(max_new_tokens=NUM_NEW)))
        ends[order] = [each.prompt_index for each in found]
        assert [each.token_ids for each in sorted(found, key=lambda each: each.prompt_index)] == alone
    lens = [len(prompts[index]) for index in ends["longest_first"]]
    assert sum(lens[: len(lens) // 2]) > sum(lens[len(lens) // 2 :])
    assert ends["arrival"] != ends["longest_first"]


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


@pytest.mark.slow
def test_a_window_that_nothing_heeds(tmp_path: Path, prompts: list[list[int]]) -> None:
    tiny_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    with LLM(tmp_path, device="cpu", kv_page_size=4, kv_cache_memory="100kB") as llm:
        params = SamplingParams(max_new_tokens=30)
        together = llm.generate(by_ids(prompts[:6]), params)
        assert [llm.generate([prompt], params)[0].token_ids for prompt in by_ids(prompts[:6])] == [
            each.token_ids for each in together
        ]


def test_a_prompt_given_twice_is_drawn_twice(llm: LLM, prompts: list[list[int]]) -> None:
    found = llm.generate(by_ids([prompts[0]] * 4), SamplingParams(max_new_tokens=8, temperature=3.0))
    assert len({each.token_ids for each in found}) == 4


def demo_answers(llm: LLM) -> list[Completion]:
    rows = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text().splitlines()]
    return llm.generate([row["prompt"] for row in rows], SamplingParams(max_new_tokens=8))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kv_cache_dtype", "least"), [("auto", 200), ("int8", 198), pytest.param("fp8", 190, marks=pytest.mark.slow)]
)
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
        assert (whole.text, whole.stop_reason) == ("579", None)
        cut = llm.generate("123+456=", SamplingParams(max_new_tokens=8, stop=("79",)))[0]
        assert (cut.text, cut.finish_reason, cut.stop_reason) == ("5", "stop", "79")
        chat = llm.generate([{"role": "user", "content": "123+456="}], SamplingParams(max_new_tokens=8))[0]
        template = llm.tokenizer.chat_template
        assert (chat.text == "579") if template else ("no chat template" in str(chat.error))
        llm.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
        refused = llm.generate([{"role": "user", "content": "1+1="}])[0]
        assert "the chat template refuses them: no such role" in str(refused.error)


def test_what_a_call_gives_chat_templates(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking %}+{% endif %}{{ reasoning_effort }}"
    given: list[dict[str, Any]] = [
        {},
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"},
        {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"},
    ]
    chat = [{"role": "user", "content": "a"}]
    with LLM(letters_model(tmp_path, chat_template=template), device="cpu", kv_cache_memory="2MB") as llm:
        wanted = llm.generate(["a", "a+low", "ahigh"], max_new_tokens=4)
        found = [llm.generate([chat, "b"], max_new_tokens=4, **each) for each in given]
        assert [each[0].token_ids for each in found] == [each.token_ids for each in wanted]
        assert len({each.token_ids for each in wanted}) == 3
        assert all(each[1].error is None for each in found)
        refused = llm.generate([chat], chat_template_kwargs={"messages": []})[0]
        assert refused.error == "chat_template_kwargs: 'messages' is zinfer's own; leave it out"
        for wrong, message in (
            ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a mapping of names to values, not [1]"),
            ({"reasoning_effort": 3}, "reasoning_effort must be a string such as 'low', not 3"),
        ):
            with pytest.raises(ConfigError) as caught:
                llm.generate([chat], **wrong)
            assert str(caught.value) == message
        with pytest.raises(
            ConfigError, match="'reasoning_effort' is for chat templates, but no prompt is the messages"
        ):
            llm.generate(["a"], reasoning_effort="low")


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "123+"}, {"type": "text", "text": "456="}]
    with LLM(DEMO / "model", device="cpu", kv_cache_memory="8MB") as llm:
        llm.tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content | replace('\n', '') }}"
        assert llm.generate([{"role": "user", "content": parts}], SamplingParams(max_new_tokens=8))[0].text == "579"
        picture = {"type": "image_url", "image_url": {"url": "data:,"}}
        refused = llm.generate([{"role": "user", "content": [parts[0], picture]}])[0]
    assert refused.error == (
        "messages: the content of message 1: part 2 ('image_url') is not a text part; "
        'only {"type": "text", "text": "..."} is supported'
    )


def test_a_message_needs_content_unless_it_says_something_else() -> None:
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(DEMO / "model"), 100)
    encoder.tokenizer.chat_template = "{% for each in messages %}{{ each.content or 'called' }}{% endfor %}"
    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    user, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": None}
    with closing(encoder):
        assert encoder.tokenize([user, {**answer, "tool_calls": calls}]) == encoder.tokenizer.encode(
            "1+1=called", add_special_tokens=False
        )
        for wrong in ({"role": "user"}, answer, {**answer, "tool_calls": []}, {"role": "tool", "tool_call_id": "a"}):
            with pytest.raises(ConfigError, match="messages: the content of message 2 is null or missing; give a text"):
                encoder.tokenize([user, wrong])


def test_prompts_of_a_generator_are_all_completed(
    llm: LLM, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    found = llm.generate((each for each in by_ids(prompts[:3])), SamplingParams(max_new_tokens=NUM_NEW))
    assert [each.token_ids for each in found] == alone[:3]


def test_fields_of_params_are_taken_by_themselves(
    llm: LLM, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    found = llm.generate(by_ids(prompts[:2]), max_new_tokens=4)
    assert [each.token_ids for each in found] == [tokens[:4] for tokens in alone[:2]]
    with pytest.raises(ConfigError, match="max_tokens is given beside params; give it in them"):
        llm.generate(by_ids(prompts[:1]), SamplingParams(), max_tokens=4)
    with pytest.raises(ConfigError, match="unknown field 'max_token'; did you mean 'max_tokens'"):
        llm.generate(by_ids(prompts[:1]), max_token=4)


def test_without_a_number_a_text_ends_where_the_context_does(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [3] * 120}, {"prompt_token_ids": [3] * 128}]
    for params in (
        SamplingParams(ignore_eos=True),
        SamplingParams(ignore_eos=True, max_new_tokens=9, min_new_tokens=9),
        SamplingParams(ignore_eos=True, min_new_tokens=100),
        SamplingParams(ignore_eos=True, max_new_tokens=10**9, temperature=1.0, seed=1),
    ):
        found = llm.generate(prompts, params)
        assert (len(found[0].token_ids), found[0].finish_reason) == (8, "length")
        assert "128 tokens, which leaves no room for new ones within 128" in str(found[1].error)
    scored = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    assert [each.token_ids for each in llm.generate(prompts, scored)] == [(), ()]
    assert all(each.error is None for each in llm.generate(prompts, scored))


def test_tokens_without_text() -> None:
    fields = {"max_new_tokens": 8, "logprobs": 0}
    with LLM(DEMO / "model", device="cpu", kv_cache_memory="8MB") as llm:
        whole, bare = (llm.generate("123+456=", **fields, detokenize=each)[0] for each in (True, False))
        assert whole == replace(bare, text="579")
        handle = llm.prepare({"prompt": "123+456="}, deltas=True, detokenize=False, max_new_tokens=8)
        llm.submit(handle)
        assert [each.text for each in handle] == [""] * len(bare.token_ids)
        with pytest.raises(ConfigError, match=r"stop is for texts, and detokenize is false.* give stop_token_ids"):
            llm.generate("123+456=", detokenize=False, stop="7")


def test_each_text_ends_where_its_own_settings_say(
    llm: LLM, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    params = [
        SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, stop_token_ids=(tokens[place],))
        for tokens, place in zip(alone, [3, 5, 0], strict=False)
    ]
    params += [SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)] * (len(prompts) - len(params))
    wanted = [tokens[: tokens.index(tokens[place]) + 1] for tokens, place in zip(alone, [3, 5, 0], strict=False)]
    wanted += alone[len(wanted) :]
    for order in (1, -1):
        found = llm.generate(by_ids(prompts)[::order], params[::order])
        assert [each.token_ids for each in found] == wanted[::order]
        assert [each.finish_reason for each in found] == [*["stop"] * 3, *["length"] * (len(prompts) - 3)][::order]
        assert [each.stop_reason for each in found][::order] == [
            *(tokens[-1] for tokens in wanted[:3]),
            *[None] * (len(prompts) - 3),
        ]


def test_stop_strings_of_one_text_are_none_of_another() -> None:
    with LLM(DEMO / "model", device="cpu", kv_cache_memory="8MB") as llm:
        params = [SamplingParams(max_new_tokens=8, stop=("79",)), SamplingParams(max_new_tokens=8)]
        for order in (1, -1):
            found = llm.generate(["123+456="] * 2, params[::order])
            assert [each.text for each in found] == ["5", "579"][::order]


def test_texts_are_encoded_together_and_a_refused_one_stops_no_other() -> None:
    texts = ["123+456=", "1+2=", "", "20+30="]
    with LLM(DEMO / "model", device="cpu", kv_cache_memory="8MB") as llm:
        encoder = PromptEncoder(llm.tokenizer, 100, LengthLimits())
        chat = [{"role": "user", "content": "1+2="}]
        usual = SamplingParams()
        encoded = encoder.encode_texts([(each, usual) for each in [*texts, chat]])
        assert encoded[4] == chat
        assert encoded[0] == {"prompt_token_ids": llm.tokenizer("123+456=").input_ids}
        with_refused = [*texts, "\ud800", 3]
        assert encoder.encode_texts([(each, usual) for each in with_refused]) == with_refused
        alone = [llm.generate([text], SamplingParams(max_new_tokens=8))[0] for text in with_refused]
        for several in (texts, with_refused):
            found = llm.generate(several, SamplingParams(max_new_tokens=8))
            assert [(each.text, each.error) for each in found] == [(each.text, each.error) for each in alone][
                : len(several)
            ]
    assert [each.text for each in alone[:2]] == ["579", "3"]
    assert "the tokenizer refuses the prompt" in str(alone[4].error)


def test_weights_stay_in_pages_that_no_text_needs_until_one_does(
    folder: Path, prompts: list[list[int]], alone: list[tuple[int, ...]], device: str
) -> None:
    num_pages = -(-max(map(len, prompts)) // 16) * len(prompts)
    memory = num_pages * 16 * token_bytes(folder)
    with LLM(folder, NVME, device=device, kv_page_size=16, kv_cache_memory=memory) as llm:
        moved, passes = [], []
        for count in (2, len(prompts), 2):
            before, first = llm.stats().bytes_to_device, llm.stats().passes
            found = llm.generate(by_ids(prompts[:count]), SamplingParams(max_new_tokens=NUM_NEW))
            assert [completion.token_ids for completion in found] == alone[:count]
            moved.append(llm.stats().bytes_to_device - before)
            passes.append(llm.stats().passes - first)
        per_pass = llm.stats().streamed_bytes_per_pass
    # The last two or three texts of many leave most pages to the weights; all of them leave none.
    assert [num_bytes < num_passes * per_pass / 2 for num_bytes, num_passes in zip(moved, passes, strict=True)] == [
        True,
        False,
        True,
    ]


def test_passes_are_told_with_the_seconds_between_them(llm: LLM, prompts: list[list[int]]) -> None:
    begin_s = time.perf_counter()
    llm.generate(by_ids(prompts), SamplingParams(max_new_tokens=5))
    passes = llm.passes()
    assert len(passes) == llm.stats().passes - 1
    assert all(seconds > 0 for _, seconds in passes)
    assert sum(seconds for _, seconds in passes) < time.perf_counter() - begin_s
    assert [size.num_samples for size, _ in passes] == [len(prompts)] * len(passes)


def test_memory_that_was_given_to_nobody_is_not_lent(
    folder: Path, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    """On a CPU pages that nobody writes to take no memory; a process would grow by the weights."""
    with LLM(folder, NVME, device="cpu") as llm:
        found = llm.generate(by_ids(prompts), SamplingParams(max_new_tokens=NUM_NEW))
        stats = llm.stats()
    assert [completion.token_ids for completion in found] == alone
    assert stats.bytes_to_device >= (stats.passes - 1) * stats.disk_bytes_per_pass


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "lens", "num_new"), [("llama", [4] * 12, 8), ("mistral", [120], 4)])
def test_lent_pages_hold_no_call_back_for_more_than_a_pass(
    family: str, lens: list[int], num_new: int, tmp_path: Path
) -> None:
    """Where pages are kept for decodes, or where a chunk takes more of them at once than its window."""
    folder = tiny_checkpoint(family, tmp_path)
    with LLM(folder, NVME, device="cpu", kv_cache_memory="6MB", kv_page_size=16) as llm:
        for call in range(3):
            made = [[5 + number, 7 + call, *range(9, 7 + length)] for number, length in enumerate(lens)]
            llm.generate(by_ids(made), SamplingParams(max_new_tokens=num_new, ignore_eos=True))
            assert len(llm._batcher.pass_sizes) <= llm.predict(lens, num_new).num_passes + 1
        assert llm._batcher._lender._limit < llm._batcher._cache.num_pages
