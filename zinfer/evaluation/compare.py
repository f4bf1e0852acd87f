"""Compare a model with its quantized version: likelihoods and greedy tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import torch
from transformers import PreTrainedModel

from zinfer.batching.family_check import check_family
from zinfer.batching.llm import LLM
from zinfer.config import Settings
from zinfer.engine.engine import InferenceEngine
from zinfer.errors import ConfigError, PlanError
from zinfer.jobs.token_rows import read_token_rows
from zinfer.model.build import build_meta_model
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import ModelSpec
from zinfer.planning.memory import Footprint, Request, find_footprint
from zinfer.probe.limits import MachineLimits
from zinfer.requests.sampling_params import SamplingParams
from zinfer.weights import Checkpoint

_NUM_NEW_TOKENS: Final = 16


@dataclass(frozen=True)
class Agreement:
    """Comparison of a quantized model with the full one.

    Attributes:
        num_prompts: number of prompts.
        num_tokens: prompt tokens whose likelihood was measured: all but the first of each prompt.
        full_log_likelihood, quantized_log_likelihood: mean natural log-likelihood of those tokens.
        num_new_tokens: tokens generated greedily after each prompt.
        equal_tokens: fraction of equal new tokens; after the first difference the models' inputs differ too.
    """

    num_prompts: int
    num_tokens: int
    full_log_likelihood: float
    quantized_log_likelihood: float
    num_new_tokens: int
    equal_tokens: float

    @property
    def change(self) -> float:
        """Change of the mean log-likelihood; negative if the quantized model is worse."""
        return self.quantized_log_likelihood - self.full_log_likelihood

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the quantized model over that of the full one."""
        return math.exp(-self.change)


def check_prompts(source: Path, prompts: Path, settings: Settings) -> None:
    """Check the prompts before the store is written.

    Raises:
        ConfigError, CheckpointError: like `compare_models`.
    """
    tree = build_meta_model(Checkpoint.open(source), settings.dtype)
    read_token_rows(prompts, source, tree, settings.max_out_tokens, _NUM_NEW_TOKENS)


def compare_models(source: Path, store: Path, prompts: Path, settings: Settings) -> Agreement:
    """Run both models over a JSONL file of prompts, one model after the other.

    Prompts share passes in `zinfer.LLM`. A model that it does not take runs them one after the other.

    Args:
        source, store: checkpoint folders; the source has the tokenizer.
        prompts: JSONL with rows like those of `zinfer run`.
        settings: device and budgets, without quantization.

    Raises:
        ConfigError: a row is invalid or does not fit the model; names its line.
        CheckpointError, PlanError: like `zinfer.LLM` and `zinfer.init_inference`.
    """
    tree = build_meta_model(Checkpoint.open(source), settings.dtype)
    rows = read_token_rows(prompts, source, tree, settings.max_out_tokens, _NUM_NEW_TOKENS)
    measure = _together if _runs_batched(tree) else _alone
    full, quantized = measure(source, rows, settings), measure(store, rows, settings)
    pairs = zip(full, quantized, strict=True)
    num_equal = sum(one == other for each, its in pairs for one, other in zip(each.new, its.new, strict=True))
    num_tokens = sum(len(row) - 1 for row in rows)
    return Agreement(
        num_prompts=len(rows),
        num_tokens=num_tokens,
        full_log_likelihood=sum(each.log_likelihood for each in full) / max(num_tokens, 1),
        quantized_log_likelihood=sum(each.log_likelihood for each in quantized) / max(num_tokens, 1),
        num_new_tokens=_NUM_NEW_TOKENS,
        equal_tokens=num_equal / max(len(rows) * _NUM_NEW_TOKENS, 1),
    )


class _Scored(NamedTuple):
    """The summed log-likelihood of a prompt's tokens but the first, and its greedy new tokens."""

    log_likelihood: float
    new: Sequence[int]


def _runs_batched(tree: PreTrainedModel) -> bool:
    try:
        check_family(tree)
    except ConfigError:
        return False
    return True


def _together(model: Path, rows: Sequence[tuple[int, ...]], settings: Settings) -> list[_Scored]:
    """Score and continue all rows in shared passes."""
    params = SamplingParams(max_new_tokens=_NUM_NEW_TOKENS, ignore_eos=True, prompt_logprobs=0)
    with LLM(model, settings) as llm:
        found = llm.generate([{"prompt_token_ids": list(row)} for row in rows], params)
    for each in found:
        if each.error is not None:
            raise PlanError(f"{model}: prompt {each.prompt_index + 1}: {each.error}")
    return [
        _Scored(sum(scores.chosen for scores in each.prompt_logprobs or () if scores is not None), each.token_ids)
        for each in found
    ]


def _alone(model: Path, rows: Sequence[tuple[int, ...]], settings: Settings) -> list[_Scored]:
    """Score and continue one row after the other, with memory for the logits of all its positions."""
    longest = max(map(len, rows), default=1)

    def find_reserve(
        module: PreTrainedModel, blocks: Sequence[ModelBlock], limits: MachineLimits, free_bytes: int
    ) -> Footprint:
        spec, dtype = ModelSpec.read(module.config), module.dtype
        footprint = find_footprint(spec, dtype, Request(1, longest, _NUM_NEW_TOKENS), on_cuda=limits.on_cuda)
        logits_bytes = longest * spec.vocab * (dtype.itemsize + 2 * torch.float32.itemsize)
        return replace(footprint, activation_bytes=footprint.activation_bytes + logits_bytes)

    engine = InferenceEngine(model, settings, find_reserve=find_reserve)
    try:
        return [_Scored(_log_likelihood(engine, row), _greedy(engine, row)) for row in rows]
    finally:
        engine.destroy()


def _log_likelihood(engine: InferenceEngine, row: tuple[int, ...]) -> float:
    """Return the summed log-likelihood of all tokens but the first."""
    ids = torch.tensor([row])
    logits = engine(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logs = torch.log_softmax(logits[0, :-1].float(), dim=-1)
    return float(logs.gather(-1, ids[0, 1:].to(logs.device).unsqueeze(-1)).sum())


def _greedy(engine: InferenceEngine, row: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([row])
    tokens = engine.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=_NUM_NEW_TOKENS,
        min_new_tokens=_NUM_NEW_TOKENS,
    )
    new: list[int] = tokens[0, len(row) :].tolist()
    return new
