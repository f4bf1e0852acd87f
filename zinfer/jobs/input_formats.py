"""Inputs in other forms than a JSONL file: each is read once, and its rows are kept as JSONL in a file without a name.

Formats are JSONL, a JSON array, CSV and TSV with a header line, and Parquet; all of them also by gzip or zstandard, and
on stdin or from a pipe.
"""

import base64
import codecs
import csv
import gzip
import io
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import date, time
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from zinfer.jobs.index import RowIndex
from zinfer.jobs.request import STANDARD_STREAM, InputFormat, JobRequest, UnusableInput
from zinfer.jobs.row_form import FIELDS_OF_ROWS, SOURCES, TEXT_FIELDS, RowForm, kept_name
from zinfer.jobs.rows import BadRow, parse_line, read_lines, row_of

_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_SUFFIXES: Final = {
    ".csv": InputFormat.CSV,
    ".tsv": InputFormat.TSV,
    ".tab": InputFormat.TSV,
    ".parquet": InputFormat.PARQUET,
}
_COMPRESSED: Final = (".gz", ".zst")
_DELIMITERS: Final = {InputFormat.CSV: ",", InputFormat.TSV: "\t"}
_UNLIKE_TEXT: Final = {
    b"PK": "a zip archive or an Excel workbook; save the sheet as CSV",
    b"BZh": "compressed by bzip2; decompress it, or compress it by gzip or zstd",
    b"\xfd7zXZ": "compressed by xz; decompress it, or compress it by gzip or zstd",
    b"ARROW1": "an Arrow or Feather file; save it as Parquet",
    b"Obj\x01": "an Avro file; save it as Parquet",
    codecs.BOM_UTF16_LE: "text in UTF-16; convert it to UTF-8, as by iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "text in UTF-16; convert it to UTF-8, as by iconv -f UTF-16 -t UTF-8",
}
_HEAD_BYTES: Final = 1 << 16
_NUM_FIRST: Final = 100  # rows that tell what an input is
_CHUNK: Final = 1 << 20  # characters of a JSON array that are read at once
_BLANK: Final = " \t\n\r"
_NO_BLANK: Final = re.compile(f"[{_BLANK}]*")


def open_input(request: JobRequest) -> AbstractContextManager[Path]:
    """Open the input of a job by `open_rows`; what its rows need of the disk, they take beside the output."""
    folder = request.output.parent if request.output != STANDARD_STREAM and request.output.parent.is_dir() else None
    return open_rows(request.input, request.input_format, limit=request.limit, folder=folder)


@contextmanager
def open_rows(
    source: Path, form: InputFormat = InputFormat.AUTO, *, limit: int | None = None, folder: Path | None = None
) -> Iterator[Path]:
    """Yield the path of a JSONL file with the rows: the source itself if it is one, else a file without a name.

    Args:
        source: a file, a pipe, or "-" for stdin.
        form: AUTO goes by the content, and for CSV and TSV by the name.
        limit: number of rows to take; None: all.
        folder: where the file without a name takes disk space; None: the system's for temporary files.

    Raises:
        UnusableInput: the source cannot be read in this format; names what is wrong and the row.
    """
    with ExitStack() as opened:
        try:
            path = _rows_of(source, form, limit, folder, opened)
        except FileNotFoundError as error:
            raise UnusableInput(f"input {source} does not exist") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UnusableInput(f"input {source} cannot be decompressed: {error}") from error
        except UnicodeDecodeError as error:
            remedy = "convert it, as by iconv -f LATIN1 -t UTF-8"
            raise UnusableInput(f"input {source} is not UTF-8 ({error.reason}); {remedy}") from error
        except OSError as error:
            told = f"{error.strerror} (errno {error.errno})" if error.errno else str(error)
            raise UnusableInput(f"input {source} cannot be read: {told}") from error
        yield path


def _rows_of(source: Path, form: InputFormat, limit: int | None, folder: Path | None, opened: ExitStack) -> Path:
    is_stdin = source == STANDARD_STREAM
    mode = stat.S_IFIFO if is_stdin else source.stat().st_mode
    if not is_stdin and not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise UnusableInput(f"input {source} is not a file; give a file, a pipe, or - for stdin")
    file: BinaryIO
    if stat.S_ISREG(mode):
        file = opened.enter_context(source.open("rb"))
    else:
        stream = sys.stdin.buffer if is_stdin else opened.enter_context(source.open("rb"))
        file = _nameless(folder, opened)
        shutil.copyfileobj(stream, file)
        file.seek(0)
    content = _decompressed(file, source, opened)
    head = content.read(_HEAD_BYTES)
    content = _rewound(file, source, opened)
    if form is InputFormat.AUTO:
        form = _format_of(source, head)
    if form is InputFormat.JSONL and limit is None and content is file:
        file.flush()
        return source if stat.S_ISREG(mode) else _path_of(file)
    spool = _nameless(folder, opened)
    spool.writelines(_first(_lines(content, form, source, opened, folder), limit))
    spool.flush()
    return _path_of(spool)


def _first(lines: Iterable[bytes], limit: int | None) -> Iterator[bytes]:
    """Yield the lines of the first rows, blank ones between them included: lines have numbers."""
    num_rows = 0
    for line in lines:
        if num_rows == limit:
            return
        num_rows += bool(line.strip())
        yield line if line.endswith(b"\n") else line + b"\n"


def check_first_rows(index: RowIndex, form: RowForm) -> list[str]:
    """Return notices about the columns of the first rows.

    Raises:
        UnusableInput: none of the first rows can be read; says what the input looks like.
        OSError: the file cannot be read.
    """
    lines = [parse_line(line) for line in islice(read_lines(index.path), _NUM_FIRST)]
    rows = [row_of(parsed, index.id_of(parsed), form) for parsed in lines]
    records = [parsed.record for parsed in lines if parsed.record is not None]
    bad = [row for row in rows if isinstance(row, BadRow) and not row.is_openai]
    columns = list(dict.fromkeys(name for record in records for name in record))
    if rows and len(bad) == len(rows):
        which = "its only row cannot" if index.num_rows == 1 else f"none of its first {len(rows)} rows can"
        words = [f"input {index.name}: {which} be used; {bad[0].message}"]
        if not records:
            words += filter(None, [look_of(index.path)])
        elif not {*SOURCES, "body"} & {*columns} and form.prompt_column is None and form.template is None:
            words.append(
                f"the rows have the columns {', '.join(columns)}: name the one with the prompt by --prompt-column, or "
                "put some together by --template 'Question: {question}'"
            )
        raise UnusableInput("; ".join(words))
    kept = list(dict.fromkeys(name for row in rows for name in row.kept))
    notes = []
    if kept and form.keep is None:
        notes.append(f"kept beside the answers: the columns {', '.join(kept)} (--keep none leaves them out)")
    if renamed := [name for name in columns if kept_name(name) in kept and kept_name(name) != name]:
        notes.append(f"answers have fields named {', '.join(renamed)}, so these columns are kept as input_{renamed[0]}")
    if absent := [name for name in form.keep or () if name not in columns and records]:
        notes.append(f"--keep names {', '.join(absent)}, which none of the first {len(rows)} rows has")
    return notes


def look_of(path: Path) -> str | None:
    """Return what a file without a readable row looks like, and a remedy; None: like nothing known."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    for magic, what in _UNLIKE_TEXT.items():
        if head.startswith(magic):
            return f"it looks like {what}"
    if b"\0" in head:
        return "it looks like a binary file; give one JSON object a line"
    lines = head.decode("utf-8", "replace").strip().splitlines()
    first = lines[0] if lines else ""
    if first.startswith("{"):
        if len(lines) > 1 and not first.rstrip().endswith("}"):
            return "it looks like one JSON object over several lines; write each row on a line of its own (jq -c)"
        return None
    for form, delimiter in _DELIMITERS.items():
        header, *others = (next(csv.reader([line], delimiter=delimiter), []) for line in lines[:3])
        if len(header) > 1 and any(len(each) == len(header) for each in others):
            name = form.value.upper()
            return f"it looks like a {name} with the columns {', '.join(header)}; add --input-format {form.value}"
    return 'it looks like plain text; give one JSON object a line, such as {"prompt": "..."}'


def _nameless(folder: Path | None, opened: ExitStack) -> BinaryIO:
    """Return a new file that has no name, and so never stays behind."""
    return cast(BinaryIO, opened.enter_context(tempfile.TemporaryFile(dir=folder)))


def _path_of(file: BinaryIO) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def _decompressed(file: BinaryIO, source: Path, opened: ExitStack) -> BinaryIO:
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(_GZIP):
        return cast(BinaryIO, opened.enter_context(gzip.open(file, "rb")))
    if magic == _ZSTD:
        _need_pyarrow(source, "compressed by zstandard")
        import pyarrow as pa

        own = opened.enter_context(os.fdopen(os.dup(file.fileno()), "rb"))  # pyarrow closes the file that it is given
        own.seek(0)
        return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(own, "r"), "zstd")))
    return file


def _rewound(file: BinaryIO, source: Path, opened: ExitStack) -> BinaryIO:
    file.seek(0)
    return _decompressed(file, source, opened)


def _format_of(source: Path, head: bytes) -> InputFormat:
    suffixes = [each.lower() for each in source.suffixes if each.lower() not in _COMPRESSED]
    if head.startswith(_PARQUET):
        return InputFormat.PARQUET
    if suffixes and suffixes[-1] in _SUFFIXES:
        return _SUFFIXES[suffixes[-1]]
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    is_array = text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b"]")
    return InputFormat.JSON if is_array else InputFormat.JSONL


def _lines(
    content: BinaryIO, form: InputFormat, source: Path, opened: ExitStack, folder: Path | None
) -> Iterator[bytes]:
    """Yield the rows as lines of JSONL."""
    match form:
        case InputFormat.JSON:
            return _elements(io.TextIOWrapper(content, encoding="utf-8-sig"), source)
        case InputFormat.CSV | InputFormat.TSV:
            text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
            return _cells(text, _DELIMITERS[form], source)
        case InputFormat.PARQUET:
            if not content.seekable() or isinstance(content, gzip.GzipFile):
                whole = _nameless(folder, opened)
                shutil.copyfileobj(content, whole)
                content = whole
            return _parquet_rows(content, source)
    return iter(content)


def _elements(text: io.TextIOBase, source: Path) -> Iterator[bytes]:
    """Yield the elements of a JSON array as they are written, each on one line; checked when they are parsed."""
    decoder, place, number = json.JSONDecoder(), 0, 0
    buffer = text.read(_CHUNK).lstrip(_BLANK).removeprefix("[")
    while True:
        place = _NO_BLANK.match(buffer, place).end()  # type: ignore[union-attr]  # matches everywhere
        if buffer.startswith("]", place):
            return
        try:
            end = decoder.raw_decode(buffer, place)[1]
            behind = _NO_BLANK.match(buffer, end).end()  # type: ignore[union-attr]
        except (json.JSONDecodeError, RecursionError):
            behind = len(buffer)
        if behind == len(buffer):  # perhaps within an element
            if not (more := text.read(max(_CHUNK, len(buffer)))):
                raise UnusableInput(
                    f"input {source}: the JSON array cannot be read on from row {number + 1}, which begins with "
                    f"{buffer[place : place + 40]!r}; correct it, or write one JSON object a line"
                )
            buffer, place = buffer[place:] + more, 0
            continue
        number += 1
        yield buffer[place:end].replace("\n", " ").replace("\r", " ").encode() + b"\n"
        place = behind + (buffer[behind] == ",")


def _cells(text: Iterable[str], delimiter: str, source: Path) -> Iterator[bytes]:
    """Yield the rows of a CSV. Cells are texts, or JSON in the columns of a row's fields; empty ones are left out."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise UnusableInput(f"input {source} has two columns {twice[0]!r}; rename one")
        for number, cells in enumerate(reader, start=1):
            if len(cells) > len(header):
                raise UnusableInput(
                    f"input {source}: row {number} (line {reader.line_num}) has {len(cells)} cells, and the header "
                    f"{len(header)}; put cells that hold {delimiter!r} into double quotes"
                )
            named = zip(header, cells, strict=False)
            if record := {name: _cell(name, cell) for name, cell in named if cell}:
                yield _line(record)
    except csv.Error as error:
        raise UnusableInput(f"input {source} line {reader.line_num}: {error}") from error


def _cell(name: str, cell: str) -> object:
    if name not in FIELDS_OF_ROWS or name in ("id", "prompt", "reasoning_effort"):
        return cell
    if name in TEXT_FIELDS and not cell.startswith("["):
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _parquet_rows(file: BinaryIO, source: Path) -> Iterator[bytes]:
    _need_pyarrow(source, "a Parquet file")
    import pyarrow as pa
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield _line({name: value for name, each in row.items() if (value := _plain(each)) is not None})
    except pa.ArrowException as error:
        raise UnusableInput(f"input {source} cannot be read as Parquet: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value of Parquet as JSON has it: times in ISO's form, bytes in base64, nothing for null and NaN."""
    match value:
        case dict():
            return {name: plain for name, each in value.items() if (plain := _plain(each)) is not None}
        case list():
            return [_plain(each) for each in value]
        case float():
            return value if math.isfinite(value) else None
        case date() | time():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode("ascii")
        case None | bool() | int() | str():
            return value
    return str(value)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _need_pyarrow(source: Path, what: str) -> None:
    if find_spec("pyarrow") is None:
        raise UnusableInput(f"input {source} is {what}, which needs pyarrow; run `pip install '.[data]'`")
