"""What ranks exchange while each computes its shard of every layer: sums of partial outputs, and whole logits.

Hooks on modules do it, so that kernels may replace the modules' forwards. Collectives are enqueued in the order of the
forward, which is the same on all ranks as long as their inputs are.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from zinfer.engine.own_pairs import OwnPairs
from zinfer.engine.picked_input import PickedInput
from zinfer.model.module_patches import ModulePatches
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.heads import Heads
from zinfer.model.sharding.sharding import Sharding
from zinfer.ranks.group import RankGroup
from zinfer.ranks.mesh import DIVIDING, Mesh
from zinfer.ranks.model_ranks import ModelRanks

# Arguments of attention modules that may hold values for each head: ALiBi, and masks that it is added to.
_PER_HEAD: Final = ("alibi", "position_bias", "attention_mask")
_WITH_ALIBI: Final = ("bloom", "falcon", "mpt")


def find_shard(mesh: Mesh, group: RankGroup | None) -> Shard | None:
    """Return this rank's place among those that divide each layer; None if the mesh divides none."""
    if group is None or mesh.num_dividing == 1:
        return None
    return Shard(mesh.ranks_in(DIVIDING, group.rank).index(group.rank), mesh.num_dividing, mesh.expert)


class ShardHooks:
    """Makes the modules of a divided model give what they would give undivided, until `remove`.

    Args:
        model: whose parameters `Sharding.apply` has cut. It may lack modules, or have others without weights in their
            place, if it is a stage of a pipeline.
        sharding: how.
        ranks: all of them.
    """

    def __init__(self, model: nn.Module, sharding: Sharding, ranks: ModelRanks) -> None:
        self._sharding, self._shard = sharding, sharding.shard
        self._others = ranks.communicator(DIVIDING)
        self._patches = ModulePatches()
        self._handles: list[RemovableHandle] = []
        with_alibi = getattr(model.config, "model_type", None) in _WITH_ALIBI
        for path, module in model.named_modules():
            self._connect_layer(path, module, with_alibi=with_alibi)
            if isinstance(module, nn.Linear) and path in sharding.heads:
                join = partial(self._join_logits, sharding.heads[path])
                self._handles.append(module.register_forward_hook(join))
            if isinstance(module, nn.Embedding) and path in sharding.embeddings:
                self._patches.patch(module, self._lookup(module, sharding.embeddings[path]))
            if isinstance(module, Conv1D) and module._parameters.get("bias") is None:
                self._patches.patch(module, partial(_without_bias, module))

    def _connect_layer(self, path: str, module: nn.Module, *, with_alibi: bool) -> None:
        """Hook into a module of a layer; in this order, if it needs several."""
        layers, add, add_before = self._sharding.layers, module.register_forward_hook, module.register_forward_pre_hook
        if path in layers.splits:
            self._handles.append(add_before(self._split))
        if path in layers.picks:
            self._handles.append(add_before(PickedInput(self._others, is_divided=layers.picks[path])))
        if path in layers.experts:
            own = OwnPairs(layers.experts[path])
            self._handles += [add_before(own.keep), add(own.spread)]
        if path in layers.sums:
            self._handles.append(add(self._sum))
        if path in layers.gathers:
            self._handles.append(add(self._join))
        if path in layers.heads and with_alibi:
            choose = partial(_choose_heads, layers.heads[path])
            self._handles.append(add_before(choose, with_kwargs=True))

    def remove(self) -> None:
        """Undo everything; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.undo()
        self._sharding.undo()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _sum(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return self._others.all_reduce(output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _join(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return self._others.all_gather(output).movedim(0, -2).flatten(-2)

    def _split(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        begin, end = self._shard.bounds(args[0].shape[-1])
        return args[0][..., begin:end]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _join_logits(self, count: int, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ``count`` tokens: equal parts are exchanged, and what pads the last is dropped."""
        padding = self._shard.padded_size(count, self._sharding.token_unit) - output.shape[-1]
        if padding:
            output = nn.functional.pad(output, (0, padding))
        joined: torch.Tensor = self._join(module, args, output)
        return joined[..., :count]

    def _lookup(self, embedding: nn.Module, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a forward that looks up the rank's tokens, takes zeros for the others, and sums over ranks."""
        begin, end = self._shard.padded_bounds(count, self._sharding.token_unit)
        plain: Callable[[torch.Tensor], torch.Tensor] = embedding.forward

        def lookup(input: torch.Tensor) -> torch.Tensor:
            is_elsewhere = (input < begin) | (input >= end)
            found = plain((input - begin).masked_fill(is_elsewhere, 0))
            return self._others.all_reduce(found.masked_fill(is_elsewhere[..., None], 0))

        outside: Callable[[torch.Tensor], torch.Tensor] = torch.compiler.disable(lookup)  # type: ignore[no-untyped-call]
        return outside


def _without_bias(module: Conv1D, x: torch.Tensor) -> torch.Tensor:
    """Compute GPT-2's linear layer on a rank that does not add its bias."""
    product: torch.Tensor = x.view(-1, x.size(-1)) @ module.weight
    return product.view(*x.shape[:-1], module.nf)


def _choose_heads(
    heads: Heads, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an attention with the values of this rank's heads alone."""
    own = {name: _of_heads(kwargs[name], heads) for name in _PER_HEAD if isinstance(kwargs.get(name), torch.Tensor)}
    return args, {**kwargs, **own}


def _of_heads(value: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Return this rank's heads of [rows, heads, ...] or [rows * heads, 1, keys]; other tensors unchanged."""
    begin, end = heads.query
    if value.dim() == 4 and value.shape[1] == heads.num_query > 1:
        return value[:, begin:end]
    if value.dim() == 3 and value.shape[1] == 1 and value.shape[0] % heads.num_query == 0:
        return value.view(-1, heads.num_query, 1, value.shape[-1])[:, begin:end].flatten(0, 1)
    return value
