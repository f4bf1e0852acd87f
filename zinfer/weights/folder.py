"""Finds the folder of a model: a path, a folder of the Hugging Face cache, or a hub name that is in that cache.

It never downloads. The folder that it returns holds a config.json and safetensors files (or their index), or else those
of `torch.save` that transformers wrote, pytorch_model*.bin, or GGUF files; anything else is refused, with a remedy.
Imports no torch: commands refuse a misspelt name at once.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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
ADAPTER_PREFIX = "adapter_"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
"""Of files of `torch.save`."""
PICKLED_PREFIX, PICKLED_SUFFIX = "pytorch_model", ".bin"
"""Of such files in a model's folder; others there hold the state of a training."""
GGUF_SUFFIX = ".gguf"
PROJECTOR_PREFIX = "mmproj"
"""Of a GGUF file with the vision part of a model."""
OTHER_WEIGHT_SUFFIXES = (*PICKLED_SUFFIXES, ".ckpt", GGUF_SUFFIX, ".h5", ".msgpack", ".onnx")
CACHED_REPO_PREFIX = "models--"
_CONVERT = "convert the model, with transformers' `from_pretrained(folder).save_pretrained(new_folder)`"
_ADDRESS = re.compile(r"\w+:/+")
_HUB_ADDRESS = re.compile(
    r"https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/.*)?/?", re.ASCII
)
HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, with ~ expanded.

    Raises:
        CheckpointError: `~name` does not name a user.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise CheckpointError(f"{os.fspath(path)}: ~ names no existing user; write the path out") from error


def resolve_folder(model: str | os.PathLike[str]) -> Path:
    """Return the absolute folder that holds the model's config.json and safetensors files.

    Args:
        model: a model folder; a GGUF file, or a folder with one, of which a folder is made ([Note: a folder made of a
            GGUF file]); a `models--org--name` folder of a Hugging Face cache (its `refs/main` decides, else its
            only snapshot) or one of its snapshots; or a hub name, looked up in the cache that `HF_HUB_CACHE` or
            `HF_HOME` sets.

    Raises:
        CheckpointError: there is no such folder, no model in it, weights in another format, or a name not in the cache.
    """
    return _checked(find_folder(model))


def find_folder(model: str | os.PathLike[str]) -> Path:
    """Return the absolute folder that a path or a hub name leads to, whatever it holds.

    Args:
        model: as for `resolve_folder`; also the address of a model's page on the hub.

    Raises:
        CheckpointError: there is no such folder, the name is not in the cache, or as `gguf_folder`.
    """
    name = hub_name(model)
    try:
        path = absolute(name)
        if path.is_dir():
            return _with_config(_snapshot(path) if _is_cached_repo(path) else path)
        if path.exists():
            if path.name.endswith(GGUF_SUFFIX):
                from zinfer.weights.gguf_folder import gguf_folder  # which needs this module

                return gguf_folder(path)
            if path.name.endswith(OTHER_WEIGHT_SUFFIXES) and not _is_pickled(path.name):
                raise CheckpointError(f"{path}: a file in another format: {_CONVERT}, and pass that folder")
            raise CheckpointError(f"{path}: a file, not a model folder: pass the folder that holds {CONFIG_NAME}")
        return _with_config(_cached(name))
    except OSError as error:
        raise unreadable(error.filename or name, error) from error


def hub_name(model: str | os.PathLike[str]) -> str:
    """Return the path or name of a model as it was given, or the name that the address of its page on the hub holds.

    Raises:
        CheckpointError: the name is empty, or the address of something else.
    """
    name = os.fspath(model)
    if not name.strip():
        raise CheckpointError("the model's name is empty: give its folder, or its name on the hub such as org/name")
    if (page := _HUB_ADDRESS.fullmatch(name)) is not None:
        return page[1]
    if _ADDRESS.match(name) and not absolute(name).exists():
        raise CheckpointError(
            f"{shorten(name)}: an address, and zinfer downloads nothing: download the model into a folder, and give "
            "that folder; or give its name on the hub, such as org/name"
        )
    return name


def holds_config_alone(folder: Path) -> bool:
    """Whether a model's folder holds config.json and no weights."""
    return (folder / CONFIG_NAME).is_file() and not any(_is_weights(file.name) for file in folder.iterdir())


def _with_config(folder: Path) -> Path:
    """Return the folder, or the one made of its GGUF file."""
    if not any(file.name.endswith(GGUF_SUFFIX) for file in weight_files(folder)):
        return folder
    from zinfer.weights.gguf_folder import folder_with_config

    return folder_with_config(folder)


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's files with weights, sorted: its *.safetensors, else pytorch_model*.bin, *.gguf, or adapters."""
    stored = sorted(path for path in folder.glob(f"*{SAFETENSORS_SUFFIX}") if path.is_file())
    models = [path for path in stored if not path.name.startswith(ADAPTER_PREFIX)]
    pickled = sorted(path for path in folder.glob(f"{PICKLED_PREFIX}*{PICKLED_SUFFIX}") if path.is_file())
    in_blocks = sorted(path for path in folder.glob(f"*{GGUF_SUFFIX}") if not path.name.startswith(PROJECTOR_PREFIX))
    return models or pickled or in_blocks or stored


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


def _snapshot(repo: Path) -> Path:
    """Return the snapshot that `refs/main` names, else the only one (huggingface_hub's layout)."""
    revisions = sorted(entry.name for entry in (repo / "snapshots").iterdir() if entry.is_dir())
    main = repo / "refs" / "main"
    download = f"run `hf download {_hub_name(repo)}`"
    if main.is_file():
        revision = main.read_text(encoding="utf-8", errors="replace").strip()
        if revision not in revisions:
            raise CheckpointError(f"{repo}: refs/main names {shorten(revision)}, which has no snapshot: {download}")
    elif not revisions:
        raise CheckpointError(f"{repo}: a cache folder without any snapshot: {download}")
    elif len(revisions) > 1:
        raise CheckpointError(
            f"{repo}: no refs/main and {len(revisions)} snapshots: pass one of them as a folder, "
            f"snapshots/<revision>: {listed(revisions)}"
        )
    else:
        revision = revisions[0]
    return repo / "snapshots" / revision


def _hub_name(repo: Path) -> str:
    return repo.name.removeprefix(CACHED_REPO_PREFIX).replace("--", "/")


def _cached(name: str) -> Path:
    """Return the snapshot of hub name `name`; called if no folder has that name."""
    no_folder = f"{name!r}: no such folder"
    if Path(name).is_absolute() or name.startswith((".", "~")):
        raise CheckpointError(f"{no_folder}: pass the folder that holds {CONFIG_NAME}, or a hub name such as org/name")
    if name.lower().endswith(GGUF_SUFFIX):
        raise CheckpointError(f"{name!r}: no such file: check the path")
    if not HUB_NAME.fullmatch(name) or "--" in name or ".." in name:
        raise CheckpointError(f"{no_folder}, and not a hub name such as org/name either: check the spelling")
    # Read at each call; reflects HF_HUB_CACHE and HF_HOME.
    repo = Path(constants.HF_HUB_CACHE).absolute() / repo_folder_name(repo_id=name, repo_type="model")
    if not repo.is_dir():
        some = " --include '*Q4_K_M*'" if name.lower().endswith("-gguf") else ""  # of many files, one for each type
        raise CheckpointError(
            f"{no_folder}, and not in the Hugging Face cache at {repo.parent}: zinfer does not download, "
            f"run `hf download {name}{some}` first"
        )
    if not (repo / "snapshots").is_dir():
        raise CheckpointError(f"{repo}: a cache folder without any snapshot: run `hf download {name}`")
    return _snapshot(repo)


def _checked(folder: Path) -> Path:
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
