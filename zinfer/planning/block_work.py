"""`BlockWork`: what a pass computes, reads and moves for one block of weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from zinfer.model.outline import PlannedBlock
from zinfer.model.spec import ModelSpec
from zinfer.offload.block import Block, SlabTensor

# Cost of transformers' modules on an H200 in passes of 16,384 tokens, as bytes and touches at a copy's rate. A 16-bit
# value is widened, squared, averaged, scaled, narrowed and weighted: seven kernels that move 36 bytes.
_RMS_NORM_BYTES: Final = 53
_ROTARY_TOUCHES: Final = 40  # rotated by half, multiplied twice, added: ten touches of scattered rows
_GATED_TOUCHES: Final = 5  # of an MLP's intermediates: activation, product with the gate
_PLAIN_TOUCHES: Final = 2


@dataclass(frozen=True)
class BlockWork:
    """The work of a pass on one block.

    Attributes:
        num_uses: loads per pass; a tied embedding and head are one block used twice.
        active_params: parameters multiplied with each token, counting only the chosen experts; 0 for embedding lookups.
        every_token: whether the block computes all tokens of a pass (layers), or only the last of each row (the head).
        between_bytes: bytes read and written between products, per token.
        dequantized_bytes: bytes read and written to dequantize the matrices.
        query_width: width of all query heads: multiplications per query and key, and again per weight and value.
        has_experts: whether its tokens go to experts.
    """

    block: Block
    num_uses: int
    active_params: float
    every_token: bool
    between_bytes: int = 0
    dequantized_bytes: int = 0
    query_width: int = 0
    has_experts: bool = False


def find_work(blocks: Iterable[PlannedBlock], spec: ModelSpec) -> tuple[BlockWork, ...]:
    """Return the work of a pass on each block of a model."""
    return tuple(_work(block, spec) for block in blocks)


def _work(block: PlannedBlock, spec: ModelSpec) -> BlockWork:
    layout = block.block.layout
    num_expert_params = sum(tensor.numel for tensor in layout.tensors if "experts" in tensor.name.split("."))
    expert_share = spec.experts.share if spec.experts else 1.0
    return BlockWork(
        block=block.block,
        num_uses=block.num_uses,
        active_params=0 if block.is_looked_up else layout.numel - num_expert_params * (1 - expert_share),
        every_token=block.is_layer,
        between_bytes=between_bytes(spec, layout.tensors[0].dtype.itemsize) if block.is_layer and layout.tensors else 0,
        dequantized_bytes=sum(map(_dequantized_bytes, layout.tensors)),
        query_width=spec.query if block.is_layer else 0,
        has_experts=num_expert_params > 0,
    )


def _dequantized_bytes(tensor: SlabTensor) -> int:
    """Return the bytes read and written to dequantize a matrix; 0 if its products use it quantized."""
    if not tensor.dequantized_bytes or getattr(tensor, "quantizes_input", False):
        return 0
    return tensor.nbytes + tensor.numel * tensor.dtype.itemsize


def between_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes that transformers' modules read and write between the products of a layer, per token.

    Counts two norms, two residual additions, the rotation of queries and keys, the attention's reads and writes, and
    the activation.
    """
    width = max(itemsize, 2)  # of an activation; smaller items are quantized weights
    norm_bytes = _RMS_NORM_BYTES if spec.has_rms_norms and not spec.is_fused else 2 * width
    rotary_touches = 2 if spec.is_fused else _ROTARY_TOUCHES
    mlp = spec.mlp if spec.experts is None else spec.experts.num_per_token * spec.experts.width
    num_values = 2 * 3 * spec.hidden + rotary_touches * spec.rotated + 2 * spec.query + 2 * spec.cached
    # Models with RMS norms have gated MLPs: a fused kernel reads two tensors and writes one.
    mlp_touches = (3 if spec.is_fused else _GATED_TOUCHES) if spec.has_rms_norms else _PLAIN_TOUCHES
    return 2 * norm_bytes * spec.hidden + width * (num_values + mlp_touches * mlp)
