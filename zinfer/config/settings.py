"""Resolved settings: small frozen objects, each field with its configuration key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zinfer.config import values
from zinfer.config.key import setting
from zinfer.config.listing import CheckpointListing, checkpoint
from zinfer.config.parallel import ANY_DIVISION, ANY_MESH, NO_GROUPS, ExpertGroups, Parallel, TensorParallel
from zinfer.config.quantization_rules import Quantization
from zinfer.config.values import BlockClass, block_classes, choice, count, elements, flag, size_bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_OFFLOAD = "zero_optimization.offload_param"
_ROOM = "the plan leaves room for it"
_is_said: ContextVar[bool] = ContextVar("zinfer_without_effect_is_said", default=False)


@dataclass(frozen=True)
class Offload:
    """Home of the parameters. `device` None: not stated in the configuration."""

    device: Literal["none", "cpu", "nvme"] | None = setting(
        f"{_OFFLOAD}.device", choice("none", "cpu", "nvme"), "home of the parameters: device, host memory or disk"
    )
    nvme_path: Path | None = setting(
        f"{_OFFLOAD}.nvme_path",
        values.folder_or_empty,
        "folder for weights that are converted for the disk, once, for those of a module given in memory, and for the "
        "KV cache of preempted sequences of zinfer.LLM; weights that need no conversion are read in place",
    )
    pin_memory: bool = setting(
        f"{_OFFLOAD}.pin_memory", flag, "host memory is page-locked; false: only the staging slots are", default=True
    )
    buffer_count: int | None = setting(f"{_OFFLOAD}.buffer_count", count(1), "a hint: staging slots")
    buffer_size: int | None = setting(
        f"{_OFFLOAD}.buffer_size",
        elements,
        "a hint: elements of a staging slot; tensors of any size pass through it in parts",
    )
    max_in_cpu: int | None = setting(f"{_OFFLOAD}.max_in_cpu", elements, "most elements in host memory")


@dataclass(frozen=True)
class Aio:
    """Settings for reading from disk. None: the reader chooses."""

    block_size: int | None = setting("aio.block_size", values.multiple(4096), "bytes of one request")
    queue_depth: int | None = setting(
        "aio.queue_depth", count(1), "requests in flight, times intra_op_parallelism; one thread each, 64 at most"
    )
    intra_op_parallelism: int | None = setting("aio.intra_op_parallelism", count(1), "threads that read one slab")
    use_gds: bool = setting(
        "aio.use_gds",
        flag,
        "read from disk directly into device memory, if kvikio and the driver allow it",
        default=False,
    )


@dataclass(frozen=True)
class Streaming:
    """Hints for the prefetch depth, in elements. None: the planner chooses."""

    prefetch_bucket_size: int | None = setting(
        "zero_optimization.stage3_prefetch_bucket_size",
        elements,
        "a hint: elements fetched ahead of use",
        "prefetch_bucket_size",
    )
    max_live_parameters: int | None = setting(
        "zero_optimization.stage3_max_live_parameters",
        elements,
        "a hint: most elements in the slots, but two layers at least",
        "max_live_parameters",
    )


@dataclass(frozen=True)
class Memory:
    """Budgets in bytes. None: by the machine's free memory."""

    max_device_memory: int | None = setting(
        "zinfer.max_device_memory",
        size_bytes,
        'most device memory for everything but CUDA\'s context, in bytes or as "24GB"',
    )
    max_weight_memory: int | None = setting(
        "zinfer.max_weight_memory", size_bytes, "the part of the device memory for resident weights and their slots"
    )
    max_host_memory: int | None = setting("zinfer.max_host_memory", size_bytes, "most host memory, pinned included")
    max_pinned_memory: int | None = setting("zinfer.max_pinned_memory", size_bytes, "most page-locked host memory")


@dataclass(frozen=True)
class LeafModules:
    """Modules whose weights are used together, so that they are in one block."""

    classes: tuple[str, ...] = setting(
        "zero_optimization.leaf_module.classes",
        values.texts,
        "classes of such modules, with or without their module",
        default=(),
    )
    names: tuple[str, ...] = setting(
        "zero_optimization.leaf_module.names", values.texts, "names of such modules in the model", default=()
    )
    suffixes: tuple[str, ...] = setting(
        "zero_optimization.leaf_module.name_suffixes", values.texts, "ends of such names", default=()
    )


NO_LEAVES = LeafModules()


@dataclass(frozen=True)
class Batch:
    """The batch for which the plan reserves memory; all three fields are stated, or none."""

    batch_size: int | None = setting("zinfer.batch_size", count(1), f"prompts computed together; {_ROOM}")
    prompt_len: int | None = setting("zinfer.prompt_len", count(1), f"tokens of the longest prompt; {_ROOM}")
    new_tokens: int | None = setting("zinfer.new_tokens", count(1), f"tokens generated after each; {_ROOM}")


@dataclass(frozen=True)
class Batching:
    """Settings of batching in `zinfer.LLM`. None: it chooses."""

    tokens_per_pass: int | None = setting(
        "zinfer.tokens_per_pass", count(1), "most tokens of a ragged batch of zinfer.LLM"
    )
    max_sequences: int | None = setting(
        "zinfer.max_sequences", count(1), "most sequences that run at once in zinfer.LLM"
    )
    kv_cache_memory: int | None = setting(
        "zinfer.kv_cache_memory",
        size_bytes,
        "memory for the KV cache of zinfer.LLM, on the device or in host memory, by kv_cache_tier",
    )
    kv_cache_tier: Literal["auto", "device", "host"] = setting(
        "zinfer.kv_cache_tier",
        choice("auto", "device", "host"),
        "where the KV cache is; host: a layer's pages are copied to the device while it computes; auto: the device, "
        "unless a job is predicted to be faster with host",
        default="auto",
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = setting(
        "zinfer.kv_cache_dtype",
        choice("auto", "int8", "fp8"),
        "dtype of the KV cache; auto: the model's dtype",
        default="auto",
    )
    admission_order: Literal["auto", "arrival", "longest_first"] = setting(
        "zinfer.admission_order",
        choice("auto", "arrival", "longest_first"),
        "which waiting sequence runs next in zinfer.LLM; longest_first: that with the most new tokens; auto: arrival, "
        "unless a job is predicted to be faster with longest_first",
        default="auto",
    )
    kv_page_size: int | None = setting("zinfer.kv_page_size", count(1), "tokens of a page of the KV cache")
    speculate: Literal["auto", "ngram", "off"] = setting(
        "zinfer.speculate",
        choice("auto", "ngram", "off"),
        "guess next tokens from a sequence's own text, and verify them in the pass that computes its next one; auto: "
        "on a GPU, where streaming the weights leaves time for 256 tokens; in a job, where its sizes are planned too",
        default="auto",
    )
    draft_model: Path | None = setting(
        "zinfer.draft_model",
        values.path,
        "folder of a small model with the same vocabulary, to guess next tokens in zinfer.LLM; it stays on the device",
    )
    max_token_latency_s: float | None = setting(
        "zinfer.max_token_latency",
        values.seconds,
        'most time between two tokens of a sequence in zinfer.LLM, such as "200ms": passes have fewer tokens for it',
    )


@dataclass(frozen=True)
class Ignored:
    """A given key without effect, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class Settings:
    """A whole, validated configuration. `dtype` None: the checkpoint's own.

    Products with quantized weights are computed in `dtype` too.
    """

    dtype: torch.dtype | None = setting(
        "dtype", values.dtype, "dtype of weights and compute, by default the checkpoint's own; int8: quantized weights"
    )
    max_out_tokens: int | None = setting(
        "max_out_tokens",
        count(1),
        "most tokens of a sequence, input and new ones together, checked before any compute",
        "max_tokens",
    )
    generation_config: Literal["auto", "none"] = setting(
        "zinfer.generation_config",
        choice("auto", "none"),
        "auto: the model's generation_config.json gives the defaults of sampling parameters, and tokens that are "
        "suppressed or forced; none: only its end tokens are read",
        default="auto",
    )
    download: bool = setting(
        "zinfer.download",
        flag,
        "download a model that is given by its name on the Hugging Face hub and is not in the cache; false: refuse it",
        default=True,
    )
    min_out_tokens: int = setting(
        "min_out_tokens", count(1), "tokens that must at least be possible", "min_tokens", default=1
    )
    num_experts: int | None = setting(
        "moe.moe_experts", values.num_experts, "experts of each mixture; checked against the model's", "num_experts"
    )
    num_slots: int | None = setting("zinfer.num_slots", count(1), "device slots that blocks stream through")
    synchronous: bool = setting("zinfer.synchronous", flag, "wait for every copy: slow, for comparison", default=False)
    check_finite: bool = setting(
        "zinfer.check_finite",
        flag,
        "generate and forward fail at infinities or NaN, before, in or after the layers, and name the first place",
        default=False,
    )
    kernel_inject: bool | None = setting(
        "replace_with_kernel_inject",
        flag,
        "use fused kernels for norms, rotary embeddings, activations, gated MLPs and experts, and merge products with "
        "one input; default: true for zinfer.LLM on a GPU",
        "kernel_inject",
    )
    cuda_graph: bool | None = setting(
        "enable_cuda_graph",
        flag,
        "replay forwards as CUDA graphs, in pieces if weights stream; default: zinfer.LLM's passes of few sequences "
        "and tokens, if little streams",
    )
    optimize: Literal["accuracy", "speed"] = setting(
        "zinfer.optimize",
        choice("accuracy", "speed"),
        "speed: a job takes what is predicted to be faster though it rounds otherwise, an INT8 KV cache or ranks that "
        "divide the layers, and says so (zinfer run --fast)",
        default="accuracy",
    )
    device: Literal["auto", "cuda", "cpu"] = setting(
        "zinfer.device", choice("auto", "cuda", "cpu"), "where the model computes", default="auto"
    )
    checkpoint: Path | CheckpointListing | None = setting(
        "checkpoint", checkpoint, "folder of the checkpoint, or a list of its files"
    )
    block_classes: tuple[BlockClass, ...] = setting(
        "injection_policy",
        block_classes,
        "classes of modules that are blocks, as {Block: (linear layers whose outputs several GPUs would sum)}",
        "injection_dict",
        default=(),
    )
    save_parts: Path | None = setting(
        "save_mp_checkpoint_path",
        values.folder_or_empty,
        "folder for the parts of ranks that divide layers (tp_size), written once; it, or its ds_inference_config.json "
        "alone, is then a checkpoint for as many ranks",
    )
    trace: Path | None = setting("zinfer.trace", values.path, "file for a Perfetto trace of reads, copies and computes")
    offload: Offload = Offload()
    aio: Aio = Aio()
    streaming: Streaming = Streaming()
    memory: Memory = Memory()
    parallel: Parallel = ANY_MESH
    tensor_parallel: TensorParallel = ANY_DIVISION
    expert_groups: ExpertGroups = NO_GROUPS
    leaves: LeafModules = NO_LEAVES
    batch: Batch = Batch()
    batching: Batching = Batching()
    quantization: Quantization | None = None
    """Quantization of the weights; None: none."""
    is_whole: bool = False
    """Of a folder's multimodal model all sides are built, not the one for text alone."""
    without_effect: tuple[Ignored, ...] = ()

    def for_batches(self, *, on_cuda: bool) -> Settings:
        """Return the settings for `LLM`: fused kernels default to on with a GPU."""
        return self if self.kernel_inject is not None else replace(self, kernel_inject=on_cuda)


def say_without_effect(settings: Settings, say: Callable[[str], object] = log.warning) -> None:
    """Report each key without effect, with the reason; does nothing inside `mute_key_report`.

    Args:
        say: called with each message; by default logs a warning.
    """
    if not _is_said.get():
        for ignored in settings.without_effect:
            say(f"without effect: {ignored.path} ({ignored.reason})")


@contextmanager
def mute_key_report() -> Iterator[None]:
    """Context in which `say_without_effect` does nothing, because the caller has reported the keys already."""
    token = _is_said.set(True)
    try:
        yield
    finally:
        _is_said.reset(token)
