"""Compile a job's kernels while its weights load, by passes of a few layers in a thread."""

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from zinfer.batching.llm import LLM
from zinfer.config import Settings, resolve_settings
from zinfer.config.settings import mute_key_report
from zinfer.config.source import config_keys
from zinfer.engine.division import Prepare
from zinfer.engine.kernel_cache import are_compiled, kernels_name, note_compiled
from zinfer.engine.prepare import PreparedModel
from zinfer.errors import PlanError
from zinfer.jobs.warmup import FewLayers, compute_passes, config_alone
from zinfer.nvme.pool import start_thread
from zinfer.planning.device_cap import DeviceParts
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.probe.limits import choose_device, find_limits
from zinfer.ranks.group import join_group, working_alone
from zinfer.ranks.mesh import Mesh
from zinfer.weights import Checkpoint

log = logging.getLogger("zinfer")

_KV_PART: Final = 8  # the few layers take an eighth of what all would
_KV_PASSES: Final = 2  # of prompts, with their new tokens
_SWITCH_S: Final = 1e-4
"""After which Python lets another thread go on. A load waits for its turn thousands of times, by default 5 ms each."""
_LEAST_BYTES: Final = 4 << 30  # of the tensors


class Rehearsal:
    """Lets a job find its kernels compiled: a small `LLM` runs beside the load, where the KV cache lies later.

    Each of several ranks rehearses by itself. Nothing is rehearsed on a CPU, where ranks divide the layers, beside a
    draft model, for a model that is loaded in a few seconds, or if kernels were compiled before with the same software
    and kind of GPU. It ends with the load, whatever is left.

    Args:
        model, config, options: of the `LLM` that loads.
        prepare: prepares the few layers.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Checkpoint,
        config: str | os.PathLike[str] | Mapping[str, object] | None,
        options: Mapping[str, object],
        prepare: Prepare = PreparedModel.of,
    ) -> None:
        self._model, self._config, self._options, self._prepare = model, config, options, prepare
        self._settings = resolve_settings(config, options)
        self._is_loaded = threading.Event()
        self._kernels: str | None = None  # that are to be compiled

    @contextmanager
    def beside_load(self, parts: DeviceParts, budget: BatchingBudget) -> Iterator[None]:
        """Rehearse in a thread until the block ends.

        Args:
            parts: the device memory that is planned.
            budget: the sizes of batches.
        """
        if not self._is_wanted():
            yield
            return
        run = partial(self._run, choose_device(self._settings), parts, budget)
        thread = start_thread("zinfer-rehearsal", run, _warn)
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            yield
        finally:
            self._is_loaded.set()
            thread.join()
            sys.setswitchinterval(usual_s)

    def note_passes(self) -> None:
        """Note that the job has computed passes, which have compiled what was left."""
        if self._kernels is not None:
            note_compiled(self._kernels)

    def _is_wanted(self) -> bool:
        settings = self._settings
        if settings.batching.draft_model is not None or not find_limits(settings).on_cuda or _divides_layers(settings):
            return False
        checkpoint = self._model if isinstance(self._model, Checkpoint) else Checkpoint.open(self._model)
        if checkpoint.is_listed or sum(tensor.nbytes for tensor in checkpoint.tensors.values()) < _LEAST_BYTES:
            return False
        self._kernels = kernels_name(checkpoint, settings)
        return not are_compiled(self._kernels)

    def _run(self, device: torch.device, parts: DeviceParts, budget: BatchingBudget) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with mute_key_report(), working_alone():
                self._rehearse(parts, budget)
        except PlanError as error:
            log.debug("kernels are compiled in the first passes, since no few layers fit beside the load: %s", error)

    def _rehearse(self, parts: DeviceParts, budget: BatchingBudget) -> None:
        num_pages = min(_KV_PASSES * budget.tokens_per_pass // budget.page_size, budget.num_pages)
        own: dict[str, Any] = {
            "tokens_per_pass": budget.tokens_per_pass,
            "max_sequences": budget.max_sequences,
            "kv_page_size": budget.page_size,
            "kv_cache_memory": num_pages * (budget.kv_bytes // budget.num_pages) // _KV_PART,
            "max_device_memory": parts.kv_cache + parts.activations,  # the KV cache is not there yet
            "max_weight_memory": None,
            "max_host_memory": None,  # the load takes what was stated
            "max_pinned_memory": None,
            "speculate": "off",
        }
        options: dict[str, Any] = {name: value for name, value in self._options.items() if name not in {*own, "trace"}}
        config = config_alone(config_keys(self._config), own)
        config.pop("zero_optimization", None)  # the few layers stay on the device
        config["enable_cuda_graph"] = False  # a capture forbids what the load does meanwhile
        with LLM(self._model, config, prepare=FewLayers(self._prepare).prepare, **options) as llm:
            if compute_passes(llm, self._is_loaded.is_set):
                self.note_passes()


def _warn(failure: BaseException) -> None:
    log.warning("kernels are compiled in the first passes, not while the weights load: %s", failure)


def _divides_layers(settings: Settings) -> bool:
    """Whether a rank has parts of layers, whose kernels have other widths, or some of the layers."""
    group = join_group(choose_device(settings).type)
    if group is None:
        return False
    mesh = Mesh.of(vars(settings.parallel), group.hosts)
    return mesh.num_dividing > 1 or mesh.pipeline > 1
