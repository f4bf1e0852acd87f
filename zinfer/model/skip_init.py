"""`SkipInit`: parameters on the meta device are made and not filled."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FILLS: Final = frozenset(getattr(torch.ops.aten, name).default for name in ("normal_", "uniform_")) | {
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
}


class SkipInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, what fills a tensor on the meta device is left out.

    Draws for such a tensor change nothing, and torch takes longer to find that out than all else that building takes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _FILLS and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
