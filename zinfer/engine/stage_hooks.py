"""What stages of a pipeline exchange while each computes its own layers: hidden states, and logits if all want them.

[Note: the schedule]
In training, 1F1B lets a stage compute one forward and one backward in turn, so that it keeps the activations of few
passes. Without a backward a pass is over for a stage once its hidden states are sent: what is left of 1F1B is that
every stage computes the passes in the order in which the first stage began them, and begins each as soon as the stage
before has sent it. `LLM` keeps all stages busy with as many passes of different sequences as there are stages
(`zinfer.batching.batcher`); a call of an engine is one pass at a time, so one stage computes while the others wait.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from zinfer.errors import ConfigError, RankError
from zinfer.model.stage import AbsentHead, Stage, StageModel
from zinfer.ranks.group import RankGroup
from zinfer.ranks.mesh import Mesh
from zinfer.ranks.stage_exchange import StageExchange

_OF_ALL_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")


def find_stage(mesh: Mesh, group: RankGroup | None) -> Stage | None:
    """Return this rank's place among the stages; None if the mesh has none."""
    if group is None or mesh.pipeline == 1:
        return None
    return Stage(mesh.coordinates(group.rank)["pipeline"], mesh.pipeline)


class StageHooks:
    """Connects a stage's layers with those of the other stages, until `remove`; first their inputs.

    Args:
        module: cut down by `part`.
        part: how.
        exchange: with the other stages.

    Attributes:
        stage: the stage.
        shares_logits: whether all stages get the last one's logits.
    """

    def __init__(self, module: PreTrainedModel, part: StageModel, exchange: StageExchange) -> None:
        self.stage, self.shares_logits = part.stage, True
        self._module, self._exchange = module, exchange
        self._layers = list(part.layers.values())
        self._handles: list[RemovableHandle] = [module.register_forward_pre_hook(self._check, with_kwargs=True)]
        if not self.stage.is_first:
            self._handles.append(self._layers[0].register_forward_pre_hook(self._receive))

    def connect_outputs(self, serve: Callable[[], bool] | None) -> None:
        """Give the outputs to other stages: after the hooks that release blocks, which must not be in use meanwhile.

        Args:
            serve: takes part in a use of a block by ranks that share this stage's; returns whether one had asked. None
                if the stage's slabs are not shared.
        """
        head: Any = self._module.get_output_embeddings()
        self._exchange.serve = serve
        self._handles.append(head.register_forward_hook(self._share))
        if not self.stage.is_last:
            self._handles.append(self._layers[-1].register_forward_hook(self._send))

    def remove(self) -> None:
        """Remove the hooks once all hidden states have arrived; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._exchange.finish()

    def _check(self, module: nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
        config: Any = self._module.config
        for name in _OF_ALL_LAYERS:
            asked = kwargs.get(name)
            if getattr(config, name, False) if asked is None else asked:
                raise ConfigError(f"{name}: a stage (zinfer.parallel.pipeline) has only its own layers' outputs")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _receive(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._exchange.receive(args[0]), *args[1:]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _send(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        if hidden.dtype != args[0].dtype:  # the next stage expects what its own embeddings would give
            raise RankError(
                f"{type(layer).__name__} makes {hidden.dtype} of {args[0].dtype}; stages exchange one dtype"
            )
        self._exchange.send(hidden)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _share(self, head: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        if not self.shares_logits:
            return output
        if isinstance(head, AbsentHead):
            output = args[0].new_empty((*args[0].shape[:-1], head.num_logits))
        return self._exchange.share(output)
