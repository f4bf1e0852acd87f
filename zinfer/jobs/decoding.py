"""Completes one batch of prompts with transformers' own `generate`, left-padded, each row by its own settings.

End tokens and the padding token come from the model's generation config, else from the tokenizer. The config's
defaults for sampling and repetition (do_sample, temperature, top_k, top_p, repetition_penalty, no_repeat_ngram_size) do
not: a row is greedy unless it asks for a temperature itself, so that a file means the same for every model, and what is
penalised would depend on a row's padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from zinfer.batching.ending import find_end_token_ids
from zinfer.errors import JobError
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.sampling import RowSampler
from zinfer.jobs.stopping import RowProgress, RowStops
from zinfer.planning.prediction import Prediction


class Engine(Protocol):
    """What a job needs of an engine."""

    @property
    def module(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def plan(self) -> Any: ...

    def generate(self, **kwargs: Any) -> Any: ...

    def stats(self) -> Any: ...

    def predict(self, batch_size: int, prompt_len: int, new_tokens: int) -> Prediction: ...

    def destroy(self) -> None: ...


@dataclass(frozen=True)
class Completion:
    """A row's result. `token_ids` ends with the token that ended the row, which `text` leaves out."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str

    def record(self) -> dict[str, Any]:
        """The output row."""
        return {
            "id": self.prompt.row.id,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "num_prompt_tokens": len(self.prompt.token_ids),
            "num_output_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
        }


def complete(
    engine: Engine, prompts: Sequence[Prompt], tokenizer: Any, on_step: Callable[[int], None]
) -> list[Completion]:
    """The completions of a batch, in the prompts' order. `on_step` is `RowStops`' own."""
    end_token_ids = find_end_token_ids(engine.module.generation_config, tokenizer)
    pad_token_id = _pad_token_id(engine.module.generation_config, tokenizer, end_token_ids)
    input_ids, attention_mask = left_padded([prompt.token_ids for prompt in prompts], pad_token_id)
    stops = RowStops(prompts, end_token_ids, tokenizer, on_step)
    engine.generate(
        input_ids=input_ids.to(engine.device),
        attention_mask=attention_mask.to(engine.device),
        logits_processor=LogitsProcessorList([RowSampler(prompts)]),
        stopping_criteria=StoppingCriteriaList([stops]),
        max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
        eos_token_id=end_token_ids or None,
        pad_token_id=pad_token_id,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
    )
    return [_completion(row) for row in stops.rows]


def left_padded(token_ids: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and attention mask, both [prompts, longest prompt]."""
    width = max(map(len, token_ids))
    input_ids = torch.full((len(token_ids), width), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros((len(token_ids), width), dtype=torch.long)
    for i, ids in enumerate(token_ids):
        input_ids[i, width - len(ids) :] = torch.tensor(ids)
        attention_mask[i, width - len(ids) :] = 1
    return input_ids, attention_mask


def _completion(row: RowProgress) -> Completion:
    if row.finish_reason is None:
        raise JobError(
            f"generation ended row {row.prompt.row.id!r} after {len(row.token_ids)} tokens for a reason of its own; "
            "remove limits such as max_time from the model's generation_config.json"
        )
    return Completion(row.prompt, row.text, tuple(row.token_ids), row.finish_reason)


def _pad_token_id(generation_config: Any, tokenizer: Any, end_token_ids: Sequence[int]) -> int:
    candidates = [generation_config.pad_token_id, tokenizer.pad_token_id, *end_token_ids]
    # Padding is masked, so that without any of them token 0 does as well.
    return next((token_id for token_id in candidates if token_id is not None and token_id >= 0), 0)
