"""OpenAI batch files through `zinfer run`: what comes back, and the same bytes however often a job is cut."""

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs_run_support import model, output
from jobs_support import ResidentEngine, letters_model, letters_tokenizer, prompt_rows, read_rows, write_rows
from openai_support import HI, asked, chat, rows_of, run, text
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from zinfer.jobs.openai_batch import OpenAIForm
from zinfer.jobs.openai_response import OpenAIResponses
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.request import manifest_path
from zinfer.jobs.rows import Row, id_key
from zinfer.requests.client_names import ClientNames
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.detokenizer import Detokenizer
from zinfer.requests.logprobs import Logprobs
from zinfer.requests.openai_choice import Echo, OpenAIChoices, TextLogprobs
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.stop_criteria import StopCriteria

__all__ = ["model", "output"]  # fixtures
WAYS: list[dict[str, Any]] = [{}, {"engine_factory": ResidentEngine}]
SAMPLED = {"temperature": 1.5, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25}
SAMPLED |= {"logit_bias": {"40": 3, "50": -100}, "top_k": 60, "min_p": 0.01, "repetition_penalty": 1.1}
SAMPLED |= {"stop": ["zz"], "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [99], "max_tokens": 6}
MIXED: list[dict[str, Any]] = [
    *prompt_rows(20),
    chat("chat", model="their-model", temperature=0),
    *(chat(f"drawn-{number}", messages=[{"role": "user", "content": f"{number}"}]) for number in range(7)),
    text("text", temperature=0, max_tokens=5),
    text("ids", prompt=[7, 8, 9], temperature=0, max_completion_tokens=5),
    text("twice", n=2, best_of=2, seed=3),
    chat("scored", logprobs=True, top_logprobs=2, seed=3),
    text("scored text", logprobs=2, seed=3),
    text("bad", temperature=-1),
    text("long", prompt="a" * 130),
    text("beyond", prompt=[7, 100_000]),
    {"id": "own bad", "prompt": "a", "temperture": 1},
    *(text(f"more-{number}", prompt="ab" * number, **SAMPLED) for number in range(1, 6)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", WAYS)
def test_a_chat_row_becomes_a_chat_completion(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    before = int(time.time())
    rows = rows_of(model, tmp_path, [chat("c", temperature=0), {"id": "own", "messages": HI}], **options)
    own, row = rows["own"], rows["c"]
    created = row["response"]["body"]["created"]
    assert before <= created <= time.time()
    key = f"{id_key('c'):016x}"
    message = {"role": "assistant", "content": own["text"], "refusal": None}
    reasons = {"finish_reason": own["finish_reason"], "stop_reason": None}
    choice = {"index": 0, "message": message, "logprobs": None, **reasons}
    num_prompt, num_new = own["num_prompt_tokens"], own["num_output_tokens"]
    body = {
        "id": f"chatcmpl-{key}",
        "object": "chat.completion",
        "created": created,
        "model": model.name,
        "choices": [choice],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }
    response = {"status_code": 200, "request_id": f"req_{key}", "body": body}
    token_ids = [own["token_ids"]]
    assert row == {"id": f"batch_req_{key}", "custom_id": "c", "response": response, "error": None} | {
        "token_ids": token_ids
    }
    assert list(row) == ["id", "custom_id", "response", "error", "token_ids"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", WAYS)
def test_answers_are_those_of_the_same_rows_in_the_jobs_own_form(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    own_names = {"max_completion_tokens": "max_tokens"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "abc", **SAMPLED}),
        ("completions", {"prompt": [7, 8, 9], **SAMPLED}),
        ("completions", {"prompt": "abc", "max_completion_tokens": 3, "temperature": 0}),
        ("chat/completions", {"messages": HI, **SAMPLED, "n": 3}),
        ("completions", {"prompt": "abc", "temperature": 0, "logit_bias": {"40": 100}, "stop": "%"}),
        (
            "completions",
            {"prompt": "abc", "temperature": 0, "stop_token_ids": [*range(3, 131)], "include_stop_str_in_output": True},
        ),
        ("completions", {"prompt": "abc", "allowed_token_ids": [1], "skip_special_tokens": False, "max_tokens": 2}),
        ("chat/completions", {"messages": HI, "temperature": 0, "seed": None, "stop": None, "n": None}),
    ]
    rows: list[dict[str, Any]] = []
    for number, (url, body) in enumerate(bodies):
        own = {own_names.get(name, name): value for name, value in body.items()}
        if isinstance(own.get("prompt"), list):
            own["prompt_token_ids"] = own.pop("prompt")
        rows += [asked(f"theirs-{number}", url, **body), {"id": f"own-{number}", **own}]
    found = rows_of(model, tmp_path, rows, **options)
    for number, (url, _) in enumerate(bodies):
        own, body = found[f"own-{number}"], found[f"theirs-{number}"]["response"]["body"]
        outputs = own.get("outputs", [own])
        answers = [each["message"]["content"] if "chat" in url else each["text"] for each in body["choices"]]
        assert answers == [each["text"] for each in outputs]
        for name in ("finish_reason", "stop_reason"):
            assert [each[name] for each in body["choices"]] == [each[name] for each in outputs]
        assert [each["index"] for each in body["choices"]] == list(range(len(outputs)))
        assert body["usage"]["completion_tokens"] == own["num_output_tokens"]
        assert body["usage"]["prompt_tokens"] == own["num_prompt_tokens"]
        assert body["object"] == ("chat.completion" if "chat" in url else "text_completion")
    kept, special = found["own-5"], found["own-6"]
    assert (len(kept["text"]), kept["stop_reason"], special["text"]) == (1, kept["token_ids"][0], "<pad><pad>")


def test_content_in_parts_is_answered_as_the_same_text(model: Path, tmp_path: Path) -> None:
    contents: dict[str, Any] = {"parts": [{"type": "text", "text": each} for each in ("ab", "c")], "text": "ab\nc"}
    rows = [chat(name, messages=[{"role": "user", "content": each}], temperature=0) for name, each in contents.items()]
    found = rows_of(model, tmp_path, rows)
    answers = [found[name]["response"]["body"] for name in contents]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]


def test_a_list_of_one_prompt_is_that_prompt(model: Path, tmp_path: Path) -> None:
    sources: list[Any] = ["abc", ["abc"], [68, 69, 70], [[68, 69, 70]]]
    rows = [text(f"{number}", prompt=each, temperature=0) for number, each in enumerate(sources)]
    found = rows_of(model, tmp_path, rows)
    answers = [found[f"{number}"]["response"]["body"]["choices"] for number in range(4)]
    assert answers == [answers[0]] * 4


def test_what_a_row_gives_its_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking %}think{% endif %}{{ reasoning_effort }}"
    model = letters_model(tmp_path / "model", chat_template=template)
    given: list[dict[str, Any]] = [{}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}]
    given += [{"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}]
    rows: list[dict[str, Any]] = [chat(f"{number}", **each) for number, each in enumerate(given)]
    rows += [{"id": "own", "messages": HI, "chat_template_kwargs": {"enable_thinking": True}}]
    rows += [chat("bad", chat_template_kwargs={"chat_template": "x"})]
    rows += [{"id": "none", "prompt": "x", "reasoning_effort": "low"}]
    found = rows_of(model, tmp_path, rows)
    lens = [found[f"{number}"]["response"]["body"]["usage"]["prompt_tokens"] for number in range(4)]
    assert lens == [2, 2 + 5, 2 + 3, 2 + 5 + 3]
    assert found["own"]["num_prompt_tokens"] == 2 + 5
    message = found["bad"]["response"]["body"]["error"]["message"]
    assert message == "line 6: chat_template_kwargs: 'chat_template' is zinfer's own; leave it out"
    assert found["none"]["error"] == "line 7: reasoning_effort and chat_template_kwargs go with 'messages' alone"


def test_without_a_number_answers_end_where_the_context_does(model: Path, tmp_path: Path) -> None:
    rows = [text("a", prompt="a" * 120, ignore_eos=True), {"id": "b", "prompt": "a" * 120, "ignore_eos": True}]
    rows += [text("named", prompt="a" * 120, max_tokens=20), text("full", prompt="a" * 128)]
    found = rows_of(model, tmp_path, rows, max_new_tokens=None)
    body = found["a"]["response"]["body"]
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (8, "length")
    assert (found["b"]["num_output_tokens"], found["b"]["finish_reason"]) == (8, "length")
    assert [found[name]["response"]["status_code"] for name in ("named", "full")] == [400, 400]


def test_without_a_temperature_a_row_draws_at_1_and_by_its_id(model: Path, tmp_path: Path) -> None:
    rows = [text("a", temperature=None), text("b"), text("c"), {"id": "own", "prompt": "abc", "temperature": 1}]
    rows += [text("d", seed=5), {"id": "own 5", "prompt": "abc", "temperature": 1, "seed": 5}]
    rows += [text("e", seed=-1), {"id": "own -1", "prompt": "abc", "temperature": 1, "seed": -1}]
    rows += [{"id": "own last", "prompt": "abc", "temperature": 1, "seed": 2**64 - 1}]
    found = rows_of(model, tmp_path, rows)
    texts = {name: found[name]["response"]["body"]["choices"][0]["text"] for name in "abcde"}
    assert len({texts["a"], texts["b"], texts["c"], found["own"]["text"]}) == 4
    assert texts["d"] == found["own 5"]["text"]
    assert texts["e"] == found["own -1"]["text"] == found["own last"]["text"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", WAYS)
def test_log_probabilities_have_their_shapes(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = [
        chat("two", logprobs=True, top_logprobs=2, seed=1),
        chat("none", logprobs=True, seed=1),
        chat("off", logprobs=False, top_logprobs=0, seed=1),
        {"id": "own chat", "messages": HI, "logprobs": 2, "seed": 1, "temperature": 1},
        text("text", logprobs=2, seed=1),
        text("text 0", logprobs=0, seed=1),
        {"id": "own text", "prompt": "abc", "logprobs": 2, "seed": 1, "temperature": 1},
    ]
    found = rows_of(model, tmp_path, rows, **options)
    choices = {name: row["response"]["body"]["choices"][0] for name, row in found.items() if "custom_id" in row}
    decode = letters_tokenizer().decode
    own = found["own chat"]
    letters = [decode([token_id]) for token_id in own["token_ids"]]
    content = choices["two"]["logprobs"]["content"]
    assert [each["token"] for each in content] == letters
    assert [bytes(each["bytes"]).decode() for each in content] == letters
    assert [each["logprob"] for each in content] == [each["logprob"] for each in own["logprobs"]]
    for each, of_own in zip(content, own["logprobs"], strict=True):
        top = [[top["token"], top["logprob"]] for top in each["top_logprobs"]]
        assert top == [[decode([token_id]), logprob] for token_id, logprob in of_own["top"]]
    assert [each["top_logprobs"] for each in choices["none"]["logprobs"]["content"]] == [[]] * len(letters)
    assert choices["off"]["logprobs"] is None

    own = found["own text"]
    letters = [decode([token_id]) for token_id in own["token_ids"]]
    logprobs = choices["text"]["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert logprobs["tokens"] == letters
    assert logprobs["token_logprobs"] == [each["logprob"] for each in own["logprobs"]]
    assert logprobs["text_offset"] == list(range(len(letters)))
    for top, of_own, letter in zip(logprobs["top_logprobs"], own["logprobs"], letters, strict=True):
        assert top == {**{decode([token_id]): each for token_id, each in of_own["top"]}, letter: of_own["logprob"]}
    only = [{letter: each["logprob"]} for letter, each in zip(letters, own["logprobs"], strict=True)]
    assert choices["text 0"]["logprobs"]["top_logprobs"] == only


@pytest.mark.sampled(10)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("num_kept", [0, 1, 13, 27, 40])
def test_a_mixed_job_that_was_cut_writes_the_same_bytes(
    model: Path, tmp_path: Path, output: Path, num_kept: int, options: dict[str, Any]
) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", MIXED)
    run(model, prompts, output, **options)
    whole = output.read_bytes()
    manifest = json.loads(manifest_path(output).read_text())
    # As if the job had begun long ago, under another name of the model's folder.
    began = datetime.fromisoformat(manifest["began"]).timestamp()
    aged = {**manifest, "began": "2001-02-03T04:05:06+07:00", "model_name": "former"}
    manifest_path(output).write_text(json.dumps(aged))
    whole = whole.replace(b'"created":%d' % began, b'"created":981147906')
    whole = whole.replace(json.dumps(model.name).encode(), b'"former"')
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:num_kept]) + b'{"id":"batch_re')
    summary = run(model, prompts, output, **options)
    assert summary.num_skipped == num_kept
    assert output.read_bytes() == whole
    assert (summary.num_done, summary.num_failed) == (len(MIXED) - 4, 4)


def test_the_time_zone_of_whoever_goes_on_changes_nothing(
    model: Path, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch, time_zone: None
) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", [chat("c"), text("t")])
    run(model, prompts, output)
    whole = output.read_bytes()
    output.write_bytes(whole.splitlines(keepends=True)[0])
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    run(model, prompts, output)
    assert output.read_bytes() == whole


@pytest.fixture
def time_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever zone a test sets, the former one comes back."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_tokens_of_both_forms_are_counted_and_own_rows_stay_as_they_are(
    model: Path, tmp_path: Path, output: Path
) -> None:
    own = [row for row in MIXED if "id" in row]
    theirs = [row for row in MIXED if "custom_id" in row]
    summary = run(model, write_rows(tmp_path / "own.jsonl", own), output)
    lines = sorted(output.read_bytes().splitlines())
    mixed = tmp_path / "mixed.jsonl"
    both = run(model, write_rows(tmp_path / "in.jsonl", [*own, *theirs]), mixed, batch_size=20)
    assert sorted(line for line in mixed.read_bytes().splitlines() if b"custom_id" not in line) == lines
    usages = [row["response"]["body"].get("usage") for row in read_rows(mixed) if "custom_id" in row]
    done = [usage for usage in usages if usage]
    assert both.num_prompt_tokens == summary.num_prompt_tokens + sum(each["prompt_tokens"] for each in done)
    assert both.num_output_tokens == summary.num_output_tokens + sum(each["completion_tokens"] for each in done)
    assert len(done) == len(theirs) - 3


def test_what_asks_for_nothing_is_read_and_has_no_effect(model: Path, tmp_path: Path) -> None:
    nothing = {"model": "m", "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}
    nothing |= {"stream": False, "response_format": {"type": "text"}, "n": 1, "tools": None, "logprobs": None}
    rows = [chat("a", seed=1), chat("b", seed=1, **nothing), text("c", seed=1, echo=False, best_of=1, n=None)]
    found = {name: row["response"]["body"] for name, row in rows_of(model, tmp_path, rows).items()}
    assert found["b"]["choices"] == found["a"]["choices"]
    assert found["b"]["model"] == "m"
    assert found["c"]["choices"][0]["text"]


def test_what_the_model_is_to_blame_for_is_a_server_error(tmp_path: Path, output: Path) -> None:
    folder = letters_model(tmp_path / "whole")
    broken = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(broken.model.norm.weight, float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    letters_tokenizer().save_pretrained(tmp_path / "broken")
    prompts = write_rows(tmp_path / "in.jsonl", [text("t", n=2)])
    assert run(tmp_path / "broken", prompts, output).num_failed == 1
    response = read_rows(output)[0]["response"]
    assert response["status_code"] == 500
    assert response["body"]["error"]["type"] == "server_error"
    assert "logits are not finite numbers" in response["body"]["error"]["message"]
    assert run(tmp_path / "broken", prompts, output).num_skipped == 1


@pytest.mark.parametrize("options", WAYS)
def test_what_the_engine_refuses_is_the_requests_fault(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    rows = [text("pattern", structured_outputs={"regex": "("}), text("good", max_tokens=2)]
    found = rows_of(model, tmp_path, rows, **options)
    assert found["good"]["response"]["status_code"] == 200
    assert found["pattern"]["response"]["status_code"] == 400
    assert found["pattern"]["response"]["body"]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("options", WAYS)
def test_an_output_goes_on_behind_its_prompt(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its first blank stays though the decoder drops that of a text, unless the prompt has no text."""
    model = letters_model(tmp_path / "model")
    tokenizer = letters_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.save_pretrained(model)
    blank, letter = tokenizer(" a").input_ids
    blanks = {"allowed_token_ids": [blank], "max_tokens": 4, "temperature": 0}
    rows = [
        text("plain", **blanks),
        text("echoed", echo=True, **blanks, **({} if options else {"logprobs": 1})),
        text("tokens", prompt=[letter, blank], **blanks),
        text("special", prompt=[0, 0], **blanks),
        text("stopped", stop=["   "], **blanks),
        {"id": "own", "prompt": "abc", **blanks},
    ]
    found = rows_of(model, tmp_path, rows, **options)
    choices = {name: row["response"]["body"]["choices"][0] for name, row in found.items() if name != "own"}
    texts = {name: choice["text"] for name, choice in choices.items()} | {"own": found["own"]["text"]}
    wanted = {"plain": " " * 4, "echoed": "abc    ", "tokens": " " * 4, "special": " " * 3, "stopped": ""}
    assert texts == wanted | {"own": " " * 4}
    if not options:
        assert choices["echoed"]["logprobs"]["text_offset"][-4:] == [3, 4, 5, 6]


def test_what_follows_an_encoder_is_a_text_of_its_own(tmp_path: Path) -> None:
    tokenizer = letters_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    config = T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = config.pad_token_id = 1
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    row = {"id": "a", "prompt": "abc", "allowed_token_ids": tokenizer(" ").input_ids, "max_tokens": 4}
    assert rows_of(tmp_path / "model", tmp_path, [row])["a"]["text"] == " " * 3


def blanks_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"</s>": 0, "▁the": 1, "cat": 2, "<0xC3>": 3, "<0xA9>": 4}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="</s>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@given(
    ids=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    stop=st.sampled_from([(), ("cat the",), ("hec", "é"), ("t t", "zz")]),
    skips=st.booleans(),
)
def test_a_streams_logprobs_are_those_of_the_whole(ids: list[int], stop: tuple[str, ...], skips: bool) -> None:
    """However much text is held back, and wherever a stop string cuts it."""
    tokenizer, choices = blanks_tokenizer(), OpenAIChoices(blanks_tokenizer())
    params = SamplingParams(stop=stop, max_new_tokens=len(ids), skip_special_tokens=skips, logprobs=0)
    criteria, detokenizer = StopCriteria(tokenizer, params, ()), Detokenizer(tokenizer, stop, skips_special=skips)
    num_tokens = next(end for end in range(1, len(ids) + 1) if criteria.reason(ids[:end]))
    given_ids, found, shown = tuple(ids[:num_tokens]), TextLogprobs(choices, begin=5, skips_special=skips), []
    logprobs = tuple(Logprobs(-float(number), [], []) for number in range(num_tokens))
    whole = Completion(0, 0, criteria.text(given_ids), given_ids, "stop", logprobs)
    for token_id, each in zip(given_ids[:-1], logprobs, strict=False):
        shown.append(choices.chunk(CompletionDelta(0, 0, detokenizer.add(token_id), (token_id,), (each,)), found))
    rest = CompletionDelta(0, 0, whole.text[detokenizer.num_chars :], given_ids[-1:], logprobs[-1:], whole)
    shown.append(choices.chunk(rest, found))
    echo = Echo("12345", ())
    wanted = choices.whole(whole, is_chat=False, skips_special=skips, echo=echo)["logprobs"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for each in shown for value in (each["logprobs"] or {name: []})[name]] == wanted[name]


def test_every_token_has_its_bytes() -> None:
    """Byte-level vocabularies, byte fallback, and the character that stands for what cannot be decoded."""
    backend = Tokenizer(BPE(unk_token=None))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(["the 😀 naïve"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "the 😀 naïve 你\ufffd"
    ids = tuple(tokenizer(text).input_ids)
    logprobs = (Logprobs(-1.0, [], []),) * len(ids)
    choice = OpenAIChoices(tokenizer).whole(
        Completion(0, 0, text, ids, "stop", logprobs), is_chat=True, skips_special=True
    )
    assert bytes(byte for each in choice["logprobs"]["content"] for byte in each["bytes"]).decode() == text
    assert any("\ufffd" in each["token"] for each in choice["logprobs"]["content"])


def test_tokens_keep_blanks_that_a_decoder_drops() -> None:
    tokenizer = blanks_tokenizer()
    row = Row(id="r", prompt="p", params=SamplingParams(logprobs=1))
    logprobs = tuple(Logprobs(-1.0, [top], [-float("inf")]) for top in (1, 2, 3, 0))
    completion = Completion(0, 0, "thecat\ufffd", (1, 2, 3, 0), "stop", logprobs)
    responses = OpenAIResponses(datetime.now(), "m", tokenizer)
    forms = [OpenAIForm(is_chat, None, ClientNames(frozenset())) for is_chat in (True, False)]
    rows = [responses.completed(Prompt(row, (1,), 1), form, [completion]) for form in forms]
    of_chat, of_text = (each["response"]["body"]["choices"][0]["logprobs"] for each in rows)
    assert [each["token"] for each in of_chat["content"]] == [" the", "cat", "\ufffd", "</s>"]
    assert [each["bytes"] for each in of_chat["content"]] == [list(b" the"), list(b"cat"), [0xC3], list(b"</s>")]
    assert of_chat["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    assert of_text["text_offset"] == [0, 3, 6, 7]
    pieces = Completion(0, 0, "the\u00e9cat\ufffd", (1, 3, 4, 2, 3), "stop", (logprobs[0],) * 5)
    choice = responses.completed(Prompt(row, (1,), 1), forms[1], [pieces])
    found = choice["response"]["body"]["choices"][0]["logprobs"]
    assert found["text_offset"] == [0, 3, 3, 4, 7], "of a character of two tokens once"
    shown = Row(id="r", prompt="p", params=SamplingParams(logprobs=1, skip_special_tokens=False))
    completion = Completion(0, 0, "the</s>cat", (1, 0, 2, 0), "stop", logprobs)
    choice = responses.completed(Prompt(shown, (1,), 1), forms[1], [completion])
    assert choice["response"]["body"]["choices"][0]["logprobs"]["text_offset"] == [0, 3, 7, 10]
