"""Divides attention heads among ranks, and tells modules and configs how many are left."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any, Final

from torch import nn
from transformers import PretrainedConfig

from zinfer.errors import ConfigError
from zinfer.model.sharding.cut import Cut, Shard

_QUERY_NAMES: Final = ("num_heads", "num_attention_heads", "n_heads")
_KV_NAMES: Final = ("num_key_value_heads", "num_kv_heads")
_GROUPS: Final = "num_key_value_groups"
_WIDTH_NAMES: Final = ("split_size", "all_head_size", "inner_dim")
_CONFIG_QUERY_NAMES: Final = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
_BIAS_KEY: Final = "head_range"


@dataclass(frozen=True)
class Heads:
    """The heads of one attention, and the range that one rank computes.

    Attributes:
        num_query, num_kv: of all ranks.
        query, kv: this rank's ranges. Where there are fewer heads of keys and values than ranks, several ranks have
            the same one.
    """

    num_query: int
    num_kv: int
    query: tuple[int, int]
    kv: tuple[int, int]

    @classmethod
    def of(cls, num_query: int, num_kv: int, shard: Shard, units: tuple[int, int] = (1, 1)) -> "Heads":
        """Divide heads; unevenly where each has keys of its own, or all have the same.

        Args:
            units: heads of queries, and of keys, that stay together, because codes of theirs share scales or words.

        Raises:
            ConfigError: they cannot be divided by so many ranks; names the sizes that can.
        """
        size = shard.size
        if not _divides(num_query, num_kv, size, units):
            usable = [str(each) for each in range(1, num_query + 1) if _divides(num_query, num_kv, each, units)]
            kept = f"{num_query} attention heads" + (f" and {num_kv} of keys and values" if num_kv != num_query else "")
            if max(units) > 1:
                kept += f", {units[0]} and {units[1]} of which share scales or words of the checkpoint's codes"
            raise ConfigError(f"{shard.key} = {size} does not divide {kept}; sizes that do are {', '.join(usable)}")
        query = kv = shard.bounds(num_query, _unit(num_query, num_kv, units))
        if num_kv < size:
            kv = (shard.rank * num_kv // size, shard.rank * num_kv // size + 1)
        elif num_kv < num_query:
            kv = shard.bounds(num_kv)
        return cls(num_query, num_kv, query, kv)

    @property
    def num_own_query(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def num_own_kv(self) -> int:
        return self.kv[1] - self.kv[0]

    def queries(self, dim: int, length: int) -> Cut:
        """Return the cut of a dimension that has equally many elements for each query head."""
        each = length // self.num_query
        return Cut(dim, ((self.query[0] * each, self.query[1] * each),))

    def keys(self, dim: int, length: int) -> Cut:
        """As `queries`, for heads of keys or values."""
        each = length // self.num_kv
        return Cut(dim, ((self.kv[0] * each, self.kv[1] * each),))

    def fused(self, dim: int, length: int) -> Cut:
        """Return the cut of queries of all heads, followed by keys of all and values of all."""
        width = length // (self.num_query + 2 * self.num_kv)
        begins = (0, self.num_query, self.num_query + self.num_kv)
        ranges = zip(begins, (self.query, self.kv, self.kv), strict=True)
        return Cut(dim, tuple(((at + begin) * width, (at + end) * width) for at, (begin, end) in ranges))

    def grouped(self, dim: int, length: int) -> Cut:
        """Return the cut of groups: the queries of one head of keys, its key, and its value."""
        each, num_queries = length // self.num_kv, self.num_query // self.num_kv
        if self.num_own_query == num_queries * self.num_own_kv:
            return Cut(dim, ((self.kv[0] * each, self.kv[1] * each),))
        width, begin = each // (num_queries + 2), self.kv[0] * each
        first = begin + (self.query[0] - self.kv[0] * num_queries) * width
        return Cut(dim, ((first, first + self.num_own_query * width), (begin + num_queries * width, begin + each)))

    def changes_of(self, module: nn.Module) -> Iterator[tuple[Any, str, object]]:
        """Yield the attributes of an attention module that its forward reads, with the values for this rank."""
        held = vars(module)
        yield from ((module, name, self.num_own_query) for name in _QUERY_NAMES if name in held)
        yield from ((module, name, self.num_own_kv) for name in _KV_NAMES if name in held)
        if _GROUPS in held:
            yield module, _GROUPS, self.num_own_query // self.num_own_kv
        for name in _WIDTH_NAMES:
            if name in held:
                yield module, name, held[name] // self.num_query * self.num_own_query
        yield module, _BIAS_KEY, (self.query[0], self.num_query)

    def config_changes(self, config: PretrainedConfig) -> Iterator[tuple[Any, str, object]]:
        """Yield the entries of a config that shapes are computed from, with the values for this rank."""
        yield from ((config, name, self.num_own_query) for name in _CONFIG_QUERY_NAMES if hasattr(config, name))
        yield from ((config, name, self.num_own_kv) for name in _KV_NAMES if hasattr(config, name))


def head_range(module: nn.Module, num_heads: int) -> tuple[int, int]:
    """Return the first head that an attention module computes, and the number of all ranks' heads.

    Args:
        num_heads: of the module, all of them if its model is not divided.
    """
    found: tuple[int, int] = getattr(module, _BIAS_KEY, (0, num_heads))
    return found


def knows_heads(module: nn.Module) -> bool:
    """Return whether a module holds a number of heads."""
    return not vars(module).keys().isdisjoint((*_QUERY_NAMES, *_KV_NAMES, _GROUPS, "head_dim"))


def _divides(num_query: int, num_kv: int, size: int, units: tuple[int, int]) -> bool:
    if size == 1:
        return True
    unit = _unit(num_query, num_kv, units)
    if num_kv in (1, num_query):
        return num_query % unit == 0 and size <= num_query // unit
    is_even = num_query % (size * unit) == 0
    return is_even and (num_kv % (size * units[1]) == 0 or (size % num_kv == 0 and units[1] == 1))


def _unit(num_query: int, num_kv: int, units: tuple[int, int]) -> int:
    """Return the heads of queries that stay together; with keys of their own, both kinds."""
    return lcm(*units) if num_kv == num_query else units[0]


def heads_in(module: nn.Module, config: Any) -> tuple[int, int]:
    """Return the numbers of query heads, and of heads of keys and values, of an attention module."""
    held = vars(module)
    num_query = next((held[name] for name in _QUERY_NAMES if name in held), None) or config.num_attention_heads
    stated = next((held[name] for name in _KV_NAMES if name in held), None)
    return int(num_query), int(stated or getattr(config, "num_key_value_heads", None) or num_query)


def can_divide(config: Any, size: int) -> bool:
    """Whether so many ranks can divide the attention heads that a config states."""
    num_query = int(config.num_attention_heads)
    return _divides(num_query, int(getattr(config, "num_key_value_heads", None) or num_query), size, (1, 1))
