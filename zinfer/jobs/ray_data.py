"""Rows of a Ray dataset in, completed rows out: a class for `ray.data.Dataset.map_batches`."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from zinfer.batching.family_check import batched_limits
from zinfer.batching.llm import LLM
from zinfer.config import resolve_settings
from zinfer.errors import ConfigError
from zinfer.jobs.prompts import Prompt, encoded
from zinfer.jobs.records import completed_record
from zinfer.jobs.row_form import RowForm
from zinfer.jobs.rows import BadRow, Line, parse_line, row_of
from zinfer.model.build import build_meta_model
from zinfer.requests.completion import Completion
from zinfer.requests.prompt_encoder import PromptEncoder, find_tokenizer
from zinfer.weights import Checkpoint
from zinfer.weights.hub import ensure_downloaded

_ID: Final = "id"
_LOGPROBS: Final = pa.list_(pa.struct([("logprob", pa.float64()), ("top", pa.list_(pa.list_(pa.float64())))]))
_OUTPUT: Final = (
    pa.field("text", pa.string()),
    pa.field("token_ids", pa.list_(pa.int64())),
    pa.field("finish_reason", pa.string()),
    pa.field("stop_reason", pa.string()),
    pa.field("logprobs", _LOGPROBS),
    pa.field("prompt_logprobs", _LOGPROBS),
)
_COLUMNS: Final = (
    *_OUTPUT,
    pa.field("outputs", pa.list_(pa.struct(_OUTPUT))),
    pa.field("num_prompt_tokens", pa.int64()),
    pa.field("num_output_tokens", pa.int64()),
    pa.field("error", pa.string()),
)


class LLMPredictor:
    """Completes the rows of a Ray dataset with an `LLM`, which each actor of a pool has for itself.

    Give it to ``Dataset.map_batches`` with ``batch_format="pyarrow"``. Columns are the fields of a row of
    `zinfer.jobs.run_job`: one of ``prompt``, ``messages`` and ``prompt_token_ids``, and optionally ``id`` and fields of
    `zinfer.SamplingParams`; null is as good as no field. The output has the rows in the order of the input, with
    ``id`` if there is one, the columns of ``keep``, and:

    * ``text``, ``token_ids``, ``finish_reason``, ``stop_reason`` (as a string), ``logprobs``, ``prompt_logprobs``;
      for a row with ``n`` above 1 they are null, and ``outputs`` is a list of them;
    * ``num_prompt_tokens`` and ``num_output_tokens``;
    * ``error``: why the row could not be used or computed; null if there was no error. It fails no other row.

    Args:
        model: a checkpoint folder with its tokenizer, on every node.
        config: DeepSpeed-style configuration, a dict or the path of a JSON file.
        max_new_tokens: default for rows that do not set it.
        keep: columns to copy to the output; others that are no fields of a row are left out.
        options: more keys of the configuration, such as ``device="cpu"``.

    Raises:
        ConfigError, CheckpointError, PlanError: as `zinfer.LLM`; ConfigError also for columns that cannot be kept.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        *,
        max_new_tokens: int | None = None,
        keep: Sequence[str] = (),
        **options: Any,
    ) -> None:
        taken = sorted(set(keep) & {_ID, *(field.name for field in _COLUMNS)})
        if taken:
            raise ConfigError(f"keep names {', '.join(taken)}, which the output has anyway; rename the column")
        self._form, self._keep = RowForm(max_new_tokens, keep=()), tuple(keep)
        settings = resolve_settings(config, options, swaps=True)
        ensure_downloaded(model, download=settings.download)
        checkpoint = Checkpoint.open(model)
        meta = build_meta_model(checkpoint, settings.dtype)
        limits = batched_limits(meta, settings.max_out_tokens)
        tokenizer = find_tokenizer(checkpoint.folder)
        self._encoder = PromptEncoder(tokenizer, meta.config.get_text_config().vocab_size, limits)
        self._llm = LLM(checkpoint, config, **options)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return a table with a row for each row of the batch, in its order.

        Raises:
            ConfigError: the batch is no pyarrow table, or lacks a column of ``keep``.
            RuntimeError, OSError: the model failed; Ray computes the batch again or ends the job, as it is told to.
        """
        if not isinstance(batch, pa.Table):
            raise ConfigError(f'batches are {type(batch).__name__}; give map_batches batch_format="pyarrow"')
        missing = [name for name in self._keep if name not in batch.column_names]
        if missing:
            raise ConfigError(f"keep names {', '.join(missing)}; the dataset has {', '.join(batch.column_names)}")
        items = [self._read(number, row) for number, row in enumerate(batch.drop_columns(self._keep).to_pylist(), 1)]
        found = pa.Table.from_pylist(self._completed(items), pa.schema(_COLUMNS))
        copied = [name for name in (_ID, *self._keep) if name in batch.column_names]
        names, columns = [*copied, *found.column_names], [*(batch[name] for name in copied), *found.columns]
        return pa.Table.from_arrays(columns, names=names)

    def close(self) -> None:
        """Release memory, threads and files of the model."""
        self._encoder.close()
        self._llm.close()

    def _read(self, number: int, columns: Mapping[str, Any]) -> Prompt | BadRow:
        """Return the prompt of a row, or why there is none."""
        record = {name: _without_nulls(value) for name, value in columns.items() if value is not None}
        try:
            data = json.dumps(record).encode()
        except TypeError as error:  # of a column, such as a time
            return BadRow(number, str(error))
        parsed = parse_line(Line(number, data))
        row = row_of(parsed, parsed.id, self._form)
        if not isinstance(row, BadRow) and row.openai is not None:
            return BadRow(number, "rows of OpenAI's batches are for zinfer run; give the fields of a row")
        return row if isinstance(row, BadRow) else encoded(row, number, self._encoder)

    def _completed(self, items: Sequence[Prompt | BadRow]) -> list[dict[str, Any]]:
        """Return the output columns of each row."""
        prompts = [item for item in items if isinstance(item, Prompt)]
        # Without an id a row is drawn by its prompt: its place in a batch is chance.
        params = [prompt.row.params if prompt.row.id == prompt.line else prompt.params for prompt in prompts]
        answers: defaultdict[int, list[Completion]] = defaultdict(list)
        for completion in self._llm.generate([{"prompt_token_ids": each.token_ids} for each in prompts], params):
            answers[completion.prompt_index].append(completion)
        completed = (_columns(prompt, answers[index]) for index, prompt in enumerate(prompts))
        return [
            {"error": item.message.removeprefix(f"line {number}: ")} if isinstance(item, BadRow) else next(completed)
            for number, item in enumerate(items, 1)
        ]


def _columns(prompt: Prompt, answers: Sequence[Completion]) -> dict[str, Any]:
    """Return the output columns of a prompt with its completions."""
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors:
        return {"error": errors[0], "num_prompt_tokens": len(prompt.token_ids)}
    record = completed_record(prompt, answers)
    for each in (record, *record.get("outputs", ())):
        reason = each.get("stop_reason")
        each["stop_reason"] = None if reason is None else str(reason)
    return record


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that Arrow adds to objects of a list, so that all have the same."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
