"""Completes any number of prompts by continuous batching, over weights that are resident or stream."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from zinfer.batching.adapters import check_family
from zinfer.batching.batcher import Batcher, Finished
from zinfer.batching.budget import BatchingBudget, find_budget
from zinfer.batching.ending import Ending
from zinfer.batching.kv_cache import KVCache
from zinfer.batching.kv_shape import read_kv_shape
from zinfer.batching.runner import PassRunner
from zinfer.batching.sampler import Logprobs, Sampler
from zinfer.batching.sampling_params import SamplingParams
from zinfer.config import resolve_settings
from zinfer.engine import InferenceEngine
from zinfer.errors import ConfigError, PlanError
from zinfer.offload.stats import RunStats
from zinfer.planning.footprint import Footprint
from zinfer.planning.model_shape import read_shape
from zinfer.planning.planner import Plan
from zinfer.sequence_length import max_positions

PromptLike = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, messages of a chat, or ``{"prompt_token_ids": [...]}``."""


@dataclass(frozen=True)
class Completion:
    """What came after one prompt.

    Attributes:
        prompt_index: which of the prompts, from 0.
        sample_index: which of its ``n`` completions, from 0.
        text: without end and special tokens, cut before the first stop string; empty without a tokenizer.
        token_ids: what was generated, the token that ended it included.
        finish_reason: "stop" (an end token or a stop string), "length" or "error".
        logprobs: of each token, where they were asked for.
        error: what is wrong with the prompt, or went wrong; None where nothing did.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprobs, ...] | None = None
    error: str | None = None


class LLM:
    """A model that completes prompts in ragged batches, each pass over its weights shared by all that run.

    Args:
        model: as for `zinfer.init_inference`.
        config: likewise; ``zinfer.tokens_per_pass``, ``max_sequences``, ``kv_cache_memory``, ``kv_cache_dtype`` and
            ``kv_page_size`` decide about the batches.
        tokenizer: one of transformers'; by default the one in the model's folder, if there is one. Without it prompts
            are token ids.
        kwargs: the same keys as in ``config``.

    One thread at a time. It is a context manager, and `close` gives memory, threads and files back.

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
        **kwargs: object,
    ) -> None:
        settings = resolve_settings(config, kwargs)
        budget: BatchingBudget | None = None

        def find_reserve(module: PreTrainedModel, free_bytes: int) -> Footprint:
            nonlocal budget
            check_family(module)
            most_tokens = _least(settings.max_out_tokens, max_positions(module))
            on_cuda = settings.device != "cpu" and torch.cuda.is_available()
            budget = find_budget(module, free_bytes, settings.batching, most_tokens, on_cuda=on_cuda)
            return budget.footprint

        self._engine = InferenceEngine(model, settings, find_reserve=find_reserve)
        assert budget is not None
        self.tokenizer = tokenizer or _find_tokenizer(self._engine.module)
        module = self._engine.module
        self._most_tokens = _least(settings.max_out_tokens, max_positions(module))
        self._vocab_size = int(module.config.get_text_config().vocab_size)
        self._end_token_ids = _end_token_ids(module.generation_config, self.tokenizer)
        device = self._engine.device
        shape = read_kv_shape(module.config)
        cache = KVCache(shape, budget.num_pages, budget.page_size, budget.kv_dtype, device)
        self._runner = PassRunner(self._engine, cache)
        self._batcher = Batcher(
            self._runner,
            cache,
            Sampler(self._vocab_size, device),
            tokens_per_pass=budget.tokens_per_pass,
            most_part_tokens=budget.most_part_tokens,
            max_sequences=budget.max_sequences,
            window=_common_window(module),
        )

    @property
    def plan(self) -> Plan:
        """Homes, buffers and bytes of the weights."""
        return self._engine.plan

    def stats(self) -> RunStats:
        """Bytes moved, memory taken and stalls so far."""
        return self._engine.stats()

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far, of prompts and of what came after; those of shared prefixes count once."""
        return self._batcher.num_tokens

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
            ValueError: a stop string without a tokenizer.
        """
        found = self.stream(prompts, params)
        return sorted(found, key=lambda completion: (completion.prompt_index, completion.sample_index))

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Completion]:
        """As `generate`, each completion as soon as it is complete. Leaving it early gives up the rest."""
        several = prompts if isinstance(prompts, list) and not _is_chat(prompts) else [prompts]
        each = [params or SamplingParams()] * len(several) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(several):
            raise ConfigError(f"{len(each)} params for {len(several)} prompts; give one, or as many as prompts")
        assert not self._batcher.num_unfinished, "another call is under way"
        waiting: dict[int, tuple[int, int]] = {}
        try:
            for index, (prompt, own) in enumerate(zip(several, each, strict=True)):
                try:
                    self._add(index, prompt, own, waiting)
                except (ConfigError, PlanError) as error:
                    for sample in range(own.n):
                        yield Completion(index, sample, "", (), "error", error=str(error))
            while waiting:
                for finished in self._batcher.step():
                    yield _completion(finished, *waiting.pop(finished.number))
        finally:
            self._batcher.abort()

    def close(self) -> None:
        """Give memory, threads and files back. May be called again."""
        if self._runner is not None:
            self._runner.close()
        self._engine.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, index: int, prompt: PromptLike, params: SamplingParams, waiting: dict[int, tuple[int, int]]) -> None:
        """Hand a prompt's ``n`` texts to the batcher."""
        token_ids = self._token_ids(prompt)
        self._check(token_ids, params)
        params.check_vocabulary(self._vocab_size)
        ends = frozenset() if params.ignore_eos else self._end_token_ids
        for sample in range(params.n):
            ending = Ending(self.tokenizer, ends | {*params.stop_token_ids}, params.stop, params.max_new_tokens)
            seed = _seed(params.seed, token_ids, sample)
            number = self._batcher.add(token_ids, params, seed=seed, ending=ending, end_token_ids=ends)
            waiting[number] = index, sample

    def _token_ids(self, prompt: PromptLike) -> list[int]:
        if isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"}:
                raise ConfigError(f"a prompt has the keys {sorted(prompt)}; it takes 'prompt_token_ids' alone")
            return [int(token_id) for token_id in prompt["prompt_token_ids"]]
        if self.tokenizer is None:
            raise ConfigError("the model's folder has no tokenizer; give prompts as {'prompt_token_ids': [...]}")
        if isinstance(prompt, str):
            found: list[int] = self.tokenizer(prompt).input_ids
        elif self.tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; give a prompt as text instead of messages")
        else:
            text = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
            found = self.tokenizer(text, add_special_tokens=False).input_ids
        if not found and self.tokenizer.bos_token_id is not None:
            return [self.tokenizer.bos_token_id]
        return found

    def _check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids:
            raise ConfigError("the prompt has no tokens; give it one at least")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ConfigError(f"token ids lie between 0 and {self._vocab_size - 1}; {max(token_ids)} does not")
        if self._most_tokens is not None and len(token_ids) + params.max_new_tokens > self._most_tokens:
            raise ConfigError(
                f"the prompt's {len(token_ids)} tokens and {params.max_new_tokens} new ones are more than "
                f"{self._most_tokens}; shorten it or lower max_new_tokens"
            )
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; give stop_token_ids instead")


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


def _is_chat(prompts: Sequence[object]) -> bool:
    """Whether a list is the messages of one chat."""
    return bool(prompts) and all(isinstance(item, Mapping) and "role" in item for item in prompts)


def _seed(stated: int | None, token_ids: Sequence[int], sample: int) -> int:
    """A text's seed: the stated one, else what the prompt decides; another for each of its samples."""
    if stated is not None and sample == 0:
        return stated
    key = f"{'' if stated is None else stated} {sample} {list(token_ids)}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def _common_window(module: PreTrainedModel) -> int | None:
    """The widest of the layers' windows; None where a layer has none."""
    windows = read_shape(module.config).windows
    return max((window for window in windows if window is not None), default=None) if all(windows) else None


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _find_tokenizer(module: PreTrainedModel) -> Any:
    """The tokenizer that lies in the model's folder; None where there is none."""
    folder = Path(module.name_or_path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _end_token_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    ends = generation_config.eos_token_id if generation_config is not None else None
    if ends is None and tokenizer is not None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
