"""What an encoder makes of a text, as fields of its row: an embedding, or a label and the scores of all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.jobs.task import Pooling
from zinfer.sequence_length import is_encoder_decoder

_NOT_FINITE: Final = "the model's outputs are not finite numbers; its weights may be damaged, or its dtype too narrow"


@dataclass(frozen=True)
class Encoding:
    """Of one text; no fields where there is an error."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def embeddings(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], pooling: Pooling) -> list[Encoding]:
    """A vector of length 1 for each row of ``input_ids`` [rows, tokens], padded on the right.

    Heads are left out, and of an encoder-decoder its decoder.
    """
    encoder: nn.Module = model.get_encoder() if is_encoder_decoder(model) else model.base_model
    hidden_RTW = encoder(**inputs).last_hidden_state.float()
    mask_RT1 = inputs["attention_mask"].to(hidden_RTW.device)[..., None]
    if pooling is Pooling.CLS:
        pooled_RW = hidden_RTW[:, 0]
    else:
        pooled_RW = hidden_RTW.masked_fill(mask_RT1 == 0, 0).sum(dim=1) / mask_RT1.sum(dim=1)
    vectors = nn.functional.normalize(pooled_RW, dim=-1)
    return [_encoding({"embedding": vector}, vector) for vector in vectors.tolist()]


def labels(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> list[Encoding]:
    """The likeliest label of each row, and the scores of all by their names in config.json.

    Scores are probabilities: of all labels together, or of each by itself (`problem_type`). Of a model of one label
    they are the numbers that it gives.
    """
    config = model.config
    logits = model(**inputs).logits.float()
    if config.problem_type == "multi_label_classification":
        scores = logits.sigmoid()
    else:
        scores = logits if logits.shape[-1] == 1 else logits.softmax(dim=-1)
    names = [config.id2label[number] for number in range(logits.shape[-1])]
    return [
        _encoding({"label": names[row.index(max(row))], "scores": dict(zip(names, row, strict=True))}, row)
        for row in scores.tolist()
    ]


def _encoding(fields: Mapping[str, Any], numbers: list[float]) -> Encoding:
    return Encoding(fields) if all(abs(each) < float("inf") for each in numbers) else Encoding(error=_NOT_FINITE)
