"""Prompts to token ids: text, the messages of a chat, or token ids already; and whether they can be used at all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from transformers import AutoTokenizer

from zinfer.errors import CheckpointError, ConfigError
from zinfer.requests.bad_words import find_bad_word_ids
from zinfer.requests.chat_templates import ChatTemplates
from zinfer.requests.length_limits import LengthLimits
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


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        tokenizer: None where there is none; prompts are token ids then.
        vocab_size: of the model.
        limits: of a prompt and what is generated after it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, limits: LengthLimits) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits
        self._templates = ChatTemplates()

    def close(self) -> None:
        """End the process that renders chats, if there is one."""
        self._templates.close()

    def encode_texts(self, prompts: Sequence[PromptLike]) -> list[PromptLike]:
        """The prompts, with token ids for texts: a fast tokenizer spreads many over threads, but not one by one.

        Texts stay as they are where `encode` has something to say of one, which finds what.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if self._tokenizer is None or not texts:
            return list(prompts)
        try:
            encoded: Iterator[list[int]] = iter(self._tokenizer(texts).input_ids)
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
        params = params.within(self._limits.most_new(len(token_ids)))
        self._check(token_ids, params)
        params.check_vocabulary(self._vocab_size)
        return token_ids, params

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word. Raises ConfigError for one that has none."""
        return find_bad_word_ids(self._tokenizer, params.bad_words, self._vocab_size)

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
        if self._tokenizer is None:
            raise ConfigError("the model's folder has no tokenizer; give prompts as {'prompt_token_ids': [...]}")
        if isinstance(prompt, str):
            return encode_text(self._tokenizer, prompt)
        if not all(isinstance(message, Mapping) for message in prompt):
            raise ConfigError("a list is the messages of a chat; give token ids as {'prompt_token_ids': [...]}")
        if self._tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; give a prompt as text instead of messages")
        return encode_chat(self._tokenizer, prompt, self._templates, variables=variables)

    def _check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids:
            raise ConfigError("the prompt has no tokens; give it one at least")
        # Long prompts are looked at one token after the other only where something is wrong with one.
        if set(map(type, token_ids)) != {int} or not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong = next(each for each in token_ids if type(each) is not int or not 0 <= each < self._vocab_size)
            raise ConfigError(f"token ids are whole numbers from 0 to {self._vocab_size - 1}, not {wrong!r}")
        if problem := self._limits.problem(len(token_ids), params.most_new_tokens):
            raise ConfigError(problem)
        if params.stop and self._tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; give stop_token_ids instead")


def encode_text(tokenizer: Any, text: str, *, adds_special: bool = True) -> list[int]:
    """The tokens of a text; of an empty one the tokenizer's first token (bos).

    Raises:
        ConfigError: the tokenizer refuses it, or it has no tokens and there is no first one.
    """
    try:
        token_ids: list[int] = tokenizer(text, add_special_tokens=adds_special).input_ids
    except (TypeError, ValueError) as error:  # half of a surrogate pair, for one
        raise ConfigError(f"the tokenizer refuses the prompt: {error}") from error
    if token_ids:
        return token_ids
    if tokenizer.bos_token_id is None:
        raise ConfigError("prompt: it has no tokens, and the tokenizer has no bos token to begin with")
    return [tokenizer.bos_token_id]


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    templates: ChatTemplates,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of a chat up to where the answer begins; the template writes the special ones.

    Args:
        templates: renders it.
        template: another than the tokenizer's own.
        variables: for the template, beside the messages.

    Raises:
        ConfigError: content that is no text; the template refuses the messages or fails on them; as `encode_text`.
    """
    plain, given = with_plain_content(messages), variables or {}
    if own := sorted(_OWN_VARIABLES.intersection(given)):
        raise ConfigError(f"chat_template_kwargs: {own[0]!r} is zinfer's own; leave it out")
    try:
        chosen: str = tokenizer.get_chat_template(template)
    except ValueError as error:
        raise ConfigError(f"messages: {error}") from error
    text = templates.render(chosen, plain, {**tokenizer.special_tokens_map, **given})
    return encode_text(tokenizer, text, adds_special=False)


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
    """The prompts one by one; messages with roles, one behind the other, are one chat."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several = list(prompts)  # a generator can be walked once only
    if several and all(isinstance(item, Mapping) and "role" in item for item in several):
        return [cast(Sequence[Mapping[str, Any]], several)]
    return several


def with_plain_content(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with one text for content that is a list of text parts, as OpenAI's clients send it.

    Parts are joined by line breaks, as in vLLM: most templates write a list as Python would.

    Raises:
        ConfigError: content that is no text, a picture for one.
    """
    return [
        message if isinstance(message.get("content"), str | None) else {**message, "content": _joined(message, number)}
        for number, message in enumerate(messages, start=1)
    ]


def _joined(message: Mapping[str, Any], number: int) -> str:
    where, parts = f"messages: the content of message {number}", message["content"]
    if not isinstance(parts, list | tuple) or not parts:
        raise ConfigError(f"{where} must be a text or a list of text parts, not {parts!r:.60}")
    for place, part in enumerate(parts, start=1):
        if not isinstance(part, Mapping) or set(part) != {"type", "text"} or part["type"] != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            remedy = 'only {"type": "text", "text": "..."} is supported'
            raise ConfigError(f"{where}: part {place} ({kind!r:.60}) is not a text part; {remedy}")
        if not isinstance(part["text"], str):
            raise ConfigError(f"{where}: the text of part {place} must be a string, not {part['text']!r:.60}")
    return "\n".join(part["text"] for part in parts)


def find_tokenizer(folder: Path) -> Any:
    """The tokenizer that lies in a model's folder; None where there is none."""
    if not any(file.is_file() for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        return None
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer that lies in a model's folder; nothing is downloaded.

    Raises:
        CheckpointError: there is none that loads.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises that class itself, and Python code whatever it meets
        said = (str(error) or "no reason given").splitlines()[0]
        reason = f"{type(error).__name__}: {said if len(said) <= 400 else said[:400] + ' ...'}"
        raise CheckpointError(
            f"model {folder} has no tokenizer that loads ({reason}); put the model's tokenizer files into the folder"
        ) from error
