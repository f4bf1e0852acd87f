"""Predict how long a pass takes, before anything runs: pure arithmetic over a plan, rates and a request.

    pass_seconds = max(disk, link, host copies, matrix work, device memory, Python)

Each term is the work of one resource divided by its rate. Resources overlap, so the slowest one determines the pass.
Only attention does not overlap with the products around it: reading the KV cache counts for both terms. Streaming
continues from one pass into the next, so the pipeline fills only once, in the first pass. Each of several ranks copies
its range of what streams over its own link, and gathers the slabs that are divided; the disk and the host's memory they
share. Sums over tensor ranks overlap with no products. Python launches the kernels of every layer, unless a captured
pass is replayed; a GPU computes meanwhile, a CPU does not. Not modelled: the latency of sums, and waits for a free slot
while a lane has work (with one block much larger than the others, or with homes on disk and host).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any, Final, NamedTuple

from zinfer.kernels.quantized import MOST_FUSED_TOKENS
from zinfer.offload.block import Home, Tier
from zinfer.planning.block_work import BlockWork
from zinfer.planning.memory import Footprint, Request
from zinfer.planning.placement import Plan
from zinfer.probe.rates import Rates
from zinfer.units import duration

LAUNCHING: Final = "Python launching"
"""The host's own work for a pass, as one of `PassTime.terms`."""
_FLOPS_PER_PARAMETER: Final = 2  # a product and a sum
# Appending a token reads and writes all of transformers' DynamicCache; then the attention reads it.
_CACHE_TOUCHES: Final = 3
# Rate of attention over prompts of 512 tokens, as a share of the rate of matrix products, including softmax and the
# half-empty tiles on the diagonal; 8,192 tokens reach 0.5.
_ATTENTION_SHARE: Final = 0.22
# Copies over the link slow products down as if each byte were moved this often on the device: 14 to 20 ms per pass for
# 15 to 20 GB on an H200.
_LINK_TOUCHES: Final = 4
# Likewise for copies from other ranks' devices: 7 ms for 12.3 GB beside fp16 products of two H200.
_GATHER_TOUCHES: Final = 2
# What turns cost for each gathered block beside its copies: 1.9 ms on two H200, whose gathers took 1.7 ms.
_TURN_S: Final = 2e-3
# Host seconds in plain layers (`zinfer.probe.measure.measure_launch`: 0.29 to 0.52 ms on three hosts of H200s). There a
# layer of an `LLM` took 2.1 to 5 of them, with experts 4.1 to 6; a pass 1.3 to 2 ms beside them, with 2 to 4
# microseconds for each sequence (`benchmarks/launches.py`, and 8 layers of Llama-3-70B's width).
_LAYER_LAUNCHES: Final = 4.0
_EXPERTS_LAUNCHES: Final = 7.0
# In `generate`: 12 layers of OPT-30B 5.9 ms a token, 48 of GPT-2 XL 25 ms, resident on an H200.
_PADDED_LAUNCHES: Final = 1.2
_PASS_LAUNCHES: Final = 3.0
_SEQUENCE_LAUNCHES: Final = 6e-3
# Seconds of a process's first pass on a GPU beside its launches: libraries are initialized, compiled kernels loaded.
# 0.2 to 0.45 s on H200s; 0.5 to 0.8 where kernels are not compiled yet (`benchmarks/as_started.py`).
_FIRST_PASS_S: Final = 0.4


def resource_name(term: str, *, on_host: bool) -> str:
    """Return the name to show of one of `PassTime.terms`: where the host computes, its memory is the link's, too."""
    return "host memory" if on_host and term in ("link", "device memory") else term


def largest(*numbers: Any) -> Any:
    """Return the largest number; of arrays the largest in each place."""
    if not any(hasattr(each, "shape") for each in numbers):
        return max(numbers)
    import numpy as np  # here, since commands that price no arrays start without it

    return reduce(np.maximum, numbers)


class PassTime(NamedTuple):
    """Seconds of work of each resource in one pass over ``num_tokens`` tokens, or arrays of them for many passes.

    ``device_s``: reading weights and KV cache; ``cache_s``: the cache's part of it; ``between_s``: work between
    products, that is activations, dequantization, attention over prompts, and the slowdown by concurrent copies;
    ``gather_s``: slabs made whole from the ranges of all ranks; ``reduce_s``: sums over tensor ranks; ``launch_s``:
    Python's own, in which the device computes unless ``shares_host``.
    """

    num_tokens: int
    disk_s: float
    link_s: float
    host_s: float
    matrix_s: float
    device_s: float
    cache_s: float = 0.0
    between_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    launch_s: float = 0.0
    shares_host: bool = False

    def beginning(self, is_first: Any = True) -> "PassTime":
        """Return the pass as a process's first one, which takes longer on a GPU whose rate of launches is known.

        Args:
            is_first: of arrays of passes, whether each is the first one.
        """
        is_known = (self.launch_s > 0) * (not self.shares_host)  # 0 or 1, or an array of them
        return self._replace(launch_s=self.launch_s + _FIRST_PASS_S * is_first * is_known)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by the resource's name; gathers only if there are any.

        Where the host computes too, the larger of its two works counts with the other.
        """
        work_s, launch_s = self.matrix_s + self.cache_s + self.between_s + self.reduce_s, self.launch_s
        if self.shares_host:
            is_work = launch_s <= work_s  # 0 or 1, or an array of them
            work_s, launch_s = work_s + launch_s * is_work, launch_s + work_s * (1 - is_work)
        terms = {
            "disk": self.disk_s,
            "link": self.link_s,
            "host copies": self.host_s,
            "matrix work": work_s,
            "device memory": self.device_s,
            LAUNCHING: launch_s,
        }
        if hasattr(self.gather_s, "shape") or self.gather_s:
            terms["gathers"] = self.gather_s
        return terms

    @property
    def transfer_s(self) -> float:
        """Seconds of streaming, by its slowest stage."""
        return max(self.disk_s, self.link_s, self.host_s, self.gather_s)

    @property
    def seconds(self) -> float:
        """Seconds of the pass: the most of its terms."""
        work_s = self.matrix_s + self.cache_s + self.between_s + self.reduce_s
        host_s = (work_s + self.launch_s,) if self.shares_host else (work_s, self.launch_s)
        seconds: float = largest(self.disk_s, self.link_s, self.host_s, *host_s, self.device_s, self.gather_s)
        return seconds

    @property
    def bottleneck(self) -> str:
        """The slowest resource, as `resource_name`."""
        return resource_name(max(self.terms, key=self.terms.__getitem__), on_host=self.shares_host)


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a request: one prefill pass, then a decode pass for every new token but the first.

    Attributes:
        prefill: the pass over all prompts.
        decode: a pass over one token per row, with a KV cache of average length.
        free_tokens: tokens per pass above which matrix work takes longer than streaming; 0 if nothing streams.
        tokens_per_s: new tokens per second of the whole request.
        seconds: time of the whole request.
        origin: source of the rates.
    """

    prefill: PassTime
    decode: PassTime
    free_tokens: int
    tokens_per_s: float
    seconds: float
    origin: str

    def __str__(self) -> str:
        # Three digits: more would claim too much precision.
        free = f"{float(f'{self.free_tokens:.3g}'):,.0f} tokens a pass are free"
        return f"{duration(self.decode.seconds)} a pass ({self.decode.bottleneck}), {speed(self.tokens_per_s)}, {free}"


class PassClock:
    """Predicts passes under one plan; sums over blocks are computed once.

    Args:
        plan: homes and buffers.
        work: work of all blocks in the plan's order, from `find_work`.
        rates: rates of the machine, as one rank has them.
        reduced_bytes: bytes per token that tensor ranks sum up.
    """

    def __init__(self, plan: Plan, work: Sequence[BlockWork], rates: Rates, *, reduced_bytes: int = 0) -> None:
        self._rates = rates
        self._num_ranks, self._reduced_bytes = plan.num_ranks, reduced_bytes
        self._slot_bytes = plan.slot_bytes
        layers = [each for each in work if each.every_token]
        others = [each for each in work if not each.every_token]
        self._layer_params = sum(each.active_params for each in layers)
        self._other_params = sum(each.active_params for each in others)
        self._layers_dequantized_bytes = sum(each.dequantized_bytes for each in layers)
        self._others_dequantized_bytes = sum(each.dequantized_bytes for each in others)
        self._nbytes = sum(each.block.nbytes for each in work)
        self._between_bytes = sum(each.between_bytes for each in work)
        self._query_width = sum(each.query_width for each in work)
        self._layer_launches = sum(_EXPERTS_LAUNCHES if each.has_experts else _LAYER_LAUNCHES for each in layers)
        streamed = [(each, home) for each, home in zip(work, plan.homes, strict=True) if home.tier is not Tier.DEVICE]
        streamed.sort(
            key=lambda entry: entry[1].tier is not Tier.DISK
        )  # blocks from disk are cached on the device first
        divided = [
            each for each, home in zip(work, plan.homes, strict=True) if home.tier is not Tier.DEVICE or home.shared
        ]
        if plan.num_ranks == 1:
            divided = []
        # Of slabs that a gather makes whole, this share comes from other ranks.
        self._pulled_share = (plan.num_ranks - 1) / plan.num_ranks
        self._pulled_bytes = self._pulled_share * sum(each.num_uses * each.block.nbytes for each in divided)
        self._copies = plan.is_on_devices and rates.joins_devices
        self._turns_s = 0.0 if self._copies else _TURN_S * sum(each.num_uses for each in divided)
        # Pageable slabs are copied through pinned staging; on a CPU, without pinned memory, directly.
        whole = [_moved_bytes(each, home, stages=plan.pinned_bytes > 0) for each, home in streamed]
        moved = [(disk, host, link // plan.num_ranks) for disk, host, link in whole]
        # Indexed by the number of blocks cached on the device.
        self._moved_bytes = list(accumulate(reversed(moved), _add, initial=(0, 0, 0)))[::-1]

    @property
    def num_gathering(self) -> int:
        """Ranks that make each pass together; 1 if each copies what the others have as it likes.

        No memory is lent to slabs among several: what one of them keeps it would not gather for the others.
        """
        return 1 if self._copies else self._num_ranks

    def pass_time(
        self,
        num_tokens: int,
        num_rows: int,
        *,
        cache_bytes: int,
        num_pairs: int = 0,
        num_parts: int = 1,
        lent_bytes: int = 0,
        hosted_bytes: int = 0,
        is_replayed: bool = False,
        is_padded: bool = False,
    ) -> PassTime:
        """Predict one pass, or many: each argument but ``is_padded`` may be an array with an element for each pass.

        Args:
            num_tokens: tokens that the layers compute.
            num_rows: tokens that the head computes, each of a sequence that is scheduled and sampled.
            cache_bytes: KV-cache bytes read.
            num_pairs: pairs of a prompt token and a token it attends to; decode tokens only read the cache.
            num_parts: parts of the pass that a layer computes one after the other.
            lent_bytes: idle KV-cache memory on the device that caches blocks.
            hosted_bytes: KV-cache bytes copied from host memory; write-backs use the link's other direction.
            is_replayed: a captured pass is replayed, whose layers Python need not launch.
            is_padded: transformers' own modules compute a padded batch.
        """
        rates = self._rates
        num_staying = 0 if self.num_gathering > 1 or not self._slot_bytes else lent_bytes // self._slot_bytes
        pulled_bytes, gathered_bytes = 0.0, 0.0
        if self._pulled_bytes:
            pulled_bytes = largest(self._pulled_bytes - num_staying * self._slot_bytes, 0)
            gathered_bytes = pulled_bytes / self._pulled_share
        disk_bytes, pageable_bytes, link_bytes = self._moved_beside(num_staying)
        flops = _FLOPS_PER_PARAMETER * (self._layer_params * num_tokens + self._other_params * num_rows)
        moved_bytes = _LINK_TOUCHES * link_bytes + _GATHER_TOUCHES * pulled_bytes + num_tokens * self._between_bytes
        moved_bytes += (num_tokens > MOST_FUSED_TOKENS) * num_parts * self._layers_dequantized_bytes
        moved_bytes += (num_rows > MOST_FUSED_TOKENS) * self._others_dequantized_bytes
        attention_flops = 2 * _FLOPS_PER_PARAMETER * num_pairs * self._query_width
        share = _PADDED_LAUNCHES / _LAYER_LAUNCHES if is_padded else num_parts
        launches = (1 - is_replayed) * share * self._layer_launches + _SEQUENCE_LAUNCHES * num_rows
        return PassTime(
            num_tokens=num_tokens,
            disk_s=disk_bytes / rates.disk_bytes_per_s,
            link_s=(link_bytes + hosted_bytes) / rates.link_bytes_per_s,
            host_s=pageable_bytes / rates.host_bytes_per_s,
            matrix_s=flops / rates.flops_per_s,
            device_s=(self._nbytes + cache_bytes) / rates.device_bytes_per_s,
            cache_s=cache_bytes / rates.device_bytes_per_s,
            between_s=moved_bytes / rates.device_bytes_per_s + attention_flops / (_ATTENTION_SHARE * rates.flops_per_s),
            gather_s=self._turns_s + _seconds(gathered_bytes, rates.gather_bytes_per_s),
            reduce_s=_seconds(num_tokens * self._reduced_bytes, rates.all_reduce_bytes_per_s),
            launch_s=(_PASS_LAUNCHES + launches) * rates.launch_s,
            shares_host=rates.shares_host,
        )

    def _moved_beside(self, num_staying: Any) -> Any:
        """Return the bytes that a pass moves while so many blocks stay on the device: see `_moved_bytes`."""
        if hasattr(num_staying, "shape"):
            return self._moved_columns[:, num_staying.clip(max=len(self._moved_bytes) - 1)]
        return self._moved_bytes[min(num_staying, len(self._moved_bytes) - 1)]

    @cached_property
    def _moved_columns(self) -> Any:
        """`_moved_bytes` as an array of three rows."""
        import numpy as np

        return np.array(self._moved_bytes).T

    def predict(self, request: Request, footprint: Footprint) -> Prediction:
        """Predict a request; uses only ``decode_kv_bytes`` of its footprint."""
        rows, rates = request.batch_size, self._rates
        num_pairs = rows * request.prompt_len * (request.prompt_len + 1) // 2
        prefill = self.pass_time(rows * request.prompt_len, rows, cache_bytes=0, num_pairs=num_pairs, is_padded=True)
        cache_bytes = footprint.decode_kv_bytes * _CACHE_TOUCHES
        decode = self.pass_time(rows, rows, cache_bytes=cache_bytes, is_padded=True)
        seconds = prefill.seconds + (request.new_tokens - 1) * decode.seconds
        token_flops = _FLOPS_PER_PARAMETER * (self._layer_params + self._other_params)
        return Prediction(
            prefill=prefill,
            decode=decode,
            free_tokens=int(max(decode.transfer_s - decode.between_s, 0) * rates.flops_per_s / token_flops),
            tokens_per_s=rows * request.new_tokens / seconds,
            seconds=seconds,
            origin=rates.origin,
        )

    def disk_spares_time(self, token_bytes: int) -> bool:
        """Return whether writing and reading ``token_bytes`` of KV cache per token is faster than recomputing it.

        Compares the disk's rate, assumed for writes too, with matrix work alone.
        """
        flops = _FLOPS_PER_PARAMETER * self._layer_params
        return 2 * token_bytes / self._rates.disk_bytes_per_s < flops / self._rates.flops_per_s


def _seconds(nbytes: float, bytes_per_s: float | None) -> float:
    """Return the seconds of an exchange among ranks; 0 if its rate is not known."""
    return nbytes / bytes_per_s if bytes_per_s else 0.0


def _moved_bytes(work: BlockWork, home: Home, *, stages: bool) -> tuple[int, int, int]:
    """Return the bytes of a block that a pass reads from disk, copies from pageable memory, and copies over the link.

    A block on disk has the size of its file's tensors; it is cast on the device. Of some columns of a matrix the disk
    reads the rows.
    """
    if home.tier is Tier.DISK:
        nbytes = work.num_uses * work.block.file_bytes
        return work.num_uses * work.block.covered_bytes if work.block.has_gaps else nbytes, 0, nbytes
    nbytes = work.num_uses * work.block.nbytes
    return 0, nbytes if stages and not home.pinned else 0, nbytes


def _add(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def speed(tokens_per_s: float) -> str:
    """Format a speed with at least two digits."""
    return f"{tokens_per_s:,.1f} tokens/s" if tokens_per_s >= 1 else f"{tokens_per_s:.2g} tokens/s"
