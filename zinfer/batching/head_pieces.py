"""Computes the logits of many tokens of a pass piece by piece, so that they take little memory.

A model's forward scales, caps and casts logits in a way of its own. So it is called once more for each piece, over the
hidden states that its layers gave in the first call: the modules around the layers return what they returned before.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from zinfer.engine.streamed_model import StreamedModel
from zinfer.model.module_patches import ModulePatches

Take = Callable[[int, torch.Tensor], None]
"""Called with the place of a piece's first token among the wanted ones, and its logits [tokens, vocabulary]."""


class HeadPieces:
    """Calls a model's forward piece by piece.

    Args:
        model: one whose forward runs all layers within one module, as transformers' causal models do.
    """

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        first_layer = next(iter(model.named_layers))
        parents = first_layer.split(".")[:-1]
        names = [".".join(parents[:count]) for count in range(1, len(parents) + 1)]
        self._bodies = [model.module.get_submodule(name) for name in names]

    def run(self, forward: Callable[[torch.Tensor], torch.Tensor], wanted: torch.Tensor, most: int, take: Take) -> None:
        """Compute the logits of the ``wanted`` tokens, and hand each piece over before the next is computed.

        The weights of the head stream once.

        Args:
            forward: calls the module; returns the logits of the tokens that are given to it.
            wanted: [tokens] int64, their places in the pass.
            most: tokens of a piece.
            take: gets at least one piece, which may be empty.
        """
        head: nn.Module = self._model.module.get_output_embeddings()
        patches = ModulePatches()
        with ExitStack() as owned:
            # Not before the layers are computed: the head may share its block with the embedding.
            outputs = _Outputs(lambda: owned.enter_context(self._model.keeping(head)))
            owned.callback(patches.undo)
            for body in self._bodies:
                patches.patch(body, partial(outputs.of, body.forward))
            for begin in range(0, max(len(wanted), 1), most):
                take(begin, forward(wanted[begin : begin + most]))


class _Outputs:
    """What the outermost of the modules around the layers returned; ``then`` is called once it has."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self._found: Any = None
        self._is_inside = False

    def of(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return forward(*args, **kwargs)
        if self._found is None:
            self._is_inside = True
            try:
                self._found = forward(*args, **kwargs)
            finally:
                self._is_inside = False
            self._then()
        return self._found
