"""What is computed within a part of a forward must not be seen outside of it: of several recordings of the part, each
computes it somewhere else."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class EscapeDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the memory that torch's operators take between `begin` and `end`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken: list[StorageWeakRef] | None = None

    def begin(self) -> None:
        """Watch from here on."""
        self._taken = []

    def end(self, given: Any) -> bool:
        """Watch no more; whether somebody keeps memory that was taken, and is none of what is given."""
        taken, self._taken = self._taken, None
        assert taken is not None
        known = {storage.cdata for storage in _storages(given)}
        return any(not storage.expired() and storage.cdata not in known for storage in taken)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._taken is not None:
            before = {storage.cdata for storage in _storages((args, kwargs))}
            self._taken += [storage for storage in _storages(found) if storage.cdata not in before]
        return found


def _storages(tree: Any) -> list[StorageWeakRef]:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]
