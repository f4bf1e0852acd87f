"""Makes a model's folder out of a GGUF file, and finds the files of one.

[Note: a folder made of a GGUF file]
All of zinfer takes a model's folder. For a GGUF file `gguf_folder` makes one in zinfer's cache, once for the file's
path, size and time: links to the file and its further parts, and config.json, generation_config.json and the
tokenizer's files out of the metadata. A folder of one's own, with config.json and tokenizer beside a GGUF file, is
taken as it is. Imports no torch.
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from zinfer.errors import CheckpointError
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.whole_file import cache_folder
from zinfer.weights.folder import CONFIG_NAME, GGUF_SUFFIX, listed, shorten, unreadable, weight_files
from zinfer.weights.gguf_config import OWN_FOLDER, Keys
from zinfer.weights.gguf_header import read_gguf_header
from zinfer.weights.gguf_model import GgufModel

VERSION: Final = 1
"""Of what is written into a folder: others are made anew."""
_PART: Final = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.gguf", re.ASCII)
_NAME_CHARS: Final = 80
_NO_TOKENIZER: Final = "none"
_DIGITS: Final = r"\p{N}{1,3}"
_DEEPSEEK_WORDS: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = {"deepseek-v3": (_DIGITS, r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", _DEEPSEEK_WORDS)}
"""How text is split before pairs are merged, where transformers does not know a pre-tokenizer of llama.cpp."""
_SPLIT_ALIKE: Final = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe"}
_USUAL_SPLIT: Final = ("gpt-2", "default")
"""Names of GPT-2's own split."""


def gguf_files(path: Path) -> list[Path]:
    """Return the file and the further parts of a model split into ``NAME-00001-of-00003.gguf``, in their order.

    Raises:
        CheckpointError: a part is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    total = int(match["total"])
    names = [f"{match['stem']}-{number:05}-of-{match['total']}{GGUF_SUFFIX}" for number in range(1, total + 1)]
    if absent := [name for name in names if not path.with_name(name).is_file()]:
        raise CheckpointError(f"{path}: missing part {listed(absent)}: download it into {path.parent}")
    return [path.with_name(name) for name in names]


def gguf_model_in(folder: Path) -> list[Path]:
    """Return the files of the one GGUF model in a folder.

    Raises:
        CheckpointError: it holds several, or a part is missing.
    """
    paths = weight_files(folder)
    files = gguf_files(paths[0])
    if others := [path.name for path in paths if path not in files]:
        names = [paths[0].name, *others]
        raise CheckpointError(f"{folder}: {len(names)} GGUF files: {listed(names)}: give the path of one of them")
    return files


def folder_with_config(folder: Path) -> Path:
    """Return a folder with GGUF files if it has a config and a tokenizer of its own, else the one made of its file.

    Raises:
        CheckpointError: as `gguf_model_in` and `gguf_folder`.
    """
    is_own = (folder / CONFIG_NAME).is_file() and any(folder.glob("tokenizer*"))
    return folder if is_own or folder.parent == _made_folders() else gguf_folder(gguf_model_in(folder)[0])


def _made_folders() -> Path:
    return cache_folder() / "gguf"


def gguf_folder(path: Path) -> Path:
    """Return the folder made of a GGUF file, which is made if it is not there yet.

    Raises:
        CheckpointError: the file is damaged, or of a model that is not read; or the cache cannot be written.
    """
    files = gguf_files(path)
    try:
        folder = _made_folders() / _name(files)
        if not (folder / CONFIG_NAME).is_file():
            _make(folder, files)
    except OSError as error:
        if error.filename is not None and Path(error.filename) in files:
            raise unreadable(error.filename, error) from error
        raise CheckpointError(
            f"{path}: its config.json and tokenizer cannot be written to {cache_folder()}: {error.strerror} (errno "
            f"{error.errno}): set XDG_CACHE_HOME to a folder that can be written to"
        ) from error
    return folder


def _name(files: Sequence[Path]) -> str:
    """Return the folder's name: the model's, and a digest of what would change its contents."""
    match = _PART.fullmatch(files[0].name)
    stem = match["stem"] if match else files[0].name.removesuffix(GGUF_SUFFIX)
    known = [VERSION, version("transformers"), [[str(file), *_state(file)] for file in files]]
    return f"{stem[:_NAME_CHARS]}-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}"


def _state(file: Path) -> tuple[int, int, int]:
    found = FileIdentity.of(file)
    return found.inode, found.num_bytes, found.mtime_ns


def _make(folder: Path, files: Sequence[Path]) -> None:
    headers = [read_gguf_header(file) for file in files]
    model = GgufModel.of(headers)
    keys = Keys(headers[0], headers[0].tensors)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        made.chmod(0o755)
        for file in files:
            (made / file.name).symlink_to(file)
        _write_tokenizer(keys, made)
        _write_json(made / "generation_config.json", _generation_config(keys, model.config))
        _write_json(made / CONFIG_NAME, model.config)
        made.rename(folder)
    except OSError:
        if not (folder / CONFIG_NAME).is_file():  # else another process has made it meanwhile
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_json(path: Path, members: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(members, indent=2) + "\n")


def _generation_config(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens that begin, end and pad a text; a turn of a chat ends a text too."""
    ends = [config["eos_token_id"], *(keys.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))]
    known = [token for token in dict.fromkeys(ends) if token is not None and 0 <= token < config["vocab_size"]]
    tokens = {name: config[name] for name in ("bos_token_id", "pad_token_id")} | {"eos_token_id": known or None}
    return {name: token for name, token in tokens.items() if token is not None}


def _write_tokenizer(keys: Keys, folder: Path) -> None:
    """Write the tokenizer's files; none if the file holds no vocabulary.

    Raises:
        CheckpointError: the metadata is of a tokenizer that cannot be made.
    """
    kind, tokens = keys.text("tokenizer.ggml.model", _NO_TOKENIZER), keys.texts("tokenizer.ggml.tokens")
    if kind == _NO_TOKENIZER or tokens is None:
        return
    members = {
        "tokenizer_type": kind,
        "tokens": tokens,
        "merges": keys.texts("tokenizer.ggml.merges"),
        "scores": keys.numbers("tokenizer.ggml.scores"),
        "token_type": keys.numbers("tokenizer.ggml.token_type"),
    }
    _check_lengths(keys, members)
    split = keys.text("tokenizer.ggml.pre", "default")
    members["pre_tokenizer_type"] = _SPLIT_ALIKE.get(split, split)
    special = {
        name: _token(keys, tokens, key)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    adds = {
        "add_bos_token": keys.flag("tokenizer.ggml.add_bos_token", kind == "llama"),
        "add_eos_token": keys.flag("tokenizer.ggml.add_eos_token", False),
    }
    template = keys.text("tokenizer.chat_template", "") or None
    _save(keys, {name: value for name, value in members.items() if value is not None}, special, adds, template, folder)


def _check_lengths(keys: Keys, members: Mapping[str, Any]) -> None:
    count = len(members["tokens"])
    for name in ("scores", "token_type"):
        if members[name] is not None and len(members[name]) != count:
            keys.fail(f"tokenizer.ggml.{name} has {len(members[name])} values for {count} tokens", OWN_FOLDER)
    if members["tokenizer_type"] == "gpt2" and members["merges"] is None:
        keys.fail("the key tokenizer.ggml.merges is missing", OWN_FOLDER)
    if members["tokenizer_type"] == "llama" and members["scores"] is None:
        keys.fail("the key tokenizer.ggml.scores is missing", OWN_FOLDER)
    if bad := next((each for each in members["merges"] or () if len(each.split(" ")) != 2), None):
        keys.fail(f"tokenizer.ggml.merges holds {shorten(bad)}, not a pair", OWN_FOLDER)


def _token(keys: Keys, tokens: Sequence[str], name: str) -> str | None:
    number = keys.whole(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if number is not None and 0 <= number < len(tokens) else None


def _save(
    keys: Keys,
    members: dict[str, Any],
    special: Mapping[str, str | None],
    adds: Mapping[str, bool],
    template: str | None,
    folder: Path,
) -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, GGUF_TOKENIZER_TYPES

    kind, split = members["tokenizer_type"], members["pre_tokenizer_type"]
    if kind not in GGUF_TOKENIZER_TYPES:
        keys.fail(f"tokenizer.ggml.model is {shorten(kind)}: {', '.join(GGUF_TOKENIZER_TYPES)} are read", OWN_FOLDER)
    if kind == "gpt2" and split not in (*GGUF_PRE_TOKENIZER_SPLITS, *_SPLITS, *_USUAL_SPLIT):
        keys.fail(f"tokenizer.ggml.pre is {shorten(split)}, a split of text that is not known", OWN_FOLDER)
    try:
        backend, _ = convert_gguf_tokenizer(keys.arch, members)
        if split in _SPLITS:
            pieces = [pre_tokenizers.Split(Regex(each), "isolated") for each in _SPLITS[split]]
            level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*pieces, level])
        named = {f"{name}_token": token for name, token in special.items()}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named, **adds)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        said = next(iter(str(error).strip().splitlines()), "no reason given")
        raise CheckpointError(
            f"{keys.file}: its tokenizer cannot be made ({type(error).__name__}: {said:.400}): {OWN_FOLDER}"
        ) from error
