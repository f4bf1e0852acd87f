"""Overlays every module of a model that is recognised, and takes the overlays off."""

from typing import Final

from torch import nn

from zinfer.inject.gates import overlay_gate
from zinfer.inject.norms import overlay_norm
from zinfer.inject.overlay import Overlay
from zinfer.inject.rotations import overlay_rotation

_FINDERS: Final = (overlay_norm, overlay_gate, overlay_rotation)


class Injection:
    """Fused kernels in a model until `remove`. Modules that somebody else has overlaid are left to him.

    Args:
        model: its parameters need not be there.
    """

    def __init__(self, model: nn.Module) -> None:
        free = {name: module for name, module in model.named_modules() if "forward" not in module.__dict__}
        found = {name: (module, _find(module)) for name, module in free.items()}
        self._overlaid = {name: (module, overlay) for name, (module, overlay) in found.items() if overlay is not None}
        for module, overlay in self._overlaid.values():
            module.forward = overlay.forward

    @property
    def injected(self) -> dict[str, str]:
        """The modules that compute by a kernel now, by name, and what is fused in each."""
        return {name: overlay.kind for name, (module, overlay) in self._overlaid.items() if _is_on(module, overlay)}

    def remove(self) -> None:
        """Let the modules compute as before. May be called again."""
        for module, overlay in self._overlaid.values():
            if _is_on(module, overlay):
                del module.forward
        self._overlaid.clear()


def _find(module: nn.Module) -> Overlay | None:
    return next((found for find in _FINDERS if (found := find(module)) is not None), None)


def _is_on(module: nn.Module, overlay: Overlay) -> bool:
    return module.__dict__.get("forward") is overlay.forward
