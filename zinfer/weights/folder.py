"""Finds the folder of a model on this machine: a path, or a name on the Hugging Face hub that is in its cache.

It never downloads; `zinfer.weights.hub` does. A model's folder holds a config.json and safetensors files (or their
index), or else those of `torch.save` that transformers wrote, pytorch_model*.bin, or GGUF files; anything else is
refused, with a remedy. Imports no torch: commands refuse a misspelt name at once.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NoReturn

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from zinfer.errors import CheckpointError
from zinfer.nvme.file_identity import FileIdentity

MAX_LISTED = 8
MAX_NAME = 120
DOWNLOAD_AGAIN = "the file is corrupted: download it again"
TRUNCATED = "the file is cut short: download it again"


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    """Return the CheckpointError for an OSError, with its errno and text."""
    reason = f"{error.strerror} (errno {error.errno})"
    return CheckpointError(f"{path}: cannot be read: {reason}: check the path, its permissions and the disk")


def shorten(name: str) -> str:
    """Return a name for a message: quoted, escaped, and shortened if it is huge."""
    if len(name) <= MAX_NAME:
        return repr(name)
    return f"{name[:MAX_NAME]!r}... ({len(name)} characters)"


def listed(names: list[str]) -> str:
    """Return the first few names and the number of others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def fail(path: Path, what: str, remedy: str = DOWNLOAD_AGAIN) -> NoReturn:
    """Raise the CheckpointError for a file."""
    raise CheckpointError(f"{path}: {what}: {remedy}")


@contextmanager
def opened(path: Path) -> Iterator[tuple[BufferedReader, FileIdentity]]:
    """Open a file of weights and yield it with its identity.

    Raises:
        CheckpointError: it cannot be read, within the context too, or is not a regular file.
    """
    try:
        # Checked before opening: opening a named pipe would wait for a writer forever.
        if not stat.S_ISREG(path.stat().st_mode):
            fail(path, "not a regular file", "name the file with the weights itself")
        with path.open("rb") as file:
            yield file, FileIdentity.from_stat(os.fstat(file.fileno()))
    except OSError as error:
        raise unreadable(path, error) from error


def check_pointer(path: Path, beginning: bytes) -> None:
    """Refuse a file that begins as a Git LFS pointer."""
    if beginning.startswith(b"version "):
        fail(path, "a Git LFS pointer, not the weights", "run `git lfs pull` in its folder")


CONFIG_NAME = "config.json"
STORE_NAME = "zinfer_store.json"
"""The manifest, which `zinfer quantize` writes first; config.json and the other files are written after the weights."""
PARTS_NAME = "ds_inference_config.json"
"""The list of the parts of several ranks, which `save_mp_checkpoint_path` writes last."""
SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
SAFETENSORS_INDEX_SUFFIX = SAFETENSORS_SUFFIX + INDEX_SUFFIX
SINGLE_NAME = "model" + SAFETENSORS_SUFFIX
INDEX_NAME = "model" + SAFETENSORS_INDEX_SUFFIX
EXPLICIT_KEY = "transformers_weights"
"""Of config.json: names the weights file, or its index."""
ADAPTER_PREFIX = "adapter_"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
"""Of files of `torch.save`."""
PICKLED_PREFIX, PICKLED_SUFFIX = "pytorch_model", ".bin"
"""Of such files in a model's folder; others there hold the state of a training."""
PICKLED_NAME = PICKLED_PREFIX + PICKLED_SUFFIX
GGUF_SUFFIX = ".gguf"
PROJECTOR_PREFIX = "mmproj"
"""Of a GGUF file with the vision part of a model."""
OTHER_WEIGHT_SUFFIXES = (*PICKLED_SUFFIXES, ".ckpt", GGUF_SUFFIX, ".h5", ".msgpack", ".onnx")
TEXT_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
)
"""Patterns of the files that decide how text is tokenized and decoded: vocabulary, templates, end tokens."""
CACHED_REPO_PREFIX = "models--"
MAIN = "main"
_CONVERT = "convert the model, with transformers' `from_pretrained(folder).save_pretrained(new_folder)`"
_ADDRESS = re.compile(r"\w+:/+")
_HUB_ADDRESS = re.compile(
    r"https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/([\w.-]+).*)?/?",
    re.ASCII,
)
HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """A model on the hub, written ``org/name`` or ``org/name@revision``.

    Attributes:
        repo: its name.
        revision: a branch, tag or commit.
    """

    repo: str
    revision: str = MAIN

    def __str__(self) -> str:
        return self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"

    @property
    def cached(self) -> Path:
        """Its folder in the cache that `HF_HUB_CACHE` or `HF_HOME` sets, there or not."""
        return cache_folder() / repo_folder_name(repo_id=self.repo, repo_type="model")


def cache_folder() -> Path:
    """Return the folder of the Hugging Face cache."""
    return Path(constants.HF_HUB_CACHE).absolute()  # read at each call


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, with ~ expanded.

    Raises:
        CheckpointError: `~name` does not name a user.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise CheckpointError(f"{os.fspath(path)}: ~ names no existing user; write the path out") from error


def find_folder(model: str | os.PathLike[str]) -> Path:
    """Return the absolute folder on this machine that a path or a hub name leads to, whatever it holds.

    Args:
        model: a model folder; a GGUF file, or a folder with one, of which a folder is made ([Note: a folder made of a
            GGUF file]); a `models--org--name` folder of a Hugging Face cache (its `refs/main` decides, else its only
            snapshot) or one of its snapshots; a hub name that is in the cache, or the address of its page.

    Raises:
        CheckpointError: there is no such folder, the name is not in the cache, or as `gguf_folder`.
    """
    if (name := name_on_hub(model)) is not None:
        return with_config(find_snapshot(name))
    path = absolute(hub_name(model))
    try:
        if path.is_dir():
            return with_config(_cached_repo(path) if _is_cached_repo(path) else path)
        if path.name.endswith(GGUF_SUFFIX):
            from zinfer.weights.gguf_folder import gguf_folder  # which needs this module

            return gguf_folder(path)
    except OSError as error:
        raise unreadable(error.filename or path, error) from error
    if path.name.endswith(OTHER_WEIGHT_SUFFIXES) and not _is_pickled(path.name):
        raise CheckpointError(f"{path}: a file in another format: {_CONVERT}, and pass that folder")
    raise CheckpointError(f"{path}: a file, not a model folder: pass the folder that holds {CONFIG_NAME}")


def name_on_hub(model: str | os.PathLike[str]) -> HubName | None:
    """Return the hub name that a model is given by; None: by a path, and something is there.

    Raises:
        CheckpointError: it is neither.
    """
    name = hub_name(model)
    try:
        if absolute(name).exists():
            return None
    except OSError as error:
        raise unreadable(error.filename or name, error) from error
    no_folder = f"{name!r}: no such folder"
    if Path(name).is_absolute() or name.startswith((".", "~")):
        raise CheckpointError(f"{no_folder}: pass the folder that holds {CONFIG_NAME}, or a hub name such as org/name")
    if name.lower().endswith(GGUF_SUFFIX):
        raise CheckpointError(f"{name!r}: no such file: check the path")
    repo, at, revision = name.partition("@")
    if not HUB_NAME.fullmatch(repo) or "--" in repo or ".." in name or (at and not _REVISION.fullmatch(revision)):
        raise CheckpointError(
            f"{no_folder}, and not a hub name such as org/name either, or org/name@revision: check the spelling"
        )
    return HubName(repo, revision or MAIN)


def find_snapshot(name: HubName, *, is_known: bool = False) -> Path:
    """Return the snapshot of a model in the cache, whole or not.

    Args:
        is_known: whether the cache must know which commit the revision is; else the only snapshot may be main's.

    Raises:
        CheckpointError: it is not there.
    """
    try:
        if not name.cached.is_dir():
            raise CheckpointError(f"'{name}': no such folder, and not in the Hugging Face cache at {cache_folder()}")
        if not (name.cached / "snapshots").is_dir():
            raise CheckpointError(f"{name.cached}: a cache folder without any snapshot")
        return _snapshot(name.cached, name.revision, is_known=is_known)
    except OSError as error:
        raise unreadable(error.filename or name.cached, error) from error


def hub_name(model: str | os.PathLike[str]) -> str:
    """Return the path or name of a model as it was given, or the name that the address of its page on the hub holds.

    Raises:
        CheckpointError: the name is empty, or the address of something else.
    """
    name = os.fspath(model)
    if not name.strip():
        raise CheckpointError("the model's name is empty: give its folder, or its name on the hub such as org/name")
    if (page := _HUB_ADDRESS.fullmatch(name)) is not None:
        return page[1] if page[2] in (None, MAIN) else f"{page[1]}@{page[2]}"
    if _ADDRESS.match(name) and not absolute(name).exists():
        raise CheckpointError(
            f"{shorten(name)}: an address, and zinfer downloads from the Hugging Face hub alone: download the model "
            "into a folder, and give that folder; or give its name on the hub, such as org/name"
        )
    return name


def holds_config_alone(folder: Path) -> bool:
    """Whether a model's folder holds config.json and no weights."""
    return (folder / CONFIG_NAME).is_file() and not any(_is_weights(file.name) for file in folder.iterdir())


def with_config(folder: Path) -> Path:
    """Return the folder, or the one made of its GGUF file."""
    if not any(file.name.endswith(GGUF_SUFFIX) for file in weight_files(folder)):
        return folder
    from zinfer.weights.gguf_folder import folder_with_config

    return folder_with_config(folder)


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's files with weights, sorted: its *.safetensors, else pytorch_model*.bin, *.gguf, or adapters."""
    return [folder / name for name in weight_names(path.name for path in folder.glob("*") if path.is_file())]


def weight_names(names: Iterable[str]) -> list[str]:
    """Return those of the files of a folder that `weight_files` returns."""
    ordered = sorted(names)
    stored = [name for name in ordered if name.endswith(SAFETENSORS_SUFFIX)]
    models = [name for name in stored if not name.startswith(ADAPTER_PREFIX)]
    pickled = [name for name in ordered if name.startswith(PICKLED_PREFIX) and name.endswith(PICKLED_SUFFIX)]
    in_blocks = [name for name in ordered if name.endswith(GGUF_SUFFIX) and not name.startswith(PROJECTOR_PREFIX)]
    return models or pickled or in_blocks or stored


def default_weights(names: Iterable[str]) -> str | None:
    """Return the file or index that transformers looks for by name, those of safetensors first; None: neither."""
    held = set(names)
    wanted = [SINGLE_NAME, INDEX_NAME]
    if not any(name.endswith(SAFETENSORS_SUFFIX) for name in weight_names(held)):
        wanted += [PICKLED_NAME, PICKLED_NAME + INDEX_SUFFIX]
    return next((name for name in wanted if name in held), None)


def _is_weights(name: str) -> bool:
    return name.endswith((SAFETENSORS_SUFFIX, SAFETENSORS_INDEX_SUFFIX, GGUF_SUFFIX)) or _is_pickled(name)


def _is_pickled(name: str) -> bool:
    """Whether a name is of a pickled file that transformers wrote, or of the index of several."""
    return name.startswith(PICKLED_PREFIX) and name.removesuffix(INDEX_SUFFIX).endswith(PICKLED_SUFFIX)


def check_weights_file(path: Path, label: str) -> None:
    """Refuse a listed weights file that is missing, or neither of safetensors nor of `torch.save`.

    Args:
        label: the name of the list in messages.

    Raises:
        CheckpointError: names the file and the remedy.
    """
    if not path.name.endswith((SAFETENSORS_SUFFIX, *PICKLED_SUFFIXES)):
        if path.name.endswith(OTHER_WEIGHT_SUFFIXES):
            raise CheckpointError(f"{label} names {path}, a file in another format: {_CONVERT}, and name those files")
        raise CheckpointError(f"{label} names {path}, which is no *{SAFETENSORS_SUFFIX}: name the files with weights")
    if not path.is_file():
        raise CheckpointError(f"{label} names {path}, which is not there: correct it, or state base_dir")


def check_file_name(file_name: str, owner: str) -> None:
    """Raise CheckpointError for a name that is empty, absolute or leaves its folder; `owner` begins the message.

    Links inside the folder are allowed: the Hugging Face cache consists of them.
    """
    parts = PurePosixPath(file_name).parts
    outside = PurePosixPath(file_name).is_absolute() or PureWindowsPath(file_name).anchor or ".." in parts
    if not parts or outside or "\\" in file_name or "\0" in file_name:
        raise CheckpointError(
            f"{owner} names {shorten(file_name)}, not a file inside the checkpoint's folder: "
            "do not trust this copy, download the checkpoint again from its authors"
        )


def _is_cached_repo(path: Path) -> bool:
    return (path / "snapshots").is_dir() and not (path / CONFIG_NAME).exists()


def _cached_repo(repo: Path) -> Path:
    try:
        return _snapshot(repo, MAIN)
    except CheckpointError as error:
        name = repo.name.removeprefix(CACHED_REPO_PREFIX).replace("--", "/")
        raise CheckpointError(f"{error}: run `hf download {name}`") from error


def _snapshot(repo: Path, revision: str, *, is_known: bool = False) -> Path:
    """Return the snapshot of a revision: a commit's, that of `refs/<revision>`, or for main the only one."""
    commits = sorted(entry.name for entry in (repo / "snapshots").iterdir() if entry.is_dir())
    if revision in commits:
        return repo / "snapshots" / revision
    ref = repo / "refs" / revision
    if ref.is_file():
        commit = ref.read_text(encoding="utf-8", errors="replace").strip()
        if commit not in commits:
            raise CheckpointError(f"{repo}: refs/{revision} names {shorten(commit)}, which has no snapshot")
        return repo / "snapshots" / commit
    if revision != MAIN or is_known:
        refs = sorted(path.relative_to(repo / "refs").as_posix() for path in repo.glob("refs/**/*") if path.is_file())
        raise CheckpointError(f"{repo}: no snapshot of revision {revision!r}, only of {listed(refs or commits)}")
    if not commits:
        raise CheckpointError(f"{repo}: a cache folder without any snapshot")
    if len(commits) > 1:
        raise CheckpointError(
            f"{repo}: no refs/main and {len(commits)} snapshots, {listed(commits)}: pass one as a folder, or "
            "name@revision"
        )
    return repo / "snapshots" / commits[0]


def checked_folder(folder: Path) -> Path:
    """Return the folder if it holds config.json and weights.

    Raises:
        CheckpointError: it does not; names what is there, and the remedy.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise unreadable(error.filename or folder, error) from error
    if not names:
        raise CheckpointError(f"{folder}: an empty folder: pass the folder that holds {CONFIG_NAME} and *.safetensors")
    if STORE_NAME in names and CONFIG_NAME not in names:
        raise CheckpointError(
            f"{folder}: a store that is not finished ({STORE_NAME} is there, {CONFIG_NAME} is not); run the same "
            "zinfer quantize command again, it resumes"
        )
    if not any(_is_weights(name) for name in names):
        if others := [name for name in names if name.endswith(OTHER_WEIGHT_SUFFIXES)]:
            what = f"no safetensors, only {listed(others)}: {_CONVERT}"
        elif CONFIG_NAME in names:
            what = f"a {CONFIG_NAME} but no *.safetensors: download the weights into it"
        elif PARTS_NAME in names:
            what = (
                f"the parts of ranks that divide layers ({PARTS_NAME}), a model for as many alone: pass the whole one"
            )
        else:
            holds = f"it holds {listed(names)}"
            what = f"not a model folder, no {CONFIG_NAME} and no *.safetensors, {holds}: pass another"
        raise CheckpointError(f"{folder}: {what}")
    if not (folder / CONFIG_NAME).is_file():
        dangling = " (a link to a file that is gone)" if (folder / CONFIG_NAME).is_symlink() else ""
        raise CheckpointError(
            f"{folder}: no {CONFIG_NAME}{dangling} beside the weights: download it from where the weights came"
        )
    return folder
