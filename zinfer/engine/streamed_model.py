"""`StreamedModel`: a module whose weights stream while it runs; `InferenceEngine` and `LLM` both run one."""

import atexit
import gc
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from socket import gethostname
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.engine.acceleration import Acceleration, open_graphs
from zinfer.engine.agreement import check_agreement
from zinfer.engine.division import Division, Prepare
from zinfer.engine.enforced_cap import EnforcedCap
from zinfer.engine.estimator import PassEstimator
from zinfer.engine.interrupts import deferred
from zinfer.engine.kernel_cache import ensure_kernel_cache
from zinfer.engine.prepare import PreparedModel
from zinfer.engine.runtime import Runtime, check_trace
from zinfer.engine.stated_groups import check_groups
from zinfer.errors import ConfigError, LengthError
from zinfer.graphs.forward_graphs import ForwardGraphs
from zinfer.model.build import find_model
from zinfer.model.context_length import check_min_out_tokens
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import check_num_experts
from zinfer.nvme.pool import call_all, start_thread
from zinfer.offload.partition import WHOLE
from zinfer.offload.stats import RunStats
from zinfer.offload.stream import CopyStream, Event, open_stream
from zinfer.offload.trace import Trace
from zinfer.planning.device_cap import DeviceParts, naming_least_cap
from zinfer.planning.memory import Footprint
from zinfer.planning.placement import Plan
from zinfer.probe.limits import MachineLimits, choose_device, find_limits, free_device_bytes
from zinfer.ranks.group import RankGroup, join_group
from zinfer.ranks.mesh import Mesh
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.weights import Checkpoint

log = logging.getLogger(__name__)

FindReserve = Callable[[PreTrainedModel, Sequence[ModelBlock], MachineLimits, int], Footprint]


class StreamedModel:
    """A module, its blocks in their homes, and the runtime that streams them.

    Args:
        model: as for `zinfer.init_inference`, or an open checkpoint.
        settings: the resolved configuration.
        open_stream: makes a copy stream for the device.
        trace: records reads, copies and compute; by default a new one if the settings name a file for it.
        check_model: raises for an unsuitable model, before its weights are read or written.
        find_reserve: computes the device memory to reserve from the module, its blocks, the budgets and the free bytes,
            whatever the cap of the budgets; by default for the batch that the settings state. Ranks get the same
            numbers, the smallest of any.
        replays_passes: the caller captures whole passes, in ``pass_graphs``, not only the module's forward.
        prepare: partitions the module, divided among ranks or not; by default over the weights of its checkpoint.
        beside_load: a context for the time in which weights are loaded, from the planned device memory.

    Attributes:
        module: the transformers module, or the plain one that was given. Between uses its streamed parameters are
            placeholders (`zinfer.engine.placeholder`); `state_dict` and `save_pretrained` read them.
        settings: the resolved configuration.
        plan: homes, buffers and bytes.
        device_parts: planned device memory, by what takes it.
        cap: enforces `zinfer.max_device_memory`, until the engine is destroyed.
        device: where it computes.
        estimator: predicts the seconds of a pass.
        trace: records reads, copies and compute; None without one.
        pass_graphs: for a caller that captures whole passes; None if that is not possible.
        ranks: the ranks of the job; None in a process that runs alone.
        stages: this rank's stage of a pipeline; None without one.

    Raises:
        CheckpointError, ConfigError, PlanError, OSError: as `zinfer.init_inference`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Checkpoint | nn.Module,
        settings: Settings,
        open_stream: Callable[[torch.device], CopyStream] = open_stream,
        trace: Trace | None = None,
        check_model: Callable[[PreTrainedModel], object] | None = None,
        find_reserve: FindReserve | None = None,
        replays_passes: bool = False,
        prepare: Prepare = PreparedModel.of,
        beside_load: Callable[[DeviceParts], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        check_trace(settings.trace)
        self.settings = settings
        self.trace = trace or (Trace() if settings.trace else None)
        self._lock = threading.RLock()
        self._calling: int | None = None  # the thread inside `call`
        self._wall_s = 0.0
        self._began_s: float | None = None
        self._ended: Event | None = None  # of the last call, on the device; None while one runs
        with ExitStack() as owned:  # a failure deletes the files written so far
            group, limits, division = self._open_division(owned)
            prepared = self._prepare(model, division, check_model, prepare)
            prepared, limits = self._place(prepared, limits, find_reserve, owned)
            self.cap = EnforcedCap(self.device, limits.cap_bytes)
            owned.callback(self.cap.close)
            prepared.take_to(self.device)
            can_capture = division.can_capture() if replays_passes else not division.exchanges
            graphs = open_graphs(self.plan, settings, self.device, by_default=replays_passes, can_capture=can_capture)
            self.pass_graphs = graphs if replays_passes else None
            self._acceleration = Acceleration(self.module, self.device, None if replays_passes else graphs)
            division.connect(self.module, prepared)
            with self.cap.explaining(), beside_load(self.device_parts):
                runtime = self._load(prepared, lambda: open_stream(self.device), graphs)
            division.connect_outputs(runtime.serve_next)
            owned.pop_all()
        self.stages = division.stages
        self._divided = self.ranks if division.exchanges else None
        self._runtime: Runtime | None = runtime
        self._process_id = os.getpid()
        self._close = _Life(self._acceleration, runtime, division, self.ranks, self.cap)
        self._acceleration.keep_experts()
        if settings.kernel_inject:
            self._acceleration.inject(prepared.packs, replayed=graphs is not None, is_copied=runtime.is_copied)
        self.estimator = self._open_estimator(prepared, group.num_local if group else 1)

    def _open_division(self, owned: ExitStack) -> tuple[RankGroup | None, MachineLimits, Division]:
        """Find this process's ranks, device and part of the model."""
        settings = self.settings
        group = join_group(choose_device(settings).type)
        self._mesh = mesh = Mesh.of(vars(settings.parallel), group.hosts if group else [gethostname()])
        check_groups(mesh, group.rank if group else 0, settings)
        self.device = choose_device(settings)
        if self.device.type == "cuda":
            ensure_kernel_cache()
        self.ranks = ranks = ModelRanks(group, self.device, mesh) if group else None
        if ranks is not None:
            owned.push(ranks.leave_after)
        # After the ranks have met: before, others may still map memory of an engine that this one has closed.
        limits = find_limits(settings, group.num_local if group else 1)
        division = Division(mesh, group, ranks)
        owned.callback(division.remove)
        return group, limits, division

    def _prepare(
        self,
        model: str | os.PathLike[str] | Checkpoint | nn.Module,
        division: Division,
        check_model: Callable[[PreTrainedModel], object] | None,
        prepare: Prepare,
    ) -> PreparedModel:
        """Build the module without its weights, and partition it into blocks."""
        settings = self.settings
        self.module, checkpoint = find_model(model, settings, division.find_part(model, settings))
        if check_model:
            check_model(self.module)
        check_min_out_tokens(self.module, settings.min_out_tokens)
        check_num_experts(self.module, settings.num_experts)
        prepared = division.prepare(self.module, checkpoint, settings, prepare)
        division.save(prepared)
        return prepared

    def _place(
        self, prepared: PreparedModel, limits: MachineLimits, find_reserve: FindReserve | None, owned: ExitStack
    ) -> tuple[PreparedModel, MachineLimits]:
        """Find the plan and what takes the device's memory, the same on all ranks.

        Args:
            owned: closes the packed model, whose files a failure deletes.

        Returns:
            The model with its weights packed, and the least limits of all ranks.

        Raises:
            PlanError: a budget is too small; says the least cap that would do, if there is one.
        """
        ranks, free_bytes = self.ranks, free_device_bytes(limits)
        if ranks is not None:
            several = ranks.exchange((limits, free_bytes))
            limits, free_bytes = limits.least(each for each, _ in several), min(each for _, each in several)
        for line in limits.overstated(self.settings.memory, free_bytes):
            log.warning("%s", line)

        def reserved(within: MachineLimits) -> Footprint | None:
            return find_reserve(self.module, prepared.blocks, within, free_bytes) if find_reserve else None

        def parts_within(within: MachineLimits) -> DeviceParts:
            return prepared.device_parts(within, free_bytes, reserved(within), ranks.partition if ranks else WHOLE)

        with naming_least_cap(limits, free_bytes, parts_within):
            reserve = reserved(limits)
            prepared = prepared.packed_alike(ranks)
            owned.callback(prepared.close)
            self.plan: Plan = prepared.plan(limits, free_bytes, reserve, ranks)
        beside = prepared.beside_weights(reserve, limits)
        self.device_parts = DeviceParts.of(self.plan, beside, limits, limits.within_cap(free_bytes))
        self._blocks = prepared.blocks
        return prepared, limits

    def _load(
        self,
        prepared: PreparedModel,
        open_stream: Callable[[], CopyStream],
        graphs: ForwardGraphs | None,
    ) -> Runtime:
        """Fill the homes, and let the module's forward find its weights there."""
        return Runtime(
            self.module,
            prepared.blocks,
            self.plan,
            open_stream,
            self.settings,
            prepared.files,
            scratch=prepared.scratch,
            trace=self.trace,
            wrap=self._acceleration.wrap,
            cuts=graphs.cuts if graphs else None,
            lock=self._lock,
            ranks=self.ranks,
            observer=prepared.observer,
        )

    def _open_estimator(self, prepared: PreparedModel, num_local: int) -> PassEstimator:
        """Return what predicts passes, of ranks that share a host's links and disk."""
        files, share = tuple(prepared.files) or None, num_local / self._mesh.zero
        fused = bool(self.injected)
        return PassEstimator(self.module, self._blocks, self.plan, self.device, files, fused, num_local, share)

    def call(self, work: Callable[[], Any]) -> Any:
        """Run work that calls the module's forward: one thread at a time, no gradients, cleaned up on any exit.

        In the main thread Ctrl-C takes effect at the start of a pass, or before the wait for a block.
        """
        self.check_process()  # before the lock: another thread may have held it when the process was forked
        with self._lock, torch.no_grad(), self.cap.explaining():
            try:
                return deferred(lambda: self._call(work, self._running()))
            except (ConfigError, LengthError):  # raised before any compute, on all ranks
                raise
            except BaseException as failure:
                if self._divided is not None:  # the others would wait for this rank's part
                    self._divided.fail(failure)
                raise

    def keeping(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keep a module's block on the device from its next use on, within `call`; it streams once for several uses."""
        return self._running().keeping(module)

    def agree(self, what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check, if ranks divide each layer, that all of them make the same call; within `call`.

        Raises:
            RankError: as `check_agreement`.
        """
        if self._divided is not None:
            check_agreement(self._divided, what, args, kwargs, self.module, self.device)

    def _call(self, work: Callable[[], Any], runtime: Runtime) -> Any:
        begin_s = time.perf_counter()
        self._began_s, self._ended = self._began_s or begin_s, None
        runtime.resume()
        outer, self._calling = self._calling, threading.get_ident()
        try:
            return work()
        finally:
            self._calling = outer
            self._ended = runtime.pause()
            self._wall_s += time.perf_counter() - begin_s
            runtime.settle()

    def check_ranks(self) -> None:
        """Raise the RankError of a rank that failed; call it once the device is done, before results are used.

        Work that is enqueued when a rank fails comes to its end on the device, with slabs that lack its ranges.
        """
        if self.ranks is not None:
            self.ranks.check()

    def stats(self, other_bytes: int = 0) -> RunStats:
        """Return bytes moved, memory used and stalls since the engine was made; callable from any thread.

        Args:
            other_bytes: that the caller copied to the device itself; they count in ``link_share`` only.
        """
        return self._running().stats(self._wall_s, self._span_s(), self.estimator.known_rates, other_bytes)

    def _span_s(self) -> float:
        began_s, ended = self._began_s, self._ended
        if began_s is None:
            return 0.0
        is_over = ended is not None and ended.is_reached()
        return (ended.time_s() if ended is not None and is_over else time.perf_counter()) - began_s

    @property
    def num_gathering(self) -> int:
        """As `Runtime.num_gathering`."""
        return self._running().num_gathering

    @property
    def injected(self) -> dict[str, str]:
        """The modules with fused kernels: their names, and what is fused in each."""
        return self._acceleration.injected

    def can_borrow(self, memory: Sequence[torch.Tensor]) -> bool:
        """Whether `add_cache_slots` could cache a block that streams in every pass."""
        return self._running().can_borrow(memory)

    def add_cache_slots(self, memory: Sequence[torch.Tensor]) -> None:
        """Cache streamed blocks in device memory (uint8, ranges of any size) that is unused until they are removed."""
        self._running().add_cache_slots(memory)

    def remove_cache_slots(self) -> None:
        """Stop using borrowed memory, so that later compute may write to it."""
        self._running().remove_cache_slots()

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
        """Stop the threads and free memory and files; the engine cannot be used after. May be called again.

        The memory is free when this returns, even if the engine or its module is still referenced. An engine that was
        not destroyed is cleaned up when it is garbage-collected, or at exit. Ctrl-C takes effect after the clean-up.

        Raises:
            RuntimeError: a call of this thread is under way, as in a forward hook.
        """
        if self.is_forked:  # a fork has no threads, and everything else belongs to the parent
            return
        if self._calling == threading.get_ident():
            raise RuntimeError(
                "destroy was called within a call of this engine, in a forward hook perhaps, and the weights are in "
                "use; let the call return first"
            )
        if self._runtime is not None:
            self._runtime.serve_to_the_end()  # before the lock, which serving takes
        with self._lock:
            self._runtime = None
            deferred(self._close)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that made the engine."""
        return os.getpid() != self._process_id

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the one that made the engine."""
        if self.is_forked:
            raise RuntimeError(
                f"process {os.getpid()} was forked from process {self._process_id}, which made this engine, and a fork "
                'has none of its threads; make the engine in the child, or start the child with "spawn" '
                "(multiprocessing.get_context)"
            )

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError("this engine was destroyed; make a new one with zinfer.init_inference")
        return self._runtime


class _Life:
    """Cleans up once: when it is called, when nothing refers to it any more, or at exit.

    Nothing happens in a process that was forked from the one that made it.
    """

    def __init__(
        self,
        acceleration: Acceleration,
        runtime: Runtime,
        division: Division,
        ranks: ModelRanks | None,
        cap: EnforcedCap,
    ) -> None:
        closes_ranks = [ranks.close] if ranks is not None else []
        self._ends = [
            acceleration.remove,
            runtime.close,
            division.remove,
            *closes_ranks,
            cap.close,
        ]  # bounds the others
        self._process_id = os.getpid()
        _lives[next(_numbers)] = self

    def __call__(self) -> None:
        ends, self._ends = self._ends, []
        if os.getpid() == self._process_id:
            call_all(ends)

    def __del__(self) -> None:
        if threading.current_thread() is threading.main_thread() or not self._ends:
            self()
        elif os.getpid() == self._process_id:  # the collector may run in a thread that ends here
            start_thread("zinfer-end-engine", partial(call_all, self._ends), _warn, daemon=False)


def _warn(failure: BaseException) -> None:
    log.error("an engine that nobody refers to has kept some of its memory", exc_info=failure)


_lives: "weakref.WeakValueDictionary[int, _Life]" = weakref.WeakValueDictionary()
_numbers: Final = itertools.count()


def collect_dropped() -> None:
    """Clean up engines that nobody refers to; an engine and its module refer to each other."""
    if _lives:
        gc.collect()


@atexit.register
def _end_all() -> None:
    call_all([life for _, life in sorted(_lives.items(), reverse=True)])
