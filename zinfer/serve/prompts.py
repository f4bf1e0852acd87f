"""`Prompts`: the prompts of HTTP requests as tokens, on a thread of its own."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from zinfer.errors import ConfigError
from zinfer.requests.length_limits import LengthLimits, Limit
from zinfer.requests.prompt_encoder import PromptEncoder, PromptLike
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.tool_formats import tool_format_of
from zinfer.requests.tool_parser import AnswerParser, open_parser
from zinfer.requests.tools import ToolUse
from zinfer.scheduling.precedence import FIRST_COME, Precedence
from zinfer.serve.caller import CALLER
from zinfer.serve.errors import ApiError
from zinfer.serve.messages import Ready

_T = TypeVar("_T")


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
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        self.tokenizer = tokenizer
        self._most = most
        self._ready: Ready | None = None
        self._encoder: PromptEncoder | None = None
        # A single thread: tokenizers and the process that renders chat templates are not thread-safe.
        self._thread = ThreadPoolExecutor(1, "zinfer-encode")

    def open(self, ready: Ready) -> None:
        """Take what the model takes, once it is loaded."""
        self._ready = ready
        self._encoder = self.new_encoder(self.tokenizer)

    def close(self) -> None:
        """End the thread, and the process that renders chats."""
        self._thread.shutdown()
        if self._encoder is not None:
            self._encoder.close()

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
        if len(prompts) > self._most:
            raise ConfigError(f"the prompts of one call are at most {self._most}, not {len(prompts)}")
        precedence = Precedence(priority=priority or 0, owner=CALLER.get())
        several = await self.on_thread(
            lambda: [self._encode(each, params, variables, default_new, tools) for each in prompts]
        )
        return [replace(each, precedence=precedence) for each in several]

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens. Raises ApiError if there is no tokenizer, or a token is beyond the vocabulary."""
        tokenizer = self._known_tokenizer
        beyond = next((each for each in token_ids if each >= self._loaded.vocab_size), None)
        if beyond is not None:
            raise ApiError(400, f"tokens: token ids are below {self._loaded.vocab_size}, not {beyond}", param="tokens")
        text: str = await self.on_thread(lambda: tokenizer.decode(token_ids))
        return text

    async def parser_of(self, use: ToolUse, encoded: Encoded, *, keeps_special: bool) -> Callable[[], AnswerParser]:
        """Return what makes a parser for each answer to a chat with tools.

        Args:
            keeps_special: whether special tokens are content.

        Raises:
            ConfigError: the form in which the model writes calls is not known.
        """
        assert self._encoder is not None
        form, prompt = tool_format_of(use, self.tokenizer, self._encoder.chat_template(use.tools)), ""
        if form is not None and form.reads_prompt:
            prompt = await self.decode(encoded.prompt_ids)
        hidden = () if keeps_special else self.tokenizer.all_special_tokens
        return partial(open_parser, use, form, prompt, hidden)

    async def plain_ids(self, text: str) -> list[int]:
        """Return a text's tokens without special ones. Raises ApiError if there is no tokenizer."""
        tokenizer = self._known_tokenizer
        found: list[int] = await self.on_thread(lambda: tokenizer(text, add_special_tokens=False).input_ids)
        return found

    async def token_ids(self, prompt: PromptLike) -> list[int]:
        """Return a prompt's tokens, however many. Raises ConfigError if it is invalid."""
        assert self._encoder is not None
        return await self.on_thread(partial(self._encoder.tokenize, prompt))

    def tokenizer_info(self) -> dict[str, Any]:
        """Return what clients need to make prompts of their own. Raises ApiError if there is no tokenizer."""
        tokenizer = self._known_tokenizer
        tokens = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": self.most_tokens,
            **tokens,
            "chat_template": tokenizer.chat_template,
        }

    async def on_thread(self, work: Callable[[], _T]) -> _T:
        """Run work with the tokenizer on the thread that owns it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _known_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ApiError(400, "the model's folder has no tokenizer")
        return self.tokenizer

    @property
    def _loaded(self) -> Ready:
        assert self._ready is not None, "the model is not loaded"
        return self._ready

    def _encode(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        variables: Mapping[str, Any] | None,
        default_new: int | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Encoded:
        assert self._encoder is not None
        token_ids, filled = self._encoder.encode(prompt, params, variables, tools)
        if params.max_new_tokens is None:
            num_left = self.most_tokens - len(token_ids)
            most = num_left if default_new is None else min(default_new, num_left)
            filled = replace(filled, max_new_tokens=max(1, most))
        return Encoded(token_ids, filled)
