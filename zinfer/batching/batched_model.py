"""`BatchedModel`: a streamed model with its KV cache, its batcher and its thread; `LLM` gives it requests."""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.batching.batcher import Batcher
from zinfer.batching.draft_model import SmallModel, open_drafter
from zinfer.batching.family_check import batched_limits
from zinfer.batching.following_loop import FollowingLoop
from zinfer.batching.lockstep import Follower, Leader, open_lockstep
from zinfer.batching.pass_meter import PassMeter
from zinfer.batching.request import RequestBuilder
from zinfer.batching.runner import PassRunner, open_pages
from zinfer.batching.serving_loop import ServingLoop
from zinfer.batching.speculating import open_speculation
from zinfer.batching.stage_tokens import StageTokens, open_tokens
from zinfer.config import Settings
from zinfer.engine.division import Prepare
from zinfer.engine.input_errors import InputErrors
from zinfer.engine.streamed_model import StreamedModel
from zinfer.graphs.forward_graphs import GraphCounts
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import ModelSpec, common_window, count_experts
from zinfer.offload.stats import RunStats
from zinfer.planning.device_cap import DeviceParts
from zinfer.planning.job_estimator import JobEstimator, JobPrediction, PassTimes
from zinfer.planning.kv_budget import BatchingBudget, WeightSizes, find_budget
from zinfer.planning.latency import ServingLatency, describe_unreachable, predict_latency
from zinfer.planning.memory import Footprint
from zinfer.planning.pass_sizes import short_pass_tokens
from zinfer.planning.placement import Plan
from zinfer.probe.limits import MachineLimits
from zinfer.requests.generation_config import GenerationDefaults
from zinfer.requests.prompt_encoder import find_tokenizer
from zinfer.requests.stop_criteria import find_end_token_ids
from zinfer.sampling.sampler import Sampler
from zinfer.scheduling.schedule import PassSize
from zinfer.scheduling.speculation import Speculation
from zinfer.weights import Checkpoint

log = logging.getLogger("zinfer")

BesideLoad = Callable[[DeviceParts, BatchingBudget], AbstractContextManager[object]]


class BatchedModel:
    """A model that computes ragged batches: what it holds, what it counts, and what it is predicted to take.

    Args:
        model: as for `zinfer.init_inference`, or an open checkpoint.
        settings: the resolved configuration, for batches.
        tokenizer, swaps_to_disk, num_pages, prepare, beside_load, interactive: as for `LLM`.
        draft: a small model that guesses tokens, which this one closes; None: there is none.

    Attributes:
        tokenizer, vocab_size, limits, end_token_ids: as of `LLM`.
        has_experts: whether tokens choose among experts, so that those that share a pass decide what kernels they get.

    Raises:
        ConfigError, CheckpointError, PlanError: as `LLM`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Checkpoint | nn.Module,
        settings: Settings,
        *,
        tokenizer: Any,
        swaps_to_disk: bool | None,
        num_pages: int | None,
        prepare: Prepare,
        beside_load: BesideLoad | None,
        interactive: bool,
        draft: SmallModel | None,
    ) -> None:
        budget: BatchingBudget | None = None

        def check_model(module: PreTrainedModel) -> None:
            self.limits = batched_limits(module, settings.max_out_tokens)

        def find_reserve(
            module: PreTrainedModel, blocks: Sequence[ModelBlock], limits: MachineLimits, free_bytes: int
        ) -> Footprint:
            nonlocal budget
            most = self.limits.most_tokens
            spec, weights = ModelSpec.read(module.config), WeightSizes.of(blocks)
            budget = find_budget(spec, module.dtype, weights, settings, limits, free_bytes, most, num_pages)
            return budget.footprint

        def loading(parts: DeviceParts) -> AbstractContextManager[object]:
            assert budget is not None
            return nullcontext() if beside_load is None else beside_load(parts, budget)

        with ExitStack() as opened:
            # Graphs capture a whole pass with its pages, not only the module's forward.
            self._model = StreamedModel(
                model,
                settings,
                check_model=check_model,
                find_reserve=find_reserve,
                replays_passes=True,
                prepare=prepare,
                beside_load=loading,
            )
            opened.callback(self._model.destroy)
            assert budget is not None
            with self._model.cap.explaining():
                self._open(settings, budget, tokenizer, swaps_to_disk, interactive, draft)
            opened.pop_all()

    def _open(
        self,
        settings: Settings,
        budget: BatchingBudget,
        tokenizer: Any,
        swaps_to_disk: bool | None,
        interactive: bool,
        draft: SmallModel | None,
    ) -> None:
        """Open the cache, the scheduler and the serving loop over the model."""
        self._open_builder(settings, tokenizer)
        device, vocab_size = self._model.device, self.vocab_size
        spec, folder = ModelSpec.read(self._model.module.config), settings.offload.nvme_path
        token_bytes = spec.kv.token_bytes(budget.kv_dtype)
        self.has_experts = count_experts(self._model.module.config.get_text_config()) > 0
        if folder is not None and swaps_to_disk is None:
            swaps_to_disk = self._model.estimator.disk_spares_time(token_bytes)
            if self._model.ranks is not None:  # which measure other rates, and make equal passes of equal rows
                swaps_to_disk = self._model.ranks.exchange(swaps_to_disk)[0]
        budget = replace(budget, swaps_to_disk=folder is not None and bool(swaps_to_disk))
        lockstep, budget = open_lockstep(self._model.ranks, budget)
        window, tokens = spec.common_window, None
        if self._model.ranks is not None and self._model.stages is not None:
            tokens = open_tokens(self._model.ranks)
            window = common_window(self._model.ranks.exchange(window))
        self._cache = open_pages(self._model, spec, budget)
        self._graphs = self._model.pass_graphs
        if interactive and self._graphs is not None:
            self._graphs.patience = 1  # a server lives long, and its first users wait, too
        self._runner = PassRunner(self._model, self._cache, self._graphs)
        self._estimator = self._open_estimator(
            budget, window, token_bytes, settings.batching.max_token_latency_s, interactive
        )
        self._pass_times = PassTimes(self._estimator)
        if (note := describe_unreachable(self._estimator)) is not None and not isinstance(lockstep, Follower):
            log.warning(note)
        if (said := self._defaults.notice) and not isinstance(lockstep, Follower):
            log.warning("%s", said)
        self._speculation: Speculation | None = None
        if not isinstance(lockstep, Follower):
            drafter = open_drafter(settings, draft, self.tokenizer, vocab_size)
            self._speculation = open_speculation(settings, self._model, self._estimator, drafter)
        self._batcher = Batcher(
            self._runner,
            self._cache,
            Sampler(vocab_size, device, budget.part_logits),
            budget,
            self._estimator,
            window,
            tokens,
            self._speculation,
        )
        self._loop = self._open_loop(lockstep, draft, tokens)
        self._loop.close_with(self)

    def _open_estimator(
        self, budget: BatchingBudget, window: int | None, token_bytes: int, latency_s: float | None, interactive: bool
    ) -> JobEstimator:
        """Return what predicts passes and limits their tokens."""
        model, streams = self._model, self._model.plan.streamed_bytes > 0
        is_short = interactive and not streams and not self.has_experts
        num_params = sum(each.block.layout.numel for each in model.estimator.blocks)
        return JobEstimator(
            budget,
            window,
            token_bytes,
            model.estimator.pass_time,
            latency_s,
            model.num_gathering,
            usual_tokens=short_pass_tokens(num_params) if is_short else None,
            # What streams is seldom replayed, and has tokens to spare: a target need not stop at a size.
            padded_sizes=() if streams else self._runner.padded_sizes,
            replayed=self._runner.padded_sizes if self._runner.replays else None,
        )

    def _open_loop(
        self, lockstep: Leader | Follower | None, draft: SmallModel | None, tokens: StageTokens | None
    ) -> ServingLoop:
        """Return the loop that runs the passes, and closes everything at its end."""
        closers = (
            *([draft.close] if draft is not None else []),
            *([tokens.close] if tokens is not None else []),
            *([lockstep.close] if lockstep is not None else []),
            self._cache.close,
            self._model.destroy,
            self._batcher.close,
            self._runner.close,
            self._builder.close,
        )
        if isinstance(lockstep, Follower):
            return FollowingLoop(self._batcher, self.device, closers, lockstep, self._builder.receive)
        return ServingLoop(self._batcher, self.device, closers, lockstep)

    def _open_builder(self, settings: Settings, tokenizer: Any) -> None:
        """Find what prompts must fit, and open what makes requests of them."""
        module = self._model.module
        self.tokenizer = tokenizer or find_tokenizer(Path(module.name_or_path))
        self.vocab_size = int(module.config.get_text_config().vocab_size)
        self.end_token_ids = ends = frozenset(find_end_token_ids(module.generation_config, self.tokenizer))
        self._defaults = GenerationDefaults.of(module, settings.generation_config)
        self._builder = RequestBuilder(self.tokenizer, self.vocab_size, self.limits, ends, self._defaults)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._model.device

    @property
    def row_settings(self) -> dict[str, str]:
        """The settings that change what requests get from a checkpoint, without those that are as usual."""
        settings, rule = self._model.settings, self._defaults.identity
        quantization, kv_cache_dtype = settings.quantization, settings.batching.kv_cache_dtype
        found = {
            "dtype": None if settings.dtype is None else str(settings.dtype).removeprefix("torch."),
            "quantization": None if quantization is None else json.dumps(quantization.as_document()),
            "kv_cache_dtype": None if kv_cache_dtype == "auto" else kv_cache_dtype,
            "generation_config": json.dumps(rule) if rule else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def plan(self) -> Plan:
        """Homes, buffers and bytes of the weights."""
        return self._model.plan

    @property
    def device_parts(self) -> DeviceParts:
        """Planned device memory, by what takes it."""
        return self._model.device_parts

    @property
    def host_bytes(self) -> int:
        """Planned host memory of weights, staging slots, and the KV cache there; of swapped pages if it is bounded."""
        footprint = self.batching.footprint
        return self.plan.host_bytes + footprint.host_bytes + (footprint.swap_bytes or 0)

    @property
    def injected(self) -> dict[str, str]:
        """The modules with fused kernels: their names, and what is fused in each."""
        return self._model.injected

    @property
    def graphs(self) -> GraphCounts:
        """Counts of captured, replayed and eager passes.

        All are zero on a CPU, with the KV cache in host memory, and with `enable_cuda_graph` false.
        """
        return self._graphs.counts if self._graphs else GraphCounts()

    def stats(self) -> RunStats:
        """Return bytes moved, memory used and stalls so far.

        Raises:
            RuntimeError: the LLM was closed.
        """
        self._check_open()
        found = self._cache.add_to(self._model.stats(self._cache.bytes_to_device))
        guesses = self._speculation
        guessed, accepted = (guesses.num_guessed, guesses.num_accepted) if guesses is not None else (0, 0)
        passes, left_out = self._runner.num_passes, self._batcher.num_left_out
        return replace(found, passes=passes, passes_left_out=left_out, guessed_tokens=guessed, accepted_tokens=accepted)

    def predict(self, prompt_lens: Sequence[int], new_tokens: int | Sequence[int]) -> JobPrediction:
        """Predict the seconds that completing such prompts takes on this machine, by simulating the passes.

        Rates are those of `zinfer probe` if it has run here, else measured quickly at the first call.

        Args:
            prompt_lens: tokens of each prompt, at least one prompt.
            new_tokens: tokens generated for each prompt: one number for all, or one for each.

        Raises:
            ConfigError: no prompts.
            PlanError: a sequence does not fit the cache even alone.
        """
        return self._estimator.of_texts(prompt_lens, new_tokens)

    def predict_rest(self, prompt_lens: Sequence[int], new_tokens: Sequence[int], missing: Set[int]) -> JobPrediction:
        """Predict a call with known tokens, as `JobEstimator.of_rest`."""
        return self._estimator.of_rest(prompt_lens, new_tokens, missing)

    def predict_passes(self) -> JobPrediction:
        """Predict the seconds of the passes since the LLM was last idle; rates as for `predict`.

        Raises:
            ConfigError: there were no passes.
        """
        return self._estimator.of_passes(list(self._batcher.pass_sizes))

    def predict_latency(self, prompt_len: int, new_tokens: int, loads: Sequence[int]) -> list[ServingLatency]:
        """Predict the times to the first token and between tokens, if so many requests are always under way.

        Args:
            prompt_len, new_tokens: tokens of each request.
            loads: numbers of requests.
        """
        return predict_latency(self._estimator, prompt_len, new_tokens, loads)

    @property
    def batching(self) -> BatchingBudget:
        """Sizes of passes and of the cache."""
        return self._estimator.budget

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far, of prompts and of completions; those of shared prefixes count once."""
        return self._batcher.num_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far."""
        return self._batcher.num_new_tokens

    @property
    def num_passes(self) -> int:
        """Passes launched so far."""
        return self._runner.num_passes

    def predicted_pass_s(self) -> float:
        """Return the predicted seconds of the passes that have ended, at the rates for `predict`."""
        batcher = self._batcher
        return self._pass_times.ended_s(self.num_passes, batcher.pass_sizes, len(batcher.pass_ends_s))

    @property
    def last_pass_s(self) -> float:
        """Seconds since a pass ended; 0 if none has since the LLM was last idle."""
        ends_s = self._batcher.pass_ends_s
        return time.perf_counter() - ends_s[-1] if ends_s else 0.0

    @property
    def num_running(self) -> int:
        """Sequences that hold pages of the KV cache."""
        return self._batcher.num_running

    @property
    def num_background(self) -> int:
        """Those of them that give way to others."""
        return self._batcher.num_background

    @property
    def num_used_pages(self) -> int:
        """Pages of the KV cache that sequences hold, of `batching.num_pages`."""
        return self._batcher.num_used_pages

    @property
    def num_swapped_pages(self) -> int:
        """Pages of preempted sequences that were swapped out to host memory or disk."""
        return self._batcher.num_swapped_pages

    @property
    def is_following(self) -> bool:
        """Whether another rank decides what passes this one makes; they may be calls ahead of those made here."""
        return isinstance(self._loop, FollowingLoop)

    @property
    def first_pass_s(self) -> float:
        """Seconds of the first pass; 0 before its end."""
        return self._batcher.meter.first_s

    def measure_passes(self) -> PassMeter:
        """Return the meter of all passes; from now on it counts the tokens that streaming leaves free, too.

        The first call takes a second where `zinfer probe` has not run.
        """
        if self._model.plan.streamed_bytes and not self._batcher.meter.free_tokens:
            free = self._estimator.free_tokens()
            self._batcher.meter.free_tokens = min(free, self.batching.tokens_per_pass)
        return self._batcher.meter

    def measure_input_errors(self) -> InputErrors:
        """Return what measures, in the passes to come, the errors of products with rounded inputs."""
        return InputErrors(self._model.module, self._model.settings.quantization)

    def passes(self) -> list[tuple[PassSize, float]]:
        """Return size and seconds of each pass since the LLM was last idle, without the first pass."""
        ends_s = self._batcher.pass_ends_s
        return [
            (size, end_s - before_s)
            for size, before_s, end_s in zip(self._batcher.pass_sizes[1:], ends_s, ends_s[1:], strict=False)
        ]

    def fits(self, prompt_len: int, new_tokens: int) -> bool:
        """Whether the cache could hold such a sequence alone."""
        return self._batcher.fits(prompt_len, new_tokens)

    def close(self) -> None:
        """Release memory, threads and files, even if the object is still referenced. May be called again.

        It waits for the pass under way; calls of other threads then end with a RuntimeError. Ctrl-C ends the wait, not
        the release.

        Raises:
            RuntimeError: it was called within a pass, as in a forward hook.
            RankError: another rank that makes the same passes has failed.
        """
        if not self._model.is_forked:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or has ended by a failure."""
        return self._loop.is_closed

    def _check_open(self) -> None:
        self._model.check_process()
        self._loop.check_open()
