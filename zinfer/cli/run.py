"""`zinfer run`: run a batch job."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from zinfer.cli.ending import Device, exit_on_error, importing, raise_on_signals
from zinfer.cli.rank_endings import LAUNCHER
from zinfer.jobs.request import Pooling, Task, kept_message
from zinfer.ranks.environment import own_rank, spoken_rank


def run(
    model: Annotated[Path, typer.Option(help="Checkpoint folder, tokenizer included.")],
    input: Annotated[Path, typer.Option(help="JSONL; a row holds 'prompt' or 'messages', or is an OpenAI batch's.")],
    output: Annotated[Path, typer.Option(help="JSONL file to append rows to.")],
    config: Annotated[Path | None, typer.Option(help="DeepSpeed-style JSON.")] = None,
    device: Annotated[Device, typer.Option(help="Where the layers compute.")] = "auto",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Default for rows that do not set it; else 128, or what the context leaves."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows that share passes; affects their bytes.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of reads, copies and computes for ui.perfetto.dev.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page that charts the job over time.")] = None,
    task: Annotated[
        Task, typer.Option(metavar="<task>", help="Task for each row: generate, embed or classify.")
    ] = Task.GENERATE,
    pooling: Annotated[
        Pooling, typer.Option(help="Pooling of token vectors for embed; auto: as the checkpoint says, else mean.")
    ] = Pooling.AUTO,
    prompt_name: Annotated[
        str | None, typer.Option(help="Which of the checkpoint's prompts precedes texts to embed.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes that share the model; by default one per GPU.")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Allow an INT8 KV cache, and ranks that divide layers, where that is faster.")
    ] = False,
    only_missing: Annotated[
        bool,
        typer.Option("--only-missing", help="Go on without computing written rows again; last bits may differ."),
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the rows of the output's earlier job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line on stdout instead of the table.")] = False,
) -> None:
    """Complete every row of a JSONL file. Run the command again to resume after an interruption.

    With --task embed each row gets a unit vector from an encoder, with classify a label and scores.

    Rows with a 'custom_id' have the OpenAI batch format, for /v1/chat/completions or /v1/completions, and so do their
    output rows. Their default temperature is 1; other rows are greedy by default.

    Exit codes: 0 all rows done, 3 some rows failed, 2 unusable input, 1 error, 130 Ctrl-C, 143 SIGTERM.
    """
    with exit_on_error(lambda: _kept(output)), raise_on_signals():
        with importing():
            from zinfer.cli.launch import begin_rank, check_mesh, choose_num_ranks, launch

            begin_rank(ranks)
            from zinfer.config import resolve_settings

        settings = resolve_settings(config, {"device": device}, swaps=task is Task.GENERATE)
        num_ranks = choose_num_ranks(ranks, settings.device, settings.parallel)
        if num_ranks > 1:
            check_mesh(settings.parallel, num_ranks)
            launch(num_ranks, lambda: kept_message(output))
        with importing():
            from zinfer.jobs.job import run_job
            from zinfer.jobs.summary import job_document, summary_table

        is_shown = own_rank() == 0
        starting_s = time.time() - psutil.Process().create_time()
        summary = run_job(
            str(model),
            input,
            output,
            config=config,
            device=device,
            max_new_tokens=max_new_tokens,
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
        )
    if is_shown and as_json:
        phase_s = {"starting": starting_s, **summary.phase_s}
        print(json.dumps(job_document(replace(summary, phase_s=phase_s))))
    elif is_shown:
        Console().print(summary_table(summary))
    raise typer.Exit(summary.exit_code)


def _kept(output: Path) -> str:
    """Return a message on the rows in the output, which other ranks than 0 may not see, unless all are on one host."""
    speaks = spoken_rank() in (None, 0) or LAUNCHER in os.environ
    return kept_message(output) if speaks else "Rank 0 keeps the finished rows"
