"""The part of `zinfer plan` that finds the machine to plan for, and the model on it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zinfer.cli.ending import importing, say
from zinfer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from zinfer.model.known_models import KnownModel
    from zinfer.planning.plan import Case
    from zinfer.planning.presets import StatedMachine

_LEAST_BYTES: Final = 10**6  # less is a number without its unit


@dataclass(frozen=True)
class MachineOptions:
    """What the command line says of the machine; all None: this one.

    Attributes:
        preset: ``--machine``.
        probe: ``--probe``.
        host_memory, link, disk: figures in place of a preset's, as written.
    """

    preset: str | None
    probe: Path | None
    host_memory: str | None = None
    link: str | None = None
    disk: str | None = None

    def check(self) -> None:
        """Raise ConfigError if the options contradict each other, or the preset's name is unknown. Imports nothing."""
        if self.preset is not None and self.probe is not None:
            raise ConfigError("--machine and --probe both set the speed of the machine; remove one of the two")
        given = {"--host-memory": self.host_memory, "--link": self.link, "--disk": self.disk}
        names = [name for name, value in given.items() if value is not None]
        if self.preset is None and names:
            raise ConfigError(
                f"{' and '.join(names)}: figures in place of a preset's, and no preset is given; add --machine NAME "
                "('--machine list' shows all). This machine's own figures are measured, by `zinfer probe` best"
            )
        if self.preset is not None:
            from zinfer.planning.data_sheets import find_data_sheet

            find_data_sheet(self.preset)

    def stated(self) -> "StatedMachine":
        """Return the stated figures.

        Raises:
            ConfigError: one is no size or rate.
        """
        from zinfer.planning.presets import StatedMachine

        return StatedMachine(
            host_bytes=_bytes("--host-memory", self.host_memory, "128GB"),
            link_bytes_per_s=_bytes("--link", self.link, "25GB/s"),
            disk_bytes_per_s=_bytes("--disk", self.disk, "7GB/s"),
        )


def _bytes(option: str, value: str | None, example: str) -> int | None:
    from zinfer.config.values import Unusable, size_bytes

    if value is None:
        return None
    try:
        nbytes = size_bytes(value.removesuffix("/s") if example.endswith("/s") else value)
    except Unusable as error:
        rate = f"; a rate is written like {example}" if example.endswith("/s") else ""
        raise ConfigError(f"{option} = {value!r}{error}{rate}") from None
    if nbytes < _LEAST_BYTES:
        read = "1 byte" if nbytes == 1 else f"{nbytes:,} bytes"
        unit = example.lstrip("0123456789")
        meant = f"write {value}{unit}" if value.isdecimal() else "state its unit"
        raise ConfigError(f"{option} = {value!r} is {read}{unit[2:]}, too little for any machine; {meant}, or the like")
    return nbytes


def find_model(
    model: str, config: Path | None = None, *, no_download: bool = False, with_texts: bool = False
) -> "KnownModel | None":
    """Return the published model of this name, for which no network is needed; None: it is a folder, or on the hub.

    Of a model on the hub config.json is downloaded, if it is not in the cache. Imports no torch: refusals come at once.

    Args:
        config: whose zinfer.download may forbid to download.
        with_texts: of a model on the hub the tokenizer is needed too.

    Raises:
        CheckpointError: there is no such model, or a folder without one; or zinfer does not know the model's layers.
    """
    with importing():
        from zinfer.cli.options import may_download, meant
        from zinfer.model.known_models import find_known_model, known_config
        from zinfer.weights.folder import checked_folder, holds_config_alone, name_on_hub
        from zinfer.weights.hub import config_folder

    if (known := find_known_model(model)) is not None:
        known_config(known)
        return known
    try:
        folder = config_folder(model, download=may_download(config, no_download), with_texts=with_texts)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{meant(model)}") from error
    if name_on_hub(model) is None and not holds_config_alone(folder):
        checked_folder(folder)
    return None


def open_case(
    model: str,
    config: Path | None,
    options: MachineOptions,
    parallel: str,
    weights: str | None = None,
    *,
    no_download: bool = False,
    with_texts: bool = False,
) -> tuple["Case", str | None]:
    """Return the model, and the machine for one process alone; and a line on what a run does not take of the model.

    Checks the machine first, then the model's name; `no_download` and `with_texts` as in `find_model`.

    Raises:
        ConfigError, CheckpointError: an option, the configuration or the checkpoint is unusable.
    """
    options.check()
    known = find_model(model, config, no_download=no_download, with_texts=with_texts)
    with importing():
        from zinfer.cli.options import STATED_BY
        from zinfer.cli.plan_ranks import parse_parallel
        from zinfer.config import resolve_settings
        from zinfer.jobs.request import WEIGHTS
        from zinfer.model.outline import check_settings, keeps_blocks, read_outline
        from zinfer.planning.plan import Case
        from zinfer.planning.presets import find_preset, probed_machine, this_machine
        from zinfer.probe.limits import choose_device
        from zinfer.weights.hub import lacks_weights

    if known is None or options.preset is None:
        with importing():
            import torch  # noqa: F401  outlines and limits import it inside functions

    keys = {"parallel": parse_parallel(parallel), **(WEIGHTS[weights] if weights is not None else {})}
    keys |= {"download": False} if no_download else {}
    settings = resolve_settings(config, keys, options=STATED_BY)
    is_stated = settings.quantization is not None or weights is not None
    if known is not None and not is_stated:
        if known.quantization is not None:
            settings = resolve_settings(config, {**keys, "quantization": known.quantization})
        settings = replace(settings, quantization=known.stored or settings.quantization)
    machine = None
    if options.preset is not None:
        machine = find_preset(options.preset, settings, options.stated())
    elif options.probe is not None:
        machine = probed_machine(settings, options.probe)
    elif known is not None or lacks_weights(model):
        machine = this_machine(settings, ())
    on_cuda = choose_device(settings).type == "cuda" if machine is None else machine.limits.on_cuda
    in_blocks = keeps_blocks(settings, on_cuda=on_cuda)
    outline = read_outline(
        model, settings.dtype, settings.quantization, in_blocks=in_blocks, asks_hub=settings.download
    )
    check_settings(outline, settings)
    machine = machine or this_machine(settings, outline.files)
    for line in machine.limits.overstated(settings.memory, machine.device_memory_bytes):
        say(line if options.preset is None else f"{line}; --host-memory states what the host of a preset has")
    return Case(outline, machine, settings), known.note(is_stated=is_stated) if known is not None else None
