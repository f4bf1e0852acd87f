"""`pipeline`: a model in this process, as DeepSpeed-MII's non-persistent deployments."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from zinfer.batching.llm import LLM
from zinfer.errors import ConfigError
from zinfer.mii.response import GenerationFinishReason, Response
from zinfer.mii.settings import config_of
from zinfer.ranks.environment import num_started, own_rank
from zinfer.requests.mii_params import MIIParams
from zinfer.requests.prompt_encoder import PromptEncoder
from zinfer.requests.sampling_params import SamplingParams

_NO_STREAM: Final = "stream: a pipeline returns whole texts; zinfer.AsyncLLM, or a client's streaming_fn, streams"


class MIIPipeline:
    """Generates texts for prompts; made by `pipeline`.

    Attributes:
        llm: the model.
    """

    def __init__(self, llm: LLM, max_length: int | None, *, all_rank_output: bool) -> None:
        self.llm = llm
        self._max_length, self._all_rank_output = max_length, all_rank_output

    def __call__(self, inputs: str | Sequence[str], **generate_kwargs: Any) -> list[Response]:
        """Return a response for each prompt, in order.

        Args:
            inputs: one prompt, or several.
            generate_kwargs: fields of `zinfer.requests.mii_params.MIIParams`, such as ``max_new_tokens``.

        Raises:
            ConfigError: a keyword or a prompt cannot be used.
        """
        prompts = [inputs] if isinstance(inputs, str) else list(inputs)
        params = MIIParams.read({"max_length": self._max_length, **generate_kwargs})
        if params.stream:
            raise ConfigError(_NO_STREAM)
        encoded, own = encode(self.llm, prompts, params)
        completions = self.llm.generate(encoded, own) if prompts else []
        if failed := next((each.error for each in completions if each.error), None):
            raise ConfigError(failed)
        if own_rank() > 0 and not self._all_rank_output:
            return []
        return [
            Response(
                prompt + each.text if params.return_full_text else each.text,
                len(ids["prompt_token_ids"]),
                len(each.token_ids),
                GenerationFinishReason(each.finish_reason),
            )
            for prompt, ids, each in zip(prompts, encoded, completions, strict=True)
        ]

    def destroy(self) -> None:
        """Release the model."""
        self.llm.close()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.llm.tokenizer


def encode(
    llm: LLM, prompts: Sequence[str], params: MIIParams
) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Return prompts as token ids, and how each is sampled. Raises ConfigError as `MIIParams.within`."""
    encoder, sampling = PromptEncoder(llm.tokenizer, llm.vocab_size), params.sampling
    several = [encoder.tokenize(each) for each in encoder.encode_texts([(prompt, sampling) for prompt in prompts])]
    own = [params.within(sampling, len(ids), llm.limits) for ids in several]
    return [{"prompt_token_ids": ids} for ids in several], own


def pipeline(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    all_rank_output: bool = False,
    **kwargs: Any,
) -> MIIPipeline:
    """Load a model into this process; processes that torchrun started divide its layers.

    Args:
        model_name_or_path: a checkpoint folder with its tokenizer, or a name on the hub.
        model_config: the same keywords as a mapping.
        all_rank_output: whether other ranks than 0 return texts too.
        kwargs: MII's keywords, see `zinfer.mii.settings`; and ``config`` and ``device``, as for `zinfer.LLM`.

    Raises:
        ConfigError, CheckpointError, PlanError: as `zinfer.LLM`; or a keyword cannot be used.
    """
    settings = config_of(model_name_or_path, model_config, kwargs, default_ranks=num_started())
    options: dict[str, Any] = {} if settings.device is None else {"device": settings.device}
    llm = LLM(settings.model, settings.config, tokenizer=settings.tokenizer, **options)
    return MIIPipeline(llm, settings.max_length, all_rank_output=all_rank_output)
