"""Attention of the families that do not ask transformers' interface, or whose pages hold something else than their keys
and values: a forward each, a file a family, for passes over ragged batches."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import nn
from transformers import PreTrainedModel

from zinfer.batching.adapters import bloom, deepseek, falcon, gptj, mpt
from zinfer.model.batching_support import ADAPTED, check_family
from zinfer.model.module_patches import ModulePatches

_OWN: Final[dict[str, tuple[type[nn.Module], Callable[..., Any]]]] = {
    "deepseek_v2": (deepseek.V2_ATTENTION, deepseek.forward_v2),
    "deepseek_v3": (deepseek.V3_ATTENTION, deepseek.forward_v3),
    "bloom": (bloom.ATTENTION, bloom.forward),
    "falcon": (falcon.ATTENTION, falcon.forward),
    "gptj": (gptj.ATTENTION, gptj.forward),
    "mpt": (mpt.ATTENTION, mpt.forward),
}
assert _OWN.keys() == ADAPTED


def patch_attention(model: PreTrainedModel, patches: ModulePatches) -> None:
    """Put our attention into the modules of a family that does not ask transformers' interface.

    Raises:
        ConfigError: the family is not known here.
    """
    model_type = check_family(model)
    if model_type in _OWN:
        attention, forward = _OWN[model_type]
        modules = [module for module in model.modules() if isinstance(module, attention)]
        assert modules, f"a {model_type} model without a {attention.__name__}"
        for module in modules:
            patches.patch(module, partial(forward, module))
