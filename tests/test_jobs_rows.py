"""Reading input rows: what is refused, in which words, and that a bad line costs only itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs_support import write_rows

from zinfer.jobs.index import scan_input
from zinfer.jobs.request import UnusableInput
from zinfer.jobs.row_form import RowForm
from zinfer.jobs.rows import BadRow, Line, Row, id_key, parse_line, read_lines, row_of
from zinfer.requests.json_object import _unique_keys
from zinfer.requests.sampling_params import SamplingParams


def row_at_7(data: bytes, form: RowForm = RowForm()) -> Row | BadRow:  # noqa: B008
    parsed = parse_line(Line(7, data))
    return row_of(parsed, parsed.id, form)


def test_every_field_is_read() -> None:
    row = row_at_7(
        b'{"id": "a", "prompt": "p", "max_new_tokens": 3, "temperature": 1, "top_p": 0.5, "top_k": 9, "seed": 4,'
        b' "stop": ["x", "yz"]}'
    )
    params = SamplingParams(max_new_tokens=3, temperature=1, top_p=0.5, top_k=9, seed=4, stop=("x", "yz"))
    assert row == Row(id="a", prompt="p", params=params)


def test_the_line_number_is_the_id_of_a_row_without_one() -> None:
    row = row_at_7(b'{"messages": [{"role": "user", "content": "hi"}], "stop": "x", "temperature": null}')
    assert row == Row(id=7, messages=({"role": "user", "content": "hi"},), params=SamplingParams(stop=("x",)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "line 7: not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'{"prompt": "\xff"}', "line 7: not UTF-8 at byte 12 of the line"),
        (b'["prompt"]', "line 7: not a JSON object but ['prompt']"),
        (b"null", "line 7: not a JSON object but None"),
        (b'{"prompt": "p", "temperature": NaN}', "NaN is not a JSON number"),
        (
            b'{"prompt": "p", "temperature": 1e999}',
            "line 7: temperature must be a finite number of at least 0 (0: greedy), not inf",
        ),
        (b'{"prompt": "p", "prompt": "q"}', "the field 'prompt' is given twice"),
        (b"[" * 100_000, "line 7: not JSON that can be used"),
        (b'{"messages": ' + b"[" * 70 + b"]" * 70 + b"}", "line 7: nested more than 64 deep"),
        (
            b'{"prompt": "p", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
            "line 7: logit_bias must be an object of token",
        ),
        (b'{"prompt": "p", "n": 100000, "temperature": 1}', "line 7: n must be a whole number from 1 to 1024"),
        (b'{"prompt": "p", "seed": ' + b"9" * 5000 + b"}", "line 7: not JSON that can be used"),
        (b'{"prompt": "p", "temperture": 1}', "line 7: unknown field 'temperture'; did you mean 'temperature'?"),
        (b'{"prompt": "p", "max_new_token": 1}', "did you mean 'max_new_tokens'? (a column of your own is kept by"),
        (b'{"prompt": "p", "guided_json": {}}', "line 7: unknown field 'guided_json'; give structured_outputs an"),
        (b"{}", "line 7: give one of 'prompt', 'messages', 'prompt_token_ids', and only one"),
        (
            b'{"prompt": "p", "messages": [{"role": "user", "content": ""}]}',
            "give one of 'prompt', 'messages', 'prompt_token_ids', and only one",
        ),
        (b'{"prompt": 3}', "line 7: prompt must be a text, not 3"),
        (b'{"messages": []}', "line 7: messages: must hold at least one message"),
        (b'{"messages": ["hi"]}', "line 7: messages: message 1 must be an object with a string 'role'"),
        (b'{"messages": [{"role": "user"}]}', "line 7: messages: message 1 has no 'content'"),
        (b'{"prompt": "p", "max_new_tokens": 0}', "line 7: max_new_tokens must be a whole number of at least 1, not 0"),
        (
            b'{"prompt": "p", "max_new_tokens": "9"}',
            "max_new_tokens must be a whole number of at least 1, not '9'",
        ),
        (
            b'{"prompt": "p", "max_new_tokens": true}',
            "line 7: max_new_tokens must be a whole number of at least 1, not True",
        ),
        (
            b'{"prompt": "p", "temperature": -1}',
            "line 7: temperature must be a finite number of at least 0 (0: greedy), not -1",
        ),
        (b'{"prompt": "p", "top_p": 0}', "line 7: top_p must be a number above 0, up to 1 (1: off), not 0"),
        (b'{"prompt": "p", "top_p": 1.1}', "line 7: top_p must be a number above 0, up to 1 (1: off), not 1.1"),
        (b'{"prompt": "p", "top_k": -2}', "line 7: top_k must be a whole number of at least -1"),
        (
            b'{"prompt": "p", "seed": 18446744073709551616}',
            "line 7: seed must be a whole number from -2**63 to 2**64 - 1",
        ),
        (b'{"prompt": "p", "stop": [""]}', "line 7: stop must be a text or a list of texts, none of them empty"),
        (b'{"prompt": "p", "stop": 3}', "line 7: stop must be a text or a list of texts, none of them empty, not 3"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"id": [1], "prompt": "p"}', "line 7: id must be a string or a whole number, not [1]"),
        (b'{"id": 1.5, "prompt": "p"}', "line 7: id must be a string or a whole number, not 1.5"),
        (b'{"id": true, "prompt": "p"}', "line 7: id must be a string or a whole number, not True"),
        (b'{"id": "\\udc00", "prompt": "p"}', "line 7: id holds half of a surrogate pair"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(data: bytes, message: str) -> None:
    row = row_at_7(data)
    assert isinstance(row, BadRow)
    assert row.id == 7
    assert message in row.message


_COLUMNS = b'{"prompt": "p", "answer": "3", "text": "t", "top_k": 2, "source": ["s", null]}'
_LINE = b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}, "error": 1, "of": {}}'


@pytest.mark.parametrize(
    ("data", "keep", "kept"),
    [
        (_COLUMNS, None, {"answer": "3", "input_text": "t", "source": ["s", None]}),
        (_COLUMNS, (), {}),
        (_COLUMNS, ("prompt", "source", "id", "absent"), {"prompt": "p", "source": ["s", None]}),
        (b'{"prompt": "p", "temperatur": 1}', ("temperatur",), {"temperatur": 1}),
        (b'{"prompt": "p", "answer": 1, "temperature": -1}', None, {"answer": 1}),
        (_LINE, None, {"input_error": 1, "of": {}}),
        (_LINE, ("of",), {"of": {}}),
    ],
)
def test_columns_of_the_users_own_are_kept(data: bytes, keep: tuple[str, ...] | None, kept: dict[str, Any]) -> None:
    row = row_at_7(data, RowForm(keep=keep))
    assert row.kept == kept
    assert isinstance(row, Row) or "temperature" in row.message


def test_a_bad_field_leaves_the_row_its_id() -> None:
    assert row_at_7(b'{"id": "mine", "prompt": 3}').id == "mine"


@given(st.binary(max_size=80))
def test_any_bytes_are_a_row_or_a_bad_row(data: bytes) -> None:
    row = row_at_7(data)
    assert isinstance(row, Row) or row.message.startswith("line 7: ")


def test_blank_lines_are_no_rows_and_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \r\n{"prompt": "b"}')
    assert [line.number for line in read_lines(path)] == [1, 4]
    assert [parse_line(line).record is not None for line in read_lines(path)] == [True, True]


def test_ids_of_other_types_are_other_ids() -> None:
    assert id_key(1) != id_key("1")
    assert id_key("row-1") == 4229521810599103859, "the hash must never change: default seeds hang on it"


def test_the_index_knows_every_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"id": f"r{i}", "prompt": "p"} for i in range(50)])
    index = scan_input(path)
    assert index.num_rows == 50
    assert index.size_bytes == path.stat().st_size
    for guess in (0, 49, 50):
        assert [index.ordinal_of(f"r{i}", guess) for i in range(50)] == list(range(50))
    assert index.ordinal_of("r50", 0) is None
    assert index.keys.dtype == np.uint64


def test_duplicate_ids_are_refused_with_both_lines(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "p"},
        {"id": "b", "prompt": "p"},
        {"id": "a", "prompt": "q"},
        {"id": "b", "prompt": 3},
    ]
    path = write_rows(tmp_path / "in.jsonl", rows)
    with pytest.raises(UnusableInput) as caught:
        scan_input(path)
    assert "lines 1 and 3 both have the id 'a'; lines 2 and 4 both have the id 'b'" in str(caught.value)


def test_an_id_that_is_another_rows_line_number_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"id": 2, "prompt": "p"}, {"prompt": "q"}])
    with pytest.raises(UnusableInput, match="line 1 has the id 2, which is the line number of line 2 that has no id"):
        scan_input(path)


def test_an_unreadable_line_never_takes_another_rows_id(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"id": 1, "prompt": "p"}, "{", {"id": 2, "prompt": "q"}])
    index = scan_input(path)
    ids = [index.id_of(parse_line(line)) for line in read_lines(path)]
    assert ids == [1, "line 2", 2]
    assert [index.ordinal_of(row_id, 9) for row_id in ids] == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_input_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(UnusableInput, match=r"in\.jsonl holds no row; give one JSON object a line"):
        scan_input(path)
    assert scan_input(path, may_be_empty=True).num_rows == 0


def test_an_input_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"gone\.jsonl does not exist"):
        scan_input(tmp_path / "gone.jsonl")
    with pytest.raises(UnusableInput, match="is not a regular file"):
        scan_input(tmp_path)


def test_the_index_of_many_rows_is_small(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "in.jsonl", (json.dumps({"id": f"a rather long id {i}", "prompt": "p"}) for i in range(2000))
    )
    index = scan_input(path)
    assert index.keys.nbytes + index.order.nbytes + index.sums.nbytes == 20 * 2000


def test_a_line_of_many_fields_is_read_in_linear_time() -> None:
    num_compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    pairs: list[tuple[str, Any]] = [(Name(number), number) for number in range(2000)]
    assert len(_unique_keys(pairs)) == 2000
    with pytest.raises(ValueError, match="the field '1999' is given twice"):
        _unique_keys([*pairs, (Name(1999), 0)])
    assert num_compared < 40_000, "with a comparison for every pair of fields it were 2,000,000"
    line = json.dumps({f"f{number}": number for number in range(40_000)}).removesuffix("}") + ', "f39999": 0}'
    problem = "line 7: not JSON that can be used: the field 'f39999' is given twice"
    assert row_at_7(line.encode()) == BadRow(7, problem, is_malformed=True)
