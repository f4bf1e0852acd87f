"""Checks config.json and generation_config.json before transformers reads them.

Refuses keys that would download code or weights, build for minutes, or silently change the generated tokens.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from zinfer.checkpoint.faults import shorten, unreadable
from zinfer.checkpoint.json_text import parse_file
from zinfer.errors import CheckpointError

TOKEN_KEYS: Final = ("eos_token_id", "bos_token_id", "pad_token_id")
_LAYERS: Final = re.compile(r"(num_|n_|encoder_|decoder_|num_hidden_|num_encoder_|num_decoder_)layers?", re.ASCII)
_IMPLEMENTATIONS: Final = re.compile(r"_?(attn|experts)_implementation(_internal)?", re.ASCII)
_FETCHED: Final = "which would be fetched from elsewhere; zinfer never does that"
_MOST_LAYERS: Final = 10_000
"""Limit if there are no tensors to count."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON file as leniently as transformers does.

    Raises:
        CheckpointError: the file cannot be read, or is not an object.
    """
    try:
        return parse_file(path, path.read_bytes(), "download it again", lenient=True)
    except OSError as error:
        raise unreadable(path, error) from error


def check_config(path: Path, config: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse keys that must not reach transformers.

    Args:
        num_tensors: number of tensors in the checkpoint, an upper bound for layers; 0: there are no weights yet.

    Raises:
        CheckpointError: names the key.
    """
    for where, part in _objects(config, ""):
        for key, value in part.items():
            name = f"{path}: {where}{shorten(key)[1:-1]}"
            if key == "backbone" and isinstance(value, str):
                remedy = "take a checkpoint that describes its backbone in backbone_config"
                raise CheckpointError(f"{name} is {shorten(value)}, {_FETCHED}: {remedy}")
            if key == "architecture" and isinstance(value, str) and re.search("[:/]", value):
                raise CheckpointError(f"{name} is {shorten(value)}, {_FETCHED}")
            if _IMPLEMENTATIONS.fullmatch(key):
                _check_implementation(name, value)
            if _LAYERS.fullmatch(key) and type(value) is int and value > (num_tensors or _MOST_LAYERS):
                holds = f"the checkpoint holds {num_tensors} tensors" if num_tensors else "no model has so many"
                raise CheckpointError(f"{name} is {value}, but {holds}: the file is damaged; download it again")
        _check_heads(f"{path}: {where}", part)


def check_token_ids(
    path: Path, members: Mapping[str, Any], vocab_size: int | None, usual: Mapping[str, object]
) -> None:
    """Refuse special tokens outside the vocabulary, with which generation would silently end elsewhere.

    Args:
        members: of the file, `config.json` or `generation_config.json`.
        vocab_size: None: not known.
        usual: default special tokens of the model's class; always accepted, because transformers writes them into
            configs even if the vocabulary is smaller.

    Raises:
        CheckpointError: names the key.
    """
    for prefix, part in (("", members), ("text_config.", members.get("text_config"))):
        if not isinstance(part, Mapping):
            continue
        for key in TOKEN_KEYS:
            value = part.get(key)
            if usual.get(key) == value and type(usual.get(key)) is type(value):  # 1.0 and True equal 1
                continue
            for token in value if isinstance(value, list) else [] if value is None else [value]:
                if type(token) is not int or token < 0 or (vocab_size is not None and token >= vocab_size):
                    most = "" if vocab_size is None else f" to {vocab_size - 1}"
                    raise CheckpointError(
                        f"{path}: {prefix}{key} is {shorten(repr(value))[1:-1]}; token ids are whole numbers from "
                        f"0{most}: correct it, or download the file again"
                    )


def _objects(value: object, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every object in a document, with the keys that lead to it."""
    if isinstance(value, Mapping):
        yield where, value
        for key, part in value.items():
            yield from _objects(part, f"{where}{key}.")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _objects(part, f"{where}{number}.")


def _check_implementation(name: str, value: object) -> None:
    for each in value.values() if isinstance(value, Mapping) else [value]:
        if isinstance(each, str) and re.search("[:/]", each):
            raise CheckpointError(f"{name} is {shorten(each)}, {_FETCHED}: remove the key from the file")


def _check_heads(where: str, part: Mapping[str, Any]) -> None:
    heads, of_keys = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if type(heads) is int and type(of_keys) is int and not (0 < of_keys <= heads and heads % of_keys == 0):
        raise CheckpointError(
            f"{where}num_key_value_heads is {of_keys}, which does not divide num_attention_heads, {heads}: "
            "download config.json again"
        )
