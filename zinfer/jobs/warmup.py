"""Compile the kernels of a model ahead, by passes of a few of its layers: `zinfer warmup`."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedModel

from zinfer.batching.llm import LLM
from zinfer.config import Settings, resolve_settings
from zinfer.config.source import config_keys
from zinfer.engine.division import Prepare
from zinfer.engine.kernel_cache import check_kernel_cache, kernels_name, note_compiled
from zinfer.engine.prepare import PreparedModel
from zinfer.errors import JobError
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.stage import ShorterModel
from zinfer.requests.prompt_encoder import PromptLike
from zinfer.requests.sampling_params import SamplingParams
from zinfer.units import duration
from zinfer.weights import Checkpoint

_MOST_PROMPT: Final = 256  # tokens
_MOST_NEW: Final = 40  # so that batches shrink from many rows to one
_OF_RANKS: Final = frozenset(
    ["tensor_parallel", "mp_size", "training_mp_size", "mpu", "moe", "ep_size", "save_mp_checkpoint_path"]
)
_PASSES_OF_PROMPTS: Final = 1.5  # one that is full, and one of prompts and rows that continue


Call = tuple[list[PromptLike], list[SamplingParams]]
"""Prompts that are computed together, each with its params."""


@dataclass(frozen=True)
class WarmedUp:
    """What was done.

    Attributes:
        num_layers: that were computed, one of each kind at least, of ``num_all``.
        num_passes, num_tokens: passes, and tokens that they computed.
        seconds: that they took, with compiling.
        folder: where compiled kernels are kept.
    """

    num_layers: int
    num_all: int
    num_passes: int
    num_tokens: int
    seconds: float
    folder: Path

    def __str__(self) -> str:
        layers = f"{self.num_layers} of {self.num_all} layers"
        passes = f"{self.num_passes} passes of {layers} over {self.num_tokens:,} tokens"
        return f"{passes} took {duration(self.seconds)}; compiled kernels are kept in {self.folder}"


def warm_up(
    model: str | os.PathLike[str],
    config: str | os.PathLike[str] | Mapping[str, object] | None = None,
    *,
    int8_kv_cache: bool = False,
) -> WarmedUp:
    """Compute passes of prompts, of prompts beside rows that continue, and of such rows alone, from many to one.

    Kernels depend on widths, dtypes and formats, which the first layers of each kind show, and on how many tokens a
    pass has. Triton keeps what it has compiled; a job with the same model, versions and kind of GPU finds it there.

    Args:
        model: a checkpoint folder.
        config: of the jobs to come. Ranks, trace, guesses and the folder for packed weights are left out.
        int8_kv_cache: in place of the configuration's.

    Raises:
        ConfigError: compiled kernels cannot be kept, or as `LLM`.
        CheckpointError, PlanError: as `LLM`.
        JobError: the passes failed, as where the layers' outputs are not finite.
    """
    folder, few = check_kernel_cache(), FewLayers()
    dtype = {"kv_cache_dtype": "int8"} if int8_kv_cache else {}
    with LLM(model, config_alone(config_keys(config), dtype), prepare=few.prepare) as llm:
        begin_s = time.perf_counter()
        try:
            compute_passes(llm)
        except JobError as error:
            why = f"its first layers cannot be computed alone, so it is not warmed up: {error}"
            raise JobError(f"{model}: {why}") from error
        seconds = time.perf_counter() - begin_s
        note_compiled(kernels_name(Checkpoint.open(model), resolve_settings(config, dtype)))
        return WarmedUp(few.num_layers, few.num_all, llm.num_passes, llm.num_tokens, seconds, folder)


def compute_passes(llm: LLM, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Compute passes of all sizes; arguments, result and errors as of `compute_calls`."""
    return compute_calls(llm, _calls(llm), is_over)


def compute_calls(llm: LLM, calls: Iterable[Call], is_over: Callable[[], bool] = lambda: False) -> bool:
    """Compute calls one after the other, each without the prefix cache; returns whether all were computed.

    Args:
        is_over: asked before each call and after each completion; true leaves the rest out.

    Raises:
        JobError: the passes failed.
    """
    for prompts, params in calls:
        if is_over():
            return False
        llm.reset_prefix_cache()  # so that all tokens are computed
        with closing(llm.stream(prompts, params)) as found:
            for completion in found:
                if completion.error is not None:
                    raise JobError(completion.error)
                if is_over():
                    return False
    return True


def _calls(llm: LLM) -> Iterator[Call]:
    """Yield calls: prompts for more than a pass with their numbers of new tokens, then passes of fewer tokens.

    One of the first prompts is a single token, for the kernels of passes whose chunks of one token are not in front.
    """
    budget = llm.batching
    most = min(llm.limits.most_tokens or _MOST_PROMPT + _MOST_NEW, budget.num_pages * budget.page_size)
    prompt_len = min(_MOST_PROMPT, most // 2)
    most_new = min(_MOST_NEW, most - prompt_len)
    num_fitting = budget.num_pages * budget.page_size // (prompt_len + most_new + budget.page_size)
    num_most = max(min(num_fitting, budget.max_sequences), 1)
    num_wanted = min(max(round(_PASSES_OF_PROMPTS * budget.tokens_per_pass / prompt_len), 3), num_most)
    yield (
        [own_prompt(llm, number, 1 if number == 1 else prompt_len) for number in range(num_wanted)],
        [
            SamplingParams(max_new_tokens=1 + number % most_new, ignore_eos=True, temperature=number % 2, seed=1)
            for number in range(num_wanted)
        ],
    )
    num_tokens = min(budget.tokens_per_pass, num_most * prompt_len)
    while (num_tokens := num_tokens // 2) > 1:
        lengths = [min(prompt_len, num_tokens - begin) for begin in range(0, num_tokens, prompt_len)]
        prompts = [own_prompt(llm, number, length) for number, length in enumerate(lengths)]
        yield prompts, [SamplingParams(max_new_tokens=1, ignore_eos=True)] * len(prompts)


def own_prompt(llm: LLM, number: int, length: int) -> PromptLike:
    """Return a prompt that begins like no other one."""
    return {"prompt_token_ids": [(number + place) % llm.vocab_size for place in range(length)]}


class FewLayers:
    """Prepares a model with the first layers of each kind alone.

    Args:
        prepare: prepares the shorter model.

    Attributes:
        num_layers, num_all: layers that are left, and all.
    """

    def __init__(self, prepare: Prepare = PreparedModel.of) -> None:
        self._prepare = prepare
        self.num_layers = self.num_all = 0

    def prepare(
        self,
        module: PreTrainedModel,
        checkpoint: Checkpoint | None,
        settings: Settings,
        sharding: Sharding | None,
        part: ShorterModel | None,
    ) -> PreparedModel:
        """As `PreparedModel.of`."""
        shorter = ShorterModel.of_each_kind(module, settings.block_classes)
        self.num_layers, self.num_all = len(shorter.layers), shorter.num_all
        return self._prepare(module, checkpoint, settings, sharding, shorter)


def config_alone(given: Mapping[str, object], stated: Mapping[str, object]) -> dict[str, Any]:
    """Return a configuration without what concerns ranks, files that are written, and guesses by another model.

    Args:
        stated: keys of the section ``zinfer`` that come before the given ones.
    """
    left = {name: value for name, value in given.items() if name not in _OF_RANKS}
    own, zero = left.get("zinfer", {}), left.get("zero_optimization")
    if isinstance(own, Mapping):
        kept = {key: value for key, value in own.items() if key not in ("parallel", "trace", "draft_model")}
        left["zinfer"] = {**kept, **stated}
    if isinstance(zero, Mapping):
        left["zero_optimization"] = {**zero, "offload_param": _without_files(zero.get("offload_param"))}
    return left


def _without_files(offload: object) -> object:
    """Return ``offload_param`` for a run that writes no packed weights: they stay in host memory."""
    if not isinstance(offload, Mapping) or "nvme_path" not in offload:
        return offload
    return {key: value for key, value in offload.items() if key != "nvme_path"} | {"device": "cpu"}
