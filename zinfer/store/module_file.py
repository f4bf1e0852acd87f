"""The weights of a module that came in memory, under `nvme_path`: in a file without a name, for as long as one engine
runs. They are no checkpoint, so nothing could tell a later start whose they were.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import Final

import torch
from torch import nn

from zinfer.checkpoint.header import DTYPES
from zinfer.config import Settings
from zinfer.cut import ModelBlock
from zinfer.errors import ConfigError
from zinfer.nvme.scratch import ScratchError, ScratchFile
from zinfer.offload.block import SlabTensor
from zinfer.offload.host_memory import HostBuffer
from zinfer.store.first_use import KEY, make_folder
from zinfer.store.head import head_of
from zinfer.units import human_bytes

log = logging.getLogger(__name__)

_PLACE_BYTES: Final = 16 << 20  # written at once


def module_file(module: nn.Module, blocks: Sequence[ModelBlock], settings: Settings) -> ScratchFile | None:
    """A safetensors file with all parameters under the module's own names, written now.

    The module keeps them. What has several names is there under the first (`zinfer.weights.held_weights`).

    Args:
        module: with its weights in memory.
        blocks: cut from it.
        settings: they call for a file where layers are to stay on the disk, and `nvme_path` names a folder there.

    Returns:
        the file; None where none is called for, and for weights that are converted on their way.

    Raises:
        ConfigError: the folder cannot be made, or a parameter is of a dtype that such files do not have.
        ScratchError: the disk is full or failed.
    """
    nvme_path, is_convertible = settings.offload.nvme_path, any(block.block.conversion for block in blocks)
    if nvme_path is None or settings.offload.device != "nvme" or is_convertible:
        return None
    folder = nvme_path.absolute()
    named = _parameters(module)
    tensors = [SlabTensor(name, tensor.dtype, tuple(tensor.shape), 0) for name, tensor in named.items()]
    head = head_of(tensors)
    num_bytes = len(head) + sum(tensor.nbytes for tensor in tensors)
    log.warning(
        "%s: the module's weights, %s, are written to a file without a name in %s, and stream from there until the "
        "engine ends",
        *(KEY, human_bytes(num_bytes), folder),
    )
    make_folder(folder)
    try:
        with ExitStack() as owned:  # whoever keeps the traceback of a failure would keep the bytes on the disk
            file = owned.enter_context(closing(ScratchFile(folder, _PLACE_BYTES)))
            _write(file, num_bytes, chain([memoryview(head)], map(_bytes_of, named.values())))
            owned.pop_all()
    except ScratchError as error:
        raise ScratchError(error.errno, f"{KEY}: {error.strerror}", error.filename) from error
    return file


def _parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """In the module's order, each once."""
    for name, parameter in module.named_parameters():
        if parameter.dtype not in DTYPES.values():
            raise ConfigError(f"model: {name} is {parameter.dtype}, which no safetensors file holds; convert it")
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(file: ScratchFile, num_bytes: int, pieces: Iterable[memoryview]) -> None:
    """Fill a new file with what comes, one after the other."""
    places = file.take(-(-num_bytes // _PLACE_BYTES))
    buffer = HostBuffer(_PLACE_BYTES)
    for place, _ in zip(places, _filled(buffer.memory, pieces), strict=True):
        file.write([place], buffer.memory)
    file.end_at(num_bytes)


def _filled(memory: memoryview, pieces: Iterable[memoryview]) -> Iterator[None]:
    """Each time the memory is full, and once more for the rest; what lies behind that is of no meaning."""
    end = 0
    for piece in pieces:
        begin = 0
        while begin < piece.nbytes:
            count = min(piece.nbytes - begin, memory.nbytes - end)
            memory[end : end + count] = piece[begin : begin + count]
            begin, end = begin + count, end + count
            if end == memory.nbytes:
                yield
                end = 0
    if end:
        yield
