"""Constrained outputs: each is what its request asks for, other requests in the same passes go on as alone."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs_support import ResidentEngine, letters_model
from llm_support import token_bytes
from openai_support import asked, rows_of
from structured_support import SCHEMA, byte_model, byte_tokenizer, check_schema
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from zinfer import LLM, SamplingParams
from zinfer.scheduling.preemption import Preemption

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo" / "model"
TOKENIZER = byte_tokenizer()
BLANKS = dict.fromkeys((i for i in range(len(TOKENIZER)) if TOKENIZER.decode([i]).isspace()), -100.0)
"""Keep a random model from writing spaces between the tokens of JSON: a test has no time for them."""
CHOICES = ["maybe", "may", "né\n", "😀", 'a"\\/.b']
REGEX = r"[A-Z]{2}-\d{1,4}( ok)?"
LARK = 'start: "(" start ")" | "[" WORD "]"\nWORD: /[a-c]{1,3}/'


def is_of_lark(text: str) -> bool:
    depth = text.count("(")
    return re.fullmatch(r"\(" * depth + r"\[[a-c]{1,3}\]" + r"\)" * depth, text) is not None


KINDS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"json": SCHEMA}, check_schema),
    ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    ({"choice": CHOICES}, CHOICES.index),
    ({"grammar": LARK}, is_of_lark),
]


def given() -> list[SamplingParams]:
    """Of fifty requests: half of them are constrained."""
    params = []
    for number in range(50):
        sampled = {"temperature": 1.0, "seed": number, "top_k": 40 if number % 4 else 0} if number % 3 else {}
        if number % 2:
            structure = KINDS[number // 2 % 4][0]
            own = {"max_new_tokens": 90, "structured_outputs": structure, "logit_bias": BLANKS}
        else:
            own = {"max_new_tokens": 4 + number % 7, "ignore_eos": True, "min_new_tokens": number % 5 // 2}
        params.append(SamplingParams(**own, **sampled))
    return params


def alike(params: SamplingParams, **fields: Any) -> SamplingParams:
    return replace(params, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """One whose pages hold few sequences."""
    pages = 14 * 8 * token_bytes(folder)
    with LLM(folder, device="cpu", kv_page_size=8, kv_cache_memory=pages, tokens_per_pass=64) as made:
        yield made


def test_each_output_is_what_its_request_asks_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = []
    preempt = Preemption.preempt
    monkeypatch.setattr(Preemption, "preempt", lambda *args: (preempted.append(1), preempt(*args)))
    params, prompts = given(), [f"{'abc' * (number % 4)}{number}" for number in range(50)]
    found = llm.generate(prompts, params)
    assert len(preempted) > 3
    for number, each in enumerate(found[1::2]):
        assert (each.error, each.finish_reason) == (None, "stop")
        assert KINDS[number % 4][1](each.text) is not False, each.text
    assert len({each.text for each in found[1::2]}) > 18
    llm.reset_prefix_cache()
    alone = llm.generate(prompts[::2], params[::2])
    assert [each.token_ids for each in alone] == [each.token_ids for each in found[::2]]
    again = llm.generate(prompts[1:18:2], params[1:18:2])
    assert [each.token_ids for each in again] == [each.token_ids for each in found[1:18:2]]


def test_where_an_output_ends(llm: LLM) -> None:
    end = TOKENIZER.eos_token_id
    as_many = SamplingParams(max_new_tokens=12, structured_outputs={"regex": "a+"}, logit_bias={end: -100})
    b = TOKENIZER.convert_tokens_to_ids("b")
    params = {
        "long": as_many,
        "ends": alike(as_many, logit_bias={end: 100}),
        "least": alike(as_many, logit_bias={end: 100}, min_new_tokens=3),
        "on": alike(as_many, logit_bias={end: 100}, ignore_eos=True),
        "token": alike(as_many, structured_outputs={"regex": "a+"}, stop_token_ids=(b,), logit_bias={b: 100}),
        "stop": alike(as_many, stop="aa"),
        "whole": SamplingParams(max_new_tokens=12, structured_outputs={"choice": ["b"]}, min_new_tokens=5, logprobs=0),
        "empty": SamplingParams(max_new_tokens=12, structured_outputs={"regex": ""}, logprobs=0, stop="x"),
        "raw": SamplingParams(max_new_tokens=1, structured_outputs={"choice": ["b"]}, logprobs=3),
        "free": SamplingParams(max_new_tokens=1, logprobs=3),
        "no": alike(as_many, bad_words=("a",), allowed_token_ids=(TOKENIZER.convert_tokens_to_ids("a"),)),
    }
    found = dict(zip(params, llm.generate(["xyz"] * len(params), list(params.values())), strict=True))
    ends = {name: (each.text, each.finish_reason, each.stop_reason) for name, each in found.items()}
    assert ends["long"] == ("a" * 12, "length", None)
    assert ends["ends"] == ("a", "stop", None)
    assert found["ends"].token_ids[1:] == (end,), "an output may end with the model's end token"
    assert ends["least"] == ("aaa", "stop", None)
    assert ends["on"] == ("a" * 12, "length", None)
    assert ends["token"] == ("a", "stop", b)
    assert ends["stop"] == ("", "stop", "aa")
    assert ends["whole"] == ("b", "stop", None), "behind the end of the grammar nothing comes"
    assert found["whole"].token_ids == (b,)
    assert len(found["whole"].logprobs or ()) == 1
    assert (ends["empty"], found["empty"].logprobs) == (("", "stop", None), ())
    raw, free = (found[name].logprobs for name in ("raw", "free"))
    assert raw is not None
    assert free is not None
    assert (raw[0].top_ids, raw[0].top) == (free[0].top_ids, free[0].top), "of the logits before masks"
    assert found["raw"].token_ids == (b,)
    assert found["no"].finish_reason == "error"
    assert "the row's own settings leave no token" in str(found["no"].error)


def test_a_model_without_end_tokens(tmp_path: Path) -> None:
    folder = byte_model(tmp_path, ends=False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with LLM(folder, device="cpu", kv_cache_memory="2MB") as llm:
        assert not llm._builder._end_token_ids
        structures = [{"choice": ["yes", "no"]}, {"regex": "(yes|no)[0-9]*"}]
        params = [SamplingParams(max_new_tokens=9, structured_outputs=each) for each in structures]
        choice, endless = llm.generate(["ab", "ab"], params)
    assert choice.text in ("yes", "no")
    assert (choice.finish_reason, endless.finish_reason) == ("stop", "length")
    assert re.fullmatch("(yes|no)[0-9]+", endless.text)


def test_spaces_that_a_decoder_drops(tmp_path: Path) -> None:
    """As Llama 2's, of a text's first one; a form's own stay behind any prompt."""
    folder = byte_model(tmp_path)
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "x", "▁x"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "x")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    params = SamplingParams(max_new_tokens=9, structured_outputs={"choice": ["  x"]}, temperature=1.0, n=4, seed=1)
    prompts = ["a", {"prompt_token_ids": [0]}, {"prompt_token_ids": [*tokenizer("a").input_ids, 0x41 + 1]}]
    with LLM(folder, device="cpu", kv_cache_memory="2MB") as llm:
        handle = llm.prepare(prompts, params, deltas=True)
        llm.submit(handle)
        deltas: list[Any] = list(handle)
    found: defaultdict[tuple[int, int], str] = defaultdict(str)
    for each in deltas:
        found[each.prompt_index, each.sample_index] += each.text
    assert {each.completion.text for each in deltas if each.completion} == {"  x"}
    assert list(found.values()) == ["  x"] * 12


def test_bytes_torn_across_tokens(llm: LLM) -> None:
    wanted = "€5ñ𝄞ý"
    handle = llm.prepare(
        ["ab"], SamplingParams(max_new_tokens=30, structured_outputs={"choice": [wanted]}), deltas=True
    )
    llm.submit(handle)
    deltas: list[Any] = list(handle)
    completion = deltas[-1].completion
    assert (completion.text, completion.finish_reason) == (wanted, "stop")
    assert len(completion.token_ids) > len(wanted)
    assert "".join(each.text for each in deltas) == wanted
    assert [token_id for each in deltas for token_id in each.token_ids] == list(completion.token_ids)


def test_refused_prompts_cost_no_other(llm: LLM) -> None:
    params = [
        SamplingParams(max_new_tokens=40, structured_outputs={"json": {"type": "text"}}, n=2, temperature=1.0),
        SamplingParams(
            max_new_tokens=40, structured_outputs={"regex": "((a{1,999}){1,999}){1,999}"}, logprobs=0, ignore_eos=True
        ),
        SamplingParams(max_new_tokens=40, structured_outputs={"choice": ["maybe"]}),
    ]
    *bad, complex_, fine = llm.generate(["ab"] * 3, params)
    assert [each.error for each in bad] == ["structured_outputs: the json cannot be used: Invalid type: text"] * 2
    assert complex_.finish_reason == "error"
    assert str(complex_.error).startswith("structured_outputs: lexer error")
    assert set(complex_.text) == {"a"}
    assert len(complex_.token_ids) == len(complex_.logprobs or ())
    assert (fine.text, fine.error) == ("maybe", None)


def test_the_demo(tmp_path: Path) -> None:
    structures: list[dict[str, Any]] = [
        {"regex": "[0-9]{2}=1234"},
        {"choice": ["12", "123"]},
        {"json": {"type": "integer", "maximum": 9}},
        {"regex": "1(x|2)"},
        {"regex": "1[x]"},
    ]
    params = [SamplingParams(max_new_tokens=9, structured_outputs=each) for each in structures]
    with LLM(DEMO, device="cpu", kv_cache_memory="2MB") as llm:
        found = llm.generate(["12+34="] * len(params), params)
    assert re.fullmatch("[0-9]{2}=1234", found[0].text)
    assert found[1].text in ("12", "123")
    assert int(found[2].text) <= 9
    assert [each.text for each in found[3:]] == ["12", "1"]
    assert [each.error for each in found[:4]] == [None] * 4
    assert found[4].error == "structured_outputs: none of the model's tokens continues the output"


def test_rows_of_jobs(tmp_path: Path) -> None:
    model = letters_model(tmp_path / "model")
    structures: dict[str, dict[str, Any]] = {
        "own": {"structured_outputs": {"regex": "[0-9]{3}", "json": None}},
        "both": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "bad": {"structured_outputs": {"json": {"type": "text"}}},
    }
    formats: dict[str, dict[str, Any]] = {
        "schema": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"enum": [7, "nÀ"]}}},
        "plain": {"type": "text"},
        "wrong": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "text"}}},
    }
    rows = [{"id": name, "prompt": "abc", "max_new_tokens": 12, **body} for name, body in structures.items()]
    rows += [
        asked(name, "completions", prompt="abc", max_tokens=12, temperature=0, response_format=each)
        for name, each in formats.items()
    ]
    found = rows_of(model, tmp_path, rows)
    assert re.fullmatch("[0-9]{3}", found["own"]["text"])
    assert found["both"]["error"].startswith("line 2: structured_outputs: give exactly one of json, regex, choice,")
    assert found["bad"]["error"] == "line 3: structured_outputs: the json cannot be used: Invalid type: text"
    wrong = found["wrong"]["response"]["body"]["error"]
    assert wrong["message"] == "line 6: response_format: the json cannot be used: Invalid type: text"
    assert wrong["param"] == "response_format"
    assert json.loads(found["schema"]["response"]["body"]["choices"][0]["text"]) in (7, "nÀ")
    assert found["plain"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    (tmp_path / "padded").mkdir()
    found = rows_of(model, tmp_path / "padded", [rows[0], {"id": "p", "prompt": "ab"}], engine_factory=ResidentEngine)
    assert found["own"]["error"].startswith("line 1: structured_outputs needs continuous batching")
    assert found["p"]["text"]
