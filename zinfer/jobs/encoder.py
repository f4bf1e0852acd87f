"""Encode the rows of a batch sorted by length: less padding, and fewer passes over the weights."""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from zinfer.engine.engine import InferenceEngine
from zinfer.engine.input_errors import InputErrors
from zinfer.engine.streamed_model import FindReserve
from zinfer.jobs.completer import Completer
from zinfer.jobs.embedding_head import EmbeddingHead
from zinfer.jobs.progress import Forecast, Load
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.records import Encoding
from zinfer.jobs.token_rows import by_length, padded
from zinfer.model.build import find_dtype
from zinfer.model.context_length import is_encoder_decoder
from zinfer.model.padding import RowSharing, reset_rotary
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import ModelSpec
from zinfer.planning.memory import Footprint, find_encoding_footprint
from zinfer.probe.limits import MachineLimits
from zinfer.requests.completion import not_finite

TOKENS_PER_PASS: Final = 16384
_T = TypeVar("_T")
_NOT_FINITE: Final = "the model's outputs are not finite numbers; its weights may be damaged, or its dtype too narrow"


class Encoder:
    """Embeds or classifies rows of tokens with an engine.

    Args:
        head: follows the token vectors; None: rows are classified.
        pad_token_id: padding token, of `find_pad_token_id`; the mask hides it.
        sharing: which rows may share a pass.
    """

    def __init__(
        self, engine: InferenceEngine, head: EmbeddingHead | None, pad_token_id: int, sharing: RowSharing
    ) -> None:
        self._engine = engine
        self._head = head
        self._pad_token_id, self._sharing = pad_token_id, sharing
        config = padding_config(engine.module)
        needs_padding = head is None and hasattr(config, "pad_token_id")
        self._lacks_padding = needs_padding and not _is_token(config, config.pad_token_id)

    def passes(self, rows: Sequence[_T], length: Callable[[_T], int], max_tokens: int) -> list[list[_T]]:
        """Divide rows among passes of at most ``max_tokens``, padding included, or of one row."""
        groups = self._sharing.groups(rows, length)
        return [part for group, _ in groups for part in by_length(group, length, max_tokens)]

    def encode(self, rows: Sequence[Sequence[int]]) -> list[Encoding]:
        """Encode one pass. Rows with non-finite outputs are recomputed alone to find the layer at fault."""
        numbers = self._compute(rows)
        broken = (~numbers.isfinite().all(dim=1)).nonzero().flatten().tolist()
        names: dict[int, str | None] = {}
        if broken:
            again = [rows[place] for place in broken]
            found = self._engine.find_broken(lambda: self._compute(again), len(again))
            names = dict(zip(broken, found, strict=True))
        if self._head is None:
            fields = label_rows(numbers, self._engine.module.config)
        else:
            fields = [{"embedding": vector} for vector in numbers.tolist()]
        return [
            Encoding(error=not_finite(names[place], _NOT_FINITE)) if place in names else Encoding(each)
            for place, each in enumerate(fields)
        ]

    def _compute(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the embeddings or logits [rows, width or labels].

        If config.json has no `pad_token_id`, transformers takes the last token of a row alone, whichever it is, and
        refuses several rows. So they are padded with a token that none of them ends with, and the head is told it.
        """
        if not self._lacks_padding:
            return self._forward(rows, self._pad_token_id)
        config = padding_config(self._engine.module)
        token_id = _token_unlike_ends(rows, self._pad_token_id, config.get_text_config().vocab_size)
        if token_id is None:
            return torch.cat([self._compute([row]) for row in rows])
        with _padding(config, token_id):
            if token_id == self._pad_token_id:
                return self._forward(rows, token_id)
            found: torch.Tensor = self._engine.eagerly(
                lambda: self._forward(rows, token_id), "its rows are padded with another token"
            )
            return found

    def _forward(self, rows: Sequence[Sequence[int]], pad_token_id: int) -> torch.Tensor:
        reset_rotary(self._engine.module)
        ids, mask = padded(rows, pad_token_id)
        device, module = self._engine.device, self._engine.module
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

        def work() -> torch.Tensor:
            if self._head is not None:
                return embeddings(module, inputs, self._head)
            logits: torch.Tensor = module(**inputs).logits.float()
            return logits

        found: torch.Tensor = self._engine.call(work)
        return found


class EncodingCompleter(Completer):
    """Embeds or classifies prompts.

    Args:
        encoder: over the engine.
        tokens_per_pass: maximum per pass, padding included; a longer row gets a pass of its own.
        input_errors: as for `Completer`.
    """

    def __init__(
        self, engine: InferenceEngine, encoder: Encoder, tokens_per_pass: int, input_errors: InputErrors
    ) -> None:
        super().__init__(engine.stats, engine.destroy, input_errors)
        self._encoder = encoder
        self._tokens_per_pass = tokens_per_pass

    def forecast(self, prompts: Sequence[Prompt]) -> Forecast:
        """Return the number of passes; their time is not predicted."""
        num_passes = len(self._parts(prompts))
        return Forecast(f"{num_passes} passes for {len(prompts)} rows", num_passes=num_passes)

    def complete(
        self, prompts: Sequence[Prompt], wanted: Collection[int]
    ) -> Generator[tuple[Prompt, Encoding], None, None]:
        """See `Completer.complete`."""
        for part in self._parts(prompts):
            if any(id(prompt) in wanted for prompt in part):
                encodings = self._encoder.encode([prompt.token_ids for prompt in part])
                num_tokens = self._load.num_tokens + sum(len(prompt.token_ids) for prompt in part)
                self._load = Load(self._load.num_passes + 1, num_tokens, num_tokens)
                yield from zip(part, encodings, strict=True)

    def _parts(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        return self._encoder.passes(prompts, lambda prompt: len(prompt.token_ids), self._tokens_per_pass)


def padding_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config whose `pad_token_id` a classifier skips to find a row's last token."""
    config: PreTrainedConfig = model.config
    return config.get_text_config() if isinstance(model, GenericForSequenceClassification) else config


def find_pad_token_id(config: PreTrainedConfig, tokenizer: Any) -> int:
    """Return the token that pads rows; 0 if neither config nor tokenizer has one of the model's vocabulary."""
    own = None if tokenizer is None else tokenizer.pad_token_id
    for each in (getattr(config, "pad_token_id", None), own):
        if each is not None and _is_token(config, each):
            return int(each)
    return 0


def _is_token(config: PreTrainedConfig, token_id: int | None) -> bool:
    return token_id is not None and 0 <= token_id < config.get_text_config().vocab_size


def _token_unlike_ends(rows: Sequence[Sequence[int]], preferred: int, vocab_size: int) -> int | None:
    """Return a token that no row ends with; None if there is none."""
    ends = {row[-1] for row in rows}
    return next((each for each in chain([preferred], range(vocab_size)) if each not in ends), None)


@contextmanager
def _padding(config: PreTrainedConfig, token_id: int) -> Iterator[None]:
    """Context in which a config has this `pad_token_id`."""
    former = config.pad_token_id
    config.pad_token_id = token_id
    try:
        yield
    finally:
        config.pad_token_id = former


def encoder_reserve(spec: ModelSpec, row_len: int, tokens_per_pass: int) -> FindReserve:
    """Return a function that computes the memory to reserve for full passes of rows of ``row_len`` tokens.

    Args:
        spec: spec of the encoder.
    """
    num_rows = max(tokens_per_pass // row_len, 1)

    def find_reserve(
        module: PreTrainedModel, blocks: Sequence[ModelBlock], limits: MachineLimits, free_bytes: int
    ) -> Footprint:
        return find_encoding_footprint(spec, find_dtype(module), num_rows, row_len, on_cuda=limits.on_cuda)

    return find_reserve


def embeddings(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], head: EmbeddingHead) -> torch.Tensor:
    """Return vectors [rows, width] for ``input_ids`` [rows, tokens], which are padded on the right.

    Runs without the model's own head; an encoder-decoder runs without its decoder.
    """
    encoder: nn.Module = model.get_encoder() if is_encoder_decoder(model) else model.base_model
    return head(encoder(**inputs).last_hidden_state, inputs["attention_mask"])


def label_rows(logits_RL: torch.Tensor, config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return each row's most likely label and the scores of all labels, by their names in config.json.

    The scores are those of transformers' text-classification pipeline. `problem_type` in config.json selects them: the
    logits of a regression, a sigmoid of each for several labels a row, else softmax; of a single label its sigmoid.

    Args:
        logits_RL: logits of the head [rows, labels].
    """
    if config.problem_type == "regression":
        scores_RL = logits_RL
    elif config.problem_type == "multi_label_classification" or logits_RL.shape[-1] == 1:
        scores_RL = logits_RL.sigmoid()
    else:
        scores_RL = logits_RL.softmax(dim=-1)
    names = [config.id2label[number] for number in range(logits_RL.shape[-1])]
    return [
        {"label": names[scores.index(max(scores))], "scores": dict(zip(names, scores, strict=True))}
        for scores in scores_RL.tolist()
    ]
