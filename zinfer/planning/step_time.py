"""How long a pass takes on a machine, before anything runs: pure arithmetic over a plan, rates and a request.

    pass_seconds = max(disk, link, host copies, matrix work, device memory)

Each term is what one resource has to do in a pass over its rate; they overlap, so the slowest one is the pass. Only
attention does not overlap with the products before and after it: reading the cache counts with both. The stream runs on
from one pass into the next, so filling and draining it costs nothing but at the first pass. What the device slots
cannot hide is not modelled: with a block that is much larger than the others, or disk and host homes side by side, a
lane may wait for a slot although its resource has work. Kernel launches are not counted either.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from torch import nn

from zinfer.kernels.quantized_linear import MOST_FUSED_TOKENS
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import ModelSpec
from zinfer.offload.block import Block, Home, SlabTensor, Tier
from zinfer.planning.memory import Footprint, Request
from zinfer.planning.placement import Plan
from zinfer.probe.rates import Rates
from zinfer.quantization.slab_matrix import SlabMatrix
from zinfer.units import duration

_FLOPS_PER_PARAMETER: Final = 2  # a product and a sum
# transformers' DynamicCache is read and written whole when a token is appended, then read by the attention.
_CACHE_TOUCHES: Final = 3
# Of the rate of plain products, what prompts of 512 tokens attend with, softmax and the half-empty tiles on the
# diagonal included; 8,192 tokens reach 0.5.
_ATTENTION_SHARE: Final = 0.22
# Bytes that cross the link slow products down by as much as moving them so often on the device: 14 to 20 ms a pass
# for 15 to 20 GB on an H200.
_LINK_TOUCHES: Final = 4
# What transformers' modules take on an H200 in passes of 16,384 tokens, as bytes and touches at a copy's rate. A value
# of 16 bits is widened, squared, averaged, scaled, narrowed and weighted: seven kernels that move 36 bytes.
_RMS_NORM_BYTES: Final = 53
_ROTARY_TOUCHES: Final = 40  # turned by half, multiplied twice, added: ten touches of scattered rows
_GATED_TOUCHES: Final = 5  # of the middle of an MLP: activated, multiplied by its gate
_PLAIN_TOUCHES: Final = 2


@dataclass(frozen=True)
class BlockWork:
    """What a pass does with one block.

    Attributes:
        num_uses: how often a pass brings it in; a tied embedding and head are one block used twice.
        active_params: parameters that one token is multiplied with: of experts the share that it chooses; looking up
            an embedding multiplies nothing.
        every_token: whether all tokens of a pass go through the matrices (layers), or the last of each row (the head).
        between_bytes: that one token's activations are read and written with, between products.
        dequantized_bytes: read and written where its matrices are dequantized.
        query_width: of all heads: terms of a query's product with one key, and of its weights with one value.
    """

    block: Block
    num_uses: int
    active_params: float
    every_token: bool
    between_bytes: int = 0
    dequantized_bytes: int = 0
    query_width: int = 0


def find_work(blocks: Iterable[ModelBlock], spec: ModelSpec) -> tuple[BlockWork, ...]:
    """What a pass does with each block of a model."""
    return tuple(_work(block, spec) for block in blocks)


def _work(block: ModelBlock, spec: ModelSpec) -> BlockWork:
    layout = block.block.layout
    is_looked_up = all(isinstance(site, nn.Embedding) for site in block.sites)
    num_expert_params = sum(tensor.numel for tensor in layout.tensors if "experts" in tensor.name.split("."))
    expert_share = spec.experts.share if spec.experts else 1.0
    return BlockWork(
        block=block.block,
        num_uses=len(block.sites),
        active_params=0 if is_looked_up else layout.numel - num_expert_params * (1 - expert_share),
        every_token=block.is_layer,
        between_bytes=between_bytes(spec, layout.tensors[0].dtype.itemsize) if block.is_layer and layout.tensors else 0,
        dequantized_bytes=sum(map(_dequantized_bytes, layout.tensors)),
        query_width=spec.query if block.is_layer else 0,
    )


def _dequantized_bytes(tensor: SlabTensor) -> int:
    """Of a matrix whose products do not take it as it is."""
    if not isinstance(tensor, SlabMatrix) or tensor.quantizes_input:
        return 0
    return tensor.nbytes + tensor.numel * tensor.dtype.itemsize


def between_bytes(spec: ModelSpec, itemsize: int) -> int:
    """What one token's activations in a layer are read and written with, between products, by transformers' modules.

    Two norms, two sums with the residual stream, the turning of queries and keys, the attention's own reading and
    writing, and the activation.
    """
    width = max(itemsize, 2)  # of a value; smaller ones are weights'
    norm_bytes = _RMS_NORM_BYTES if spec.has_rms_norms and not spec.is_fused else 2 * width
    rotary_touches = 2 if spec.is_fused else _ROTARY_TOUCHES
    mlp = spec.mlp if spec.experts is None else spec.experts.num_per_token * spec.experts.width
    num_values = 2 * 3 * spec.hidden + rotary_touches * spec.rotated + 2 * spec.query + 2 * spec.cached
    # Models with such norms have gates: two tensors read, one written where a kernel does it all.
    mlp_touches = (3 if spec.is_fused else _GATED_TOUCHES) if spec.has_rms_norms else _PLAIN_TOUCHES
    return 2 * norm_bytes * spec.hidden + width * (num_values + mlp_touches * mlp)


@dataclass(frozen=True)
class PassTime:
    """Seconds that each resource has work for in one pass over ``num_tokens`` tokens.

    ``device_s`` is of weights and cache, ``cache_s`` the cache's part of it, ``between_s`` what is done between
    products: activations read and written, matrices dequantized, products of prompts with their keys and values, and
    what they lose to copies beside them.
    """

    num_tokens: int
    disk_s: float
    link_s: float
    host_s: float
    matrix_s: float
    device_s: float
    cache_s: float = 0.0
    between_s: float = 0.0

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by the resource's name."""
        return {
            "disk": self.disk_s,
            "link": self.link_s,
            "host copies": self.host_s,
            "matrix work": self.matrix_s + self.cache_s + self.between_s,
            "device memory": self.device_s,
        }

    @property
    def transfer_s(self) -> float:
        """Of bringing in what is streamed, at the pace of its slowest stage."""
        return max(self.disk_s, self.link_s, self.host_s)

    @property
    def seconds(self) -> float:
        """Of the pass."""
        return max(self.terms.values())

    @property
    def bottleneck(self) -> str:
        """The resource that the pass waits for."""
        return max(self.terms, key=self.terms.__getitem__)


@dataclass(frozen=True)
class Prediction:
    """What a request will take: one prefill pass, then a decode pass for every new token but the first.

    Attributes:
        prefill: over all prompts.
        decode: over one token a row, the cache as long as it is on average.
        free_tokens: tokens a pass may carry before matrix work takes longer than the transfers; 0 if nothing streams.
        tokens_per_s: new tokens of the whole request a second.
        seconds: of the whole request.
        origin: of the rates.
    """

    prefill: PassTime
    decode: PassTime
    free_tokens: int
    tokens_per_s: float
    seconds: float
    origin: str

    def __str__(self) -> str:
        # Three digits: more would pretend to know.
        free = f"{float(f'{self.free_tokens:.3g}'):,.0f} tokens a pass are free"
        return f"{duration(self.decode.seconds)} a pass ({self.decode.bottleneck}), {speed(self.tokens_per_s)}, {free}"


class PassClock:
    """Seconds of passes; what all of them have in common is summed once.

    Args:
        plan: homes and buffers.
        work: all blocks, in the plan's order; `find_work` makes it.
        rates: of the machine.
    """

    def __init__(self, plan: Plan, work: Sequence[BlockWork], rates: Rates) -> None:
        self._rates = rates
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
        streamed = [(each, home) for each, home in zip(work, plan.homes, strict=True) if home.tier is not Tier.DEVICE]
        streamed.sort(key=lambda entry: entry[1].tier is not Tier.DISK)  # those from disk stay on the device first
        # A pageable slab passes through pinned staging; without any pinned memory, on a CPU, it is copied as it is.
        moved = [_moved_bytes(each, home, stages=plan.pinned_bytes > 0) for each, home in streamed]
        # By the number of blocks that stay on the device.
        self._moved_bytes = list(accumulate(reversed(moved), _add, initial=(0, 0, 0)))[::-1]

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
    ) -> PassTime:
        """One pass.

        Args:
            num_tokens: tokens that the layers compute.
            num_rows: tokens that the head computes.
            cache_bytes: of keys and values that are read.
            num_pairs: of a prompt's token and one that it attends to; a decode's take no more than reading the cache.
            num_parts: of the pass, which a layer computes one after the other.
            lent_bytes: of the device, that blocks stay in.
            hosted_bytes: of keys and values brought from host memory; what goes back crosses the link the other way.
        """
        rates = self._rates
        num_staying = lent_bytes // self._slot_bytes if self._slot_bytes else 0
        disk_bytes, pageable_bytes, link_bytes = self._moved_bytes[min(num_staying, len(self._moved_bytes) - 1)]
        flops = _FLOPS_PER_PARAMETER * (self._layer_params * num_tokens + self._other_params * num_rows)
        moved_bytes = _LINK_TOUCHES * link_bytes + num_tokens * self._between_bytes
        if num_tokens > MOST_FUSED_TOKENS:
            moved_bytes += num_parts * self._layers_dequantized_bytes
        if num_rows > MOST_FUSED_TOKENS:
            moved_bytes += self._others_dequantized_bytes
        attention_flops = 2 * _FLOPS_PER_PARAMETER * num_pairs * self._query_width
        return PassTime(
            num_tokens=num_tokens,
            disk_s=disk_bytes / rates.disk_bytes_per_s,
            link_s=(link_bytes + hosted_bytes) / rates.link_bytes_per_s,
            host_s=pageable_bytes / rates.host_bytes_per_s,
            matrix_s=flops / rates.flops_per_s,
            device_s=(self._nbytes + cache_bytes) / rates.device_bytes_per_s,
            cache_s=cache_bytes / rates.device_bytes_per_s,
            between_s=moved_bytes / rates.device_bytes_per_s + attention_flops / (_ATTENTION_SHARE * rates.flops_per_s),
        )

    def predict(self, request: Request, footprint: Footprint) -> Prediction:
        """Predict a request; of its footprint the cache's bytes are read."""
        rows, rates = request.batch_size, self._rates
        num_pairs = rows * request.prompt_len * (request.prompt_len + 1) // 2
        prefill = self.pass_time(rows * request.prompt_len, rows, cache_bytes=0, num_pairs=num_pairs)
        decode = self.pass_time(rows, rows, cache_bytes=footprint.decode_kv_bytes * _CACHE_TOUCHES)
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
        """Whether writing and reading the ``token_bytes`` of a token's keys and values beats computing them again.

        Each by its own resource alone: bytes over the disk's rate, which counts for writes too, and matrix work.
        """
        flops = _FLOPS_PER_PARAMETER * self._layer_params
        return 2 * token_bytes / self._rates.disk_bytes_per_s < flops / self._rates.flops_per_s


def _moved_bytes(work: BlockWork, home: Home, *, stages: bool) -> tuple[int, int, int]:
    """Bytes that a pass reads from disk, copies out of pageable memory and brings over the link, for one block.

    A block is as large as in its file where it lives there, and cast on arrival.
    """
    if home.tier is Tier.DISK:
        nbytes = work.num_uses * sum(extent.nbytes for extent in work.block.extents)
        return nbytes, 0, nbytes
    nbytes = work.num_uses * work.block.nbytes
    return 0, nbytes if stages and not home.pinned else 0, nbytes


def _add(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def speed(tokens_per_s: float) -> str:
    """A speed as people read it, with two digits at least."""
    return f"{tokens_per_s:,.1f} tokens/s" if tokens_per_s >= 1 else f"{tokens_per_s:.2g} tokens/s"
