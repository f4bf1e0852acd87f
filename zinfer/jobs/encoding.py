"""What an encoder makes of a text, as fields of its row: an embedding, or a label and the scores of all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from zinfer.jobs.task import Pooling
from zinfer.model.context_length import is_encoder_decoder
from zinfer.requests.completion import not_finite

_NOT_FINITE: Final = "the model's outputs are not finite numbers; its weights may be damaged, or its dtype too narrow"


@dataclass(frozen=True)
class Encoding:
    """Of one text; no fields where there is an error."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def broken_by(self, name: str | None) -> "Encoding":
        """The same, which has an error, with what gave the first of the numbers that are none, if that was seen."""
        return replace(self, error=not_finite(name, str(self.error)))


def embeddings(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], pooling: Pooling) -> torch.Tensor:
    """A vector of length 1 for each row of ``input_ids`` [rows, tokens], padded on the right; [rows, width].

    Heads are left out, and of an encoder-decoder its decoder.
    """
    encoder: nn.Module = model.get_encoder() if is_encoder_decoder(model) else model.base_model
    hidden_RTW = encoder(**inputs).last_hidden_state.float()
    mask_RT1 = inputs["attention_mask"].to(hidden_RTW.device)[..., None]
    if pooling is Pooling.CLS:
        pooled_RW = hidden_RTW[:, 0]
    else:
        pooled_RW = hidden_RTW.masked_fill(mask_RT1 == 0, 0).sum(dim=1) / mask_RT1.sum(dim=1)
    return nn.functional.normalize(pooled_RW, dim=-1)


def logits(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the model's head gives each row of ``input_ids`` [rows, tokens]; [rows, labels]."""
    logits_RL: torch.Tensor = model(**inputs).logits.float()
    return logits_RL


def embedded(vectors_RW: torch.Tensor) -> list[Encoding]:
    """The rows of `embeddings`."""
    return [_checked({"embedding": vector}, vector) for vector in vectors_RW.tolist()]


def labelled(logits_RL: torch.Tensor, config: PreTrainedConfig) -> list[Encoding]:
    """The likeliest label of each row of `logits`, and the scores of all by their names in config.json.

    Scores are probabilities: of all labels together, or of each by itself (`problem_type`). Of a model of one label
    they are the numbers that it gives.
    """
    if config.problem_type == "multi_label_classification":
        scores_RL = logits_RL.sigmoid()
    else:
        scores_RL = logits_RL if logits_RL.shape[-1] == 1 else logits_RL.softmax(dim=-1)
    names = [config.id2label[number] for number in range(logits_RL.shape[-1])]
    rows = zip(scores_RL.tolist(), logits_RL.tolist(), strict=True)
    return [
        _checked({"label": names[scores.index(max(scores))], "scores": dict(zip(names, scores, strict=True))}, raw)
        for scores, raw in rows
    ]


def _checked(fields: Mapping[str, Any], numbers: Sequence[float]) -> Encoding:
    return Encoding(fields) if all(math.isfinite(each) for each in numbers) else Encoding(error=_NOT_FINITE)
