"""`zinfer run`: a batch job. Says in its exit code how the job ended, and in words what to do next."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zinfer.cli.ending import Device, explained, importing, signals_raise
from zinfer.jobs.request import Pooling, Task, say_kept


def run(
    model: Annotated[Path, typer.Option(help="Checkpoint folder, tokenizer included.")],
    input: Annotated[Path, typer.Option(help="JSONL; a row holds 'prompt' or 'messages', or is an OpenAI batch's.")],
    output: Annotated[Path, typer.Option(help="JSONL that rows are appended to.")],
    config: Annotated[Path | None, typer.Option(help="DeepSpeed-style JSON.")] = None,
    device: Annotated[Device, typer.Option(help="Where the layers compute.")] = "auto",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default for rows; else 128, or what the model's context leaves.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows that share passes; part of what decides their bytes.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of reads, copies and computes for ui.perfetto.dev.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page of what the job did over time.")] = None,
    task: Annotated[
        Task, typer.Option(metavar="<task>", help="What to make of each row: generate, embed or classify.")
    ] = Task.GENERATE,
    pooling: Annotated[Pooling, typer.Option(help="Over tokens, of embeddings.")] = Pooling.MEAN,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the rows of the output's earlier job.")] = False,
) -> None:
    """Complete every row of a JSONL file; run again after any interruption, it goes on where it stopped.

    With --task embed each row gets a vector of length 1 from an encoder, with classify a label and scores.

    Rows with a 'custom_id' are those of an OpenAI batch file, for /v1/chat/completions or /v1/completions, and are
    answered in that form. Without a temperature they draw at 1; other rows are greedy.

    Exit codes: 0 all rows done, 3 some rows failed, 2 unusable input, 1 stopped by an error, 130 by Ctrl-C, 143 by
    SIGTERM.
    """
    with explained(lambda: say_kept(output)), signals_raise():
        with importing():
            from zinfer.jobs.job import run_job
            from zinfer.jobs.summary import summary_table

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
            console=Console(stderr=True),
        )
    Console().print(summary_table(summary))
    raise typer.Exit(summary.exit_code)
