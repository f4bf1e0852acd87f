"""`zinfer bench`: run a job on random weights, and compare it with its prediction."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from zinfer.cli.ending import exit_on_error, importing, process_seconds, raise_on_signals
from zinfer.cli.options import STATED_BY, Config, DeviceOption, KVCache, NoDownload, Weights
from zinfer.cli.plan_machine import find_model
from zinfer.errors import ConfigError


def bench(
    model: Annotated[str, typer.Option(help="Folder with config.json, a name on the hub, or one from '--model list'.")],
    rows: Annotated[int | None, typer.Option(min=1, help="Number of random prompts.")] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each random prompt.")] = 512,
    new_tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens generated after each prompt that does not set it."),
    ] = 32,
    input: Annotated[Path | None, typer.Option(help="JSONL file with the prompts, instead of random ones.")] = None,
    weights: Weights = None,
    kv_cache: KVCache = None,
    memory_cap: Annotated[
        str | None,
        typer.Option(
            "--max-device-memory",
            help='Most device memory to use, such as "20GB"; the rest of a GPU is held.',
        ),
    ] = None,
    config: Config = None,
    device: DeviceOption = "auto",
    experts: Annotated[
        Literal["uniform", "zipf"], typer.Option(help="How often a mixture's experts are chosen.")
    ] = "uniform",
    compare: Annotated[
        str, typer.Option(help="Rivals to run on the same prompts, such as 'accelerate,deepspeed'; they need the disk.")
    ] = "",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes that share weights and rows; by default one per GPU.")
    ] = None,
    no_download: NoDownload = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line on stdout.")] = False,
) -> None:
    """Measure a job with random weights: of the model only config.json is needed.

    The weights are random bytes in one file, which all blocks are read from. It is written to a temporary folder, or
    to offload_param.nvme_path if the configuration states one, and removed at the end.

    Exit codes: 0 measured, 2 unusable input or too little memory, 1 error, 130 Ctrl-C, 143 SIGTERM.
    """
    if model == "list":
        from zinfer.model.known_models import known_listing

        with exit_on_error():
            print(known_listing())
        return
    with exit_on_error(), raise_on_signals(makes_passes=True):
        find_model(model, config, no_download=no_download)
        cap_bytes = None if memory_cap is None else _cap_bytes(memory_cap)
        with importing():
            from zinfer.cli.launch import begin_rank, check_mesh, choose_num_ranks, launch

            begin_rank(ranks)
            import torch  # noqa: F401  settings import it inside functions

            from zinfer.config import resolve_settings
            from zinfer.jobs.bench_request import BenchRequest
            from zinfer.jobs.rivals import chosen_rivals
            from zinfer.ranks.environment import own_rank

        request = BenchRequest(
            model=model,
            new_tokens=new_tokens,
            rows=rows,
            prompt_len=prompt_len,
            input=input,
            weights=weights,
            kv_cache=kv_cache,
            memory_cap=cap_bytes,
            config=config,
            device=device,
            experts=experts,
            compare=chosen_rivals(compare),
        )
        parallel = resolve_settings(config, {"device": device}, options=STATED_BY).parallel
        num_ranks = choose_num_ranks(ranks, device, parallel, rows)
        if num_ranks > 1:
            check_mesh(parallel, num_ranks)
        with importing():
            from zinfer.jobs.bench import run_bench
            from zinfer.jobs.bench_summary import bench_document, bench_table

        if num_ranks > 1:
            launch(num_ranks, lambda: "Nothing was kept")
        is_shown, starting_s = own_rank() == 0, process_seconds()
        result = run_bench(request, Console(stderr=True) if is_shown else None)
        if not is_shown:
            return
        result = result.of_process(starting_s, process_seconds())
        if not as_json:
            Console().print(bench_table(result))
        print(json.dumps(bench_document(result)))


def _cap_bytes(text: str) -> int:
    from zinfer.config.values import Unusable, size_bytes

    try:
        return size_bytes(text)
    except Unusable as error:
        raise ConfigError(f"--max-device-memory = {text!r}{error}") from error
