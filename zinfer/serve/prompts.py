"""`Prompts`: the prompts of HTTP requests as tokens, on threads of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.length_limits import LengthLimits, Limit
from zinfer.requests.prompt_encoder import PromptEncoder, PromptLike
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.tool_formats import tool_format_of
from zinfer.requests.tool_parser import AnswerParser, open_parser
from zinfer.requests.tools import ToolUse
from zinfer.scheduling.precedence import FIRST_COME, Precedence
from zinfer.serve.caller import CALLER
from zinfer.serve.encoding_lanes import SHORT, EncodingLanes, size_of
from zinfer.serve.errors import ApiError
from zinfer.serve.list_lengths import check_lists
from zinfer.serve.messages import Ready

_FEW_TOKENS: Final = 2048
"""A prompt of so many token ids is checked in less time than another thread takes to begin."""


@dataclass(frozen=True)
class Encoded:
    """A prompt's tokens, its params with the number of new tokens filled in, and whether it starts before others."""

    prompt_ids: list[int]
    params: SamplingParams
    precedence: Precedence = FIRST_COME


class Prompts:
    """Encodes and decodes for one model.

    Args:
        tokenizer: None: prompts must be token ids.
        most: prompts of one call.

    Attributes:
        tokenizer, most: the same.
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        self.tokenizer = tokenizer
        self.most = most
        self._ready: Ready | None = None
        self._lanes: EncodingLanes | None = None

    def open(self, ready: Ready) -> None:
        """Take what the model takes, once it is loaded."""
        self._ready = ready
        self._lanes = EncodingLanes(lambda: self.new_encoder(deepcopy(self.tokenizer)))

    def close(self) -> None:
        """End the threads, and the processes that render chats."""
        if self._lanes is not None:
            self._lanes.close()

    @property
    def most_tokens(self) -> int:
        """What the context and the KV cache hold of one sequence."""
        ready = self._loaded
        positions = ready.limits.most_tokens
        return ready.most_tokens if positions is None else min(positions, ready.most_tokens)

    @property
    def embeds(self) -> bool:
        """Whether prompts are embedded, and not continued."""
        return self._loaded.embeds

    @property
    def row_settings(self) -> dict[str, str]:
        """As `LLM.row_settings`."""
        return self._loaded.row_settings

    def embedding_prompt(self, name: str | None) -> str:
        """Return the text that precedes what is embedded; without a name, the model's default."""
        ready = self._loaded
        if name is not None and name not in ready.prompts:
            known = ", ".join(map(repr, ready.prompts)) or "none"
            message = f"prompt_name is {name!r:.60}, but the model's prompts are {known}; name one, or leave it out"
            raise ApiError(400, message, param="prompt_name")
        return ready.default_prompt if name is None else ready.prompts[name]

    @property
    def length_limits(self) -> LengthLimits:
        """The same as limits."""
        return LengthLimits(total=Limit(self.most_tokens, "the context and the KV cache"))

    def new_encoder(self, tokenizer: Any) -> PromptEncoder:
        """Return an encoder of this model's prompts with a tokenizer of its own."""
        return PromptEncoder(tokenizer, self._loaded.vocab_size, self._loaded.limits)

    async def encode(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        variables: Mapping[str, Any] | None = None,
        *,
        default_new: int | None = None,
        priority: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Encoded]:
        """Encode the prompts of a call.

        Args:
            variables: of the chat template.
            priority: lower ones start first; None: 0.
            default_new: new tokens unless the call states them; None: what the context and the KV cache leave.
            tools: the functions that a chat may call.

        Raises:
            ConfigError: there are too many prompts, or one of them or its params are invalid.
        """
        if len(prompts) > self.most:
            raise ConfigError(f"the prompts of one call are at most {self.most}, not {len(prompts)}")
        precedence = Precedence(priority=priority or 0, owner=CALLER.get())
        beside, several = size_of([variables, tools]), list[Encoded]()
        for size, part in _parts(prompts):  # calls take turns between their parts
            work = partial(self._encode, part, params, variables, default_new, tools)
            if len(prompts) == 1 and isinstance(part[0], Mapping) and size + beside <= _FEW_TOKENS:
                several += work(self._open_lanes.short_encoder)  # which tokenizes nothing
            else:
                several += await self._open_lanes.run(size + beside, work)
        return [replace(each, precedence=precedence) for each in several]

    def check_lists(self, record: Mapping[str, Any]) -> None:
        """Raise FieldError for a list in a body that is too long to be looked at."""
        check_lists(record, self._loaded.vocab_size)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens. Raises ApiError if there is no tokenizer, or a token is beyond the vocabulary."""
        self._check_tokenizer()
        beyond = next((each for each in token_ids if each >= self._loaded.vocab_size), None)
        if beyond is not None:
            raise ApiError(400, f"tokens: token ids are below {self._loaded.vocab_size}, not {beyond}", param="tokens")
        text: str = await self._open_lanes.run(len(token_ids), lambda encoder: encoder.tokenizer.decode(token_ids))
        return text

    async def texts(self, prompts: Sequence[PromptLike], several: Sequence[Encoded]) -> list[str]:
        """Return the text of each prompt, which its tokens tell if it is not one."""
        return [
            prompt if isinstance(prompt, str) else await self.decode(each.prompt_ids)
            for prompt, each in zip(prompts, several, strict=True)
        ]

    async def parser_of(self, use: ToolUse, encoded: Encoded, *, keeps_special: bool) -> Callable[[], AnswerParser]:
        """Return what makes a parser for each answer to a chat with tools.

        Args:
            keeps_special: whether special tokens are content.

        Raises:
            ConfigError: the form in which the model writes calls is not known.
        """
        template = await self._open_lanes.run(0, lambda encoder: encoder.chat_template(use.tools))
        form, prompt = tool_format_of(use, self.tokenizer, template), ""
        if form is not None and form.reads_prompt:
            prompt = await self.decode(encoded.prompt_ids)
        hidden = () if keeps_special else self.tokenizer.all_special_tokens
        return partial(open_parser, use, form, prompt, hidden)

    async def plain_ids(self, text: str) -> list[int]:
        """Return a text's tokens without special ones. Raises ApiError if there is no tokenizer."""
        self._check_tokenizer()

        def work(encoder: PromptEncoder) -> list[int]:
            found: list[int] = encoder.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            return found

        return await self._open_lanes.run(len(text), work)

    async def token_ids(self, prompt: PromptLike) -> list[int]:
        """Return a prompt's tokens, however many. Raises ConfigError if it is invalid."""
        return await self._open_lanes.run(size_of(prompt), lambda encoder: encoder.tokenize(prompt))

    def tokenizer_info(self) -> dict[str, Any]:
        """Return what clients need to make prompts of their own. Raises ApiError if there is no tokenizer."""
        self._check_tokenizer()
        tokenizer = self.tokenizer
        tokens = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": self.most_tokens,
            **tokens,
            "chat_template": tokenizer.chat_template,
        }

    def _check_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise ApiError(400, "the model's folder has no tokenizer")

    @property
    def _open_lanes(self) -> EncodingLanes:
        assert self._lanes is not None, "the model is not loaded"
        return self._lanes

    @property
    def _loaded(self) -> Ready:
        assert self._ready is not None, "the model is not loaded"
        return self._ready

    def _encode(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        variables: Mapping[str, Any] | None,
        default_new: int | None,
        tools: Sequence[Mapping[str, Any]] | None,
        encoder: PromptEncoder,
    ) -> list[Encoded]:
        several = []
        for prompt in prompts:
            token_ids, filled = encoder.encode(prompt, params, variables, tools)
            if params.max_new_tokens is None:
                num_left = self.most_tokens - len(token_ids)
                most = num_left if default_new is None else min(default_new, num_left)
                filled = replace(filled, max_new_tokens=max(1, most))
            several.append(Encoded(token_ids, filled))
        return several


def _parts(prompts: Sequence[PromptLike]) -> Iterator[tuple[int, list[PromptLike]]]:
    """Yield all prompts in order, short ones together up to the size of a short text, with their size."""
    part, size = list[PromptLike](), 0
    for prompt in prompts:
        if part and size + size_of(prompt) > SHORT:
            yield size, part
            part, size = [], 0
        part.append(prompt)
        size += size_of(prompt)
    if part:
        yield size, part
