"""`LLM`: completes any number of prompts by continuous batching, with resident or streamed weights."""

import logging
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from zinfer.batching.batched_model import BatchedModel, BesideLoad
from zinfer.batching.beam_search import BeamSearchOutput, BeamSearchParams, one_step, search_beams
from zinfer.batching.draft_model import beside_draft, draft_config, own_bytes, saying_shares
from zinfer.batching.handle import Handle
from zinfer.config import Settings, resolve_settings
from zinfer.config.settings import mute_key_report, say_without_effect
from zinfer.config.values import show
from zinfer.engine.division import Prepare
from zinfer.engine.prepare import PreparedModel
from zinfer.errors import ConfigError
from zinfer.planning.job_plan import Job
from zinfer.planning.job_sizes import SWAPS, choose_sizes, split
from zinfer.probe.limits import find_limits
from zinfer.ranks.environment import is_several
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.prompt_encoder import PromptLike
from zinfer.requests.sampling_params import SamplingParams
from zinfer.scheduling.precedence import Precedence
from zinfer.weights import Checkpoint
from zinfer.weights.hub import ensure_downloaded

log = logging.getLogger("zinfer")


class LLM(BatchedModel):
    """A model that completes prompts in ragged batches; all running sequences share each pass over its weights.

    Args:
        model: as for `zinfer.init_inference`, or an open checkpoint.
        config: likewise; ``zinfer.tokens_per_pass``, ``max_sequences``, ``kv_cache_memory``, ``kv_cache_tier``,
            ``kv_cache_dtype`` and ``kv_page_size`` configure the batches, ``max_token_latency`` bounds their passes,
            and ``speculate`` and ``draft_model`` say whether and by what tokens are guessed.
        tokenizer: one of transformers'; by default the one in the model's folder, if there is one. Without it prompts
            are token ids.
        swaps_to_disk: whether preempted sequences are swapped to ``offload_param.nvme_path`` once their share of host
            memory is full; None: if a path is stated and swapping is faster than recomputing.
        num_pages: of the KV cache; None: by ``kv_cache_memory``, or as many as are useful.
        prepare: partitions the module; by default over the weights of its checkpoint.
        beside_load: a context for the time in which weights are loaded, from the planned device memory and the sizes of
            batches; the KV cache is not there yet.
        job: what it is to complete: on a GPU the sizes of passes and KV cache that the configuration leaves open are
            those that are predicted to be the fastest for it, and a line of the log says which. The model is a folder
            then. None: sizes for any prompts.
        interactive: requests come while others run, and somebody waits for each token. A pass then has 1,024 tokens at
            most, unless weights stream, tokens choose among experts, the model is too small to profit, or
            ``max_token_latency`` says what is wanted.
        kwargs: the same keys as in ``config``.

    A thread of its own runs the passes (`ServingLoop`); any number of threads may call, and their prompts share passes.
    It is a context manager; `close` releases memory, threads and files, and leaves counters, plan and predictions.

    Ranks that make the same passes (`zinfer.batching.lockstep`) make the same calls, and each gets the same results; a
    rank that makes none computes along. The first of them decides: on the others `cancel` has no effect, and `close`
    waits for the first one's.

    Attributes:
        tokenizer: None: there is none.
        vocab_size: token ids are below it.
        limits: of prompts and new tokens.
        end_token_ids: the tokens that end a text, by the model's generation config, else its tokenizer.

    Raises:
        ConfigError, CheckpointError, PlanError: as `zinfer.init_inference`; also for a family of models whose attention
            is not known to work in ragged batches.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Checkpoint | nn.Module,
        config: str | os.PathLike[str] | Mapping[str, object] | Settings | None = None,
        *,
        tokenizer: Any = None,
        swaps_to_disk: bool | None = None,
        num_pages: int | None = None,
        prepare: Prepare = PreparedModel.of,
        beside_load: BesideLoad | None = None,
        job: Job | None = None,
        interactive: bool = False,
        **kwargs: object,
    ) -> None:
        is_module = isinstance(model, nn.Module)
        settings = resolve_settings(config, kwargs, is_module=is_module, swaps=True, is_job=job is not None)
        say_without_effect(settings)
        if job is not None:
            _check_job(model, job)
        ensure_downloaded(model, download=settings.download)
        if job is not None:
            folder = model.folder if isinstance(model, Checkpoint) else cast(Path, model)
            sizes, arguments = split(choose_sizes(folder, settings, job, log.warning))
            swaps_to_disk = arguments[SWAPS] if swaps_to_disk is None else swaps_to_disk
            settings = resolve_settings(config, {**kwargs, **sizes}, swaps=True)
        settings = settings.for_batches(on_cuda=find_limits(settings).on_cuda)
        with ExitStack() as opened:
            self._draft = draft = self._open_draft(settings)  # first: the large model takes what memory is left
            stated, device_bytes, host_bytes = settings.memory, 0, 0
            if draft is not None:
                opened.callback(draft.close)
                device_bytes, host_bytes = own_bytes(draft.device_parts), draft.host_bytes
                settings = beside_draft(settings, device_bytes, host_bytes)
                draft._model.cap.lower_to(device_bytes)
            with saying_shares(stated, device_bytes, host_bytes):
                super().__init__(
                    model,
                    settings,
                    tokenizer=tokenizer,
                    swaps_to_disk=swaps_to_disk,
                    num_pages=num_pages,
                    prepare=prepare,
                    beside_load=beside_load,
                    interactive=interactive,
                    draft=draft,
                )
            opened.pop_all()

    def _open_draft(self, settings: Settings) -> "LLM | None":
        """Open the small model that guesses tokens, if one is configured."""
        folder = settings.batching.draft_model
        if folder is None or settings.batching.speculate == "off":
            return None
        with mute_key_report():
            return LLM(folder, draft_config(settings))

    def reset_prefix_cache(self) -> None:
        """Forget the pages of earlier prompts, so that later ones are computed as in a new LLM.

        Raises:
            RuntimeError: requests are under way, or the LLM was closed.
        """
        self._check_open()
        self._loop.drop_prefixes()

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """Return the completions of all prompts, in order; those of one prompt are adjacent.

        Args:
            prompts: one prompt, or an iterable of them.
            params: one for all, or one for each prompt; greedy by default.
            chat_template_kwargs: more variables for the chat template, such as ``{"enable_thinking": False}``.
            reasoning_effort: the template's variable of that name.
            fields: fields of `SamplingParams` in place of params, such as ``max_new_tokens=4``; and ``priority`` and
                ``owner`` as for `prepare`.

        A prompt that is malformed or too long gets a completion with an ``error``; the others are completed. One that
        leaves less room within `limits` than params state gets as many new tokens as fit.

        Raises:
            ConfigError: the numbers of params and prompts differ, or template variables are given without any chat.
            RuntimeError: the LLM was closed.
        """
        options = {"chat_template_kwargs": chat_template_kwargs, "reasoning_effort": reasoning_effort, **fields}
        completions = self.stream(prompts, params, **options)
        return sorted(completions, key=lambda each: (each.prompt_index, each.sample_index))

    def beam_search(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: BeamSearchParams,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely sequences of each prompt that a beam search finds, as transformers' `generate` does.

        Args:
            prompts, chat_template_kwargs, reasoning_effort: as for `generate`.
            params: of all prompts.

        A prompt that cannot be used gets an output with an ``error``. Each step is a call of `generate` for one token.
        Of the model's generation config only end tokens have an effect.

        Raises:
            ConfigError, RuntimeError: as `generate`; or params are not `BeamSearchParams`.
        """
        if not isinstance(params, BeamSearchParams):
            raise ConfigError(f"params are BeamSearchParams, not a {type(params).__name__}")
        if ignored := self._defaults.of_all:
            log.warning("beam_search: %s of generation_config.json has no effect on beams", ", ".join(ignored))
        ends = frozenset() if params.ignore_eos else self.end_token_ids
        step = one_step(params, ends)
        options = {"chat_template_kwargs": chat_template_kwargs, "reasoning_effort": reasoning_effort}
        first = self.generate(prompts, step, **options)  # type: ignore[arg-type]
        return search_beams(first, lambda more: self.generate(more, step), params, ends, self.limits, self.tokenizer)

    def stream(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> Generator[Completion, None, None]:
        """As `generate`, but yield each completion as soon as it is complete. Leaving it early cancels the rest."""
        handle = self.prepare(prompts, params, **options)
        try:
            self.submit(handle)
            yield from cast(Iterable[Completion], handle)
        finally:
            self.cancel(handle)

    def prepare(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        deltas: bool = False,
        is_background: bool = False,
        priority: int = 0,
        owner: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        known: Mapping[int, Sequence[Sequence[int]]] = MappingProxyType({}),
        **fields: Any,
    ) -> Handle:
        """Encode prompts, as `generate` does, for `submit`.

        Args:
            deltas: the handle yields a `CompletionDelta` for each token instead of a `Completion` for each request.
            is_background: the requests give way to others, whenever these are submitted.
            priority: of one owner's requests that wait, those of a lower number start first.
            owner: whose requests they are: those of several owners that wait take turns, by tokens.
            known: by number of a prompt, the tokens of each of its completions from an equal call that was cut short.
                These prompts take their places in the passes, so that the others get the same bits, but passes without
                other prompts are not computed. Such a call shares its passes with no other call.
        """
        self._check_open()
        requests, refused = self._builder.build(
            prompts,
            params,
            chat_template_kwargs,
            reasoning_effort,
            fields,
            deltas=deltas,
            precedence=Precedence(is_background, priority, owner),
            known=known,
        )
        if deltas:
            return Handle(requests, [CompletionDelta.refused(each) for each in refused])
        return Handle(requests, refused)

    def submit(self, handle: Handle) -> None:
        """Start prepared requests; iterate the handle for their results.

        Raises:
            RuntimeError: the LLM was closed.
        """
        self._check_open()
        self._loop.submit(handle)

    def cancel(self, handle: Handle) -> None:
        """End the unfinished requests of a handle; their completions get the finish reason "cancelled"."""
        self._loop.cancel(handle)


def _check_job(model: object, job: object) -> None:
    """Raise ConfigError unless sizes can be planned for a job of this model."""
    if not isinstance(job, Job):
        raise ConfigError(
            f"job = {show(job)}: expected a zinfer.Job, the lengths of the rows to come, such as "
            "zinfer.Job(num_rows=1000, prompt_lens=[512], new_tokens=[128])"
        )
    if isinstance(model, nn.Module):
        raise ConfigError("job: sizes are planned for a model's folder, not for a module; leave job out")
    if is_several():
        raise ConfigError("job: sizes are planned for one process; state zinfer.tokens_per_pass and kv_cache_memory")
