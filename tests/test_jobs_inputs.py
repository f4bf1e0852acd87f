"""Inputs in every format, columns of the user's own, and what becomes of a prompt: the same rows from each."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import give_stdin, start
from jobs_run_support import job, model, never_made, output
from jobs_support import read_rows, write_rows

from zinfer.errors import ConfigError
from zinfer.jobs import UnusableInput
from zinfer.jobs.input_formats import open_rows
from zinfer.jobs.request import manifest_path
from zinfer.jobs.row_form import RowForm
from zinfer.jobs.rows import BadRow, Line, Row, parse_line, row_of

__all__ = ["model", "output"]  # fixtures

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": 'x, "y"\nz', "answer": "3"},
    {"id": "b", "prompt": "007", "answer": "é", "max_new_tokens": 3, "stop": ["5", "6"]},
    {"id": "c", "prompt": "1"},
]


def _csv(path: Path, delimiter: str = ",") -> Path:
    cells = [
        ["id", "prompt", "answer", "max_new_tokens", "stop"],
        ["a", '"x, ""y""\nz"', "3"],
        ["b", "007", "é", "3", '"[""5"", ""6""]"'],
        ["c", "1", "", "", ""],
    ]
    path.write_text("\ufeff" + "".join(delimiter.join(row) + "\r\n" for row in cells), "utf-8")
    return path


def _array(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=2))
    return path


def _gzipped(path: Path, make: Callable[[Path], Path]) -> Path:
    path.write_bytes(gzip.compress(make(path).read_bytes()))
    return path


MADE: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": lambda path: write_rows(path, ROWS),
    "rows.json": _array,
    "rows.csv": _csv,
    "rows.tsv": lambda path: _csv(path, "\t"),
    "rows.jsonl.gz": lambda path: _gzipped(path, lambda path: write_rows(path, ROWS)),
    "rows.csv.gz": lambda path: _gzipped(path, _csv),
    "array.gz": lambda path: _gzipped(path, _array),
}


@pytest.mark.parametrize("name", MADE)
def test_each_format_holds_the_same_rows(name: str, tmp_path: Path) -> None:
    source = MADE[name](tmp_path / name)
    with open_rows(source) as rows:
        assert read_rows(rows) == ROWS
        assert (rows == source) == (name == "rows.jsonl")
    with open_rows(source, limit=2) as rows:
        assert read_rows(rows) == ROWS[:2]
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.zst"])
def test_pyarrow_reads_parquet_and_zstandard(name: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    source = tmp_path / name
    if name.endswith(".parquet"):
        columns = list(dict.fromkeys(name for row in ROWS for name in row))
        parquet.write_table(pa.table({name: [row.get(name) for row in ROWS] for name in columns}), source)
    else:
        plain = write_rows(tmp_path / "plain", ROWS).read_bytes()
        source.write_bytes(pa.compress(plain, "zstd", asbytes=True))
    with open_rows(source) as rows:
        assert read_rows(rows) == ROWS


@pytest.mark.parametrize("name", ["rows.parquet", "rows.zst"])
def test_without_pyarrow_the_extra_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.jobs.input_formats.find_spec", lambda name: None)
    source = tmp_path / name
    source.write_bytes(b"PAR1" if name.endswith(".parquet") else b"\x28\xb5\x2f\xfd")
    with pytest.raises(UnusableInput, match=r"needs pyarrow; run `pip install '\.\[data\]'`"), open_rows(source):
        pass


@pytest.mark.parametrize("size", [3, 40, 1 << 20])
def test_an_array_of_any_length_is_read_by_pieces(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.jobs.input_formats._CHUNK", size)
    elements = [{"prompt": "[{]}" * number, "n": number} for number in range(50)]
    source = tmp_path / "array.json"
    source.write_text(json.dumps(elements, indent=1))
    with open_rows(source) as rows:
        assert read_rows(rows) == elements


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.json", b'[{"prompt": "a"}, {"prompt": ', "the JSON array cannot be read on from row 2, which begins with"),
        ("x.csv", b"a,b\n1,2\n1,2,3\n", "row 2 (line 3) has 3 cells, and the header 2; put cells that hold ','"),
        ("x.csv", b"a,a\n1,2\n", "has two columns 'a'; rename one"),
        ("x.csv", b"a\n\xff\n", "is not UTF-8"),
        ("x.gz", b"\x1f\x8b\x08\x00", "cannot be decompressed"),
    ],
)
def test_what_cannot_be_converted_is_told(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    source = tmp_path / name
    source.write_bytes(data)
    with pytest.raises(UnusableInput) as raised, open_rows(source):
        pass
    assert message in str(raised.value)


LOOKS = {
    "a CSV with the columns question, answer; add --input-format csv": "question,answer\n1,2\n3,4\n",
    "a TSV with the columns question, answer; add --input-format tsv": "question\tanswer\n1\t2\n",
    "one JSON object over several lines": json.dumps({"prompt": "x"}, indent=2),
    "plain text; give one JSON object a line": "what is this?\nand this\n",
    "a zip archive or an Excel workbook; save the sheet as CSV": "PK\x03\x04xx",
    "a binary file": "\x01\x00\x02",
    "the rows have the columns question, answer: name the one with the prompt by --prompt-column": (
        '{"question": "1", "answer": "2"}\n'
    ),
    "did you mean 'max_new_tokens'?": '{"prompt": "1", "max_new_token": 2}\n',
}


@pytest.mark.parametrize("look", LOOKS)
def test_an_input_without_a_usable_row_ends_before_the_model_is_loaded(look: str, model: Path, output: Path) -> None:
    source = output.with_name("in.jsonl")
    source.write_text(LOOKS[look])
    with pytest.raises(UnusableInput) as raised:
        job(model, source, output, engine_factory=never_made)
    assert look in str(raised.value)
    assert [path for path in output.parent.iterdir() if path != source] == []


def read(record: dict[str, Any], form: RowForm) -> Row | BadRow:
    parsed = parse_line(Line(1, json.dumps(record).encode()))
    return row_of(parsed, parsed.id, form)


USER, BEGIN, OWN = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("system", "S"), ("system", "T"))
)
CHAT = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [USER], "top_p": None}}


@pytest.mark.parametrize(
    ("record", "form", "fields"),
    [
        ({"q": "hi", "prompt": "no"}, RowForm(prompt_column="q"), {"prompt": "hi"}),
        ({"q": [USER]}, RowForm(prompt_column="q"), {"messages": (USER,)}),
        ({"q": "hi", "n1": 2}, RowForm(template="Q: {q}{{}}\n{n1}"), {"prompt": "Q: hi{}\n2"}),
        ({"my column": "hi"}, RowForm(template="{my column}"), {"prompt": "hi"}),
        ({"prompt": "hi"}, RowForm(system="S"), {"messages": (BEGIN, USER), "prompt": None}),
        ({"messages": [USER]}, RowForm(system="S"), {"messages": (BEGIN, USER)}),
        ({"messages": [OWN, USER]}, RowForm(system="S"), {"messages": (OWN, USER)}),
        (CHAT, RowForm(system="S"), {"messages": (BEGIN, USER)}),
    ],
)  # fmt: skip
def test_options_make_the_prompt(record: dict[str, Any], form: RowForm, fields: dict[str, Any]) -> None:
    row = read(record, form)
    assert isinstance(row, Row)
    assert {name: getattr(row, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("record", "form", "message"),
    [
        ({"a": 1}, RowForm(prompt_column="q"), "line 1: the row has no column 'q'; its columns are a"),
        ({"q": None}, RowForm(template="{q}"), "line 1: the row has no column 'q'"),
        ({"prompt_token_ids": [3]}, RowForm(system="S"), "system is for 'prompt' and 'messages'"),
        ({**CHAT, "url": "/v1/completions", "body": {"prompt": "x"}}, RowForm(system="S"), "system is for chats"),
    ],
)
def test_a_row_that_lacks_what_an_option_names_is_told(record: dict[str, Any], form: RowForm, message: str) -> None:
    row = read(record, form)
    assert isinstance(row, BadRow)
    assert message in row.message


@pytest.mark.parametrize("record", [{"prompt": "p"}, {**CHAT, "body": {"messages": [USER]}}, CHAT])
def test_a_rows_own_fields_come_before_the_jobs(record: dict[str, Any]) -> None:
    form = RowForm(max_new_tokens=9, sampling={"temperature": 0.5, "top_p": 0.25, "stop": ["x"]}, seed=3)
    row = read(record, form)
    assert isinstance(row, Row)
    params = row.params
    assert (params.max_new_tokens, params.temperature, params.top_p, params.stop) == (9, 0.5, 0.25, ("x",))
    own = {"temperature": 2, "seed": 4}
    other = read({**record, "body": {**record["body"], **own}} if "body" in record else {**record, **own}, form)
    assert isinstance(other, Row)
    assert (other.params.temperature, other.params.top_p, other.params.seed) == (2, 0.25, 4)


def test_rows_draw_by_the_jobs_seed_and_their_ids() -> None:
    seeds = [
        row.params.seed
        for seed in (1, 2)
        for name in "ab"
        if isinstance(row := read({"id": name, "prompt": "p"}, RowForm(seed=seed)), Row)
    ]
    assert len(set(seeds)) == 4
    assert None not in seeds


@pytest.mark.parametrize("template", ["{", "{}", "{q!r}", "{q:3}"])
def test_a_template_that_no_row_can_fill_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="template"):
        RowForm(template=template).check()


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl.gz"])
def test_a_job_goes_on_with_a_converted_input_and_keeps_columns(name: str, model: Path, output: Path) -> None:
    source = MADE[name](output.with_name(name))
    job(model, source, output, ordered=True)
    whole = read_rows(output)
    assert [(row["id"], row.get("answer")) for row in whole] == [("a", "3"), ("b", "é"), ("c", None)]
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(lines[2] + lines[0])
    assert job(model, source, output, ordered=True).num_skipped == 2
    assert output.read_bytes() == b"".join(lines)
    with pytest.raises(UnusableInput, match=r"settings\.keep: absent in the manifest, none now"):
        job(model, source, output, keep=())
    assert sorted(path.name for path in output.parent.iterdir()) == sorted(
        [output.name, manifest_path(output).name, name]
    )


@pytest.mark.parametrize("ordered", [False, True])
def test_stdin_and_stdout_carry_rows_alone(ordered: bool, model: Path, tmp_path: Path) -> None:
    words = ["run", "--model", str(model), "--input", "-", "--output", "-", "--device", "cpu", "--max-tokens", "4"]
    rows = [{"id": number, "prompt": "abc"[: 3 - number % 3], "tag": number} for number in range(6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    ran = start([*words, *(["--ordered"] if ordered else [])], tmp_path, warm=True, prepare=(give_stdin, (text,)))
    out, said = ran.communicate(timeout=60)
    assert ran.returncode == 0, said
    found = [json.loads(line) for line in out.splitlines()]
    assert {row["id"]: row["tag"] for row in found} == {number: number for number in range(6)}
    assert not ordered or [row["id"] for row in found] == [*range(6)]
    assert "6 done, 0 failed" in said
