"""Attention of the families that do not ask transformers' interface, or whose pages hold something else than their keys
and values: a forward each, a file a family, for passes over ragged batches."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import nn
from transformers import PreTrainedModel

from zinfer.batching.adapters import bloom, deepseek, falcon, gptj, mpt
from zinfer.model.batching_support import ADAPTED, check_family

_OWN: Final[dict[str, tuple[type[nn.Module], Callable[..., Any]]]] = {
    "deepseek_v2": (deepseek.V2_ATTENTION, deepseek.forward_v2),
    "deepseek_v3": (deepseek.V3_ATTENTION, deepseek.forward_v3),
    "bloom": (bloom.ATTENTION, bloom.forward),
    "falcon": (falcon.ATTENTION, falcon.forward),
    "gptj": (gptj.ATTENTION, gptj.forward),
    "mpt": (mpt.ATTENTION, mpt.forward),
}
assert _OWN.keys() == ADAPTED


class OwnAttention:
    """Puts our attention into the modules of a family that does not ask transformers' interface, until `remove`.

    Raises:
        ConfigError: the family is not known here.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model_type = check_family(model)
        self._modules: list[nn.Module] = []
        if model_type in _OWN:
            attention, forward = _OWN[model_type]
            for module in model.modules():
                if isinstance(module, attention):
                    module.forward = partial(forward, module)
                    self._modules.append(module)
            assert self._modules, f"a {model_type} model without a {attention.__name__}"

    def remove(self) -> None:
        """Let the modules attend as before."""
        for module in self._modules:
            del module.forward
        self._modules.clear()
