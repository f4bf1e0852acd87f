"""`BatchJob`: one batch's rows, completed in a server's background; of the same parts as a job of `zinfer run`."""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from copy import deepcopy
from datetime import datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeAlias

from zinfer.errors import ConfigError
from zinfer.jobs.index import RowIndex, scan_input
from zinfer.jobs.manifest import Manifest
from zinfer.jobs.openai_response import OpenAIResponses
from zinfer.jobs.output import OutputFile, RowWriter
from zinfer.jobs.prompts import BatchCutter, Prompt, PromptReader, prefetch_iter
from zinfer.jobs.records import Records
from zinfer.jobs.request import UnusableInput
from zinfer.jobs.rows import BadRow, Fault, Parsed, Row, RowState
from zinfer.jobs.versions import software
from zinfer.nvme.pool import when_done
from zinfer.nvme.whole_file import replace_file
from zinfer.requests.completion import Completion
from zinfer.serve.errors import ApiError, RequestFailed
from zinfer.serve.prompts import Encoded
from zinfer.serve.service import Service
from zinfer.serve.suspects import Case

_OK: Final = 200
_ROWS_READ: Final = 256  # before they are submitted
_MOST_UNDER_WAY: Final = 2048
_LOOK_EVERY_S: Final = 0.2


def suspects_path(rows: Path) -> Path:
    """Return the path of the file that is kept beside a batch's rows while replicas end."""
    return rows.with_name(f"{rows.name}.suspects")


class _Done(NamedTuple):
    ordinal: int
    prompt: Prompt
    result: "Future[list[Completion]]"


_Ended: TypeAlias = "SimpleQueue[_Done | BaseException]"


class BatchJob:
    """Completes the rows of a batch's input that its output lacks. Rows are on the disk as they finish.

    Args:
        url: of all rows.
        began: of the batch; ``created`` in every row, so that a resumed batch writes the same bytes.
    """

    def __init__(self, service: Service, input: Path, output: Path, url: str, began: datetime) -> None:
        self._service, self._input, self._output, self._url, self._began = service, input, output, url, began
        self._states = bytearray()
        self._counts = {"total": 0, "completed": 0, "failed": 0}
        self._unwritten: deque[str] = deque()
        self._stop = threading.Event()
        self._suspicions = _Suspicions(suspects_path(output))

    @property
    def counts(self) -> dict[str, int]:
        """Rows in all, and those completed and failed that are on the disk."""
        return dict(self._counts)

    def stop(self) -> None:
        """End `run` soon; rows that are under way are given up."""
        self._stop.set()

    def run(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Complete the rows, on a thread of its own; returns whether all are in the output.

        Args:
            loop: of the service.

        Raises:
            UnusableInput: the input is no batch for this url; nothing was computed.
            JobError: the output cannot be written; whole rows in it are kept.
        """
        index = scan_input(self._input, check=self._check_line)
        service = self._service
        tokenizer = deepcopy(service.tokenizer)
        with closing(service.prompts.new_encoder(tokenizer)) as encoder, closing(OutputFile(self._output)) as out:
            encoder.now = self._began
            self._begin(out, index)
            reader = PromptReader(encoder, index, check=self._check_row)
            responses = OpenAIResponses(self._began, service.names[0], deepcopy(tokenizer))
            cutter = BatchCutter(reader, self._states, _ROWS_READ, only_missing=True)
            with (
                closing(RowWriter(out, self._note_written)) as writer,
                closing(prefetch_iter(cutter)) as batches,
            ):
                records = Records(responses, partial(self._put, writer), self._states)

                def prompts() -> Iterator[tuple[int, Prompt]]:
                    for batch in batches:
                        missing = records.begin_batch(batch.missing)
                        for prompt in batch.prompts:
                            yield missing[id(prompt)], prompt

                for ordinal, prompt, result in self._completed(prompts(), loop):
                    records.write(ordinal, prompt, _answer(result))
        return RowState.MISSING not in self._states

    def _begin(self, out: OutputFile, index: RowIndex) -> None:
        manifest = Manifest(
            model={"name": self._service.names[0]},
            input={"sha256": index.sha256, "size_bytes": index.size_bytes},
            settings={"url": self._url, **self._service.prompts.row_settings},
            versions=software(),
            began=self._began,
            model_name=self._service.names[0],
        )
        if out.manifest is None:
            out.begin(manifest)
            self._states = bytearray(index.num_rows)
        elif differences := out.manifest.differences(manifest):
            raise UnusableInput(
                "the server was started with other settings than the batch was begun with: "
                f"{'; '.join(differences)}. The rows so far are in its files; create a batch of the others"
            )
        else:
            self._states, _ = out.resume(index)
        done, failed = (self._states.count(each) for each in (RowState.DONE, RowState.FAILED))
        self._counts = {"total": index.num_rows, "completed": done, "failed": failed}

    def _put(self, writer: RowWriter, row: Mapping[str, Any]) -> None:
        self._unwritten.append("completed" if row["response"]["status_code"] == _OK else "failed")
        writer.put(row)

    def _note_written(self, number: int) -> None:
        """Count rows that are on the disk now; called by the writer's thread."""
        for _ in range(number):
            self._counts[self._unwritten.popleft()] += 1

    def _check_line(self, parsed: Parsed) -> None:
        url = None if parsed.record is None else parsed.record.get("url")
        if not parsed.is_openai:
            problem = parsed.problem or "there is no custom_id"
        elif url != self._url:
            problem = f"its url is {url!r:.60}, and the batch's is {self._url!r}"
        else:
            return
        raise UnusableInput(f"line {parsed.line}: {problem}", parsed.line)

    def _check_row(self, row: Row, line_number: int) -> BadRow | None:
        """Return the error of a row for another model or with long lists, which the routes would give it."""
        assert row.openai is not None
        try:
            self._service.check_model(row.openai.model)
            self._service.prompts.check_lists(vars(row.params))
        except ConfigError as error:
            return row.bad(line_number, str(error))
        except ApiError as error:
            return row.bad(line_number, error.message, Fault(error.status, error.param, error.code))
        return None

    def _completed(self, prompts: Iterator[tuple[int, Prompt]], loop: asyncio.AbstractEventLoop) -> Iterator[_Done]:
        """Yield prompts with their results as they finish; a limited number is under way."""
        done: _Ended = SimpleQueue()
        under_way: set[Future[list[Completion]]] = set()
        try:
            for ordinal, prompt in prompts:
                if self._stop.is_set():
                    return
                while len(under_way) >= _MOST_UNDER_WAY and not self._stop.is_set():
                    yield from self._take(done, under_way)
                encoded = Encoded(list(prompt.token_ids), prompt.params)
                working = self._service.complete_in_background(encoded, self._suspicions.begin(ordinal))
                result = asyncio.run_coroutine_threadsafe(working, loop)
                under_way.add(result)
                when_done(result, partial(_put, done, ordinal, prompt), done.put)
            while under_way and not self._stop.is_set():
                yield from self._take(done, under_way)
        finally:
            for result in under_way:
                result.cancel()

    def _take(self, done: "_Ended", under_way: "set[Future[list[Completion]]]") -> Iterator[_Done]:
        """Yield the next result; none if it does not come soon, so that `stop` is noticed."""
        self._suspicions.keep(self._service.suspects.num_notes)
        with suppress(Empty):
            found = done.get(timeout=_LOOK_EVERY_S)
            if isinstance(found, BaseException):
                raise found
            under_way.discard(found.result)
            self._suspicions.end(found.ordinal)
            yield found


class _Suspicions:
    """Which rows under way are suspected of the end of a replica, in a file, so that the next server knows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[int] = json.loads(path.read_bytes()) if path.exists() else []
        self._not_begun = set(self._kept)
        self._cases: dict[int, Case] = {}
        self._num_notes = 0

    def begin(self, ordinal: int) -> Case:
        """Return what is known of a row."""
        self._cases[ordinal] = Case(is_suspect=ordinal in self._not_begun)
        self._not_begun.discard(ordinal)
        return self._cases[ordinal]

    def end(self, ordinal: int) -> None:
        """Forget a row that has its answer."""
        del self._cases[ordinal]

    def keep(self, num_notes: int) -> None:
        """Write the file, if suspicions have changed since the last time. Raises OSError if that fails."""
        if self._num_notes == num_notes:
            return
        self._num_notes = num_notes
        found = sorted(self._not_begun.union(ordinal for ordinal, case in self._cases.items() if case.is_suspect))
        if found != self._kept:
            replace_file(self._path, json.dumps(found))
            self._kept = found


def _put(done: "_Ended", ordinal: int, prompt: Prompt, result: "Future[list[Completion]]") -> None:
    done.put(_Done(ordinal, prompt, result))


def _answer(result: "Future[list[Completion]]") -> list[Completion]:
    try:
        return result.result()
    except ConfigError as error:
        return [Completion.failed(0, 0, str(error))]
    except RequestFailed as error:  # the server's fault
        return [Completion(0, 0, "", (), "error", error=str(error))]
