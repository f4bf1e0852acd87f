"""The batch job: prompts in one JSONL file, completions in another; crash-safe and resumable, with identical bytes.

A row's bytes depend on the model, the input, the machine, and the settings and sizes in the manifest. Interruptions and
other memory budgets do not change them.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from socket import gethostname
from typing import Any

from rich.console import Console

from zinfer.config import resolve_settings
from zinfer.display import shown
from zinfer.jobs.input_formats import open_input
from zinfer.jobs.job_run import JobRun
from zinfer.jobs.output import Output, OutputFile, Stdout
from zinfer.jobs.peer_worker import PeerWorker
from zinfer.jobs.peers import Peers
from zinfer.jobs.progress import Meter
from zinfer.jobs.request import (
    STANDARD_STREAM,
    InputFormat,
    JobRequest,
    PathLike,
    Pooling,
    Task,
    kept_message,
)
from zinfer.jobs.row_form import RowForm
from zinfer.jobs.summary import JobSummary
from zinfer.probe.limits import choose_device
from zinfer.ranks.group import join_group
from zinfer.ranks.mesh import Mesh
from zinfer.ranks.open_models import failing_together
from zinfer.weights.hub import ensure_downloaded


def run_job(
    model: PathLike,
    input: PathLike,
    output: PathLike,
    *,
    config: PathLike | Mapping[str, object] | None = None,
    device: str = "auto",
    input_format: str = "auto",
    limit: int | None = None,
    prompt_column: str | None = None,
    template: str | None = None,
    system: str | None = None,
    keep: Sequence[str] | None = None,
    ordered: bool = False,
    max_new_tokens: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    restart: bool = False,
    trace: PathLike | None = None,
    report: PathLike | None = None,
    task: str = "generate",
    pooling: str = "auto",
    prompt_name: str | None = None,
    fast: bool = False,
    only_missing: bool = False,
    console: Console | None = None,
    **options: Any,
) -> JobSummary:
    """Complete every row of `input` into `output`; resumes an earlier run of the same job.

    Processes that torchrun started share the job: each calls this with the same arguments. Rank 0 reads and writes all
    files, the others compute batches, and all return the same summary.

    Args:
        model: a checkpoint folder with its tokenizer.
        input: JSONL with `prompt`, `messages` or `prompt_token_ids` in each row, and optionally `id` and fields of
            `zinfer.SamplingParams`. Rows are greedy unless they set a temperature. Rows with a `custom_id` have the
            OpenAI batch format and a default temperature of 1. Also a JSON array, CSV, TSV and Parquet, any of them by
            gzip or zstandard, and "-" for stdin.
        output: JSONL. Rows are appended as they finish, each in the format of its input row. The manifest is
            `<output>.manifest.json`. "-": stdout, from which no other run can go on.
        config: DeepSpeed-style configuration, a dict or the path of a JSON file.
        device: "auto", "cuda" or "cpu".
        input_format: "jsonl", "json", "csv", "tsv" or "parquet"; "auto" goes by the content and the name.
        limit: number of rows to take from the input; None: all.
        prompt_column: column that holds the prompt, or the messages, instead of `prompt`.
        template: the prompt, with columns in braces: "Q: {question}".
        system: system message of rows that have none; a prompt becomes the message of a user.
        keep: columns to copy to the output rows; None: all that are no fields of a row.
        ordered: leave the rows in the input's order at the end.
        max_new_tokens: for "generate": default for rows that do not set it; None: 128, or fewer if the model's context
            leaves less.
        sampling: for "generate": defaults of other fields of `SamplingParams`. Of a ``seed`` and its id each row gets
            a seed.
        batch_size: rows that share passes; the next batch starts when all of them are complete. It affects the rows'
            bytes. By default 4,096 at most, and in mixtures of experts fewer so that a batch takes ten minutes at most;
            32 for models that need padded batches.
        restart: discard the rows of an earlier job in `output`, even one with other settings.
        trace: a file for a Perfetto trace of reads, copies and computes, written when the job ends.
        report: path of an HTML page that charts the job over time, written when it ends.
        task: "generate", "embed" (one unit vector per row, from the encoder) or "classify" (a label, and the scores of
            all labels). For the last two, rows may have only a prompt and an id.
        pooling: for "embed": "auto", as the checkpoint's modules.json says, else the mean; "mean" over the tokens,
            "cls", the first token, or "last".
        prompt_name: for "embed": which of the checkpoint's prompts comes before each text; None: its default.
        fast: choose what is predicted to be faster though it rounds otherwise, as ``zinfer.optimize`` "speed".
        only_missing: leave rows that `output` has out of a batch that an earlier run left unfinished, also where they
            would be computed again: in mixtures of experts, padded batches and encoders. The missing ones then share
            passes with fewer rows, and may differ in last bits from those of an undisturbed run.
        console: where to show progress; None shows nothing.
        options: more keys of the configuration, such as ``kv_cache_dtype="int8"``.

    Raises:
        UnusableInput, ConfigError, CheckpointError, PlanError: no prompt was computed.
        JobError: the job stopped early; the rows in the output are whole, and the same call resumes it.
    """
    meter = Meter(console)  # its clock begins
    columns = {"prompt_column": prompt_column, "template": template, "system": system}
    form = RowForm.of(max_new_tokens, sampling or {}, keep, **columns)
    request = JobRequest(
        model=model,
        input=Path(input),
        output=Path(output),
        config=config,
        device=device,
        form=form,
        batch_size=batch_size,
        restart=restart,
        trace=None if trace is None else Path(trace),
        report=None if report is None else Path(report),
        task=Task(task),
        pooling=Pooling(pooling),
        prompt_name=prompt_name,
        fast=fast,
        only_missing=only_missing,
        limit=limit,
        ordered=ordered,
        input_format=InputFormat(input_format),
        options=options,
    )
    form.check()
    request.check()
    keys = {**request.keys, **({"optimize": "speed"} if request.fast else {})}
    settings = resolve_settings(request.config, keys, swaps=request.generates, is_job=request.generates)
    for each in (request.model, settings.batching.draft_model):
        ensure_downloaded(each, download=settings.download)
    group = join_group(choose_device(settings).type)
    Mesh.of(vars(settings.parallel), group.hosts if group else [gethostname()])  # before anything is loaded
    with failing_together():
        if group is not None and group.rank > 0:
            with closing(PeerWorker(request, settings, group)) as worker:
                return worker.run()
        peers = None if group is None else Peers(group, lambda: kept_message(request.output))
        try:
            with shown(meter), open_input(request) as rows:
                job = JobRun(request, settings, meter, peers, rows)
                with closing(_open_output(request)) as out, closing(job):
                    return job.run(out)
        except BaseException as error:
            if peers is not None and (first := peers.first_failure(error)) is not None:
                raise first from None
            raise


def _open_output(request: JobRequest) -> Output:
    """Open the job's output; errors are those of `OutputFile`."""
    if request.output == STANDARD_STREAM:
        return Stdout()
    return OutputFile(request.output, restart=request.restart)
