"""Cuts the parameters of one layer as its family's plan says."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd, lcm
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from zinfer.errors import ConfigError
from zinfer.model.matching import holds_transpose
from zinfer.model.sharding import plans
from zinfer.model.sharding.cut import Cut, Shard
from zinfer.model.sharding.grain import Grain
from zinfer.model.sharding.heads import Heads, heads_in
from zinfer.model.sharding.matrices import matrix_dim
from zinfer.model.spec import check_ranks

ATTENTION: Final = re.compile(r"attn|attention", re.IGNORECASE)
_OF_KEYS: Final = re.compile(r"(^|\.)(k_proj|v_proj)$")
# Weights that every rank holds whole: norms, routers, and the first products of latent attention.
WHOLE: Final = re.compile(r"norm|(^|\.)ln_|(^|\.)(gate|router)\.|q_a_proj|kv_a_proj", re.IGNORECASE)
_ADDS: Final = (plans.ROWWISE, plans.SPLIT)
_OF_EXPERTS: Final = (plans.EXPERTS, plans.DISPATCHED)
_WHOLE_HEADS: Final = (plans.GATHERED, plans.SPLIT, plans.REPLICATED)
_WIDTHS: Final = ("intermediate_size", "intermediate_dim")


@dataclass
class LayerCuts:
    """What becomes of a layer's modules and parameters, by their names in the model.

    Attributes:
        cuts: the parameters of which a rank has ranges.
        dropped: biases that are added after a sum over ranks, and that the first rank has in this one's place.
        sums: modules whose outputs are summed over ranks.
        gathers: modules whose outputs are joined along the last dimension.
        splits: modules that take their part of the last dimension of an input that all ranks have whole.
        picks: modules whose weight has groups of columns in activation order, which may be anywhere in the input: with
            whether each rank has its part of the input alone.
        heads: of attention modules.
        experts: modules of experts of which a rank computes some, with the range of their numbers.
        changes: attributes of modules, with the values for this rank.
    """

    cuts: dict[str, Cut] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    picks: dict[str, bool] = field(default_factory=dict)
    heads: dict[str, Heads] = field(default_factory=dict)
    experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    changes: list[tuple[Any, str, object]] = field(default_factory=list)


class LayerDivider:
    """Divides layers of one model.

    Args:
        plan: of the model's family.
        shard: this rank's place.
        config: of the model's text part.
        grain: what stays together.

    Attributes:
        most_unit: the largest number of rows of a feed-forward that stay together in a layer divided so far.
        most_stored: the largest number that must, because stored codes do.
    """

    def __init__(
        self,
        plan: plans.Plan,
        shard: Shard,
        config: Any,
        grain: Grain,
    ) -> None:
        self._plan, self._shard, self._config, self._grain = plan, shard, config, grain
        self._least = self.most_stored = 1
        self.most_unit = grain.preferred

    def divide(self, name: str, layer: nn.Module, found: LayerCuts) -> None:
        """Add what becomes of a layer.

        Raises:
            ConfigError: heads or widths cannot be divided, or the plan lacks a weight.
        """
        heads = self._heads_of(name, layer)
        self._least = self._feed_forward_unit(name, layer, heads)
        self.most_unit = max(self.most_unit, lcm(self._grain.preferred, self._least))
        self.most_stored = max(self.most_stored, self._least)
        for path, module in layer.named_modules():
            style = self._style(path)
            if style in (*_ADDS, *_OF_EXPERTS):
                found.sums.append(f"{name}.{path}")
            if style == plans.DISPATCHED:
                self._divide_experts(f"{name}.{path}", module, found)
            if style == plans.GATHERED:
                found.gathers.append(f"{name}.{path}")
            if style == plans.SPLIT:
                found.splits.append(f"{name}.{path}")
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    whole = f"{path}.{leaf}" if path else leaf
                    self._cut(f"{name}.{whole}", whole, module, parameter, heads, found)
        self._change_attributes(name, layer, heads, found)

    def _cut(
        self,
        name: str,
        path: str,
        module: nn.Module,
        parameter: torch.Tensor,
        heads: Mapping[str, Heads],
        found: LayerCuts,
    ) -> None:
        owner, _, leaf = path.rpartition(".")
        style = self._style(path) or self._style(owner) or self._plan.get(plans.EVERYTHING_ELSE)
        style = None if style in _OF_EXPERTS else style
        if style is None and not WHOLE.search(path):
            raise ConfigError(
                f"{self._shard.key}: no plan says how {name} is divided; leave the key out: the ranks then "
                "share the weights"
            )
        if style in (None, plans.REPLICATED):
            return
        shard, experts = self._shard_of(owner), self._experts_of(owner, parameter)
        if style == plans.BY_NUMBER:
            assert experts is not None, f"{name} is of a module of experts"
            found.cuts[name] = Cut(0, (experts,))
            return
        if style in _ADDS and leaf.endswith("bias"):
            if experts is not None:
                found.cuts[name] = Cut(0, (experts,))
            if shard.rank:
                found.dropped.append(name)
            return
        dim = _dim_of(style, module, leaf, parameter)
        if (unit := self._unit_of_groups(name, style, dim, module, parameter)) is not None:
            self._pick_groups(name, style, dim, parameter.shape[dim], unit, found)
            return
        own = next((each for root, each in heads.items() if path.startswith(f"{root}.")), None)
        cut = self._cut_of(style, name, owner, dim, parameter.shape[dim], own)
        found.cuts[name] = replace(cut, within=experts)

    def _unit_of_groups(
        self, name: str, style: str, dim: int, module: nn.Module, parameter: torch.Tensor
    ) -> int | None:
        """Return the size of groups of columns in activation order that are cut; None for other parameters."""
        units = self._grain.units.get(name)
        if units is None or not units.is_ordered or style not in _ADDS:
            return None
        is_across = matrix_dim(dim, parameter.dim(), transposed=holds_transpose(module, parameter.dim()))
        return units.columns if is_across else None

    def _pick_groups(self, name: str, style: str, dim: int, length: int, unit: int, found: LayerCuts) -> None:
        if length // unit < self._shard.size:
            raise ConfigError(
                f"{self._shard.key} = {self._shard.size} is more than the {length // unit} groups of columns of {name}"
            )
        path = name.rpartition(".")[0]
        found.cuts[name] = Cut(dim, (self._shard.bounds(length, unit),))
        found.picks[path] = style == plans.ROWWISE
        if path in found.splits:
            found.splits.remove(path)

    def _divide_experts(self, name: str, module: nn.Module, found: LayerCuts) -> None:
        """Give the rank a range of a module's experts; it finds out that tokens may choose others."""
        count = int(getattr(module, "num_experts", 0))
        check_ranks(count, self._shard, name)
        begin, end = found.experts[name] = self._shard.by_number.bounds(count)
        found.changes.append((module, "num_experts", end - begin))

    def _cut_of(self, style: str, name: str, owner: str, dim: int, length: int, heads: Heads | None) -> Cut:
        if style in (plans.GATHERED, plans.SPLIT):
            return self._even(name, dim, length)
        if heads is None:
            return self._of_feed_forward(style, name, owner, dim, length)
        if style == plans.FUSED:
            return heads.fused(dim, length)
        if style == plans.GROUPED:
            return heads.grouped(dim, length)
        return heads.keys(dim, length) if _OF_KEYS.search(owner) else heads.queries(dim, length)

    def _of_feed_forward(self, style: str, name: str, owner: str, dim: int, length: int) -> Cut:
        parts = 2 if style in (plans.PACKED, plans.PAIRED) else 1
        width, shard = length // parts, self._shard_of(owner)
        begin, end = shard.bounds(width, self._unit_of(name, width, shard))
        if style == plans.PAIRED:
            return Cut(dim, ((2 * begin, 2 * end),))
        return Cut(dim, tuple((part * width + begin, part * width + end) for part in range(parts)))

    def _unit_of(self, name: str, width: int, shard: Shard) -> int:
        if width < shard.size:
            raise ConfigError(f"{shard.key} = {shard.size} is more than the {width} rows of {name}")
        together = lcm(self._grain.preferred, self._least)
        if width % together == 0 and width // together >= shard.size:
            return together
        most = -(-width // self._least)  # a last block may be cut
        if most >= shard.size:
            return self._least
        raise ConfigError(
            f"{shard.key} = {shard.size}: codes of {self._least} of the {width} rows or columns of "
            f"{name} share scales or words in the checkpoint, so that {most} ranks can divide them at the most; sizes "
            f"up to {most} work, or leave the key out: the ranks then share the weights"
        )

    def _feed_forward_unit(self, name: str, layer: nn.Module, heads: Mapping[str, Heads]) -> int:
        """Return how many rows of a layer's feed-forwards stay together because stored codes do."""
        roots = tuple(f"{root}." for root in heads)
        return lcm(*(unit for path, _, unit, _ in self._stored_units(name, layer, "") if not path.startswith(roots)))

    def _head_units(self, name: str, layer: nn.Module, root: str, num_query: int, num_kv: int) -> tuple[int, int]:
        """Return how many heads of queries, and of keys, stay together because stored codes do."""
        units = [1, 1]
        for path, style, unit, length in self._stored_units(name, layer, f"{root}."):
            of_keys = style == plans.GROUPED or _OF_KEYS.search(path.rpartition(".")[0]) is not None
            both = num_query + 2 * num_kv if style == plans.FUSED else num_query
            each = unit // gcd(unit, length // (num_kv if of_keys else both))
            if of_keys or style == plans.FUSED:
                units[1] = lcm(units[1], each)
            if not of_keys:
                units[0] = lcm(units[0], each)
        return units[0], units[1]

    def _stored_units(self, name: str, layer: nn.Module, begin: str) -> Iterator[tuple[str, str, int, int]]:
        """Yield the stored weights of a layer that are cut: path, style, the unit of the cut, and the whole length."""
        for path, module in layer.named_modules():
            for leaf, parameter in module._parameters.items():
                whole = f"{path}.{leaf}" if path else leaf
                units = self._grain.units.get(f"{name}.{whole}")
                style = self._style(whole) or self._style(path)
                if units is None or parameter is None or style is None or not whole.startswith(begin):
                    continue
                if style in (*_OF_EXPERTS, plans.BY_NUMBER, *_WHOLE_HEADS):
                    continue
                dim = _dim_of(style, module, leaf, parameter)
                across = matrix_dim(dim, parameter.dim(), transposed=holds_transpose(module, parameter.dim()))
                if across and units.is_ordered:  # cut by groups, whatever the heads and widths of its input
                    continue
                yield whole, style, units.columns if across else units.rows, parameter.shape[dim]

    def _even(self, name: str, dim: int, length: int) -> Cut:
        if length % self._shard.size:
            raise ConfigError(
                f"{self._shard.key} = {self._shard.size} does not divide the {length} rows or columns of {name}"
            )
        return Cut(dim, (self._shard.bounds(length),))

    def _style(self, path: str) -> str | None:
        return style_of(self._plan, path)

    def _heads_of(self, name: str, layer: nn.Module) -> dict[str, Heads]:
        """Return the heads of each attention in a layer that is divided by heads, by its path."""
        found: dict[str, Heads] = {}
        for path, _ in layer.named_modules():
            parts = path.split(".")
            place = next((at for at, part in enumerate(parts) if ATTENTION.search(part) and "norm" not in part), None)
            if place is None or (style := self._style(path)) in (None, *_WHOLE_HEADS):
                continue
            assert style is not None
            root = ".".join(parts[: place + 1])
            if root not in found:
                owners = [each for each in layer.get_submodule(root).modules() if not isinstance(each, nn.Linear)]
                counts = [heads_in(each, self._config) for each in owners]
                most = min(counts, key=lambda count: count[1])
                found[root] = Heads.of(*most, self._shard, self._head_units(name, layer, root, *most))
        return found

    def _change_attributes(self, name: str, layer: nn.Module, heads: Mapping[str, Heads], found: LayerCuts) -> None:
        for root, own in heads.items():
            found.heads[f"{name}.{root}"] = own
            for module in layer.get_submodule(root).modules():
                if any(True for _ in module.children()) or "num_key_value_groups" in vars(module):
                    found.changes += own.changes_of(module)
        for path, module in layer.named_modules():
            for width in _WIDTHS:
                value = vars(module).get(width)
                if isinstance(value, int) and self._divides_children(path, module):
                    shard = self._shard_of(path)
                    begin, end = shard.bounds(value, self._unit_of(f"{name}.{path}", value, shard))
                    found.changes.append((module, width, end - begin))

    def _shard_of(self, path: str) -> Shard:
        """Return the rank's place among those that divide the matrices of a module."""
        return self._shard.within if self._style(path) == plans.DISPATCHED else self._shard

    def _experts_of(self, owner: str, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Return the range of experts that the rank has of a parameter; None if it is not of experts divided so."""
        is_dispatched = self._style(owner) == plans.DISPATCHED
        return self._shard.by_number.bounds(parameter.shape[0]) if is_dispatched else None

    def _divides_children(self, path: str, module: nn.Module) -> bool:
        names = [*module._modules, *module._parameters]
        return any(self._style(f"{path}.{name}" if path else name) == plans.ROWWISE for name in names)


def style_of(plan: plans.Plan, path: str) -> str | None:
    """Return how a plan divides what is at a path within a layer; None if it does not say."""
    return next((style for end, style in plan.items() if path == end or path.endswith(f".{end}")), None)


def _dim_of(style: str, module: nn.Module, leaf: str, parameter: torch.Tensor) -> int:
    """Return the dimension of a parameter that a style divides."""
    is_transposed = isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))
    if style in _ADDS:
        return parameter.dim() - (2 if is_transposed else 1)
    return parameter.dim() - (1 if leaf.endswith("bias") or is_transposed or style == plans.PER_HEAD else 2)
