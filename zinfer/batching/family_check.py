"""Measures whether sequences of a model that share ragged passes get the logits that each gets alone in transformers.

[Note: what the measurement sees]
A few layers of the same config, with every kind of layer among them and random float32 weights, compute sequences of
several lengths: alone by transformers' `generate`, and together over pages, in chunks, by the runner of real passes.
Pages begin as NaN. Tokens are prescribed, and logits compared. Windows, chunks and the numbers of keys that an index
chooses are lowered to a few tokens, so that these sequences exceed them. Where that tells them apart and the config's
own numbers do not, sequences run up to the smallest of these numbers of tokens.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from zinfer.batching.ragged import BatchBuilder
from zinfer.batching.runner import PagedForward
from zinfer.errors import ConfigError, PlanError
from zinfer.kv_cache.device import KVCache
from zinfer.model.context_length import read_limits
from zinfer.model.families import Batching, limited, recall_batching, record_batching
from zinfer.model.miniature import FORCED, MINIATURES, TOLERANCE, Miniature, generate_forced, narrowed_sizes
from zinfer.model.partition import find_layers
from zinfer.model.spec import ModelSpec
from zinfer.requests.length_limits import LengthLimits
from zinfer.scheduling.schedule import Chunk, Chunks
from zinfer.scheduling.sequence import Sequence as TokenSequence

log = logging.getLogger("zinfer")

_PROMPT_LENS: Final = (3, 14, 9)
_NUM_NEW: Final = 3
_CHUNK: Final = 5
_PAGE_SIZE: Final = 4
_PAD_TOKEN_ID: Final = 1


def check_family(model: PreTrainedModel) -> Batching:
    """Return up to what length a model runs in ragged batches; measure it, if its class and options are new.

    Raises:
        ConfigError: it cannot run in them; says why.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"a {name} is not a transformers model, whose attention ragged batches need; use zinfer.init_inference for "
            "it"
        )
    if not model.can_generate() or model.config.is_encoder_decoder:
        kind = "generates from an encoder's outputs" if model.can_generate() else "does not generate"
        raise ConfigError(f"a {name} cannot run in ragged batches: it {kind}; use zinfer.init_inference for it")
    found = recall_batching(model)
    if found is None:
        begin_s = time.monotonic()
        found = _measure(model)
        record_batching(model, found)
        log.info("measured in %.1f s whether a %s runs in ragged batches", time.monotonic() - begin_s, name)
    if found.why_not is not None:
        raise ConfigError(
            f"a {name} cannot run in ragged batches: {found.why_not}; `zinfer run` computes it in padded batches, and "
            "zinfer.init_inference runs it"
        )
    return found


def batched_limits(model: PreTrainedModel, max_out_tokens: int | None) -> LengthLimits:
    """Return the limits of requests in ragged batches, as `read_limits`, before the model is divided.

    Raises:
        ConfigError: as `check_family`.
    """
    limits, found = read_limits(model, max_out_tokens), check_family(model)
    return limits if found.max_tokens is None else limits.within(found.max_tokens, found.limited_by or "")


def _measure(model: PreTrainedModel) -> Batching:
    config: Any = model.config.get_text_config(decoder=True)
    try:
        ModelSpec.read(model.config)
    except PlanError as error:
        return Batching(str(error))
    why_not = _difference(model, narrows=True)
    if why_not is None:
        return limited(config, Batching())
    sizes = narrowed_sizes(config)
    if not sizes or _difference(model, narrows=False) is not None:
        return Batching(why_not)
    name = min(sizes, key=lambda each: sizes[each])
    return limited(config, Batching(None, sizes[name], f"{name} of config.json: pages hold nothing to choose by"))


@torch.no_grad()
def _difference(model: PreTrainedModel, *, narrows: bool) -> str | None:
    """Return what keeps a model from ragged batches, None if nothing does."""
    why: str | None = None
    for make in MINIATURES:
        try:
            return _compared(model, make, narrows)
        except Exception as error:  # a class that such a copy does not suit may fail in any way
            said = " ".join(f"{error}".split()) or type(error).__name__
            why = why or f"a few of its layers do not run in them ({said:.150})"
    return why


def _compared(model: PreTrainedModel, make: Miniature, narrows: bool) -> str | None:
    small = make(model, narrows=narrows)
    prompts = [[3 + (7 * place + 5 * num) % 60 for place in range(num)] for num in _PROMPT_LENS]
    alone = [generate_forced(small, [prompt], _PAD_TOKEN_ID, _NUM_NEW) for prompt in prompts]
    if not all(bool(logits.isfinite().all()) for logits in alone):
        raise ConfigError("outputs with random weights are not finite")
    together = _ragged(small, prompts)
    errors = [float((own - found).abs().max() / own.std()) for own, found in zip(alone, together, strict=True)]
    if max(errors) <= TOLERANCE:  # NaN is not
        return None
    return "sequences that share a pass get other logits than each alone, measured on a few of its layers"


def _ragged(small: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return each prompt's logits for its new tokens [new tokens, logits], from passes that all share."""
    device = torch.device("cpu")
    num_pages = -(-(max(map(len, prompts)) + _NUM_NEW) // _PAGE_SIZE) * len(prompts)
    cache = KVCache(ModelSpec.read(small.config).kv, num_pages, _PAGE_SIZE, torch.float32, device)
    for part in (part for layer in cache.layers if layer is not None for part in layer.parts()):
        part.fill_(torch.nan)
    texts = [
        TokenSequence(number, tuple(prompt), _NUM_NEW, pages=list(range(number, num_pages, len(prompts))))
        for number, prompt in enumerate(prompts)
    ]
    forward = PagedForward(small, find_layers(small), cache)
    builder = BatchBuilder(_PAGE_SIZE, device, stride=cache.stride)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    try:
        while chunks := list(_next_chunks(texts)):
            rows = iter(forward(builder.build(Chunks(chunks))))
            for chunk in chunks:
                if chunk.samples:
                    found[chunk.sequence.number].append(next(rows).float())
                    chunk.sequence.output_ids.append(FORCED)
                chunk.sequence.num_computed = chunk.end
    finally:
        forward.close()
        cache.close()
    return [torch.stack(logits) for logits in found]


def _next_chunks(texts: Sequence[TokenSequence]) -> Iterator[Chunk]:
    """Yield the next chunk of each sequence that lacks new tokens; decodes come first, as in real passes."""
    for text in sorted(texts, key=lambda each: not each.output_ids):
        if len(text.output_ids) < _NUM_NEW:
            end = min(text.num_computed + _CHUNK, text.num_tokens)
            yield Chunk(text, text.num_computed, end, end == text.num_tokens)
