"""`zinfer warmup`: compile a model's kernels ahead of its jobs."""

from pathlib import Path
from typing import Annotated

import typer

from zinfer.cli.ending import exit_on_error, importing, raise_on_signals, say
from zinfer.cli.options import Model, NoDownload, model_folder
from zinfer.errors import ConfigError


def warmup(
    model: Model,
    config: Annotated[Path | None, typer.Option(help="DeepSpeed-style JSON of the jobs to come.")] = None,
    no_download: NoDownload = False,
    fast: Annotated[bool, typer.Option("--fast", help="The jobs will run with --fast: an INT8 KV cache too.")] = False,
) -> None:
    """Compile the kernels that a model needs on this GPU, so that its first job does not wait for them.

    Reads the first layers of the model, one of each kind at least. Compiled kernels are kept by Triton, for these
    versions of zinfer, Triton and the driver. Exit codes: 0 done, 1 error, 2 unusable input, 130 Ctrl-C,
    143 SIGTERM.
    """
    with exit_on_error(), raise_on_signals():
        model_folder(model, config, no_download=no_download)
        with importing():
            from zinfer.config import resolve_settings
            from zinfer.jobs.warmup import warm_up
            from zinfer.probe.limits import choose_device

        if choose_device(resolve_settings(config, swaps=True)).type != "cuda":
            raise ConfigError("kernels are compiled for a GPU, and this job would run on the CPU, where none are")
        for is_int8 in (False, True) if fast else (False,):
            say(str(warm_up(model, config, int8_kv_cache=is_int8)))
