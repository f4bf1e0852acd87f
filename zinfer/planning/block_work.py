"""What a pass does with each block of a model: parameters that tokens are multiplied with, and bytes beside them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from torch import nn

from zinfer.model.partition import ModelBlock
from zinfer.model.spec import ModelSpec
from zinfer.offload.block import Block, SlabTensor
from zinfer.quantization.slab_matrix import SlabMatrix

# What transformers' modules take on an H200 in passes of 16,384 tokens, as bytes and touches at a copy's rate. A value
# of 16 bits is widened, squared, averaged, scaled, narrowed and weighted: seven kernels that move 36 bytes.
_RMS_NORM_BYTES: Final = 53
_ROTARY_TOUCHES: Final = 40  # turned by half, multiplied twice, added: ten touches of rows that lie apart
_GATED_TOUCHES: Final = 5  # of the middle of an MLP: activated, multiplied by its gate
_PLAIN_TOUCHES: Final = 2


@dataclass(frozen=True)
class BlockWork:
    """What a pass does with one block.

    Attributes:
        block: the block.
        num_uses: how often a pass brings it in; a tied embedding and head are one block used twice.
        num_params: parameters that a position is multiplied with; looking up an embedding multiplies nothing.
        num_expert_params: those of them that belong to experts.
        expert_share: of the experts' parameters, what one token is multiplied with.
        every_token: whether all tokens of a pass go through the matrices (layers), or the last of each row (the head).
        between_bytes: that one token's activations are read and written with, between products.
        dequantized_bytes: read and written where its matrices are dequantized.
        query_width: of all heads: terms of a query's product with one key, and of its weights with one value.
    """

    block: Block
    num_uses: int
    num_params: int
    num_expert_params: int
    expert_share: float
    every_token: bool
    between_bytes: int = 0
    dequantized_bytes: int = 0
    query_width: int = 0

    @property
    def num_active_params(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.num_params - self.num_expert_params * (1 - self.expert_share)


def find_work(blocks: Iterable[ModelBlock], spec: ModelSpec) -> tuple[BlockWork, ...]:
    """What a pass does with each block of a model."""
    return tuple(_work(block, spec) for block in blocks)


def _work(block: ModelBlock, spec: ModelSpec) -> BlockWork:
    tensors = block.block.layout.tensors
    num_params = block.block.layout.numel
    num_multiplying_sites = sum(not isinstance(site, nn.Embedding) for site in block.sites)
    num_expert_params = sum(tensor.numel for tensor in tensors if "experts" in tensor.name.split("."))
    return BlockWork(
        block=block.block,
        num_uses=len(block.sites),
        num_params=num_params * min(1, num_multiplying_sites),
        num_expert_params=num_expert_params,
        expert_share=spec.experts.share if spec.experts else 1.0,
        every_token=block.is_layer,
        between_bytes=between_bytes(spec, tensors[0].dtype.itemsize) if block.is_layer and tensors else 0,
        dequantized_bytes=sum(map(_dequantized_bytes, tensors)),
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
