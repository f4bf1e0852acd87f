"""Forms of outputs: which can be asked for and compiled, and which tokens their grammars allow."""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from jobs_support import letters_tokenizer
from structured_support import SCHEMA, byte_tokenizer
from test_detokenizer import word_piece

from zinfer import SamplingParams, StructuredOutputsParams
from zinfer.errors import ConfigError
from zinfer.requests.grammar import GrammarCompiler
from zinfer.requests.structured_outputs import structure_of_response_format
from zinfer.sampling.sampler import Row, Sampler
from zinfer.sampling.structure import StructureMatcher, token_masks

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, 340, [0], threading.Lock(), most_cpu_s=1)
    yield made
    made.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"regex": "(a"}, "the regex cannot be used: .*unclosed group"),
        ({"regex": "(?=a)a"}, "the regex cannot be used: .*look-around, .* is not supported"),
        ({"grammar": "start: word"}, 'the grammar cannot be used: at .*: unknown name: "word"'),
        ({"json": {"type": "text"}}, "the json cannot be used: Invalid type: text"),
        ({"json": {"not": {}}}, 'the json cannot be used: Unimplemented keys: \\["not"\\]'),
        ({"json": {"enum": []}}, "the json cannot be used: "),
        ({"json": {"$ref": "#"}}, "no text of the model's tokens matches the json"),
        ({"json": {"items": {"items": {}}, "$ref": "https://example.org/a"}}, "the json cannot be used: Resource"),
        ({"grammar": 'start: "a" </s>'}, "the grammar cannot be used: at .*: unknown special token"),
        ({"json": {"enum": [f"value {i}" for i in range(9000)]}}, None),
        ({"regex": "((a{1,999}){1,999}){1,999}"}, None),
        ({"json": {"multipleOf": 99_999_989, "type": "integer"}}, "cannot be compiled: it computes for more than 1 s"),
    ],
)
def test_what_can_be_compiled(compiler: GrammarCompiler, structure: dict[str, Any], message: str | None) -> None:
    form = StructuredOutputsParams(**structure)
    if message is None:
        assert compiler.compile(form) is compiler.compile(StructuredOutputsParams(**structure)), "kept"
        return
    with pytest.raises(ConfigError, match=f"^structured_outputs: .*{message}") as caught:
        compiler.compile(form)
    with pytest.raises(ConfigError) as again, patch.object(compiler._worker, "ask", side_effect=AssertionError):
        compiler.compile(form)
    assert str(again.value) == str(caught.value), "kept"


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "structured_outputs needs a tokenizer; put the model's tokenizer files into its folder"),
        (word_piece(), "structured_outputs: the model's tokenizer is not supported: can't determine decoder type"),
        ([], "structured_outputs needs a tokenizer of the tokenizers library, not a list; put its tokenizer.json"),
    ],
)
def test_tokenizers_that_cannot_be_used(tokenizer: Any, message: str) -> None:
    compiler = GrammarCompiler(tokenizer, 20, [], threading.Lock())
    with pytest.raises(ConfigError) as caught:
        compiler.compile(StructuredOutputsParams(regex="a"))
    assert str(caught.value).startswith(message)


def test_the_extra_is_named(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.requests.grammar.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run `pip install '\.\[structured\]'`"):
        compiler.compile(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, StructuredOutputsParams(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": False}},
            StructuredOutputsParams(json=json.dumps(SCHEMA)),
        ),
        ("json", "response_format must be an object with a 'type', not 'json'"),
        ({"type": "json_schema"}, "response_format: json_schema goes with the type 'json_schema', and only with it"),
        ({"type": "text", "strict": 1}, "response_format: unknown field 'strict'; known fields: type, json_schema"),
    ],
)
def test_response_formats(value: object, wanted: object) -> None:
    try:
        found: object = structure_of_response_format(value)
    except ConfigError as error:
        found = str(error)
    assert found == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give exactly one of json, regex, choice, grammar, json_object, not none"),
        ({"json": "{"}, "json: the schema is not JSON: Expecting property name"),
        ({"json": [1]}, "json must be a JSON schema, an object or its text, not [1]"),
        ({"json": {"a": {1}}}, "json: the schema is not JSON: Object of type set is not JSON serializable"),
        ({"choice": []}, "choice must be a list of texts, one at least, not []"),
        ({"json_object": False}, "json_object must be true, or left out, not False"),
        ({"regex": "a" * 300_000}, "regex has 300,000 characters; 262,144 at most are supported"),
        ({"jsn": {}}, "unknown field 'jsn'; did you mean 'json'?"),
    ],
)
def test_malformed_structures(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StructuredOutputsParams(**fields)
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigError) as caught:
        SamplingParams(structured_outputs=fields)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"structured_outputs: {message}")


def test_masks_on_the_device(compiler: GrammarCompiler, device: str) -> None:
    """Each row draws the likeliest token that its grammar allows, beside rows without one, in one batch."""
    structures: Sequence[dict[str, Any]] = [{"regex": "[a-z]+"}, {"choice": ["0", "1é"]}, {"json_object": True}]
    grammars = [compiler.compile(StructuredOutputsParams(**each)) for each in structures]
    rows_per_kind, logits = 40, torch.randn(120 + 40, 340, generator=torch.Generator().manual_seed(0))
    rows = []
    for place in range(len(logits)):
        kind = place % 4
        params = SamplingParams(structured_outputs=structures[kind] if kind < 3 else None)
        matcher = StructureMatcher(grammars[kind], [0], [0, 7]) if kind < 3 else None
        rows.append(Row(params, [3], [], (0,), lambda step: 0.5, (), matcher))
    token_ids = Sampler(335, device).sample(logits.to(device), rows).token_ids
    texts = [TOKENIZER.decode([token_id]) for token_id in token_ids]
    assert token_ids[3::4] == logits[3::4, :335].argmax(1).tolist()
    assert all(re.fullmatch("[a-z]+", text) for text in texts[::4])
    assert set(texts[1::4]) == {"0", "1"}
    assert set(texts[2::4]) == {"{", '{"'}
    assert len(set(texts[::4])) > rows_per_kind // 3
    lower = [i for i in range(len(TOKENIZER)) if re.fullmatch("[a-z]+", TOKENIZER.decode([i]))]
    assert token_ids[::4] == [lower[i] for i in logits[::4, lower].argmax(1).tolist()]


def test_letters_are_bytes_too() -> None:
    """Of a tokenizer whose texts are those of its tokens, joined."""
    compiler = GrammarCompiler(letters_tokenizer(), 131, [2], threading.Lock())
    matcher = StructureMatcher(compiler.compile(StructuredOutputsParams(regex="À?x"), is_checked=True), [2], [2])
    for letter in "Àx":
        assert not matcher.is_complete
        matcher.accept(letters_tokenizer().convert_tokens_to_ids(letter))
    assert matcher.is_complete


def test_tokens_that_the_model_lacks_do_not_come() -> None:
    compiler = GrammarCompiler(TOKENIZER, 40, [0], threading.Lock())
    grammar = compiler.compile(StructuredOutputsParams(regex="[a-zA-Z!]é"), is_checked=True)
    matcher = StructureMatcher(grammar, [0], [0])
    allowed = token_masks([matcher])[0].view(torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    token_ids = allowed.flatten().nonzero().flatten().tolist()
    assert set(token_ids) < set(range(2, 40))
    assert [TOKENIZER.decode([each]) for each in token_ids] == sorted("ABCDEF!")
    matcher.accept(token_ids[0])
    assert token_masks([matcher]).eq(-1).all()
    assert matcher.problem == "structured_outputs: none of the model's tokens continues the output"
