"""Memory of a request besides the weights: KV cache and activations; and the memory left for weights.

Pure arithmetic over a `ModelSpec`: an upper bound for transformers' eager and sdpa forwards under `generate`, and for
encoders. Every formula names the code it counts; `tests/test_footprint.py` compares them with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

from zinfer.config import Settings
from zinfer.errors import ConfigError, PlanError
from zinfer.model.spec import ModelSpec
from zinfer.offload.block import Block
from zinfer.probe.limits import MachineLimits
from zinfer.units import human_bytes
from zinfer.weights.slab_matrix import most_dequantized_bytes

if TYPE_CHECKING:
    import torch

# Allowances, not measurements: one for loaded kernels, what the driver keeps for captured graphs, and cuBLAS workspaces
# (of a preset's memory also for CUDA's context, which is there before a machine's free memory is read); one for the
# allocator, which rounds blocks up to 2 MiB and leaves holes between them.
_CONTEXT_BYTES: Final = 800_000_000
_ALLOCATOR_SHARE: Final = 0.03
_UNKNOWN_SHARE: Final = 0.2  # of a cap, for passes of unknown size

_SCRATCH_BYTES: Final = 64 << 10  # for kernels, and for tensors of a few elements
_FLOAT_BYTES: Final = 4
_INDEX_BYTES: Final = 8
# `generate` copies the logits to float32; top-p sorts them: values, indices, softmax, its sums, and the kept ones.
_SAMPLING_BYTES: Final = _FLOAT_BYTES + (_FLOAT_BYTES + _INDEX_BYTES) + 3 * _FLOAT_BYTES


@dataclass(frozen=True)
class Request:
    """One batch: every prompt is padded to ``prompt_len`` tokens and gets ``new_tokens`` more.

    Raises:
        ConfigError: one of the three is not a whole number of at least 1.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{field.name} is {value!r}; give a whole number of at least 1")

    @property
    def total_len(self) -> int:
        """Tokens of a finished sequence."""
        return self.prompt_len + self.new_tokens

    def part(self, count: int) -> Request:
        """Return the part of one group of ranks, of so many groups."""
        return replace(self, batch_size=-(-self.batch_size // count))

    def __str__(self) -> str:
        return f"{self.batch_size:,} prompts of {self.prompt_len:,} tokens, {self.new_tokens:,} new ones each"


@dataclass(frozen=True)
class Footprint:
    """Bytes of device memory besides the weights.

    Attributes:
        kv_bytes: KV cache at its largest.
        activation_bytes: peak of a forward on top, including the copy of one layer's cache.
        decode_kv_bytes: KV cache in the middle of the decode passes.
        host_bytes: KV cache in host memory, if it is there; ``kv_bytes`` then counts its slots on the device.
        swap_bytes: host memory for the KV cache of preempted sequences, where the configuration bounds host memory and
            they are swapped; else None.
    """

    kv_bytes: int
    activation_bytes: int
    decode_kv_bytes: int
    host_bytes: int = 0
    swap_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Total device memory."""
        return self.kv_bytes + self.activation_bytes

    def dequantizing(self, blocks: Iterable[Block]) -> Footprint:
        """Add the largest quantized matrix in dequantized form, which products of many tokens need."""
        return replace(self, activation_bytes=self.activation_bytes + most_dequantized_bytes(blocks))

    def __str__(self) -> str:
        return f"KV cache {human_bytes(self.kv_bytes)}, activations {human_bytes(self.activation_bytes)}"


def find_footprint(spec: ModelSpec, dtype: torch.dtype, request: Request, *, on_cuda: bool = True) -> Footprint:
    """Return an upper bound for one `generate` over the request.

    Args:
        spec: spec of the model.
        dtype: dtype of weights, activations and cache.
        request: the batch, with every prompt as long as the longest.
        on_cuda: assume a fused kernel for every attention, and 16-bit products without wider temporaries.
    """
    middle = request.prompt_len + (request.new_tokens + 1) // 2
    forward = _Forward(spec, dtype.itemsize, request.batch_size, on_cuda)
    prefill_bytes = forward.peak_bytes(request.prompt_len, request.prompt_len)
    decode_bytes = forward.peak_bytes(1, request.total_len)
    return Footprint(
        kv_bytes=_kv_bytes(spec, dtype, request, request.total_len),
        activation_bytes=max(prefill_bytes, decode_bytes),
        decode_kv_bytes=request.batch_size * _held_tokens(spec, middle) * spec.cached * dtype.itemsize,
    )


def find_encoding_footprint(
    spec: ModelSpec, dtype: torch.dtype, num_rows: int, row_len: int, *, on_cuda: bool = True
) -> Footprint:
    """Return an upper bound for one pass of an encoder, including float32 vectors of its output.

    Args:
        spec: from `ModelSpec.read_encoder`.
        dtype: dtype of weights and activations.
        num_rows: rows of the pass.
        row_len: tokens per row, padding included.
        on_cuda: as for `find_footprint`.
    """
    return Footprint(0, _Forward(spec, dtype.itemsize, num_rows, on_cuda).peak_bytes(row_len, row_len), 0)


def reserved_bytes(device_memory_bytes: int, *, on_cuda: bool = True) -> int:
    """Return what is kept of the device memory for CUDA itself: 0.8 GB and 3 %; nothing on a CPU."""
    return _CONTEXT_BYTES + int(device_memory_bytes * _ALLOCATOR_SHARE) if on_cuda else 0


def weight_budget(device_memory_bytes: int, footprint: Footprint, *, on_cuda: bool = True) -> int:
    """Return the bytes of device memory for weights and slots beside a request, and beside `reserved_bytes`.

    Raises:
        PlanError: nothing is left; names the consumers and what to lower.
    """
    reserve_bytes = reserved_bytes(device_memory_bytes, on_cuda=on_cuda)
    left_bytes = device_memory_bytes - reserve_bytes - footprint.nbytes
    if left_bytes <= 0:
        raise PlanError(
            f"the request does not fit: the KV cache takes {human_bytes(footprint.kv_bytes)}, activations "
            f"{human_bytes(footprint.activation_bytes)} and the reserve {human_bytes(reserve_bytes)} of "
            f"{human_bytes(device_memory_bytes)} device memory, which leaves nothing for weights; lower the batch size "
            f"first, then the lengths of prompts and outputs; where prompts are encoded, zinfer.tokens_per_pass"
        )
    return left_bytes


def beside_request(
    limits: MachineLimits, device_memory_bytes: int, settings: Settings, footprint: Footprint | None
) -> MachineLimits:
    """Return the budgets less the memory of a request.

    Args:
        limits: budgets without the request.
        device_memory_bytes: free device memory, for everything; what exceeds the cap of the limits does not count.
        settings: a budget that is stated for weights is kept, or refused if it leaves too little for the request.
        footprint: memory of the request; None: not known, and a fifth of a cap is left for it.

    Raises:
        PlanError: the request leaves too little.
    """
    device_memory_bytes = limits.within_cap(device_memory_bytes)
    if footprint is None:
        if limits.cap_bytes is None:
            return limits
        footprint = Footprint(0, int(device_memory_bytes * _UNKNOWN_SHARE), 0)
    left_bytes = weight_budget(device_memory_bytes, footprint, on_cuda=limits.on_cuda)
    stated_bytes = settings.memory.max_weight_memory
    if stated_bytes is not None and stated_bytes > left_bytes:
        raise PlanError(
            f"zinfer.max_weight_memory is {human_bytes(stated_bytes)}, but beside the request only {left_bytes} bytes "
            f"({human_bytes(left_bytes)}) of {human_bytes(device_memory_bytes)} are left for weights "
            f"({footprint}); lower it, or the batch size"
        )
    return replace(
        limits,
        device_bytes=min(limits.device_bytes, left_bytes),
        host_bytes=max(0, limits.host_bytes - footprint.host_bytes - (footprint.swap_bytes or 0)),
        pinned_bytes=max(0, limits.pinned_bytes - footprint.host_bytes),
        host_kv_bytes=footprint.host_bytes,
        swap_bytes=footprint.swap_bytes,
    )


def _kv_bytes(spec: ModelSpec, dtype: torch.dtype, request: Request, num_tokens: int) -> int:
    """Return the largest size of transformers' DynamicCache: rows x tokens x layers x cached width.

    A layer with a window keeps its whole prompt until the first decode pass, since it holds a view of it
    (cache_utils.py, `DynamicSlidingWindowLayer.update`).
    """
    after_prefill = len(spec.windows) * (request.prompt_len + 1)
    num_held = max(after_prefill, _held_tokens(spec, num_tokens))
    return request.batch_size * num_held * spec.cached * dtype.itemsize


def _held_tokens(spec: ModelSpec, num_tokens: int) -> int:
    """Return the tokens in the cache, summed over layers, after ``num_tokens`` tokens."""
    return sum(num_tokens if window is None else min(num_tokens, window) for window in spec.windows)


@dataclass(frozen=True)
class _Forward:
    """Live bytes in a forward of ``num_rows`` sequences; "q" new tokens per row attend to "k" tokens."""

    spec: ModelSpec
    itemsize: int
    num_rows: int
    on_cuda: bool

    def peak_bytes(self, q: int, k: int) -> int:
        """Return the peak: tensors that live throughout, plus the largest of attention, MLP, norm and logits.

        Attention weights that are tensors stay alive until the end of their layer, BLOOM's until the end of the next
        layer (`hidden_states, _ = self.self_attn(...)`, `outputs = block(...)`).
        """
        weights = self._num_scores(q, k) * self.itemsize
        after_attention = weights + max(self._mlp(q), self._norm(q), self._experts(q), self._logits())
        return self._throughout(q, k) + weights + max(self._attention(q, k), after_attention)

    def _elements(self, num_tokens: int, width: int) -> int:
        return self.num_rows * num_tokens * width * self.itemsize

    def _throughout(self, q: int, k: int) -> int:
        """Count the embeddings and the input of the layer (`LlamaModel.forward` holds both), rotary cosines and sines
        (made in float32), ids, positions and the 2-D mask, and the 4-D masks."""
        head = self.spec.query // self.spec.num_heads
        states = self._elements(q, 2 * self.spec.hidden)
        positions = self.num_rows * q * (2 * head * (self.itemsize + _FLOAT_BYTES) + 2 * _INDEX_BYTES)
        ids = self.num_rows * k * 2 * _INDEX_BYTES
        return states + positions + ids + self._masks(q, k) + _SCRATCH_BYTES

    def _masks(self, q: int, k: int) -> int:
        """Count one mask per kind of layer (masking_utils.py): booleans [rows, 1, q, k] from two [q, k] ones, then
        floats, which sdpa's kernels convert and pad again."""
        num_kinds = len(set(self.spec.windows))
        pairs = q * (k + 8)
        return num_kinds * self.num_rows * pairs * (1 + 2 * self.itemsize) + 2 * pairs

    def _num_scores(self, q: int, k: int) -> int:
        """Return the elements of the attention scores; 0 if a fused kernel computes them in tiles."""
        as_tensors = self.spec.is_eager or self._is_unfused
        return self.num_rows * self.spec.num_heads * q * k if as_tensors else 0

    @property
    def _is_unfused(self) -> bool:
        return self.spec.is_uneven and not self.on_cuda

    def _attention(self, q: int, k: int) -> int:
        """Count residual and normed states and projections; then copied queries, the output and its transpose, keys and
        values repeated for each query head; in decode, the old cache of the layer beside the new one.

        Eager: scores before and after the mask (`BloomAttention` holds both), their softmax in float32, and for 16-bit
        scores a float32 copy of its input. Fused: the log-sum-exp and a float32 output for each query.
        """
        spec = self.spec
        alive = self._elements(q, 2 * spec.hidden + spec.query + spec.cached)
        if spec.is_paged and not self.on_cuda:
            return alive + self._padded_attention(q)
        # Without a fused kernel sdpa scales and widens keys and values in copies (aten, `sdp_math`).
        core = self._elements(q, 4 * spec.query) + self._elements(k, spec.expanded) * (3 if self._is_unfused else 1)
        copied = self._elements(k, spec.cached) if q < k else 0
        softmax = _FLOAT_BYTES if self.itemsize >= _FLOAT_BYTES else 2 * _FLOAT_BYTES
        scores = self._num_scores(q, k) * (2 * self.itemsize + softmax)
        fused = self.num_rows * q * (spec.num_heads + spec.query) * _FLOAT_BYTES
        return alive + core + copied + (scores or fused)

    def _padded_attention(self, q: int) -> int:
        """Count rotated queries with their parts; or the output, the workspace, and a latent attention's own queries
        (`padded_attention`, `_attend_to_latents`)."""
        from zinfer.kernels.padded_attention import padded_attention_bytes  # imports torch; for CPUs alone

        spec, kv = self.spec, self.spec.kv
        workspace_bytes = padded_attention_bytes(spec.num_heads, kv.num_heads, kv.key_dim, kv.value_dim)
        out = self._elements(q, spec.query + (spec.expanded if kv.values_in_keys else 0))
        return max(self._elements(q, 4 * spec.query), out + workspace_bytes)

    def _mlp(self, q: int) -> int:
        """Count residual, input, output and intermediates (`LlamaMLP`, `GPT2MLP` with `NewGELUActivation`).

        On CPUs without 16-bit instructions oneDNN sums each product in a float32 buffer. Only here it adds to the peak:
        elsewhere in a layer less is alive during products than after them.
        """
        copies = self.spec.mlp_copies
        if not self.on_cuda and self.itemsize < _FLOAT_BYTES:
            copies = max(copies, 2 + _FLOAT_BYTES // self.itemsize)  # the gate, the product, and its sums
        return self._elements(q, 3 * self.spec.hidden + copies * self.spec.mlp)

    def _norm(self, q: int) -> int:
        """Count residual and result of `LlamaRMSNorm`, and two float32 copies between them."""
        return self._elements(q, 2 * self.spec.hidden) + self.num_rows * q * self.spec.hidden * 2 * _FLOAT_BYTES

    def _experts(self, q: int) -> int:
        """Count each token once per chosen expert, and the router (integrations/moe.py, `grouped_mm`).

        Decode passes use it too (`Acceleration.keep_experts`), not `batched_mm`, which copies experts' weights.
        """
        experts, hidden = self.spec.experts, self.spec.hidden
        if experts is None:
            return 0
        each = hidden + max(4 * experts.width, 3 * hidden)
        chosen = self._elements(q * experts.num_per_token, each)
        router = self.num_rows * q * experts.num_experts * (2 * _FLOAT_BYTES + _INDEX_BYTES * experts.num_per_token)
        return self._elements(q, 3 * hidden) + chosen + router

    def _logits(self) -> int:
        """Count the last position's logits (`logits_to_keep`, generation/utils.py), and their copies in sampling."""
        return self.num_rows * self.spec.vocab * (self.itemsize + _SAMPLING_BYTES)
