"""Compare a model with its quantized version: likelihoods and greedy tokens."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from zinfer.checkpoint import Checkpoint
from zinfer.config import Settings
from zinfer.engine.engine import InferenceEngine
from zinfer.jobs.token_rows import padded, read_token_rows
from zinfer.model.build import build_meta_model

_BATCH_SIZE: Final = 16
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

    Args:
        source, store: checkpoint folders; the source has the tokenizer.
        prompts: JSONL with rows like those of `zinfer run`.
        settings: device and budgets, without quantization.

    Raises:
        ConfigError: a row is invalid or does not fit the model; names its line.
        CheckpointError: like `zinfer.init_inference`.
    """
    full, num_tokens, full_new = _run(source, source, prompts, settings)
    quantized, _, quantized_new = _run(store, source, prompts, settings)
    equal = [one == other for one, other in zip(full_new, quantized_new, strict=True)]
    return Agreement(
        num_prompts=len(equal) // _NUM_NEW_TOKENS,
        num_tokens=num_tokens,
        full_log_likelihood=full,
        quantized_log_likelihood=quantized,
        num_new_tokens=_NUM_NEW_TOKENS,
        equal_tokens=sum(equal) / max(len(equal), 1),
    )


def _run(model: Path, tokenizer: Path, prompts: Path, settings: Settings) -> tuple[float, int, list[int]]:
    """Return the prompts' mean log-likelihood, the number of tokens in it, and all new tokens."""
    engine = InferenceEngine(model, settings)
    try:
        rows = read_token_rows(prompts, tokenizer, engine.module, settings.max_out_tokens, _NUM_NEW_TOKENS)
        total, num_tokens, new_tokens = 0.0, 0, list[int]()
        for begin in range(0, len(rows), _BATCH_SIZE):
            batch = rows[begin : begin + _BATCH_SIZE]
            ids, mask = padded(batch)
            total += _log_likelihood(engine, ids, mask)
            num_tokens += int(mask[:, 1:].sum())
            for row in batch:
                new_tokens += _greedy(engine, row)
        return total / max(num_tokens, 1), num_tokens, new_tokens
    finally:
        engine.destroy()


def _log_likelihood(engine: InferenceEngine, ids: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the summed log-likelihood of all tokens but each row's first."""
    logits = engine(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    chosen = logs.gather(-1, ids[:, 1:].to(logs.device).unsqueeze(-1)).squeeze(-1)
    return float((chosen * mask[:, 1:].to(logs.device)).sum())


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
