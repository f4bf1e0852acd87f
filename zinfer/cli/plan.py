"""`zinfer plan`: predict the memory and speed of a run, without a GPU or even the weights."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from zinfer.cli.ending import exit_on_error, importing
from zinfer.cli.options import NoDownload
from zinfer.cli.plan_machine import MachineOptions, open_case
from zinfer.display import print_text
from zinfer.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from rich.table import Table

    from zinfer.cli.plan_ranks import Arranged
    from zinfer.planning.job_plan import Job
    from zinfer.planning.plan import Case


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder, one with config.json alone, or a name on the hub; 'list': those known here."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="DeepSpeed-style JSON.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Preset to plan for instead of this machine, or the GPU's name in nvidia-smi; 'list': all.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory, such as '128GB', in place of the preset's.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate from host memory to the GPU, such as '25GB/s', in place of the preset's.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(help="Rate of the checkpoint's disk, such as '7GB/s', in place of the preset's.")
    ] = None,
    probe: Annotated[Path | None, typer.Option(help="Output of 'zinfer probe --json'.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts computed together; default 32. Jobs choose their own.")
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 512,
    new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens generated after each prompt; by default 128, of a file's rows as `zinfer run` does."
        ),
    ] = None,
    weights: Annotated[
        Literal["fp16", "int8", "int4", "fp8"] | None,
        typer.Option(help="Form of the weights, as in zinfer.quantization; else as published, or as in --config."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Plan a job of this many rows instead of a batch.")] = None,
    input: Annotated[
        Path | None, typer.Option(help="Plan the job of this JSONL file, by a sample of its rows.")
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="GPUs of all machines together; compares the ways to share the job among them.")
    ] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines, all alike, that the ranks are on.")] = 1,
    parallel: Annotated[
        str,
        typer.Option(help="How the ranks share the job, such as 'replicas=2,zero=4'; auto: as a job would choose."),
    ] = "auto",
    no_download: NoDownload = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of the table.")] = False,
) -> None:
    """Predict memory, speed and the bottleneck of a batch or a job, and suggest how to make it faster.

    Exit codes: 0 planned, 2 unusable input or a batch that does not fit, 1 disk error.
    """
    if machine == "list":
        with importing():
            from zinfer.planning.tables import preset_table
        with exit_on_error():
            Console().print(preset_table())
        return
    if model == "list":
        from zinfer.model.known_models import known_listing

        with exit_on_error():
            print(known_listing())
        return
    if model is None:
        raise typer.BadParameter("give the model to plan for", param_hint="--model")
    if batch_size is not None and (rows is not None or input is not None):
        raise typer.BadParameter(
            f"is for a batch, but {'--rows' if input is None else '--input'} plans a job, which chooses how many rows "
            "run at once; remove it, or set zinfer.max_sequences in --config",
            param_hint="--batch-size",
        )
    with exit_on_error():
        if rows is not None and input is not None:
            raise ConfigError("--rows and --input both set the number of rows; remove one of the two")
        stated = MachineOptions(machine, probe, host_memory, link, disk)
        case, note = open_case(
            model, config, stated, parallel, weights, no_download=no_download, with_texts=input is not None
        )
        document, tables, answer, lines = (
            _plan_batch(case, (batch_size or 32, prompt_len, new_tokens), (ranks, nodes))
            if rows is None and input is None
            else _plan_job(case, model, config, (rows, input), (prompt_len, new_tokens), (ranks, nodes))
        )
        if as_json:
            print(json.dumps({"answer": answer, "note": note, **document}, indent=2))
            return
        console = Console()
        for line in (answer, note):
            if line is not None:
                print_text(console, line)
        for table in tables:
            console.print(table)
        for line in lines:
            print_text(console, line)


_Found = tuple[dict[str, Any], list["Table"], str, list[str]]
"""A plan as a JSON document, as tables, in a sentence printed above them, and in lines printed below them."""


def _plan_batch(case: "Case", lengths: tuple[int, int, int | None], ranks: tuple[int, int]) -> _Found:
    with importing():
        from zinfer.cli.plan_ranks import arrange
        from zinfer.planning.advice import advise, fitting_changes
        from zinfer.planning.memory import Request
        from zinfer.planning.plan import plan_batch
        from zinfer.planning.tables import batch_answer, plan_document, plan_table
        from zinfer.requests.length_limits import DEFAULT_NEW_TOKENS

    batch_size, prompt_len, new_tokens = lengths
    whole = Request(batch_size, prompt_len, new_tokens or DEFAULT_NEW_TOKENS)
    arranged = arrange(case, whole, *ranks)
    case, request = arranged.case, whole.part(arranged.num_groups)
    try:
        planned = plan_batch(case, request)
    except PlanError as error:
        raise _with_changes(error, fitting_changes(case, request)) from error
    advice = advise(planned)
    lines = [str(planned.prediction), *(f"advice: {each}" for each in advice)]
    answer = batch_answer(planned, advice, arranged.num_groups)
    found = plan_document(planned, advice), [plan_table(planned)], answer, lines
    return _with_ranks(found, arranged, planned.prediction.tokens_per_s)


def _plan_job(
    case: "Case",
    model: str,
    config: Path | None,
    rows: tuple[int | None, Path | None],
    lengths: tuple[int, int | None],
    ranks: tuple[int, int],
) -> _Found:
    with importing():
        from zinfer.cli.plan_ranks import arrange
        from zinfer.config.source import config_keys
        from zinfer.planning.advice import fitting_job_changes, job_advice
        from zinfer.planning.job_search import plan_job
        from zinfer.planning.tables import job_answer, job_document, job_table, served_line

    given = config_keys(config)
    whole, skipped = _job(case, model, rows, lengths)
    arranged = arrange(case, whole, *ranks)
    case, job = arranged.case, whole.part(arranged.num_groups)
    try:
        planned = plan_job(case, job)
    except PlanError as error:
        raise _with_changes(error, fitting_job_changes(case, job)) from error
    advice = job_advice(planned, case.settings, given)
    configuration = f"configuration: {json.dumps(planned.configuration(given))}"
    lines = [*skipped, served_line(job, planned), configuration, *(f"advice: {each}" for each in advice)]
    answer = job_answer(whole.num_rows, planned, advice)
    found = job_document(job, planned, advice, given), [job_table(job, planned)], answer, lines
    return _with_ranks(found, arranged, planned.tokens_per_s)


def _job(
    case: "Case", model: str, rows: tuple[int | None, Path | None], lengths: tuple[int, int | None]
) -> tuple["Job", list[str]]:
    """Return the whole job, of stated rows or a file's, and notes on rows that are left out."""
    with importing():
        from zinfer.planning.job_plan import Job
        from zinfer.requests.length_limits import DEFAULT_NEW_TOKENS

    (num_rows, input), (prompt_len, new_tokens) = rows, lengths
    if input is None:
        new_tokens = new_tokens or DEFAULT_NEW_TOKENS
        case.check_length(prompt_len, new_tokens)
        return Job(num_rows or 1, [prompt_len], [new_tokens]), []
    with importing():
        from zinfer.jobs.row_form import RowForm
        from zinfer.jobs.token_rows import sample_rows
        from zinfer.weights.folder import find_folder

    vocab, limits = case.outline.spec.vocab, case.outline.limits(case.settings)
    sample = sample_rows(input, find_folder(model), vocab, RowForm(new_tokens), limits)
    if not sample.bad:
        return sample.job(), []
    return sample.job(), [f"{len(sample.bad):,} of {sample.num_read:,} sampled rows would fail, and are left out"]


def _with_ranks(found: _Found, arranged: "Arranged", tokens_per_s: float) -> _Found:
    """Add what is to be said of several ranks; ``tokens_per_s`` are those of one."""
    document, tables, answer, lines = found
    if arranged.case.mesh.size == 1:
        return found
    more = arranged.document(tokens_per_s)
    return document | more, [*tables, arranged.table()], answer, [*arranged.lines(tokens_per_s), *lines]


def _with_changes(error: PlanError, changes: Iterable[str]) -> PlanError:
    words = ", or ".join(changes)
    return PlanError(f"{error}; what would fit: {words}") if words else error
