"""`DraftModel`: guesses by a small model of the same vocabulary, which stays on the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from zinfer.config import Memory, Settings
from zinfer.errors import ConfigError, PlanError
from zinfer.planning.device_cap import DeviceParts
from zinfer.ranks.environment import num_started
from zinfer.requests.completion import Completion
from zinfer.requests.sampling_params import SamplingParams
from zinfer.scheduling.sequence import Sequence as TokenSequence
from zinfer.scheduling.speculation import MOST_TOKENS
from zinfer.units import human_bytes

_MOST_GUESSES: Final = 8
"""Each takes a pass of the small model, during which the large one only streams on."""
_KV_BYTES: Final = 1 << 30
_TOKENS_PER_PASS: Final = 8192


class SmallModel(Protocol):
    """What is asked of the `LLM` that guesses."""

    tokenizer: Any
    vocab_size: int

    def generate(self, prompts: Any, params: SamplingParams) -> list[Completion]: ...

    def close(self) -> None: ...


class DraftModel:
    """Completes each sequence's text greedily; what it computed before is found in its prefix cache.

    Args:
        generate: `LLM.generate` of the small model.
        vocab_size: of the large model; guesses end before a token that it lacks.
    """

    def __init__(self, generate: Callable[..., list[Completion]], vocab_size: int) -> None:
        self._generate = generate
        self._vocab_size = vocab_size

    def guess(self, sequences: Sequence[TokenSequence], most: int) -> Mapping[int, tuple[int, ...]]:
        """As `NGramDrafter.guess`; a sequence that the small model cannot hold has no guess."""
        if not sequences:
            return {}
        prompts = [{"prompt_token_ids": each.tokens(0, each.num_known).tolist()} for each in sequences]
        found = self._generate(prompts, SamplingParams(max_new_tokens=min(most, _MOST_GUESSES)))
        pairs = zip(sequences, found, strict=True)
        return {each.number: self._known(completion) for each, completion in pairs if completion.error is None}

    def _known(self, completion: Completion) -> tuple[int, ...]:
        ids = completion.token_ids
        return ids[: next((place for place, each in enumerate(ids) if each >= self._vocab_size), len(ids))]


def draft_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of the small model beside a large one with these settings.

    Among several ranks each has the small model as a replica, since they open their models in step; the first of those
    that make the same passes asks it.
    """
    own: dict[str, Any] = {
        "device": settings.device,
        "speculate": "off",
        "generation_config": "none",
        "download": settings.download,
        "kv_cache_memory": _KV_BYTES,
        "max_sequences": MOST_TOKENS // 2,
        "tokens_per_pass": _TOKENS_PER_PASS,
        "max_device_memory": settings.memory.max_device_memory,
        "max_host_memory": settings.memory.max_host_memory,
    }
    return {"zinfer": own | ({"parallel": {"replicas": num_started()}} if num_started() > 1 else {})}


def own_bytes(draft: DeviceParts) -> int:
    """Return the device memory of a small model alone: what is kept for CUDA itself serves the large one too."""
    return draft.total - draft.reserve


def beside_draft(settings: Settings, device_bytes: int, host_bytes: int) -> Settings:
    """Return the settings of a large model beside a small one that takes so much of the same caps.

    Raises:
        PlanError: it takes all of one.
    """
    memory = settings.memory
    return replace(
        settings,
        memory=replace(
            memory,
            max_device_memory=_left("max_device_memory", memory.max_device_memory, device_bytes),
            max_host_memory=_left("max_host_memory", memory.max_host_memory, host_bytes),
        ),
    )


@contextmanager
def saying_shares(memory: Memory, device_bytes: int, host_bytes: int) -> Iterator[None]:
    """Let a PlanError of the large model say what the small one has of the stated caps, beside the figures of the rest.

    Args:
        memory: as stated, for both.
        device_bytes, host_bytes: of the small model; 0: there is none.

    Raises:
        PlanError: the block's, with both shares.
    """
    taken = {"max_device_memory": device_bytes, "max_host_memory": host_bytes}
    shares = [
        f"{human_bytes(nbytes)} of zinfer.{key}, {human_bytes(cap)}"
        for key, nbytes in taken.items()
        if nbytes and (cap := getattr(memory, key)) is not None
    ]
    try:
        yield
    except PlanError as error:
        if not shares:
            raise
        raise PlanError(f"zinfer.draft_model takes {' and '.join(shares)}; with the rest: {error}") from error


def _left(key: str, cap: int | None, nbytes: int) -> int | None:
    if cap is not None and nbytes >= cap:
        raise PlanError(
            f"zinfer.{key} is {human_bytes(cap)}, and zinfer.draft_model takes {human_bytes(nbytes)} of it; raise the "
            "one, or leave out the other"
        )
    return None if cap is None else cap - nbytes


def open_drafter(settings: Settings, draft: SmallModel | None, tokenizer: Any, vocab_size: int) -> DraftModel | None:
    """Return what lets the small model guess for the large one, whose tokenizer and vocabulary are given.

    Raises:
        ConfigError: tokens do not mean the same to both.
    """
    folder = settings.batching.draft_model
    if draft is None or folder is None:
        return None
    check_vocabulary(folder, (draft.tokenizer, draft.vocab_size), (tokenizer, vocab_size))
    return DraftModel(draft.generate, vocab_size)


def check_vocabulary(folder: Path, draft: tuple[Any, int], own: tuple[Any, int]) -> None:
    """Check that tokens mean the same to both models.

    Args:
        folder: of the small model.
        draft, own: the tokenizer, None if there is none, and the size of the vocabulary of each.

    Raises:
        ConfigError: they do not.
    """
    (theirs, their_size), (ours, our_size) = draft, own
    if theirs is not None and ours is not None:
        is_same = theirs.get_vocab() == ours.get_vocab()
    else:
        is_same = their_size == our_size
    if not is_same:
        raise ConfigError(
            f"zinfer.draft_model = {str(folder)!r}: its vocabulary of {their_size:,} tokens is not the model's of "
            f"{our_size:,}; give a smaller model of the same family"
        )
