"""The whole probe: the disk first, so that a wrong path fails at once, then the host, then each device."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Final

import torch

from zinfer.probe.card import MachineCard, PcieLink, query_links, read_card, read_uuid
from zinfer.probe.disk import measure_disk
from zinfer.probe.findings import VERSION, Findings
from zinfer.probe.measure import copy_until, measure_device, measure_memory, measure_together
from zinfer.probe.sizes import Sizes
from zinfer.probe.warnings import find_warnings, read_facts

_MOST_BUSY_BYTES: Final = 64 << 20  # enough to keep a link awake


def probed_devices(device: torch.device) -> tuple[torch.device, ...]:
    """Return all GPUs if CUDA was chosen, else the CPU."""
    if device.type != "cuda":
        return (device,)
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def run_probe(path: Path, devices: Sequence[torch.device], sizes: Sizes, say: Callable[[str], None]) -> Findings:
    """Measure everything.

    Args:
        path: a file, a checkpoint's folder, or a folder to write a temporary file to.
        devices: all GPUs, or only the CPU.
        say: called with progress messages.

    Raises:
        ConfigError: the path cannot be measured.
        OSError: the disk failed.
    """
    on_cuda = devices[0].type == "cuda"
    card = read_card(devices[0].type)
    say(f"measuring the disk of {path}")
    disk = measure_disk(path, sizes)
    say("measuring host memory")
    memory = measure_memory(sizes.host_bytes, repeats=sizes.repeats)
    links = _query_awake(devices, sizes) if on_cuda else (None,)
    found = []
    for device, name, pcie in zip(devices, card.gpus or (_cpu_name(card),), links, strict=True):
        say(f"measuring {device} ({name})")
        found.append(measure_device(device, name, sizes, pcie))
    findings = Findings(
        version=VERSION,
        taken_on=date.today(),
        card=card,
        devices=tuple(found),
        together=measure_together(devices, sizes.link_bytes, repeats=sizes.repeats),
        memory=memory,
        disks=(disk,),
        warnings=(),
    )
    facts = read_facts([link.address if link is not None else None for link in links] if on_cuda else ())
    return replace(findings, warnings=find_warnings(findings, facts))


def _cpu_name(card: MachineCard) -> str:
    return f"{card.cpu}, {card.num_cores} cores"


def _query_awake(devices: Sequence[torch.device], sizes: Sizes) -> tuple[PcieLink | None, ...]:
    """Query nvidia-smi for the links while they are busy."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(query_links)
        copy_until(answer.done, devices, min(sizes.link_bytes, _MOST_BUSY_BYTES))
        links = answer.result()
    return tuple(links.get(read_uuid(device)) for device in devices)
