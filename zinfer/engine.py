"""`init_inference` and `InferenceEngine`: a model that runs as transformers wrote it while its weights stream."""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.checkpoint import Checkpoint
from zinfer.config import Settings, resolve_settings
from zinfer.cut import ModelBlock, cut_model
from zinfer.finite import checked
from zinfer.inject.injection import Injection
from zinfer.model import find_model, report_device
from zinfer.offload.stats import RunStats
from zinfer.offload.stream import CopyStream, open_stream
from zinfer.offload.trace import Trace
from zinfer.planning.block_work import BlockWork, find_work
from zinfer.planning.footprint import Footprint, find_footprint
from zinfer.planning.forecast import beside_request
from zinfer.planning.machine import MachineLimits, find_limits, free_device_bytes
from zinfer.planning.model_shape import shape_of
from zinfer.planning.planner import Plan, make_plan
from zinfer.planning.prediction import PassTime, Prediction, disk_spares_time, pass_time, predict
from zinfer.planning.rates import Rates
from zinfer.planning.request import Request
from zinfer.probe.rates import known_rates
from zinfer.quantization.forms import check_patterns, find_activations, find_form, find_rounding
from zinfer.quantization.slab_matrix import most_dequantized_bytes
from zinfer.quantization.stored import find_stored_scheme
from zinfer.runtime import Runtime, check_trace
from zinfer.sequence_length import check_input, check_length, check_room
from zinfer.store.first_use import stored_copy
from zinfer.weights import Weight, load_buffers, match_weights

FindReserve = Callable[[PreTrainedModel, Sequence[ModelBlock], int], Footprint]


def init_inference(
    model: str | os.PathLike[str] | nn.Module,
    config: str | os.PathLike[str] | Mapping[str, object] | None = None,
    **kwargs: object,
) -> "InferenceEngine":
    """Make an engine that runs ``model`` within the memory budgets.

    Args:
        model: a checkpoint folder, a Hugging Face cache folder, a hub name that is in the cache, or a transformers
            module: one with its weights in memory (they are taken over, block by block), or one on the meta device
            together with ``checkpoint=``.
        config: DeepSpeed-style settings: a dict, or the path of a JSON file. Never changed.
        kwargs: the same keys; a key given twice with different values is an error.

    Raises:
        ConfigError: a key or value cannot be used.
        CheckpointError: the checkpoint is incomplete, damaged, or of no model that transformers builds.
        PlanError: a memory budget is too small.
    """
    settings = resolve_settings(config, kwargs)
    return InferenceEngine(model, settings)


class InferenceEngine(nn.Module):
    """A model whose weights stream while it runs; made by `init_inference`.

    Attributes:
        module: the transformers module; its streamed parameters are absent between uses (`zinfer.absent`).
        settings: the resolved configuration.
        plan: homes, buffers and bytes.
        device: where it computes.
        trace: where reads, copies and computes are noted, if they are.

    One thread at a time: concurrent calls of `generate` and `forward` wait for each other.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        settings: Settings,
        open_stream: Callable[[torch.device], CopyStream] = open_stream,
        trace: Trace | None = None,
        check_model: Callable[[PreTrainedModel], object] | None = None,
        find_reserve: FindReserve | None = None,
    ) -> None:
        """As `init_inference`, with settings that are resolved already.

        Args:
            open_stream: makes a copy stream for the device.
            trace: where reads, copies and computes are noted; by default a new one if the settings name a file for it.
            check_model: raises for a model that is not wanted, before anything is read or written for it.
            find_reserve: what to leave of the device for others, from the module, its blocks and the bytes that are
                free for all; by default the batch that the settings state.
        """
        super().__init__()
        check_trace(settings.trace)
        limits = find_limits(settings)
        self.settings = settings
        self.device = limits.device
        self.module, checkpoint = find_model(model, settings)
        if check_model:
            check_model(self.module)
        check_room(self.module, settings.min_out_tokens)
        check_patterns(settings.quantization, self.module)
        blocks, weights = self._cut(checkpoint)
        reserve = find_reserve(self.module, blocks, free_device_bytes(limits)) if find_reserve else None
        if checkpoint and (copy := stored_copy(checkpoint, blocks, self.module.dtype, settings)):
            checkpoint = copy
            blocks, weights = self._cut(copy)
        layers = [block.block.index for block in blocks if block.is_layer]
        self._blocks = tuple(blocks)
        limits = self._beside_others(limits, reserve)
        self.plan: Plan = make_plan([block.block for block in blocks], layers, limits, settings)
        self._files = tuple(checkpoint.files) if checkpoint else None
        self._rates: Rates | None = None
        load_buffers(self.module, weights, self.device)
        report_device(self.module, self.device)
        self._lock = threading.RLock()
        self._wall_s = 0.0
        self.trace = trace or (Trace() if settings.trace else None)
        runtime = Runtime(
            self.module,
            blocks,
            self.plan,
            lambda: open_stream(self.device),
            settings.aio,
            checkpoint.files if checkpoint else {},
            synchronous=settings.synchronous,
            trace=self.trace,
            trace_path=settings.trace,
        )
        self._runtime: Runtime | None = runtime
        self._close = weakref.finalize(self, runtime.close)
        self._injection = Injection(self.module) if settings.kernel_inject else None
        self._restore = weakref.finalize(self, self._injection.remove) if self._injection else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; tensors among the arguments are moved to the device. No gradients.

        Raises:
            NonFiniteError: `zinfer.check_finite` is set, and a layer gave infinities or NaN.
            ValueError: the input, with what the cache holds, exceeds `max_out_tokens` or the model's positions.
        """

        def forward() -> Any:
            check_input(self.module, args, kwargs, self.settings.max_out_tokens)
            return self.module(*self._moved(args), **self._moved(kwargs))

        return self.call(self._checked(forward))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own `generate`: same arguments, same result.

        Raises:
            TypeError: the model generates nothing.
            ValueError: input and new tokens together exceed `max_out_tokens` or the model's positions; checked before
                any compute.
        """
        if not self.module.can_generate():
            raise TypeError(f"a {type(self.module).__name__} does not generate; call the engine itself for its outputs")

        def generate() -> Any:
            check_length(self.module, args, kwargs, self.settings.max_out_tokens)
            return self.module.generate(*self._moved(args), **self._moved(kwargs))

        return self.call(self._checked(generate))

    def stats(self, other_bytes: int = 0) -> RunStats:
        """Bytes moved, memory taken and stalls since the engine was made; another thread may ask while it runs.

        Args:
            other_bytes: that others have copied to the device beside it; they are in the link's share alone.
        """
        return self._running().stats(self._wall_s, self._rates, other_bytes)

    @property
    def injected(self) -> dict[str, str]:
        """What is computed by fused kernels: names of modules, and what is fused in each."""
        return self._injection.injected if self._injection else {}

    def predict(self, batch_size: int, prompt_len: int, new_tokens: int) -> Prediction:
        """What a `generate` of this shape takes on this machine: seconds a pass, tokens a second, the bottleneck.

        The rates are those of `zinfer probe` if it has run here, else measured in a hurry at the first call, which
        takes about a second; `stats` gives shares of them from then on.

        Args:
            batch_size: prompts.
            prompt_len: tokens of the longest of them.
            new_tokens: tokens generated after each.

        Raises:
            ConfigError: a number below 1, or files that cannot be read.
            PlanError: the model is no decoder that generates, or keeps a state whose size is not known.
        """
        request = Request(batch_size, prompt_len, new_tokens)
        return predict(self.plan, self._work, self._find_rates(), request, self._footprint(request))

    def pass_time(self, num_tokens: int, num_rows: int, **sizes: int) -> PassTime:
        """What one pass takes, by resource; rates as for `predict`, arguments as for `prediction.pass_time`."""
        return pass_time(self.plan, self._work, self._find_rates(), num_tokens, num_rows, **sizes)

    def disk_spares_time(self, token_bytes: int) -> bool:
        """As `prediction.disk_spares_time`; rates as for `predict`.

        The disk is the checkpoint's; of a module with its weights in memory no disk is known, and none spares anything.
        """
        return self._files is not None and disk_spares_time(self._work, self._find_rates(), token_bytes)

    def can_borrow(self, memory: Sequence[torch.Tensor]) -> bool:
        """Whether `borrow` would spare a block the way in every pass."""
        return self._running().can_borrow(memory)

    def borrow(self, memory: Sequence[torch.Tensor]) -> None:
        """Let streamed blocks stay in device memory (uint8, ranges of any size) that nobody else uses meanwhile."""
        self._running().borrow(memory)

    def give_back(self) -> None:
        """Use no borrowed memory any more: what is computed from now on may write to it."""
        self._running().give_back()

    @property
    def layers(self) -> list[nn.Module]:
        """The modules of the transformer's layers, in the model's order."""
        return list(self.named_layers.values())

    @property
    def named_layers(self) -> dict[str, nn.Module]:
        """As `layers`, by their names in the module."""
        names = {module: name for name, module in self.module.named_modules()}
        return {names[block.sites[0]]: block.sites[0] for block in self._blocks if block.is_layer}

    def destroy(self) -> None:
        """Stop the threads and give back memory and files; the engine cannot be used after. May be called again.

        An engine that is dropped without it is cleaned up when it is collected, or at the end of the process.
        """
        with self._lock:
            self._runtime = None
            if self._restore:
                self._restore()
            self._close()

    def _cut(self, checkpoint: Checkpoint | None) -> tuple[list[ModelBlock], dict[str, Weight]]:
        """The blocks, and where the checkpoint holds what they consist of; nowhere for weights in memory."""
        scheme = find_stored_scheme(checkpoint) if checkpoint else None
        weights = match_weights(self.module, checkpoint, scheme) if checkpoint else {}
        rules, checksums = self.settings.quantization, scheme.checksums if scheme else {}
        form, rounding, quantizes_input = find_form(rules), find_rounding(rules), find_activations(rules)
        return cut_model(self.module, weights, form, rounding, checksums, quantizes_input), weights

    @functools.cached_property
    def _work(self) -> tuple[BlockWork, ...]:
        return find_work(self._blocks, replace(shape_of(self.module), is_fused=bool(self.injected)))

    def _find_rates(self) -> Rates:
        if self._rates is None:
            self._rates = known_rates(self.device, self._files)
        return self._rates

    @property
    def _dequantized_bytes(self) -> int:
        return most_dequantized_bytes(block.block for block in self._blocks)

    def _footprint(self, request: Request) -> Footprint:
        shape, dtype = shape_of(self.module), self.module.dtype
        on_cuda = self.device.type == "cuda"
        return find_footprint(shape, dtype, request, on_cuda=on_cuda, dequantized_bytes=self._dequantized_bytes)

    def _beside_others(self, limits: MachineLimits, reserve: Footprint | None) -> MachineLimits:
        """The budgets, less what others take of the device: by default the batch that the configuration states."""
        free_bytes = free_device_bytes(limits)
        if reserve is not None:
            whole = replace(reserve, activation_bytes=reserve.activation_bytes + self._dequantized_bytes)
            return beside_request(limits, free_bytes, self.settings, whole)
        batch = self.settings.batch
        if batch.batch_size is None or batch.prompt_len is None or batch.new_tokens is None:
            return limits
        request = Request(batch.batch_size, batch.prompt_len, batch.new_tokens)
        return beside_request(limits, free_bytes, self.settings, self._footprint(request))

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError("this engine was destroyed; make a new one with zinfer.init_inference")
        return self._runtime

    def call(self, work: Callable[[], Any]) -> Any:
        """Whatever runs the module's forward: one thread at a time, no gradients, left in order however it ends."""
        # No generator-based context manager here: one that Ctrl-C leaves suspended may be collected, and its lock
        # released in vain, by another thread.
        with self._lock, torch.no_grad():
            runtime = self._running()
            begin_s = time.perf_counter()
            try:
                return work()
            finally:
                self._wall_s += time.perf_counter() - begin_s
                runtime.settle()

    def _checked(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return checked(work, self.named_layers, self.module.dtype) if self.settings.check_finite else work

    def _moved(self, value: Any) -> Any:
        """Tensors on the device, inside the containers that transformers passes around."""
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        if isinstance(value, Mapping):
            return {key: self._moved(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self._moved(item) for item in value)
        return value
