"""The prompts of one call of `LLM.stream`, from texts that wait to completions."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zinfer.batching.batcher import Batcher
from zinfer.errors import ConfigError, PlanError
from zinfer.requests.completion import Completion, text_seed
from zinfer.requests.prompt_encoder import PromptEncoder, PromptLike, as_list
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.stop_criteria import StopCriteria


def paired(
    prompts: PromptLike | Iterable[PromptLike],
    params: SamplingParams | Sequence[SamplingParams] | None,
    fields: Mapping[str, Any],
) -> list[tuple[PromptLike, SamplingParams]]:
    """Each prompt with its params, by default greedy ones of these fields.

    Raises:
        ConfigError: there are not as many params as prompts, or they are none; a field that cannot be used, or fields
            beside params.
    """
    if fields:
        if params is not None:
            raise ConfigError(f"{next(iter(fields))} is given beside params; give it in them")
        params = SamplingParams.from_mapping(fields)
    several = as_list(prompts)
    each = [params or SamplingParams()] * len(several) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(several):
        raise ConfigError(f"{len(each)} params for {len(several)} prompts; give one, or as many as prompts")
    for own in each:
        if not isinstance(own, SamplingParams):
            raise ConfigError(f"params are SamplingParams, not a {type(own).__name__}; write SamplingParams(...)")
    return list(zip(several, each, strict=True))


class RequestTracker:
    """Hands prompts to a batcher as texts, ``n`` of each, and tells which completion each text is.

    Args:
        batcher: with no text unfinished.
        encoder: makes tokens of prompts.
        variables: for chat templates, beside the messages.
        tokenizer: makes text of tokens; None where there is none.
        end_token_ids: the model's.
    """

    def __init__(
        self,
        batcher: Batcher,
        encoder: PromptEncoder,
        tokenizer: Any,
        end_token_ids: frozenset[int],
        variables: Mapping[str, Any],
    ) -> None:
        self._batcher = batcher
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._variables = variables
        self._seen: dict[bytes, int] = {}
        self._waiting: dict[int, tuple[int, int]] = {}
        """Prompt and sample of each text."""

    def add(self, index: int, prompt: PromptLike, params: SamplingParams) -> list[Completion]:
        """Let the texts of a prompt wait; or what is wrong with it, as its completions."""
        try:
            self._add(index, prompt, params)
        except (ConfigError, PlanError) as error:
            return [Completion(index, sample, "", (), "error", error=str(error)) for sample in range(params.n)]
        return []

    @property
    def is_complete(self) -> bool:
        """Whether no text is left to wait for."""
        return not self._waiting

    def step(self) -> list[Completion]:
        """Have a pass computed; the texts that are complete by now."""
        complete = []
        for finished in self._batcher.step():
            index, sample = self._waiting.pop(finished.number)
            complete.append(
                Completion(
                    prompt_index=index,
                    sample_index=sample,
                    text=finished.text,
                    token_ids=finished.token_ids,
                    finish_reason=finished.finish_reason,
                    logprobs=finished.logprobs,
                    error=finished.error,
                    stop_reason=finished.stop_reason,
                )
            )
        return complete

    def _add(self, index: int, prompt: PromptLike, params: SamplingParams) -> None:
        token_ids, params = self._encoder.encode(prompt, params, self._variables)
        prompt_ids = array("i", token_ids)
        ends = frozenset() if params.ignore_eos else self._end_token_ids
        bad_word_ids = self._encoder.bad_word_ids(params)
        name = prompt_ids.tobytes()
        repeat = self._seen.get(name, 0)
        self._seen[name] = repeat + 1
        for sample in range(params.n):
            ending = StopCriteria.of(self._tokenizer, params, ends)
            seed = 0 if params.is_greedy else text_seed(params.seed, prompt_ids, repeat, sample)
            number = self._batcher.add(
                prompt_ids, params, seed=seed, ending=ending, end_token_ids=ends, bad_word_ids=bad_word_ids
            )
            self._waiting[number] = index, sample
