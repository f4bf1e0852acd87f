"""A model's checkpoint as one set of named tensors, gathered from its files' headers; it reads no weights.

Which files count follows transformers' `_get_resolved_checkpoint_files`: the one that config.json names in
`transformers_weights`, else model.safetensors, else model.safetensors.index.json, else pytorch_model.bin or its index.
Unlike transformers, a folder with none of them is the union of its model*.safetensors, or of all *.safetensors unless
that would mix models, or else of its pytorch_model*.bin. Adapters are not models.

config.json and generation_config.json are checked before transformers reads them: keys that would download code or
weights, build for minutes, or silently change the generated tokens are refused. Fingerprints take milliseconds, since
weights are sampled.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from zinfer.errors import CheckpointError
from zinfer.nvme.file_identity import FileIdentity
from zinfer.weights.folder import (
    ADAPTER_PREFIX,
    CONFIG_NAME,
    EXPLICIT_KEY,
    GGUF_SUFFIX,
    INDEX_NAME,
    INDEX_SUFFIX,
    PICKLED_SUFFIXES,
    SAFETENSORS_INDEX_SUFFIX,
    SAFETENSORS_SUFFIX,
    TEXT_FILES,
    HubName,
    absolute,
    check_file_name,
    check_weights_file,
    default_weights,
    listed,
    shorten,
    unreadable,
    weight_files,
)
from zinfer.weights.gguf_folder import gguf_model_in
from zinfer.weights.gguf_header import GgufTensor, read_gguf_header
from zinfer.weights.gguf_model import Encoded, GgufModel
from zinfer.weights.header import DTYPES, Header, TensorEntry, parse_file, read_header, tensor_entry
from zinfer.weights.hub import fetch_headers, resolve_folder
from zinfer.weights.pickled import read_pickled

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


_SAMPLE_BYTES = 16 * 1024
_NUM_SAMPLES = 16


def weights_sample(files: Sequence[Path]) -> str:
    """Return a SHA-256 over 16 evenly spread samples of 16 KiB from each file.

    This tells fine-tunes of one model apart: their headers and sizes are equal, but nearly all weights differ.
    """
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            for number in range(_NUM_SAMPLES):
                stream.seek(max(0, size_bytes - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def text_files(folder: Path) -> list[Path]:
    """Return the files that decide how text is tokenized and decoded: vocabulary, templates, end tokens."""
    return sorted({file for pattern in TEXT_FILES for file in folder.glob(pattern) if file.is_file()})


def tokenizer_hash(folder: Path) -> str:
    """Return a SHA-256 over the names and bytes of `text_files`."""
    digest = hashlib.sha256()
    for file in text_files(folder):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


NUMBERED = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<total>\d+)\.(safetensors|bin)", re.ASCII)
MAX_TOTAL = 100_000


@dataclass(frozen=True)
class Checkpoint:
    """The places of all tensors of a model.

    Attributes:
        tensors: sorted by file, then by offset.
        files: identities of the files whose headers were read.
        fingerprint: identifies the model without reading its weights: SHA-256 over config.json and each file's name,
            size and header, as they were when the checkpoint was opened. Two fine-tunes of one model, saved alike,
            differ only in their weights and so share a fingerprint.
        is_listed: whether it is a list of files, without a config.json.
        unnamed: tensors that the index does not name, which count only where the model needs them.
        absent: the file that the index states for each tensor that no file holds; the model may not need them.
        encoded: parameters of a GGUF file that are not stored as they are; `tensors` has their blocks' bytes.
    """

    folder: Path
    tensors: Mapping[str, TensorEntry]
    files: Mapping[Path, FileIdentity]
    fingerprint: str = field(repr=False)
    is_listed: bool = False
    unnamed: frozenset[str] = frozenset()
    absent: Mapping[str, str] = field(default_factory=dict, repr=False)
    encoded: Mapping[str, Encoded] = field(default_factory=dict, repr=False)

    @property
    def config_path(self) -> Path:
        return self.folder / CONFIG_NAME

    @classmethod
    def open(cls, model: str | os.PathLike[str]) -> "Checkpoint":
        """Read config.json, the index and the headers of the model that `resolve_folder` finds or downloads.

        Raises:
            CheckpointError: anything missing, malformed, contradictory or unreadable; names file and tensor.
        """
        folder = resolve_folder(model)
        try:
            config = (folder / CONFIG_NAME).read_bytes()
            found = _gathered(folder, config)
        except OSError as error:
            raise unreadable(error.filename or folder, error) from error
        return cls._of(f"{folder}", folder, config, found)

    @classmethod
    def on_hub(cls, name: HubName, folder: Path) -> "Checkpoint":
        """Read the headers of a model's files on the hub, to plan for it; its weights cannot be read.

        Args:
            folder: of its config.json.

        Raises:
            CheckpointError: the hub cannot be reached, or a header is damaged.
        """
        entries = [
            tensor_entry(folder / file, 0, tensor, value)
            for file, header in sorted(fetch_headers(name).items())
            for tensor, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        ]
        return cls(folder, {entry.name: entry for entry in entries}, {}, "")

    @classmethod
    def of_weights(cls, folder: Path) -> "Checkpoint":
        """As `open`; without a config.json, all of the folder's files with weights together are the model.

        Raises:
            CheckpointError: as `open` and `listed`.
        """
        files = weight_files(absolute(folder))
        if not files or (absolute(folder) / CONFIG_NAME).exists():
            return cls.open(folder)
        return cls.listed(files, f"checkpoint {folder}")

    @classmethod
    def listed(cls, files: Sequence[Path], label: str) -> "Checkpoint":
        """Read the headers of these files, which together are a model.

        Args:
            files: files of safetensors or `torch.save`, or one folder as for `open`.
            label: the name of the list in messages.

        Raises:
            CheckpointError: as `open`, and files in another format.
        """
        paths = [absolute(file) for file in files]
        if len(paths) == 1 and paths[0].is_dir():
            return cls.open(paths[0])
        for path in paths:
            check_weights_file(path, label)
        folder = Path(os.path.commonpath([path.parent for path in paths]))
        return cls._of(label, folder, b"", _union(paths))

    @classmethod
    def _of(cls, label: str, folder: Path, config: bytes, found: "_Found") -> "Checkpoint":
        headers, tensors = found.headers, found.tensors
        if not tensors:
            raise CheckpointError(f"{label}: the files hold no tensor: download the weights again")
        digest = hashlib.sha256(hashlib.sha256(config).digest())
        for header in headers:
            name = header.file.relative_to(folder).as_posix()
            digest.update(f"{name}\0{header.identity.num_bytes}\0{header.sha256}\n".encode("utf-8", "surrogateescape"))
        files = {header.file: header.identity for header in headers}
        return cls(folder, tensors, files, digest.hexdigest(), not config, found.unnamed, found.absent, found.encoded)


class _Found(NamedTuple):
    headers: list[Header]
    tensors: dict[str, TensorEntry]
    unnamed: frozenset[str] = frozenset()
    absent: Mapping[str, str] = MappingProxyType({})
    encoded: Mapping[str, Encoded] = MappingProxyType({})


def _gathered(folder: Path, config: bytes) -> _Found:
    weights = _explicit_file(folder, config) or _default_file(folder)
    if weights is None and any(path.name.endswith(GGUF_SUFFIX) for path in weight_files(folder)):
        return _in_blocks(gguf_model_in(folder))
    if weights is None:
        return _union(_loose_files(folder))
    if weights.name.endswith(INDEX_SUFFIX):
        return _indexed(folder, weights)
    return _union([weights])


def _in_blocks(files: list[Path]) -> _Found:
    """Return what the GGUF files of a model hold."""
    read = [read_gguf_header(file) for file in files]
    model = GgufModel.of(read)
    entries = [_gguf_entry(name, tensor) for name, tensor in model.plain.items()]
    blocks = {part.name: part for each in model.encoded.values() for part in each.parts}
    for part in blocks.values():
        row_bytes = part.type.row_bytes(part.shape[-1])
        shape = (part.nbytes // row_bytes, row_bytes)
        entries.append(TensorEntry(part.name, DTYPES["U8"], shape, part.file, part.offset, part.nbytes))
    entries.sort(key=lambda entry: (str(entry.file), entry.offset))
    tensors = {entry.name: entry for entry in entries}
    headers = [
        Header(each.file, {n: e for n, e in tensors.items() if e.file == each.file}, each.identity, each.sha256)
        for each in read
    ]
    return _Found(headers, tensors, encoded=model.encoded)


def _gguf_entry(name: str, tensor: GgufTensor) -> TensorEntry:
    return TensorEntry(name, DTYPES[tensor.type.name], tensor.shape, tensor.file, tensor.offset, tensor.nbytes)


def _default_file(folder: Path) -> Path | None:
    name = default_weights(path.name for path in folder.iterdir() if path.is_file())
    return None if name is None else folder / name


def _explicit_file(folder: Path, config: bytes) -> Path | None:
    """Return the weights file that the config names; None if it names none."""
    path = folder / CONFIG_NAME
    name = parse_file(path, config, "download it again", lenient=True).get(EXPLICIT_KEY)
    if name is None:
        return None
    if not isinstance(name, str) or not name.endswith((SAFETENSORS_SUFFIX, SAFETENSORS_INDEX_SUFFIX)):
        raise CheckpointError(f"{path}: {EXPLICIT_KEY} is {name!r}, not a safetensors file or its index: correct it")
    check_file_name(name, f"{path}: {EXPLICIT_KEY}")
    if not (folder / name).is_file():
        raise CheckpointError(f"{path}: {EXPLICIT_KEY} names {name!r}, which is not in the folder: download it")
    return folder / name


def _indexed(folder: Path, index: Path) -> _Found:
    """Return what the shards of an index hold, which are relative to `folder`.

    As in transformers, every tensor of a shard counts, and what the index names beside them does not matter. A tensor
    in several shards is the one where the index says.
    """
    weight_map = _weight_map(index)
    paths = {name: folder / name for name in sorted(set(weight_map.values()))}
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        num_tensors = sum(file_name in missing for file_name in weight_map.values())
        raise CheckpointError(
            f"{index}: missing shard {listed(missing)} ({num_tensors} tensors are in it): download it into {folder}"
        )
    headers = {name: _read(path) for name, path in paths.items()}
    tensors: dict[str, TensorEntry] = {}
    for name, header in headers.items():
        for tensor, entry in header.tensors.items():
            stated = weight_map.get(tensor)
            if stated in (name, None) or tensor not in headers[stated].tensors:
                tensors[tensor] = entry
    absent = {tensor: name for tensor, name in weight_map.items() if tensor not in tensors}
    return _Found(list(headers.values()), tensors, frozenset(tensors.keys() - weight_map.keys()), absent)


def _weight_map(index: Path) -> dict[str, str]:
    """Return the index's file name for each tensor, relative to the checkpoint's folder and inside it."""
    members = parse_file(index, index.read_bytes(), "the index is corrupted, download it again")
    weight_map = members.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map of tensor names to file names: download the index again")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CheckpointError(f"{index}: weight_map[{shorten(name)}] is not a file name: download the index again")
        check_file_name(file_name, f"{index}: weight_map[{shorten(name)}]")
    return weight_map


def _read(path: Path) -> Header:
    return read_pickled(path) if path.name.endswith(PICKLED_SUFFIXES) else read_header(path)


def _union(files: list[Path]) -> _Found:
    headers = [_read(path) for path in files]
    tensors: dict[str, TensorEntry] = {}
    for header in headers:
        for name, entry in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{header.file}: tensor {shorten(name)} is in {tensors[name].file.name} too, and no index says "
                    f"which counts: keep the files of one model in the folder, or add its {INDEX_NAME}"
                )
            tensors[name] = entry
    return _Found(headers, tensors)


def _loose_files(folder: Path) -> list[Path]:
    """Return the model*.safetensors if there are any, else all other `weight_files` of one model, sorted by name.

    Raises:
        CheckpointError: only adapters, a gap in files numbered `-00001-of-00003`, or files of more than one model.
    """
    names = [path.name for path in weight_files(folder)]
    models = [name for name in names if not name.startswith(ADAPTER_PREFIX)]
    if not models:
        what = f"only an adapter, {listed(names)}" if names else "its *.safetensors are links to files that are gone"
        remedy = "merge it into its base model and pass that folder" if names else "download the model again"
        raise CheckpointError(f"{folder}: {what}: {remedy}")
    chosen = [name for name in models if name.startswith("model")] or models
    matches = {name: NUMBERED.fullmatch(name) for name in chosen}
    numbered_sets = {(match["stem"], int(match["total"])) for match in matches.values() if match}
    if numbered_sets and (len(numbered_sets) > 1 or not all(matches.values())):
        raise CheckpointError(
            f"{folder}: the files of several models, and no index to say which counts: {listed(chosen)}: "
            "keep those of one model"
        )
    for _, total in numbered_sets:
        parts = {int(match["part"]) for match in matches.values() if match}
        # A file's name states the number: do not count up to a huge one.
        absent = [str(part) for part in range(1, min(total, MAX_TOTAL) + 1) if part not in parts]
        if absent:
            raise CheckpointError(f"{folder}: missing shard {listed(absent)} of {total}: download it")
    return [folder / name for name in chosen]
