"""Replaces the forwards of all recognised modules of a model by fused kernels, and restores them."""

from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Final
from weakref import WeakSet

import torch
from torch import nn

from zinfer.inject.activations import overlay_activation
from zinfer.inject.fusion_groups import FusionGroup
from zinfer.inject.gates import overlay_experts, overlay_gate
from zinfer.inject.grouped_experts import overlay_grouped_experts
from zinfer.inject.norms import overlay_layer_norm, overlay_norm
from zinfer.inject.overlay import Overlay
from zinfer.inject.products import make_rows_contiguous, overlay_product, product
from zinfer.inject.rotations import overlay_rotation
from zinfer.inject.shared_product import SharedProduct
from zinfer.model.module_patches import ModulePatches, is_patched

_FINDERS: Final = (
    overlay_norm,
    overlay_gate,
    overlay_experts,
    overlay_grouped_experts,
    overlay_rotation,
    overlay_activation,
)
_FINDERS_REPLAYED: Final = (*_FINDERS, overlay_layer_norm, overlay_product)  # the last two are faster only in graphs

# In multiples of the input's width. Wider products belong to gated MLPs: unless a kernel consumes such a product, it
# stays allocated until the module returns, in more memory than planned.
_MOST_WIDENING: Final = 4
_fused: Final[WeakSet[nn.Module]] = WeakSet()


def has_fused_kernels(module: nn.Module) -> bool:
    """Return whether a module, or one in it, computes with a fused kernel of an engine."""
    return any(each in _fused for each in module.modules())


class Injection:
    """Keeps fused kernels in a model until `remove`; leaves modules alone that are already patched.

    Args:
        model: its parameters may be placeholders.
        packs: layers whose weights form one matrix in memory, so that one product computes them all.
        replayed: whether forwards may be replayed as graphs; resident weights must not move any more then.
        is_copied: whether other processes copy resident weights, whose layout must stay as they know it.
    """

    def __init__(
        self,
        model: nn.Module,
        packs: Iterable[FusionGroup] = (),
        *,
        replayed: bool = False,
        is_copied: bool = False,
    ) -> None:
        free = {name: module for name, module in model.named_modules() if not is_patched(module)}
        finders = _FINDERS_REPLAYED if replayed else _FINDERS
        self._overlaid: dict[tuple[str, str], tuple[nn.Module, Overlay]] = {}
        for name, module in free.items():
            for find in finders:
                if overlay := find(module):
                    self._overlaid.setdefault((name, overlay.method), (module, overlay))
        if replayed and not is_copied:
            make_rows_contiguous(model)
        for pack in packs:
            self._share(pack, free, product if replayed else None)
        self._patches = ModulePatches()
        for module, overlay in self._overlaid.values():
            self._patches.patch(module, overlay.forward, overlay.method)
            _fused.add(module)

    @property
    def injected(self) -> dict[str, str]:
        """The fused operations of each module, by its name."""
        kinds: dict[str, list[str]] = {}
        for (name, _), (module, overlay) in self._overlaid.items():
            if overlay.kind and module.__dict__.get(overlay.method) is overlay.forward:
                kinds.setdefault(name, []).append(overlay.kind)
        return {name: "; ".join(found) for name, found in kinds.items()}

    def remove(self) -> None:
        """Undo all patches. Idempotent."""
        self._patches.undo()
        for module, _ in self._overlaid.values():
            _fused.discard(module)
        self._overlaid.clear()

    def _share(
        self, pack: FusionGroup, free: Mapping[str, nn.Module], multiply: Callable[..., torch.Tensor] | None
    ) -> None:
        """Make the pack's layers share a product in their module's forward, whether it has an overlay or not."""
        names = [f"{pack.module}.{layer}" for layer in pack.layers]
        layers = [layer for name in names if isinstance(layer := free.get(name), nn.Linear)]
        if pack.module not in free or len(layers) != len(names):
            return
        module, overlay = self._overlaid.get((pack.module, "forward"), (free[pack.module], None))
        width = sum(layer.out_features for layer in layers)
        if overlay is None and width > _MOST_WIDENING * layers[0].in_features:
            return
        plain = MethodType(type(module).forward, module) if overlay is None else overlay.forward
        shared = SharedProduct(plain, layers, pack.leaves, multiply)
        kinds = [f"{', '.join(pack.layers[:-1])} and {pack.layers[-1]} in one product"]
        if overlay is not None:
            kinds.insert(0, overlay.kind)
        self._overlaid[pack.module, "forward"] = module, Overlay("; ".join(kinds), shared.forward)
        for name, layer, forward in zip(names, layers, shared.layer_forwards(), strict=True):
            self._overlaid[name, "forward"] = layer, Overlay("", forward)
