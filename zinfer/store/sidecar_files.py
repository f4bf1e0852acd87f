"""What makes a model's folder of a store's weights: config.json, the index, and the tokenizer's files."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.checkpoint import EXPLICIT_KEY, INDEX_NAME
from zinfer.checkpoint.fingerprint import text_files
from zinfer.checkpoint.json_text import parse_object
from zinfer.quantization.native.manifest import FORMAT_VERSION, METHOD
from zinfer.store.block_file import BlockFile


def companions(checkpoint: Checkpoint, dtype: torch.dtype, files: Sequence[BlockFile]) -> dict[str, bytes]:
    """The files by their names in the folder.

    Raises:
        OSError: one of the source's cannot be read.
    """
    config = parse_object(checkpoint.config_path.read_bytes(), lenient=True)
    made = {checkpoint.config_path.name: _text(_config(config, dtype)), INDEX_NAME: _text(_index(files))}
    folder = checkpoint.folder
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in text_files(folder)} | made


def _config(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The source's, but for what says where and how its weights are stored.

    The dtype is stated: that of codes, which are floating-point too in some formats, would be taken for it else.
    """
    dropped = ("torch_dtype", EXPLICIT_KEY)
    method = {"quant_method": METHOD, "format_version": FORMAT_VERSION}
    kept = {key: value for key, value in config.items() if key not in dropped}
    return kept | {"dtype": str(dtype).removeprefix("torch."), "quantization_config": method}


def _index(files: Sequence[BlockFile]) -> dict[str, Any]:
    places = {tensor.name: file.file for file in files for tensor in file.tensors}
    return {"metadata": {"total_size": sum(file.data_bytes for file in files)}, "weight_map": places}


def _text(members: Mapping[str, Any]) -> bytes:
    return (json.dumps(members, indent=2, sort_keys=True) + "\n").encode()
