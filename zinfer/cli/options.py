"""Options that several commands have, spelt and described alike."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from zinfer.cli.ending import Device
from zinfer.config.source import config_keys
from zinfer.errors import CheckpointError
from zinfer.jobs.request import WEIGHTS
from zinfer.model.known_models import KNOWN_MODELS, find_known_model, near_names
from zinfer.nvme.page_cache import end_reading_ahead, read_ahead
from zinfer.probe.cgroups import free_host_bytes
from zinfer.ranks.environment import own_local_rank
from zinfer.weights.folder import weight_files
from zinfer.weights.hub import NotOnHubError, resolve_folder

MODEL_PANEL: Final = "Model and machine"
SAMPLING_PANEL: Final = "Sampling"

_MODEL: Final = typer.Option(
    metavar="<model>",
    help="Folder of the model and its tokenizer, or a name on the Hugging Face hub: org/name or org/name@revision.",
)
Model = Annotated[str, _MODEL]
"""Not a `Path`, which drops the "./" that makes a name a folder, and makes "." of an empty one."""
OptionalModel = Annotated[str | None, _MODEL]
DraftModel = Annotated[
    str | None,
    typer.Option(
        metavar="<model>", help="Small model of the same vocabulary that guesses next tokens; as for --model."
    ),
]
NoDownload = Annotated[
    bool,
    typer.Option(
        "--no-download", help="Refuse a model that is not in the Hugging Face cache.", rich_help_panel=MODEL_PANEL
    ),
]
Config = Annotated[
    Path | None, typer.Option(help="DeepSpeed-style JSON with further settings.", rich_help_panel=MODEL_PANEL)
]
DeviceOption = Annotated[Device, typer.Option(help="Where the layers compute.", rich_help_panel=MODEL_PANEL)]
WeightForm = Literal["fp16", "int8", "int4", "fp8"]
Weights = Annotated[
    WeightForm | None,
    typer.Option(help="Form of the weights; quantized while they load.", rich_help_panel=MODEL_PANEL),
]
CacheForm = Literal["int8", "fp8"]
KVCache = Annotated[
    CacheForm | None, typer.Option("--kv-cache", help="Form of the KV cache.", rich_help_panel=MODEL_PANEL)
]
MaxDeviceMemory = Annotated[
    str | None, typer.Option(help='Most device memory to use, such as "20GB".', rich_help_panel=MODEL_PANEL)
]
GenerationRule = Literal["auto", "none"]
GenerationConfig = Annotated[
    GenerationRule | None,
    typer.Option(
        help="none: ignore the model's generation_config.json, but for its end tokens.", rich_help_panel=SAMPLING_PANEL
    ),
]
System = Annotated[str | None, typer.Option(help="System message of chats that have none.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of an answer; also --max-tokens. Default: 128."),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0, help="0: always the likeliest token.", rich_help_panel=SAMPLING_PANEL),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from the likeliest tokens of this probability.", rich_help_panel=SAMPLING_PANEL),
]
TopK = Annotated[
    int | None, typer.Option(help="Draw from so many of the likeliest tokens.", rich_help_panel=SAMPLING_PANEL)
]
MinP = Annotated[
    float | None,
    typer.Option(help="Draw from tokens at least so likely, beside the likeliest.", rich_help_panel=SAMPLING_PANEL),
]
Seed = Annotated[int | None, typer.Option(help="Of the draws.", rich_help_panel=SAMPLING_PANEL)]
Stop = Annotated[
    list[str] | None,
    typer.Option(help=r"Text that ends an answer; repeatable. \n is a line break.", rich_help_panel=SAMPLING_PANEL),
]


STATED_BY: Final = {
    "device": "--device",
    "dtype": "--weights",
    "quantization": "--weights",
    "kv_cache_dtype": "--kv-cache",
    "download": "--no-download",
    "max_device_memory": "--max-device-memory",
    "generation_config": "--generation-config",
    "max_token_latency": "--max-token-latency",
    "speculate": "--speculate",
    "draft_model": "--draft-model",
    "parallel": "--parallel",
    "optimize": "--fast",
}
"""The options that state keys of the configuration, for messages."""


def model_folder(model: str, config: Path | None = None, *, no_download: bool = False) -> Path:
    """Return the folder of the model that --model names, downloading it unless that is forbidden.

    Imports no torch, so that refusals come at once.

    Args:
        config: whose zinfer.download may forbid it too.

    Raises:
        CheckpointError: there is no such model.
        ConfigError: the configuration cannot be read.
    """
    if "/" not in model and (known := find_known_model(model)) is not None:
        raise CheckpointError(f"{model!r}: no such folder; the published model of this name is --model {known.hub}")
    try:
        return resolve_folder(model, download=may_download(config, no_download))
    except NotOnHubError as error:
        raise CheckpointError(f"{error}{meant(model)}") from error


def may_download(config: Path | None, no_download: bool) -> bool:
    """Return whether a model that is not in the cache may be downloaded. Raises ConfigError as `config_keys`."""
    if no_download or config is None:
        return not no_download
    section = config_keys(config).get("zinfer")
    return not isinstance(section, Mapping) or section.get("download") is not False


def meant(model: str) -> str:
    """Return a hint at the published model that is spelt like this one; empty: there is none."""
    return "".join(f"; did you mean {KNOWN_MODELS[each].hub}?" for each in near_names(model)[:1])


def begin_reading(folder: Path) -> None:
    """Begin to read the weights of a model while modules are imported ([Note: reading ahead]).

    Of the ranks on a host the first one reads for all; replicas find what another one has read. A quarter of the free
    memory at most: the rest of the weights is read into buffers, which take the place of what lies in the page cache.
    """
    if own_local_rank() == 0:
        read_ahead(weight_files(folder), free_host_bytes() // 4)


@contextmanager
def reading_ahead(folder: Path) -> Iterator[None]:
    """As `begin_reading`, and end it: ranks are forked from a process without threads."""
    begin_reading(folder)
    try:
        yield
    finally:
        end_reading_ahead()


def stated_keys(
    weights: WeightForm | None = None,
    kv_cache: CacheForm | None = None,
    max_device_memory: str | None = None,
    generation_config: GenerationRule | None = None,
    *,
    no_download: bool = False,
) -> dict[str, Any]:
    """Return the keys of the configuration that options state."""
    keys = {} if weights is None else dict(WEIGHTS[weights])
    keys |= {"download": False} if no_download else {}
    others = {
        "kv_cache_dtype": kv_cache,
        "max_device_memory": max_device_memory,
        "generation_config": generation_config,
    }
    return keys | {name: value for name, value in others.items() if value is not None}


def option_words(**options: object) -> list[str]:
    """Return the words of a command line that state these options; None: not stated."""
    return [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
