"""Downloads models of the Hugging Face hub into its cache, by huggingface_hub's own client.

A model that is in the cache is never asked for again, so it starts without a network. Otherwise the files that a run
reads are downloaded, and no others, once the cache's disk is known to hold them; one process of a host downloads while
its others wait. An interrupted download goes on with the files that are left. `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`,
`HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_HUB_DISABLE_PROGRESS_BARS` mean what they mean to the client.

The client takes half a second to import, and is only imported where it is needed.
"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import constants

from zinfer.errors import CheckpointError
from zinfer.nvme.pool import start_thread
from zinfer.units import human_bytes
from zinfer.weights.folder import (
    CACHED_REPO_PREFIX,
    CONFIG_NAME,
    EXPLICIT_KEY,
    GGUF_SUFFIX,
    INDEX_SUFFIX,
    OTHER_WEIGHT_SUFFIXES,
    SAFETENSORS_SUFFIX,
    STORE_NAME,
    TEXT_FILES,
    HubName,
    cache_folder,
    checked_folder,
    default_weights,
    find_folder,
    find_snapshot,
    holds_config_alone,
    listed,
    name_on_hub,
    unreadable,
    weight_names,
    with_config,
)

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_READ: Final = (*TEXT_FILES, "*config*.json", "modules.json", STORE_NAME, "tekken.json", "*.spm", "[0-9]_*/config.json")
"""Patterns of the files that a run may read, besides weights; the last one is of sentence-transformers' modules."""
_MODULE_WEIGHTS: Final = "[0-9]_*/model.safetensors"
_WEIGHT_SUFFIXES: Final = (SAFETENSORS_SUFFIX, *OTHER_WEIGHT_SUFFIXES)
_TIMEOUT_S: Final = 10
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AGAIN: Final = "try again, which goes on with the files that are left"


class NotOnHubError(CheckpointError):
    """The hub has no model of this name, or hides it from this user."""


def resolve_folder(model: str | os.PathLike[str], *, download: bool = True) -> Path:
    """Return the absolute folder that holds the model's config.json and weights, downloading it if need be.

    Args:
        model: a path as for `find_folder`, a hub name such as ``org/name`` or ``org/name@revision``, or the address of
            a model's page.
        download: whether a model that is not in the cache may be downloaded.

    Raises:
        CheckpointError: there is no such folder, no model in it, or weights in another format; or the model is not in
            the cache and cannot be downloaded.
    """
    if (name := name_on_hub(model)) is None:
        return checked_folder(find_folder(model))
    return checked_folder(with_config(_fetched(name, download, missing_files, _download_model)))


def ensure_downloaded(model: object, *, download: bool) -> None:
    """Download a model that is given by its hub name, unless it is in the cache. Others pass: paths, modules.

    Every way to load a model begins with it, before ranks meet and wait for each other.

    Raises:
        CheckpointError: as `resolve_folder`.
    """
    if isinstance(model, str | os.PathLike) and (name := name_on_hub(model)) is not None:
        _fetched(name, download, missing_files, _download_model)


def config_folder(model: str | os.PathLike[str], *, download: bool = True, with_texts: bool = False) -> Path:
    """Return the folder that holds the model's config.json, downloading that file alone if need be.

    Args:
        with_texts: the tokenizer's files are needed too.

    Raises:
        CheckpointError: as `resolve_folder`, but for missing weights.
    """
    if (name := name_on_hub(model)) is None:
        return find_folder(model)
    if with_texts:
        return with_config(_fetched(name, download, _missing_texts, _download_texts))
    return with_config(_fetched(name, download, _missing_config, _download_config))


def lacks_weights(model: str | os.PathLike[str]) -> bool:
    """Return whether only config.json of a model is on this machine, or a part of its weights."""
    name = name_on_hub(model)
    return holds_config_alone(find_folder(model)) or (name is not None and bool(missing_files(find_snapshot(name))))


def is_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` forbids to reach the hub."""
    return bool(constants.is_offline_mode())


def fetch_headers(name: HubName) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the headers of a model's safetensors files on the hub, by file and tensor.

    Raises:
        CheckpointError: it has none there, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        with _explained(name):
            found = HfApi().get_safetensors_metadata(name.repo, revision=name.revision)
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise CheckpointError(
            f"'{name}': its files on the hub do not say how its weights are stored ({error}): download it, and plan "
            "with its folder"
        ) from error
    return {
        file: {
            tensor: {"dtype": each.dtype, "shape": [*each.shape], "data_offsets": [*each.data_offsets]}
            for tensor, each in header.tensors.items()
        }
        for file, header in found.files_metadata.items()
    }


def missing_files(snapshot: Path) -> list[str]:
    """Return the files that a run reads and a snapshot of the cache lacks; one interrupted while downloading does.

    The snapshot's list of files decides, where the client has kept one; else its index, and that there are weights.
    """
    held = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    if _is_gguf(held):  # of a repository's many, those that the user wanted; their reader finds parts that lack
        return []
    listing = _kept_listing(snapshot)
    lacking = sorted(set(_files_to_read(listing or held, snapshot)) - set(held))
    if not listing and not lacking and not any(name.endswith(_WEIGHT_SUFFIXES) for name in held):
        return ["the weights"]
    return lacking


def _is_gguf(names: Iterable[str]) -> bool:
    """Return whether weights of these files in a folder are in GGUF, and in no form that comes before it."""
    return any(name.endswith(GGUF_SUFFIX) for name in weight_names(name for name in names if "/" not in name))


def _missing_config(snapshot: Path) -> list[str]:
    is_there = (snapshot / CONFIG_NAME).is_file() or _is_gguf(path.name for path in snapshot.iterdir())
    return [] if is_there else [CONFIG_NAME]


def _missing_texts(snapshot: Path) -> list[str]:
    names = _kept_listing(snapshot)
    if not names or _is_gguf(path.name for path in snapshot.iterdir()):
        return missing_files(snapshot)
    return [name for name in names if _is_read(name, ()) and not (snapshot / name).is_file()]


def _kept_listing(snapshot: Path) -> list[str]:
    """Return the names of the files in the repository, if huggingface_hub has kept their list."""
    repo = snapshot.parent.parent
    if not (repo / "trees" / f"{snapshot.name}.json").is_file():  # spares the import
        return []
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    name = repo.name.removeprefix(CACHED_REPO_PREFIX).replace("--", "/")
    try:
        return [file.path for file in get_cached_repo_tree(name, revision=snapshot.name, cache_dir=repo.parent)]
    except CachedRepoTreeNotFoundError:
        return []


def _files_to_read(names: Collection[str], folder: Path) -> list[str]:
    """Return those of a repository's files that a run reads; its config.json and index are in ``folder``, if any.

    As `Checkpoint.open` chooses: the weights that config.json names, else those of the usual names, else all of one
    kind in the folder itself. Copies in other formats or in folders such as ``original`` are left out.
    """
    top = [name for name in names if "/" not in name]
    explicit = _members(folder / CONFIG_NAME).get(EXPLICIT_KEY)
    found = explicit if isinstance(explicit, str) and explicit in top else default_weights(top)
    if found is None:
        loose = weight_names(top)
        weights = [name for name in loose if name.startswith("model")] or loose
    elif found.endswith(INDEX_SUFFIX):
        shards = _members(folder / found).get("weight_map")
        weights = [found, *sorted({str(name) for name in shards.values()} if isinstance(shards, dict) else ())]
    else:
        weights = [found]
    others = [name for name in names if _is_read(name, weights)]
    return [*others, *(name for name in weights if name not in others)]


def _is_read(name: str, weights: Collection[str]) -> bool:
    if name.endswith(INDEX_SUFFIX):
        return name in weights
    if name.endswith(OTHER_WEIGHT_SUFFIXES):
        return False
    patterns = (*_READ, _MODULE_WEIGHTS)
    return any(name.count("/") == each.count("/") and fnmatchcase(name, each) for each in patterns)


def _members(path: Path) -> Mapping[str, Any]:
    """Return the members of a JSON file; none if it is absent or damaged, of which `Checkpoint.open` speaks."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _fetched(
    name: HubName, download: bool, missing: Callable[[Path], list[str]], fetch: Callable[[HubName], Path]
) -> Path:
    """Return the snapshot of a model in the cache if nothing of it is missing, else what ``fetch`` returns."""
    is_asked = download and not is_offline()
    folder, lack = _cached(name, missing, is_known=is_asked)
    if folder is not None:
        return folder
    if not download:
        raise CheckpointError(
            f"{lack}{_held()}; --no-download (zinfer.download = false) forbids to download it: leave that out, or "
            f"run `{_command(name)}` first"
        )
    if not is_asked:
        raise CheckpointError(
            f"{lack}{_held()}; HF_HUB_OFFLINE forbids to download it: unset that, or run `{_command(name)}` where "
            "there is a network"
        )
    with _explained(name), _one_at_a_time(name):
        folder, _ = _cached(name, missing, is_known=True)  # another process may have downloaded it by now
        return fetch(name) if folder is None else folder


def _cached(name: HubName, missing: Callable[[Path], list[str]], *, is_known: bool) -> tuple[Path | None, str]:
    """Return the model's snapshot in the cache; or None, and what is missing. `is_known` as in `find_snapshot`."""
    try:
        folder = find_snapshot(name, is_known=is_known)
        lacking = missing(folder)
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        raise unreadable(error.filename or name.cached, error) from error
    if lacking:
        return None, f"'{name}': the copy in the Hugging Face cache at {folder} lacks {listed(lacking)}"
    return folder, ""


def _command(name: HubName) -> str:
    revision = f" --revision {name.revision}" if name != HubName(name.repo) else ""
    some = " --include '*Q4_K_M*'" if name.repo.lower().endswith("-gguf") else ""  # of many files, one for each type
    return f"hf download {name.repo}{revision}{some}"


def _held() -> str:
    names = _cached_names()
    return f" (it holds {listed(names)})" if names else ""


def _cached_names() -> list[str]:
    """Return the names of the models in the cache."""
    folders = cache_folder().glob(f"{CACHED_REPO_PREFIX}*/snapshots")
    return sorted(folder.parent.name.removeprefix(CACHED_REPO_PREFIX).replace("--", "/") for folder in folders)


@contextmanager
def _one_at_a_time(name: HubName) -> Iterator[None]:
    """Hold the lock of downloads of this model, which the ranks and replicas of a host have in common."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # documented, not in __all__

    path = cache_folder() / ".locks" / name.cached.name / "zinfer.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(path):
        yield


def _download_config(name: HubName) -> Path:
    _describe(name)
    return _download_file(name, CONFIG_NAME).parent


def _download_texts(name: HubName) -> Path:
    names = [each.rfilename for each in _describe(name).siblings or ()]
    return _download_files(name, [each for each in names if _is_read(each, ())])


def _download_model(name: HubName) -> Path:
    info = _describe(name)
    names = [each.rfilename for each in info.siblings or ()]
    folder = _download_file(name, CONFIG_NAME).parent
    explicit = _members(folder / CONFIG_NAME).get(EXPLICIT_KEY)
    for index in (explicit, default_weights(each for each in names if "/" not in each)):
        if isinstance(index, str) and index.endswith(INDEX_SUFFIX) and index in names:
            _download_file(name, index)
    wanted = _files_to_read(names, folder)
    _check_room(name, info, wanted)
    return _download_files(name, wanted)


def _download_files(name: HubName, wanted: Iterable[str]) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [escape(each) for each in wanted]
    return Path(
        _stoppable(
            lambda bars: snapshot_download(
                name.repo, revision=name.revision, allow_patterns=patterns, tqdm_class=bars, etag_timeout=_TIMEOUT_S
            )
        )
    )


def _describe(name: HubName) -> "ModelInfo":
    """Return the hub's description of a model: its commit, and its files with their sizes."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=_TIMEOUT_S)
    names = [each.rfilename for each in info.siblings or ()]
    if _is_gguf(names):
        raise CheckpointError(
            f"'{name}' on the hub holds GGUF files, often one for each type ({listed(weight_names(names))}): run "
            f"`hf download {name.repo} --include '*Q4_K_M*'` with the type that you want, and give the same name again"
        )
    if CONFIG_NAME not in names:
        raise CheckpointError(
            f"'{name}' on the hub holds no {CONFIG_NAME}, but {listed(names) or 'nothing'}: no model that transformers "
            "wrote; give the name of the one that it was made from, or download it, and give the folder or file"
        )
    return info


def _download_file(name: HubName, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name.repo, file, revision=name.revision, etag_timeout=_TIMEOUT_S))


def _check_room(name: HubName, info: "ModelInfo", wanted: Iterable[str]) -> None:
    """Raise CheckpointError if the files that are not in the cache yet do not fit on its disk."""
    blobs, sizes = name.cached / "blobs", {each.rfilename: each for each in info.siblings or ()}
    needed = 0
    for file in (sizes[each] for each in wanted if each in sizes):
        blob = file.blob_id if file.lfs is None else file.lfs.sha256
        if blob is None or not (blobs / blob).exists():
            needed += file.size or 0
    free = shutil.disk_usage(cache_folder()).free
    if needed <= free:
        return
    unfinished = sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
    kept = (
        f"; delete {blobs}/*.incomplete, {human_bytes(unfinished)} of downloads that were killed," if unfinished else ""
    )
    raise CheckpointError(
        f"'{name}': {human_bytes(needed)} are to be downloaded to {cache_folder()}, whose disk has {human_bytes(free)} "
        f"free{kept or ':'} free some, or set HF_HOME to a folder on a larger disk"
    )


class _Stopped(Exception):
    """Ends a thread of the client, whose download was interrupted."""


def _stoppable(download: Callable[[type], str]) -> str:
    """Return what a download returns; a signal's exception stops its threads, which the client would wait for.

    Args:
        download: takes the class of the client's progress bars, which each of its threads calls after every chunk.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # likewise

    stop, found = threading.Event(), list[str | BaseException]()

    class Bars(tqdm):
        def update(self, n: float | None = 1) -> Any:
            if stop.is_set():
                raise _Stopped
            return super().update(n)

    thread = start_thread("zinfer-download", lambda: found.append(download(Bars)), found.append)
    try:
        thread.join()
    except BaseException:
        stop.set()
        thread.join()
        raise
    [result] = found
    if isinstance(result, BaseException):
        raise result
    return result


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turn the client's errors into a CheckpointError that names the remedy."""
    from httpx2 import HTTPError
    from huggingface_hub import errors

    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{name.repo}"
        raise CheckpointError(
            f"'{name}': its authors ask you to accept a licence: do so at {page}, then log in with `hf auth login`, or "
            "set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"'{name}': no revision {name.revision!r} on the hub; it has {listed(_revisions(name))}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        near = "".join(f"; did you mean {each}?" for each in get_close_matches(name.repo, _cached_names(), 1, 0.75))
        raise NotOnHubError(
            f"'{name}': no such folder, and no such model at {constants.ENDPOINT}: check the spelling; for a private "
            f"one log in with `hf auth login`, or set HF_TOKEN{near}"
        ) from error
    except (HTTPError, OSError) as error:
        raise _of_network(name, error) from error


def _of_network(name: HubName, error: Exception) -> CheckpointError:
    """Return the error for a hub that cannot be reached or fails, or a cache that cannot be written."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return CheckpointError(
                f"'{name}': {constants.ENDPOINT} refuses the token (HTTP {status}): log in again with `hf auth login`, "
                "or correct HF_TOKEN"
            )
        return CheckpointError(f"'{name}': {constants.ENDPOINT} answers with HTTP {status}: later {_AGAIN}")
    if isinstance(error, OSError) and error.errno in _FULL:
        return CheckpointError(
            f"'{name}': the disk of {cache_folder()} was full before the download ended: free some of it, or set "
            f"HF_HOME to a folder on a larger disk; then {_AGAIN}"
        )
    if isinstance(error, OSError) and error.errno is not None:
        reason = f"{error.strerror} (errno {error.errno})"
        return CheckpointError(
            f"'{name}': {error.filename or cache_folder()}: cannot be written: {reason}: check its permissions and "
            f"disk, or set HF_HOME to another folder; then {_AGAIN}"
        )
    reason = f"{type(error).__name__}: {str(error).strip() or 'no answer'}"
    return CheckpointError(
        f"'{name}': not whole in the Hugging Face cache at {cache_folder()}{_held()}, and {constants.ENDPOINT} cannot "
        f"be reached ({reason}): check the network and HF_ENDPOINT, and {_AGAIN}; or give a folder"
    )


def _revisions(name: HubName) -> list[str]:
    """Return the branches and tags of a model on the hub."""
    from huggingface_hub import HfApi

    refs = HfApi().list_repo_refs(name.repo)
    return [each.name for each in (*refs.branches, *refs.tags)]
