"""`zinfer run`: run a batch job."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from zinfer.cli.ending import exit_on_error, importing, process_seconds, raise_on_signals
from zinfer.cli.options import (
    MODEL_PANEL,
    STATED_BY,
    Config,
    DeviceOption,
    GenerationConfig,
    KVCache,
    MaxDeviceMemory,
    MaxNewTokens,
    MinP,
    Model,
    NoDownload,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    Weights,
    begin_reading,
    model_folder,
    reading_ahead,
    stated_keys,
)
from zinfer.cli.rank_endings import LAUNCHER
from zinfer.display import print_text
from zinfer.jobs.request import STANDARD_STREAM, InputFormat, Pooling, Task, kept_message
from zinfer.ranks.environment import own_rank, spoken_rank

if TYPE_CHECKING:
    from zinfer.jobs.row_form import RowForm

_ROWS_PANEL, _TASK_PANEL = "Rows", "Other tasks"
_RESUME_PANEL, _REPORTS = "Going on with a job", "What is told"
_ESCAPE, _ESCAPED = re.compile(r"\\([nt\\])"), {"n": "\n", "t": "\t", "\\": "\\"}


def run(
    model: Model,
    input: Annotated[
        Path, typer.Option(help="JSONL, a JSON array, CSV, TSV or Parquet, also .gz or .zst; - is stdin.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="JSONL file that gets a row for each row of the input; - is stdout.")
    ] = None,
    input_format: Annotated[
        InputFormat,
        typer.Option(
            metavar="<format>",
            help="jsonl, json, csv, tsv or parquet; auto: as content and name say.",
            rich_help_panel=_ROWS_PANEL,
        ),
    ] = InputFormat.AUTO,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column with the prompt; by default 'prompt'.", rich_help_panel=_ROWS_PANEL)
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help=r"Prompt made of columns: 'Q: {question}\nA:'.", rich_help_panel=_ROWS_PANEL),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="System message of rows without one; prompts become chats.", rich_help_panel=_ROWS_PANEL),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="all|none|NAME,...",
            help="Columns of the input to copy to the output; by default all of your own.",
            rich_help_panel=_ROWS_PANEL,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First rows to take.", rich_help_panel=_ROWS_PANEL)] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Leave the rows in the input's order.", rich_help_panel=_ROWS_PANEL)
    ] = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    generation_config: GenerationConfig = None,
    config: Config = None,
    device: DeviceOption = "auto",
    weights: Weights = None,
    kv_cache: KVCache = None,
    max_device_memory: MaxDeviceMemory = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that share the model; by default one per GPU.", rich_help_panel=MODEL_PANEL
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Rows that share passes; affects their bytes.", rich_help_panel=MODEL_PANEL),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Allow an INT8 KV cache, and ranks that divide layers, where that is faster.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = False,
    task: Annotated[
        Task,
        typer.Option(
            metavar="<task>", help="Task for each row: generate, embed or classify.", rich_help_panel=_TASK_PANEL
        ),
    ] = Task.GENERATE,
    pooling: Annotated[
        Pooling,
        typer.Option(
            help="Pooling of token vectors for embed; auto: as the checkpoint says, else mean.",
            rich_help_panel=_TASK_PANEL,
        ),
    ] = Pooling.AUTO,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="Which of the checkpoint's prompts precedes texts to embed.", rich_help_panel=_TASK_PANEL),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard the rows of the output's earlier job.", rich_help_panel=_RESUME_PANEL),
    ] = False,
    only_missing: Annotated[
        bool,
        typer.Option(
            "--only-missing",
            help="Go on without computing written rows again; last bits may differ.",
            rich_help_panel=_RESUME_PANEL,
        ),
    ] = False,
    no_download: NoDownload = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show the plan and the first prompt; compute nothing.", rich_help_panel=_REPORTS
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON line instead of the table.", rich_help_panel=_REPORTS)
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page that charts the job over time.", rich_help_panel=_REPORTS),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace of reads and computes for ui.perfetto.dev.", rich_help_panel=_REPORTS),
    ] = None,
) -> None:
    """Complete every row of a file. Run the command again to resume after an interruption.

    A row holds 'prompt' or 'messages', and perhaps an 'id' and sampling fields of its own, which come before the
    options here. Rows with a 'custom_id' have the OpenAI batch format, and so do their output rows. Rows are greedy
    by default, those of OpenAI's format excepted.

    Exit codes: 0 all rows done, 3 some rows failed, 2 unusable input, 1 error, 130 Ctrl-C, 143 SIGTERM.
    """
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    sampling["stop"] = [_unescaped(text) for text in stop] if stop else None
    names = None if keep in (None, "all") else [] if keep == "none" else [each.strip() for each in keep.split(",")]
    keys = stated_keys(weights, kv_cache, max_device_memory, generation_config, no_download=no_download)
    columns = {
        "prompt_column": prompt_column,
        "template": None if template is None else _unescaped(template),
        "system": None if system is None else _unescaped(system),
    }
    if dry_run:
        with exit_on_error():
            folder = model_folder(model, config, no_download=no_download)
            with importing():
                from zinfer.jobs.row_form import RowForm

            form = RowForm.of(max_new_tokens, sampling, names, **columns)
            _show_plan(folder, config, {"device": device, **keys}, input, form, input_format=input_format, limit=limit)
        return
    if output is None:
        raise typer.BadParameter("give the file for the rows, or - for stdout", param_hint="--output")
    to_stdout = output == STANDARD_STREAM
    with exit_on_error(None if to_stdout else lambda: _kept(output)), raise_on_signals(makes_passes=True):
        folder = model_folder(model, config, no_download=no_download)
        with reading_ahead(folder), importing():
            from zinfer.cli.launch import begin_rank, check_mesh, choose_num_ranks, launch

            begin_rank(ranks)
            import torch  # noqa: F401  settings import it inside functions

            from zinfer.config import resolve_settings

        stated = {"device": device, **({"optimize": "speed"} if fast else {}), **keys}
        settings = resolve_settings(config, stated, swaps=task is Task.GENERATE, options=STATED_BY)
        num_ranks = choose_num_ranks(ranks, settings.device, settings.parallel)
        if num_ranks > 1:
            check_mesh(settings.parallel, num_ranks)
        with reading_ahead(folder), importing():
            from zinfer.jobs.job import run_job
            from zinfer.jobs.summary import job_document, summary_table

        if num_ranks > 1:
            launch(num_ranks, lambda: kept_message(output))
        begin_reading(folder)
        is_shown = own_rank() == 0
        starting_s = process_seconds()
        summary = run_job(
            model,
            input,
            output,
            config=config,
            device=device,
            input_format=input_format,
            limit=limit,
            keep=names,
            ordered=ordered,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            batch_size=batch_size,
            restart=restart,
            trace=trace,
            report=report,
            task=task.value,
            pooling=pooling.value,
            prompt_name=prompt_name,
            fast=fast,
            only_missing=only_missing,
            console=Console(stderr=True) if is_shown else None,
            **columns,
            **keys,
        )
    console = Console(stderr=to_stdout)
    summary = summary.of_process(starting_s, process_seconds())
    if is_shown and as_json:
        print(json.dumps(job_document(summary)), file=console.file)
    elif is_shown:
        console.print(summary_table(summary))
    raise typer.Exit(summary.exit_code)


def _show_plan(
    model: Path, config: Path | None, keys: Mapping[str, Any], input: Path, form: "RowForm", **options: Any
) -> None:
    """Print the plan of a job, and its first row as the model gets it. Nothing is computed or written."""
    with importing():
        from zinfer.config import resolve_settings
        from zinfer.jobs.token_rows import sample_rows
        from zinfer.model.outline import check_settings, keeps_blocks, read_outline
        from zinfer.planning.job_search import plan_job
        from zinfer.planning.plan import Case
        from zinfer.planning.presets import this_machine
        from zinfer.planning.tables import job_table
        from zinfer.probe.limits import choose_device
        from zinfer.requests.prompt_encoder import find_tokenizer

    settings = resolve_settings(config, keys, swaps=True, options=STATED_BY)
    form.check()
    in_blocks = keeps_blocks(settings, on_cuda=choose_device(settings).type == "cuda")
    outline = read_outline(model, settings.dtype, settings.quantization, in_blocks=in_blocks)
    check_settings(outline, settings)
    sample = sample_rows(input, model, outline.spec.vocab, form, outline.limits(settings), **options)
    first, tokenizer = sample.prompts[0], find_tokenizer(model)
    text = "" if tokenizer is None else tokenizer.decode(first.token_ids)
    job = sample.job()
    planned = plan_job(Case(outline, this_machine(settings, outline.files), settings), job)
    console = Console()
    console.print(job_table(job, planned))
    print_text(console, f"rows: {sample.num_rows:,}; of {sample.num_read:,} looked at, {len(sample.bad):,} would fail")
    for bad in sample.bad[:1]:
        print_text(console, f"the first of them: {bad.message}")
    print_text(console, f"first prompt, row {first.row.id!r}: {text!r}")
    print_text(console, f"its {len(first.token_ids):,} tokens: {' '.join(map(str, first.token_ids))}")


def _unescaped(text: str) -> str:
    r"""Return a text of the command line with the line breaks and tabs that it spells as \n and \t."""
    return _ESCAPE.sub(lambda found: _ESCAPED[found[1]], text)


def _kept(output: Path) -> str:
    """Return a message on the rows in the output, which other ranks than 0 may not see, unless all are on one host."""
    speaks = spoken_rank() in (None, 0) or LAUNCHER in os.environ
    return kept_message(output) if speaks else "Rank 0 keeps the finished rows"
