"""Graphs, fused kernels and compiled parts that speed up a module's forward, and a timer for it."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.engine.forward_timer import PassTimes
from zinfer.engine.hooks import Forward
from zinfer.engine.static_caches import StaticCaches
from zinfer.errors import NotProfiledError
from zinfer.graphs.capturer import CudaCapturer
from zinfer.graphs.forward_graphs import ForwardGraphs, GraphCounts
from zinfer.inject.fusion_groups import FusionGroup
from zinfer.inject.injection import Injection
from zinfer.model.module_patches import ModulePatches, is_patched
from zinfer.planning.pass_sizes import PATIENCE, most_streamed_bytes
from zinfer.planning.placement import Plan

log = logging.getLogger(__name__)

_DECODE: Final = "_optimize_model_for_decode"
"""The context manager that `generate` enters before its decode passes (transformers, generation/utils.py)."""


def open_graphs(
    plan: Plan, settings: Settings, device: torch.device, *, by_default: bool = False, can_capture: bool = True
) -> ForwardGraphs | None:
    """Return the graphs that the settings ask for; None if they do not, or if nothing can be replayed.

    Graphs that were asked for and cannot be used are a warning.

    Args:
        by_default: whether to use graphs if the settings do not mention them, for forwards that they may speed up.
        can_capture: whether what ranks exchange within a forward, if anything, can be captured.
    """
    if not (by_default if settings.cuda_graph is None else settings.cuda_graph):
        return None
    capturer = capturer_for(device)
    if capturer is None:
        hindrance = "graphs need a CUDA device"
    elif not can_capture:
        hindrance = (
            "what ranks exchange within a pass is captured only for zinfer.parallel.tensor, in an LLM, among GPUs that "
            "copy from each other's memory"
        )
    elif settings.check_finite:
        hindrance = "zinfer.check_finite looks at every layer"
    elif settings.batching.kv_cache_tier == "host":
        hindrance = "a KV cache in host memory changes its addresses"
    elif settings.cuda_graph:
        return ForwardGraphs(capturer, device)
    else:
        return ForwardGraphs(capturer, device, most_streamed_bytes(len(plan.homes)), PATIENCE)
    level = logging.WARNING if settings.cuda_graph else logging.DEBUG
    log.log(level, "enable_cuda_graph: %s; Python launches every forward", hindrance)
    return None


def capturer_for(device: torch.device) -> CudaCapturer | None:
    """Return the graph capturer for a device; None without CUDA."""
    return CudaCapturer() if device.type == "cuda" else None


class Acceleration:
    """Graphs, fused kernels, compiled parts and a timer, each active from its request until `remove`.

    Graphs wrap the module's own forward first; streaming and pass counting wrap the graphs. Kernels are inside the
    forward, and only parts without a kernel are compiled. The timer is outermost.

    Args:
        module: the module to speed up.
        device: where it computes.
        graphs: of its forward, none captured yet. None: Python launches all.

    Attributes:
        caches: the KV caches of `generate` that graphs read.
        is_compiled: whether `compile` was called.
    """

    def __init__(self, module: PreTrainedModel, device: torch.device, graphs: ForwardGraphs | None) -> None:
        self._module = module
        self._device = device
        self._graphs = graphs
        self.caches = StaticCaches(module, graphs) if graphs else None
        self._injection: Injection | None = None
        self._patches = ModulePatches()
        self.is_compiled = False
        self._times: PassTimes | None = None

    @property
    def wrap(self) -> Callable[[Forward], Forward] | None:
        """The function that wraps a forward in the graphs; None without graphs."""
        return self._graphs.wrap if self._graphs else None

    @property
    def counts(self) -> GraphCounts:
        """How many forwards were captured, replayed or run eagerly."""
        return self._graphs.counts if self._graphs else GraphCounts()

    @property
    def generate(self) -> Callable[..., Any]:
        """The module's own `generate`, with static KV caches if graphs are used."""
        found: Callable[..., Any] = self.caches.generate if self.caches else self._module.generate
        return found

    def eagerly(
        self, work: Callable[[], Any], reason: str = "its layers are being checked"
    ) -> Callable[[], Any] | None:
        """Return the work without graphs, so that hooks on layers run; None if there are no graphs."""
        return partial(self._graphs.eagerly, work, reason) if self._graphs else None

    def keep_experts(self) -> None:
        """Compute mixtures of experts in decode passes as in prefill.

        transformers would switch to an implementation that copies an expert's weights for each token routed to it:
        1.2 GB per token and layer of Mixtral-8x22B, far more than is streamed.
        """
        if hasattr(type(self._module), _DECODE):
            self._patches.patch(self._module, nullcontext, _DECODE)

    def inject(self, packs: Iterable[FusionGroup], *, replayed: bool, is_copied: bool) -> None:
        """Install fused kernels; arguments as for `Injection`."""
        self._injection = Injection(self._module, packs, replayed=replayed, is_copied=is_copied)
        if not self._injection.injected:
            name = type(self._module).__name__
            log.warning("replace_with_kernel_inject: nothing in a %s has a fused kernel; it runs as it is", name)

    @property
    def injected(self) -> dict[str, str]:
        """The modules with fused kernels: their names, and what is fused in each."""
        return self._injection.injected if self._injection else {}

    def compile(self, layers: Iterable[nn.Module], backend: str, options: Mapping[str, object]) -> None:
        """Compile the layers' norms and feed-forwards, whose code is the same in all layers.

        A whole layer would be recompiled for each KV cache length and for each layer, because its code reads its own
        index; torch gives up after a few. Parts with fused kernels are not compiled.

        Args:
            backend, options: for `torch.compile`.

        Raises:
            RuntimeError: `compile` was called before.
        """
        if self.is_compiled:
            raise RuntimeError("this engine is compiled already")
        self.is_compiled = True
        for part in (part for layer in layers for part in layer.children()):
            if not _knows_its_layer(part) and not is_patched(part):
                self._patches.patch(part, torch.compile(part.forward, backend=backend, **options))  # type: ignore[call-overload]
        if self._graphs:
            self._graphs.begin_anew()

    def time_passes(self, *, use_cuda_events: bool) -> None:
        """Time every forward call from now on; ``use_cuda_events`` as for `PassTimes`."""
        if self._times is not None:
            self._times.remove()
        self._times = PassTimes(self._module, self._device, use_cuda_events=use_cuda_events)

    def take_times(self) -> list[float]:
        """Return the times as `PassTimes.take`, also after `remove`.

        Raises:
            NotProfiledError: `time_passes` was not called.
        """
        if self._times is None:
            raise NotProfiledError("model profiling is not enabled; call profile_model_time() before the model runs")
        return self._times.take()

    def remove(self) -> None:
        """Undo everything in reverse order and free the graphs' memory; may be called again."""
        if self._times is not None:
            self._times.remove()
        self._patches.undo()
        if self._injection:
            self._injection.remove()
        if self.caches:
            self.caches.close()


def _knows_its_layer(part: nn.Module) -> bool:
    """Whether a module of the part knows its layer's number, as every module with a KV cache does."""
    return any(hasattr(module, "layer_idx") or hasattr(module, "layer_number") for module in part.modules())
