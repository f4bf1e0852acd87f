"""Completes any number of prompts by continuous batching, over weights that are resident or stream."""

import os
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from transformers import PreTrainedModel

from zinfer.batching.adapters import check_family, common_window
from zinfer.batching.batcher import Batcher, Finished
from zinfer.batching.budget import BatchingBudget, find_budget
from zinfer.batching.completion import Completion, text_seed
from zinfer.batching.ending import Ending, find_end_token_ids, special_stops
from zinfer.batching.kv_shape import read_kv_shape
from zinfer.batching.open_pages import open_pages
from zinfer.batching.passes import PassSize
from zinfer.batching.prompt_encoder import PromptEncoder, PromptLike, as_list, find_tokenizer
from zinfer.batching.rehearsal import JobPrediction, predict_job, rehearse
from zinfer.batching.runner import PassRunner
from zinfer.batching.sampler import Sampler
from zinfer.batching.sampling_params import SamplingParams
from zinfer.config import Settings, resolve_settings
from zinfer.cut import ModelBlock
from zinfer.engine import InferenceEngine
from zinfer.errors import ConfigError, PlanError
from zinfer.graphs.forward_graphs import GraphCounts
from zinfer.graphs.open_graphs import open_graphs
from zinfer.offload.stats import RunStats
from zinfer.planning.footprint import Footprint
from zinfer.planning.machine import find_limits
from zinfer.planning.planner import Plan
from zinfer.sequence_length import max_positions


class LLM:
    """A model that completes prompts in ragged batches, each pass over its weights shared by all that run.

    Args:
        model: as for `zinfer.init_inference`.
        config: likewise; ``zinfer.tokens_per_pass``, ``max_sequences``, ``kv_cache_memory``, ``kv_cache_tier``,
            ``kv_cache_dtype`` and ``kv_page_size`` decide about the batches.
        tokenizer: one of transformers'; by default the one in the model's folder, if there is one. Without it prompts
            are token ids.
        parks_on_disk: whether texts that had to make room are kept in ``offload_param.nvme_path`` once host memory has
            its share of them; None: where a path is stated and that takes less than computing them again.
        kwargs: the same keys as in ``config``.

    One thread at a time. It is a context manager, and `close` gives memory, threads and files back; what was counted,
    planned and predicted can be asked for after it.

    Raises:
        ConfigError, CheckpointError, PlanError: as `zinfer.init_inference`; also for a family of models whose attention
            is not known to work in ragged batches.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        *,
        tokenizer: Any = None,
        parks_on_disk: bool | None = None,
        **kwargs: object,
    ) -> None:
        settings = resolve_settings(config, kwargs)
        budget: BatchingBudget | None = None

        def find_reserve(module: PreTrainedModel, blocks: Sequence[ModelBlock], free_bytes: int) -> Footprint:
            nonlocal budget
            most_tokens = _least(settings.max_out_tokens, max_positions(module))
            limits = find_limits(settings)
            budget = find_budget(module.config, module.dtype, blocks, settings, limits, free_bytes, most_tokens)
            return budget.footprint

        # What is replayed is a pass with its pages, not the module's forward alone.
        apart = replace(settings, cuda_graph=False)
        self._engine = InferenceEngine(model, apart, check_model=check_family, find_reserve=find_reserve)
        assert budget is not None
        try:
            self._open(settings, budget, tokenizer, parks_on_disk)
        except BaseException:
            self._engine.destroy()
            raise

    def _open(self, settings: Settings, budget: BatchingBudget, tokenizer: Any, parks_on_disk: bool | None) -> None:
        """Make what stands on the engine."""
        self._closed = self._is_streaming = False
        self._seen: Counter[tuple[int, ...]] = Counter()
        module = self._engine.module
        self.tokenizer = tokenizer or find_tokenizer(Path(module.name_or_path))
        vocab_size = int(module.config.get_text_config().vocab_size)
        most_tokens = _least(settings.max_out_tokens, max_positions(module))
        self._encoder = PromptEncoder(self.tokenizer, vocab_size, most_tokens)
        self._end_token_ids = frozenset(find_end_token_ids(module.generation_config, self.tokenizer))
        device = self._engine.device
        shape, folder = read_kv_shape(module.config), settings.offload.nvme_path
        if folder is not None and parks_on_disk is None:
            parks_on_disk = self._engine.outlook.disk_spares_time(shape.token_bytes(budget.kv_dtype))
        budget = replace(budget, parks_on_disk=folder is not None and bool(parks_on_disk))
        self._cache = open_pages(self._engine, shape, budget)
        self._budget, self._window = budget, common_window(module.config)
        self._graphs = open_graphs(self.plan, settings, device)
        self._runner = PassRunner(self._engine, self._cache, self._graphs)
        self._batcher = Batcher(self._runner, self._cache, Sampler(vocab_size, device), budget, self._window)

    @property
    def plan(self) -> Plan:
        """Homes, buffers and bytes of the weights."""
        return self._engine.plan

    @property
    def injected(self) -> dict[str, str]:
        """What is computed by fused kernels: names of modules, and what is fused in each."""
        return self._engine.injected

    @property
    def graphs(self) -> GraphCounts:
        """What has become of the passes of few texts under `enable_cuda_graph`; all zero where it has no effect."""
        return self._graphs.counts if self._graphs else GraphCounts()

    def stats(self) -> RunStats:
        """Bytes moved, memory taken and stalls so far.

        Raises:
            RuntimeError: the LLM was closed.
        """
        self._check_open()
        found = self._cache.add_to(self._engine.stats(self._cache.bytes_to_device))
        return replace(found, passes=self._runner.num_passes)

    def predict(self, prompt_lens: Sequence[int], new_tokens: int | Sequence[int]) -> JobPrediction:
        """What completing such prompts takes on this machine: the passes are rehearsed, nothing is computed.

        Rates are those of `zinfer probe` if it has run here, else measured in a hurry at the first call.

        Args:
            prompt_lens: tokens of each prompt, one prompt at least.
            new_tokens: tokens generated after each, for all or one by one.

        Raises:
            ConfigError: no prompts.
            PlanError: a text does not fit the cache even alone.
        """
        if not prompt_lens:
            raise ConfigError("there are no prompts to predict anything of; give the tokens of one at least")
        each = [new_tokens] * len(prompt_lens) if isinstance(new_tokens, int) else new_tokens
        return self._predict(rehearse(prompt_lens, each, self._budget, self._window))

    def predict_passes(self) -> JobPrediction:
        """What the passes of the last call ought to have taken; rates as for `predict`.

        Raises:
            ConfigError: it had none.
        """
        if not self._batcher.pass_sizes:
            raise ConfigError("no pass was computed yet, so that none can be predicted")
        return self._predict(self._batcher.pass_sizes)

    def _predict(self, sizes: Sequence[PassSize]) -> JobPrediction:
        token_bytes = read_kv_shape(self._engine.module.config).token_bytes(self._budget.kv_dtype)
        return predict_job(sizes, token_bytes, self._budget, self._engine.outlook.pass_time)

    @property
    def batching(self) -> BatchingBudget:
        """Sizes of passes and of the cache."""
        return self._budget

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far, of prompts and of what came after; those of shared prefixes count once."""
        return self._batcher.num_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far."""
        return self._batcher.num_new_tokens

    @property
    def num_running(self) -> int:
        """Texts under way."""
        return self._batcher.num_running

    @property
    def num_parked_pages(self) -> int:
        """Pages of texts that had to make room, in host memory or on the disk."""
        return self._batcher.num_parked_pages

    def passes(self) -> list[tuple[PassSize, float]]:
        """What each pass of the last call carried, and the seconds since the one before it; the first is left out."""
        ends_s = self._batcher.pass_ends_s
        return [
            (size, end_s - before_s)
            for size, before_s, end_s in zip(self._batcher.pass_sizes[1:], ends_s, ends_s[1:], strict=False)
        ]

    def fits(self, prompt_len: int, new_tokens: int) -> bool:
        """Whether the cache holds such a text alone."""
        return self._batcher.fits(prompt_len, new_tokens)

    def reset_prefix_cache(self) -> None:
        """Find no page of an earlier call again: what follows is computed as in a new LLM.

        Raises:
            RuntimeError: a call is under way, or the LLM was closed.
        """
        self._check_open()
        if self._is_streaming:
            raise RuntimeError("a call of this LLM is under way; take all of its completions, or leave it, first")
        self._batcher.forget_prefixes()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """The completions of all prompts, in their order, those of one prompt side by side.

        Args:
            prompts: one, or a list of them.
            params: for all, or one for each; by default greedy.

        A prompt that cannot be used, or does not fit, gets a completion with an ``error``; the others go on.

        Raises:
            ConfigError: not as many params as prompts.
            RuntimeError: another call is under way, or the LLM was closed.
        """
        return sorted(
            self.stream(prompts, params), key=lambda completion: (completion.prompt_index, completion.sample_index)
        )

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[Completion, None, None]:
        """As `generate`, each completion as soon as it is complete. Leaving it early gives up the rest."""
        several = as_list(prompts)
        each = [params or SamplingParams()] * len(several) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(several):
            raise ConfigError(f"{len(each)} params for {len(several)} prompts; give one, or as many as prompts")
        self._check_open()
        if self._is_streaming:
            raise RuntimeError("another call of this LLM is under way; take all of its completions, or leave it, first")
        waiting: dict[int, tuple[int, int]] = {}
        self._batcher.abort()  # what Ctrl-C in an abort has left
        self._seen.clear()
        self._batcher.pass_sizes.clear()
        self._batcher.pass_ends_s.clear()
        self._is_streaming = True
        try:
            for index, (prompt, own) in enumerate(zip(several, each, strict=True)):
                try:
                    self._add(index, prompt, own, waiting)
                except (ConfigError, PlanError) as error:
                    for sample in range(own.n):
                        yield Completion(index, sample, "", (), "error", error=str(error))
            while waiting:
                self._check_open()
                for finished in self._batcher.step():
                    yield _completion(finished, *waiting.pop(finished.number))
        finally:
            try:
                if not self._closed:
                    self._batcher.abort()
            finally:
                self._is_streaming = False

    def close(self) -> None:
        """Give memory, threads and files back, also where the object is still referred to. May be called again."""
        if not self._closed:
            self._closed = True
            with ExitStack() as owned:  # the last first: weights may be on their way into pages that were lent
                owned.callback(self._cache.close)
                owned.callback(self._engine.destroy)
                owned.callback(self._batcher.close)
                owned.callback(self._runner.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM was closed; make a new one")

    def _add(self, index: int, prompt: PromptLike, params: SamplingParams, waiting: dict[int, tuple[int, int]]) -> None:
        """Hand a prompt's ``n`` texts to the batcher."""
        token_ids = self._encoder.encode(prompt, params)
        ends = frozenset() if params.ignore_eos else self._end_token_ids
        ending_ids = ends.union(params.stop_token_ids, special_stops(self.tokenizer, params.stop))
        repeat = self._seen[tuple(token_ids)]
        self._seen[tuple(token_ids)] += 1
        for sample in range(params.n):
            ending = Ending(self.tokenizer, ending_ids, params.stop, params.max_new_tokens, params.min_new_tokens)
            seed = text_seed(params.seed, token_ids, repeat, sample)
            number = self._batcher.add(token_ids, params, seed=seed, ending=ending, end_token_ids=ends)
            waiting[number] = index, sample


def _completion(finished: Finished, prompt_index: int, sample_index: int) -> Completion:
    return Completion(
        prompt_index,
        sample_index,
        finished.text,
        finished.token_ids,
        finished.finish_reason,
        finished.logprobs,
        finished.error,
    )


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
