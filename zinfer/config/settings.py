"""What a configuration resolves to: small frozen objects. Nothing here reads, checks or converts anything."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from zinfer.config.block_classes import BlockClass
from zinfer.config.listing import CheckpointListing
from zinfer.config.quantization_rules import Quantization


@dataclass(frozen=True)
class Offload:
    """Where the parameters live. `device` None means that the configuration does not say."""

    device: Literal["none", "cpu", "nvme"] | None = None
    nvme_path: Path | None = None
    """Folder where weights that stream from disk, but are not there in the form that streams, are written once, and
    where `zinfer.LLM` swaps preempted sequences."""
    pin_memory: bool = True
    buffer_count: int | None = None
    """Staging slots."""
    buffer_size: int | None = None
    """Elements of a staging slot."""
    max_in_cpu: int | None = None
    """Most elements whose home is host memory."""


@dataclass(frozen=True)
class Aio:
    """How the disk is read. None means that the reader chooses."""

    block_size: int | None = None
    """Bytes of one request."""
    queue_depth: int | None = None
    intra_op_parallelism: int | None = None
    """Threads that read one slab."""
    use_gds: bool = False
    """Read straight into device memory where that is possible."""


@dataclass(frozen=True)
class Streaming:
    """Hints at the depth of the stream, in elements; None means that the planner chooses."""

    prefetch_bucket_size: int | None = None
    max_live_parameters: int | None = None


@dataclass(frozen=True)
class Memory:
    """Budgets in bytes; None means what the machine has."""

    max_device_memory: int | None = None
    max_host_memory: int | None = None
    max_pinned_memory: int | None = None


@dataclass(frozen=True)
class Batch:
    """What the plan leaves room for beside the weights; all three are stated, or none."""

    batch_size: int | None = None
    prompt_len: int | None = None
    new_tokens: int | None = None


@dataclass(frozen=True)
class Batching:
    """How `zinfer.LLM` batches sequences; None means that it chooses."""

    tokens_per_pass: int | None = None
    max_sequences: int | None = None
    kv_cache_memory: int | None = None
    """Bytes of the memory that `kv_cache_tier` names."""
    kv_cache_tier: Literal["device", "host"] = "device"
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    admission_order: Literal["arrival", "longest_first"] = "arrival"
    kv_page_size: int | None = None
    """Tokens."""


@dataclass(frozen=True)
class Ignored:
    """A key that was given and changes nothing here, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class Settings:
    """A whole configuration, checked. `dtype` None means the checkpoint's own.

    Products with quantized weights are computed in `dtype` too.
    """

    dtype: torch.dtype | None = None
    max_out_tokens: int | None = None
    """Most tokens of a sequence, input and new ones together; None means the model's positions."""
    min_out_tokens: int = 1
    num_slots: int | None = None
    synchronous: bool = False
    check_finite: bool = False
    """Whether every layer's output is looked at; costs a reading of each."""
    kernel_inject: bool | None = None
    """Whether fused kernels take the place of what modules write out; None: where `LLM` runs on a GPU."""
    cuda_graph: bool | None = None
    """Whether forwards are replayed as CUDA graphs; None: `LLM`'s passes of few sequences, where little streams."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    checkpoint: Path | CheckpointListing | None = None
    block_classes: tuple[BlockClass, ...] = ()
    """What of a model is a block, beside what its own class says."""
    trace: Path | None = None
    """Where a trace of reads, copies and computes is written when the engine is destroyed."""
    offload: Offload = field(default_factory=Offload)
    aio: Aio = field(default_factory=Aio)
    streaming: Streaming = field(default_factory=Streaming)
    memory: Memory = field(default_factory=Memory)
    batch: Batch = field(default_factory=Batch)
    batching: Batching = field(default_factory=Batching)
    quantization: Quantization | None = None
    """Which weights are quantized, and how; None: none."""
    without_effect: tuple[Ignored, ...] = ()

    def for_batches(self, *, on_cuda: bool) -> Settings:
        """These for `LLM`, on a GPU or not: with fused kernels there if nothing is said of them."""
        return self if self.kernel_inject is not None else replace(self, kernel_inject=on_cuda)
