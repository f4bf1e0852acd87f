"""Prompts to token ids: text, the messages of a chat, or token ids already; and whether they can be used at all.

Text gets the tokenizer's own special tokens; a chat template writes its own. A text of no tokens becomes the
tokenizer's first token (bos), or is refused where there is none.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

from transformers import AutoTokenizer

from zinfer.errors import CheckpointError, ConfigError
from zinfer.requests.bad_words import find_bad_word_ids
from zinfer.requests.chat_templates import ChatTemplates
from zinfer.requests.length_limits import NO_LIMITS, LengthLimits
from zinfer.requests.sampling_params import SamplingParams

PromptLike = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, messages of a chat, or ``{"prompt_token_ids": [...]}``."""

_TOKENIZER_FILES: Final = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")

_OWN_VARIABLES: Final = frozenset(
    {
        *("conversations", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    }
)

_STRFTIME_NOW: Final = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")

NO_TOKENIZER: Final = (
    "put the model's tokenizer files into it, or give 'prompt_token_ids' alone, without stop strings and bad words"
)


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        tokenizer: None where there is none; prompts are token ids then.
        vocab_size: of the model.
        limits: of a prompt and what is generated after it.

    Attributes:
        now: what chat templates take for the present, with its time zone; None: the clock. Templates that call
            ``strftime_now`` with a format computed at run time always see the clock.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, limits: LengthLimits = NO_LIMITS) -> None:
        self.tokenizer = tokenizer
        self.now: datetime | None = None
        self._vocab_size = vocab_size
        self._limits = limits
        self._templates = ChatTemplates()

    @property
    def template_hash(self) -> str:
        """Identifies the chat template, "none" where there is none."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return "none" if template is None else hashlib.sha256(repr(template).encode()).hexdigest()

    def close(self) -> None:
        """End the process that renders chats, if there is one."""
        self._templates.close()

    def encode_texts(self, prompts: Sequence[PromptLike]) -> list[PromptLike]:
        """The prompts, with token ids for texts: a fast tokenizer spreads many over threads, but not one by one.

        Texts stay as they are where `encode` has something to say of one, which finds what.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if self.tokenizer is None or not texts:
            return list(prompts)
        try:
            encoded: Iterator[list[int]] = iter(self.tokenizer(texts, verbose=False).input_ids)
        except (TypeError, ValueError):
            return list(prompts)
        each = ((prompt, next(encoded) if isinstance(prompt, str) else []) for prompt in prompts)
        return [{"prompt_token_ids": token_ids} if token_ids else prompt for prompt, token_ids in each]

    def encode(
        self, prompt: PromptLike, params: SamplingParams, variables: Mapping[str, Any] | None = None
    ) -> tuple[list[int], SamplingParams]:
        """The prompt's tokens, and its params with the number of new tokens that it may have.

        ``variables`` are for a chat's template, beside the messages.

        Raises:
            ConfigError: the prompt or its params cannot be used; says why, and the remedy.
        """
        token_ids = self._token_ids(prompt, variables)
        self._check_tokens(token_ids, is_given=isinstance(prompt, Mapping))
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; give stop_token_ids instead")
        params.check_vocabulary(self._vocab_size)
        params = params.within(self._limits.most_new(len(token_ids)))
        if problem := self._limits.problem(len(token_ids), params.most_new_tokens):
            raise ConfigError(problem)
        return token_ids, params

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word. Raises ConfigError for one that has none."""
        return find_bad_word_ids(self.tokenizer, params.bad_words, self._vocab_size)

    def _token_ids(self, prompt: PromptLike, variables: Mapping[str, Any] | None) -> list[int]:
        if isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"}:
                raise ConfigError(f"a prompt has the keys {sorted(prompt)}; it takes 'prompt_token_ids' alone")
            token_ids = prompt["prompt_token_ids"]
            if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
                raise ConfigError(f"prompt_token_ids is a list of whole numbers, not a {type(token_ids).__name__}")
            return list(token_ids)
        if not isinstance(prompt, Sequence):
            raise ConfigError(f"a prompt is text, the messages of a chat or token ids, not a {type(prompt).__name__}")
        if self.tokenizer is None:
            raise ConfigError(f"the model's folder has no tokenizer; {NO_TOKENIZER}")
        if isinstance(prompt, str):
            return self._encode_text(prompt)
        if not all(isinstance(message, Mapping) for message in prompt):
            raise ConfigError("a list is the messages of a chat; give token ids as {'prompt_token_ids': [...]}")
        return self._encode_text(self._render(prompt, variables or {}), adds_special=False)

    def _encode_text(self, text: str, *, adds_special: bool = True) -> list[int]:
        """The tokens of a text; of an empty one the tokenizer's first token (bos)."""
        tokenizer = self.tokenizer
        try:
            # Not verbose: its warning on long texts goes by another limit than the model's, which is checked later.
            token_ids: list[int] = tokenizer(text, add_special_tokens=adds_special, verbose=False).input_ids
        except (TypeError, ValueError) as error:  # half of a surrogate pair, for one
            raise ConfigError(f"the tokenizer refuses the prompt: {error}") from error
        if token_ids:
            return token_ids
        if tokenizer.bos_token_id is None:
            raise ConfigError("the prompt has no tokens, and the tokenizer has no bos token to begin with")
        return [tokenizer.bos_token_id]

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of a chat up to where the answer begins; each `strftime_now("...")` gives `now`."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise ConfigError("messages: the model's tokenizer has no chat template; give the prompt as text instead")
        plain = [_with_plain_content(message, number) for number, message in enumerate(messages, start=1)]
        if own := sorted(_OWN_VARIABLES.intersection(variables)):
            raise ConfigError(f"chat_template_kwargs: {own[0]!r} is zinfer's own; leave it out")
        try:
            template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(f"messages: {error}") from error
        if self.now is not None:
            now = self.now.replace(tzinfo=None)  # as strftime_now has it: %Z and %z are empty
            template = _STRFTIME_NOW.sub(lambda call: json.dumps(now.strftime(call[2])), template)
        return self._templates.render(template, plain, {**tokenizer.special_tokens_map, **variables})

    def _check_tokens(self, token_ids: Sequence[int], *, is_given: bool) -> None:
        if not token_ids:
            raise ConfigError("the prompt has no tokens; give it one at least")
        # Long prompts are looked at one token after the other only where something is wrong with one.
        if set(map(type, token_ids)) == {int} and 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            return
        wrong = next(each for each in token_ids if type(each) is not int or not 0 <= each < self._vocab_size)
        last = self._vocab_size - 1
        if is_given:
            raise ConfigError(f"token ids are whole numbers from 0 to {last}, not {wrong!r}")
        raise ConfigError(
            f"the tokenizer gives token {wrong}, but the model's vocabulary ends at {last}; "
            "the tokenizer is another model's, or a token was added to it alone"
        )


def template_variables(chat_template_kwargs: object, reasoning_effort: object) -> dict[str, Any]:
    """What a call gives chat templates beside the messages; as in vLLM, the effort is one of them.

    Raises:
        ConfigError: they are no mapping and no text.
    """
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise ConfigError(
            f"chat_template_kwargs must be a mapping of names to values, not {chat_template_kwargs!r:.60}"
        )
    if not isinstance(reasoning_effort, str | None):
        raise ConfigError(f"reasoning_effort must be a text, 'low' for one, not {reasoning_effort!r:.60}")
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    return {**effort, **(chat_template_kwargs or {})}


def is_chat(prompt: PromptLike) -> bool:
    """Whether a prompt is the messages of a chat."""
    return not isinstance(prompt, str | Mapping)


def as_list(prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    """The prompts one by one; a list of messages with roles is one chat."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several = list(prompts)  # a generator can be walked once only
    if several and all(isinstance(item, Mapping) and "role" in item for item in several):
        return [cast(Sequence[Mapping[str, Any]], several)]
    return several


def _with_plain_content(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """A message with one text for content that is a list of text parts, as OpenAI's clients send it.

    Parts are joined by line breaks, as in vLLM: most templates write a list as Python would.

    Raises:
        ConfigError: content that is no text, a picture for one.
    """
    where, parts = f"messages: the content of message {number}", message.get("content")
    if isinstance(parts, str | None):
        return message
    if not isinstance(parts, list | tuple) or not parts:
        raise ConfigError(f"{where} must be a text or a list of text parts, not {parts!r:.60}")
    for place, part in enumerate(parts, start=1):
        if not isinstance(part, Mapping) or set(part) != {"type", "text"} or part["type"] != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            remedy = 'only {"type": "text", "text": "..."} is supported'
            raise ConfigError(f"{where}: part {place} ({kind!r:.60}) is not a text part; {remedy}")
        if not isinstance(part["text"], str):
            raise ConfigError(f"{where}: the text of part {place} must be a string, not {part['text']!r:.60}")
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def find_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder, None where there is none; nothing is downloaded.

    Raises:
        CheckpointError: it does not load.
    """
    if not any(file.is_file() for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises that class itself, and Python code whatever it meets
        said = (str(error) or "no reason given").splitlines()[0]
        raise CheckpointError(
            f"model {folder} has no tokenizer that loads ({type(error).__name__}: {said:.400}); put the model's "
            "tokenizer files into the folder"
        ) from error
