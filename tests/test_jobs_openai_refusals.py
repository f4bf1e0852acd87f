"""Rows of an OpenAI batch that cannot be used: each gets its answer, which names the field."""

import json
from pathlib import Path
from typing import Any

import pytest
from jobs_run_support import model, never_made, output
from jobs_support import read_rows, write_rows
from openai_support import HI, asked, chat, rows_of, run, text

from zinfer.jobs import UnusableInput
from zinfer.jobs.rows import id_key

__all__ = ["model", "output"]  # fixtures

REFUSED: list[tuple[dict[str, Any], str]] = [
    *((chat("", **{name: value}), f"{name} is not supported; leave it out") for name, value in {
        "functions": [], "audio": {},
        "stream_options": {}, "truncate_prompt_tokens": 3, "return_token_ids": True,
    }.items()),
    (chat("", modalities=["text", "audio"]), "modalities: only text can be generated"),
    (chat("", tools=[{"type": "function", "function": {"name": "f"}}]), "calls in a form that is not known here"),
    (chat("", tool_choice="required"), "tool_choice needs tools; give them, or leave it out"),
    (text("", tools=[]), "tools is not supported; leave it out"),
    (text("", suffix="x"), "suffix is not supported; leave it out"),
    (chat("", temperture=1), "unknown field 'temperture'; did you mean 'temperature'?"),
    (chat("", max_new_tokens=1), "unknown field 'max_new_tokens'; did you mean 'max_tokens'?"),
    *((chat("", **{f"guided_{kind}": "x"}), f"'guided_{kind}'; give structured_outputs an object with {kind!r} instead")
      for kind in ("json", "regex", "choice", "grammar")),
    (text("", continue_final_message=True), "continue_final_message is for the messages of a chat"),
    (chat("", continue_final_message=True, add_generation_prompt=True), "are both true"),
    (chat("", detokenize=False), "detokenize is not supported; leave it out"),
    (chat("", add_special_tokens=1), "add_special_tokens must be true or false, not 1"),
    (chat("", echo=False), "unknown field 'echo'; known fields: model, user, metadata"),
    (text("", messages=HI), "unknown field 'messages'"),
    (text("", top_logprobs=1), "unknown field 'top_logprobs'; did you mean 'logprobs'?"),
    (chat("", max_tokens=3, max_completion_tokens=4), "max_tokens and max_completion_tokens mean the same"),
    (chat("", max_tokens=0), "max_tokens must be a whole number of at least 1, not 0; 0 needs prompt_logprobs"),
    (chat("", temperature="1"), "temperature must be a finite number"),
    (chat("", temperature=0, n=2), "n must be 1 if temperature is 0"),
    (chat("", seed=-(2**63) - 1), "seed must be a whole number from -2**63 to 2**64 - 1"),
    (chat("", logit_bias={"1": 101}), "and biases from -100 to 100, not 101 at 1"),
    (chat("", logit_bias={"5000": 1}), "logit_bias must be made of token ids below 131"),
    (chat("", priority=1), "priority must be left out: a batch's rows start in order, not 1"),
    (chat("", stream=True), "stream must be false or left out: a row has one answer, not True"),
    (chat("", response_format={"type": "xml"}), "response_format: type must be 'text', 'json_object' or 'json_schema'"),
    (chat("", response_format={"type": "text", "strict": 1}), "response_format: unknown field 'strict'"),
    (
        chat("", response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "response_format and structured_outputs both say what the output is",
    ),
    (chat("", structured_outputs={"choice": "a"}), "structured_outputs: choice must be a list of texts"),
    (chat("", logprobs=1), "logprobs must be true or false, not 1"),
    (chat("", logprobs=True, top_logprobs=21), "top_logprobs must be a whole number from 0 to 20, not 21"),
    (chat("", logprobs=True, top_logprobs=-1), "top_logprobs must be a whole number from 0 to 20, not -1"),
    (chat("", top_logprobs=3), "top_logprobs needs logprobs to be true"),
    (chat("", model=3), "model must be a text, not 3"),
    (chat("", messages=None), "messages must be a list of messages, objects with a 'role' and a 'content', not None"),
    (chat("", messages=[]), "messages: must hold at least one message"),
    (chat("", messages=[{"role": "tool", "content": "x"}]), "the chat template refuses them: no tools here"),
    *((chat("", messages=[{"role": "user", "content": content}]), message) for content, message in [
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "part 1 ('image_url') is not a text part; only"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "part 2 ('input_audio') is not a text part; only"),
        ([{"type": "text", "text": 5}], "the text of part 1 must be a string, not 5"),
        (["a"], "part 1 ('a') is not a text part; only"),
        ([], "the content of message 1 must be a text or a list of text parts, not []"),
        (5, "the content of message 1 must be a text or a list of text parts, not 5"),
        (None, "the content of message 1 is null or missing; give a text, or '' for an empty one"),
    ]),
    (asked("", "chat/completions"), "messages is missing"),
    (asked("", "completions"), "prompt is missing"),
    (text("", prompt=["a", "b"]), "prompt: must be one text or one list of token ids (give each of several prompts a"),
    (chat("", reasoning_effort=3), "reasoning_effort must be a text, not 3"),
    (chat("", chat_template_kwargs=3), "chat_template_kwargs must be an object, not 3"),
    (text("", prompt=[[1], [2]]), "give each of several prompts a row of its own)"),
    (text("", prompt=None), "prompt: must be one text or one list of token ids"),
    (text("", prompt=[]), "the prompt has no tokens; give it one at least"),
    (text("", prompt=[7, 5000]), "token ids are whole numbers from 0 to 130"),
    (text("", prompt="\udfff"), "the text holds half of a surrogate pair"),
    (text("", best_of=3), "best_of must be equal to n, which is 1, not 3"),
    (text("", logprobs=True), "logprobs must be a whole number of at least 0, not True"),
    (asked("", "embeddings", input="x"), "url must be '/v1/chat/completions' or '/v1/completions', not"),
    ({**chat(""), "method": "GET"}, "method must be 'POST', not 'GET'"),
    ({**chat(""), "body": "x"}, "body must be an object, not 'x'"),
    ({"custom_id": "", "method": "POST", "url": "/v1/completions"}, "body is missing"),
    ({**chat(""), "id": 3}, "id must be left out beside a 'custom_id', not 3"),
    ({**chat(""), "prompt": "x"}, "unknown field 'prompt'; known fields: custom_id, method, url, body"),
    ({**chat(""), "max_tokens": 3}, "unknown field 'max_tokens'; known fields: custom_id, method, url, body"),
    ({**chat(""), "urll": "x"}, "unknown field 'urll'; did you mean 'url'?"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refusals(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    rows = [{**row, "custom_id": f"row {number}"} for number, (row, _) in enumerate(REFUSED)]
    folder = tmp_path_factory.mktemp("refused")
    prompts, output = write_rows(folder / "in.jsonl", rows), folder / "out.jsonl"
    summary = run(model, prompts, output, engine_factory=never_made)
    assert (summary.num_done, summary.num_failed, summary.num_prompt_tokens) == (0, len(REFUSED), 0)
    assert run(model, prompts, output, engine_factory=never_made).num_skipped == len(REFUSED)
    return read_rows(output)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_wrong_with_a_row_is_its_answer(refusals: list[dict[str, Any]], number: int) -> None:
    row, custom_id = refusals[number], f"row {number}"
    error = row["response"]["body"]["error"]
    assert error["message"].startswith(f"line {number + 1}: ")
    assert REFUSED[number][1] in error["message"]
    key = f"{id_key(custom_id):016x}"
    field = error["param"]  # tests/test_client_names.py says which
    body = {"error": {"message": error["message"], "type": "invalid_request_error", "param": field, "code": None}}
    response = {"status_code": 400, "request_id": f"req_{key}", "body": body}
    assert row == {"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": None}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**chat("x"), "custom_id": None}, "custom_id must be a string, not None"),
        ({**chat("x"), "custom_id": 5}, "custom_id must be a string, not 5"),
        ({**chat("x"), "custom_id": "\udfff"}, "custom_id holds half of a surrogate pair"),
        ({"method": "POST", "url": "/v1/completions", "body": {}}, "a row of an OpenAI batch needs a 'custom_id'"),
    ],
)  # fmt: skip
def test_a_row_without_a_custom_id_is_known_by_its_line(
    model: Path, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    found = rows_of(model, tmp_path, [row, {"prompt": "x" * 200}], engine_factory=never_made)[1]  # type: ignore[index]
    assert found["error"].removeprefix("line 1: ").startswith(message)
    assert list(found) == ["id", "error"]


def test_ids_of_both_forms_are_ids_of_one_job(model: Path, tmp_path: Path, output: Path) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", [{"id": "a", "prompt": "p"}, text("a")])
    with pytest.raises(UnusableInput, match="lines 1 and 2 both have the id 'a'"):
        run(model, prompts, output)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "line",
    [
        {"id": "batch_req_1", "custom_id": "b", "error": None},
        {"custom_id": "b", "response": {"status_code": 200, "body": {}}},
        {"custom_id": "b", "response": {"status_code": 302, "body": {"choices": [{}]}}},
        {"custom_id": "b", "response": {"status_code": 400, "body": {}}},
    ],
)
def test_a_line_that_is_no_answer_is_refused(model: Path, tmp_path: Path, output: Path, line: dict[str, Any]) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", [text("a"), text("b")])
    run(model, prompts, output)
    output.write_bytes(output.read_bytes().splitlines(keepends=True)[0] + json.dumps(line).encode() + b"\n")
    with pytest.raises(UnusableInput, match="line 2 holds neither a completion nor an error"):
        run(model, prompts, output)
