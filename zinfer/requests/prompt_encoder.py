"""Encode and validate prompts: text, the messages of a chat, or token ids.

Text gets the tokenizer's special tokens, but no second bos token; a chat template writes its own. An empty text becomes
the tokenizer's bos token, or is refused if there is none. A chat's last message is continued if it is the assistant's.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from transformers import AutoTokenizer
from transformers.utils import is_mistral_common_available, is_protobuf_available, is_sentencepiece_available

from zinfer.errors import CheckpointError, ConfigError
from zinfer.requests.bad_words import find_bad_word_ids
from zinfer.requests.chat_templates import ChatTemplates
from zinfer.requests.field_errors import short
from zinfer.requests.length_limits import NO_LIMITS, LengthLimits, Limit
from zinfer.requests.sampling_params import SamplingParams, as_whole
from zinfer.requests.text_beginning import check_beginning
from zinfer.requests.tools import with_objects

PromptLike = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, messages of a chat, or ``{"prompt_token_ids": [...]}``."""

_TOKENIZER_FILES: Final = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")

_NEEDED_PACKAGES: Final = (
    ("tekken.json", "a tokenizer in Mistral's format", {"mistral-common": is_mistral_common_available}),
    (
        "*.model",
        "a sentencepiece tokenizer",
        {"sentencepiece": is_sentencepiece_available, "protobuf": is_protobuf_available},
    ),
)
"""Files that hold a whole tokenizer, what they are, and the packages that transformers reads them with."""

_OWN_VARIABLES: Final = frozenset(
    {
        *("conversations", "messages", "tools", "documents", "chat_template", "tokenize"),
        "return_assistant_tokens_mask",
    }
)
_TURN: Final = ("add_generation_prompt", "continue_final_message")
_USUAL: Final = SamplingParams()
log = logging.getLogger("zinfer")

_STRFTIME_NOW: Final = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")

_TEXT_PART: Final = frozenset({"type", "text"})
_HINTS: Final = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Of a text part, for servers that keep prompts by request; here all of them are kept."""
_SAYS_NOTHING: Final = ("role", "name", "tool_call_id")
"""Fields of a message beside which it needs content."""

NO_TOKENIZER: Final = (
    "put the model's tokenizer files into it, or give 'prompt_token_ids' alone, without stop strings and bad words"
)


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        tokenizer: None: prompts must be token ids.
        vocab_size: vocabulary size of the model.
        limits: length limits of a prompt and its new tokens.
        clips: whether a prompt gets as many new tokens as the limits leave where its params state more; else it is
            refused.

    Attributes:
        now: current time for chat templates, with its time zone; None: the clock. Templates that call
            ``strftime_now`` with a format computed at run time always see the clock.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, limits: LengthLimits = NO_LIMITS, *, clips: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.now: datetime | None = None
        self.prefix = ""
        self._vocab_size = vocab_size
        self._limits, self._clips = limits, clips
        self._templates = ChatTemplates()
        self._says_bos = True

    @property
    def template_hash(self) -> str:
        """Hash of the chat template, or "none"."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return "none" if template is None else hashlib.sha256(repr(template).encode()).hexdigest()

    def close(self) -> None:
        """End the process that renders chats, if it runs."""
        self._templates.close()

    def encode_texts(self, pairs: Sequence[tuple[PromptLike, SamplingParams]]) -> list[PromptLike]:
        """Replace texts by token ids in one call, which a fast tokenizer spreads over threads.

        Empty texts and those with tokens outside the vocabulary stay unchanged, those whose params say how they are
        encoded, and all texts if the tokenizer refuses one; `encode` reports the error.
        """
        usual = [isinstance(prompt, str) and _is_usual(params) for prompt, params in pairs]
        texts = [str(prompt) for (prompt, _), is_usual in zip(pairs, usual, strict=True) if is_usual]
        prompts = [prompt for prompt, _ in pairs]
        if self.tokenizer is None or not texts:
            return prompts
        try:
            encoded: Iterator[list[int]] = iter(self.tokenizer(texts, verbose=False).input_ids)
        except (TypeError, ValueError):
            return prompts
        found = [
            self._with_one_bos(str(prompt), next(encoded)) if is_usual else []
            for prompt, is_usual in zip(prompts, usual, strict=True)
        ]
        return [
            {"prompt_token_ids": ids} if ids and max(ids) < self._vocab_size else prompt
            for prompt, ids in zip(prompts, found, strict=True)
        ]

    def encode(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[list[int], SamplingParams]:
        """Return the prompt's tokens, and its params with the number of new tokens filled in.

        ``variables`` are further variables of a chat template, ``tools`` the functions that it lists.

        Raises:
            ConfigError: the prompt or its params are invalid; gives the remedy.
        """
        token_ids = self._token_ids(prompt, params, variables, tools, self._limits.prompt_limit)
        self._check_tokens(token_ids, is_given=isinstance(prompt, Mapping))
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; give stop_token_ids instead")
        params.check_vocabulary(self._vocab_size)
        if params.prompt_logprobs is not None and params.prompt_logprobs_start > len(token_ids):
            raise ConfigError(
                f"prompt_logprobs_start is {params.prompt_logprobs_start}, but the prompt has {len(token_ids)} tokens"
            )
        num_left = self._limits.most_new(len(token_ids))
        params = params.clipped(num_left) if self._clips else params.within(num_left)
        if problem := self._limits.problem(len(token_ids), params.most_new_tokens):
            raise ConfigError(problem)
        return token_ids, params

    def tokenize(self, prompt: PromptLike) -> list[int]:
        """Return the prompt's tokens, however many. Raises ConfigError as `encode`, but for lengths."""
        return self._token_ids(prompt, _USUAL, None, None, None)

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word. Raises ConfigError for a word without tokens."""
        return find_bad_word_ids(self.tokenizer, params.bad_words, self._vocab_size)

    def chat_template(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the template of chats with these tools. Raises ConfigError if there is none."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ConfigError(f"the model's folder has no tokenizer; {NO_TOKENIZER}")
        if tokenizer.chat_template is None:
            raise ConfigError("messages: the model's tokenizer has no chat template; give the prompt as text instead")
        try:
            template: str = tokenizer.get_chat_template(tools=None if tools is None else list(tools))
        except ValueError as error:
            raise ConfigError(f"messages: {error}") from error
        if tools is not None and "tools" not in template:
            raise ConfigError("tools: the model's chat template has no place for them; leave them out")
        return template

    def _token_ids(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        limit: Limit | None,
    ) -> list[int]:
        if isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"}:
                raise ConfigError(f"a prompt has the keys {sorted(prompt)}; it takes 'prompt_token_ids' alone")
            token_ids = prompt["prompt_token_ids"]
            if not isinstance(token_ids, Sequence) and hasattr(token_ids, "tolist"):  # numpy's and torch's
                token_ids = token_ids.tolist()
            if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
                raise ConfigError(f"prompt_token_ids is a list of whole numbers, not a {type(token_ids).__name__}")
            if set(map(type, token_ids)) <= {int}:
                return list(token_ids)
            return [cast(int, each if isinstance(each, float) else as_whole(each)) for each in token_ids]
        if not isinstance(prompt, Sequence):
            raise ConfigError(f"a prompt is text, the messages of a chat or token ids, not a {type(prompt).__name__}")
        if self.tokenizer is None:
            raise ConfigError(f"the model's folder has no tokenizer; {NO_TOKENIZER}")
        adds_special = params.add_special_tokens
        if isinstance(prompt, str):
            if (name := next((each for each in _TURN if getattr(params, each) is not None), None)) is not None:
                raise ConfigError(f"{name} is for the messages of a chat, and the prompt is a text; leave it out")
            return self._encode_text(self.prefix + prompt, limit, adds_special=adds_special)
        if not all(isinstance(message, Mapping) for message in prompt):
            raise ConfigError("a list is the messages of a chat; give token ids as {'prompt_token_ids': [...]}")
        return self._encode_text(
            self._render(prompt, params, variables or {}, tools), limit, adds_special=bool(adds_special)
        )

    def _encode_text(self, text: str, limit: Limit | None, *, adds_special: bool | None) -> list[int]:
        """Encode a text; an empty one becomes the bos token, and one far beyond the limit is refused.

        ``adds_special`` None: special tokens are added, but no second bos token.
        """
        tokenizer = self.tokenizer
        # Not verbose: the tokenizer warns by its own length limit; the model's is checked later.
        encode = partial(tokenizer, add_special_tokens=adds_special is not False, verbose=False)
        try:
            if limit is not None:
                check_beginning(text, limit, lambda part: encode(part).input_ids)
            token_ids: list[int] = encode(text).input_ids
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:  # for example a lone surrogate
            raise ConfigError(f"the tokenizer refuses the prompt: {error}") from error
        if token_ids:
            return self._with_one_bos(text, token_ids) if adds_special is None else token_ids
        if tokenizer.bos_token_id is None:
            raise ConfigError("the prompt has no tokens, and the tokenizer has no bos token to begin with")
        return [tokenizer.bos_token_id]

    def _with_one_bos(self, text: str, token_ids: list[int]) -> list[int]:
        """Return a text's tokens without the bos token that the tokenizer put before the text's own."""
        bos, bos_id = self.tokenizer.bos_token, self.tokenizer.bos_token_id
        if bos_id is None or token_ids[:2] != [bos_id, bos_id] or not text.startswith(bos):
            return token_ids
        if self._says_bos:
            self._says_bos = False
            log.warning(
                "a prompt begins with %s already, as rendered chats do, and gets no second one; add_special_tokens as "
                "true adds it",
                bos,
            )
        return token_ids[1:]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Render a chat; `strftime_now("...")` returns `now`."""
        template = self.chat_template(tools)
        plain = [_with_plain_content(each, number) for number, each in enumerate(with_objects(messages), start=1)]
        if own := sorted(_OWN_VARIABLES.intersection(variables)):
            raise ConfigError(f"chat_template_kwargs: {short(own[0])} is zinfer's own; leave it out")
        if self.now is not None:
            now = self.now.replace(tzinfo=None)  # like strftime_now: %Z and %z are empty
            template = _STRFTIME_NOW.sub(lambda call: json.dumps(now.strftime(call[2])), template)
        own_variables = {} if tools is None else {"tools": [dict(each) for each in tools]}
        turn, others = _turn(plain, params, variables)
        return self._templates.render(
            template, plain, {**self.tokenizer.special_tokens_map, **others, **own_variables}, **turn
        )

    def _check_tokens(self, token_ids: Sequence[int], *, is_given: bool) -> None:
        if not token_ids:
            raise ConfigError("the prompt has no tokens; give it one at least")
        # Search token by token only if one of them is invalid.
        if set(map(type, token_ids)) == {int} and 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            return
        wrong = next(each for each in token_ids if type(each) is not int or not 0 <= each < self._vocab_size)
        last = self._vocab_size - 1
        if is_given:
            raise ConfigError(f"token ids are whole numbers from 0 to {last}, not {short(wrong)}")
        remedy = "the tokenizer belongs to another model; put the model's own into the folder"
        if wrong in self.tokenizer.added_tokens_decoder:
            remedy = (
                "it was added to the tokenizer and not to the model; leave it out of the prompt, or take the tokenizer "
                "that the model was saved with"
            )
        token = self.tokenizer.convert_ids_to_tokens(wrong)
        raise ConfigError(
            f"the tokenizer returned token {wrong} ({token!r:.60}), but the model has tokens 0 to {last} "
            f"(vocab_size {self._vocab_size}): {remedy}"
        )


def _is_usual(params: SamplingParams) -> bool:
    """Whether a text is encoded as texts are that nothing is said about."""
    return params.add_special_tokens is None and all(getattr(params, name) is None for name in _TURN)


def _turn(
    messages: Sequence[Mapping[str, Any]], params: SamplingParams, variables: Mapping[str, Any]
) -> tuple[dict[str, bool], dict[str, Any]]:
    """Return whether a chat's last message is continued or answered, and the variables that do not say so.

    Raises:
        ConfigError: params and variables contradict each other.
    """
    stated = {name: value for name in _TURN if (value := getattr(params, name)) is not None}
    for name in _TURN:
        if (value := variables.get(name)) is None:
            continue
        if not isinstance(value, bool):
            raise ConfigError(f"chat_template_kwargs: {name} must be true or false, not {value!r:.60}")
        if stated.setdefault(name, value) != value:
            raise ConfigError(f"{name} is {stated[name]}, and {value} in chat_template_kwargs; give it once")
    others = {name: value for name, value in variables.items() if name not in _TURN}
    last = messages[-1] if messages else {}
    is_begun = last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
    answers, continues = (stated.get(name) for name in _TURN)
    if answers and continues:
        raise ConfigError("continue_final_message and add_generation_prompt are both true; give one of them")
    if continues is None:
        continues = is_begun and answers is None
    if answers is None:
        answers = not continues
    return dict(zip(_TURN, (answers, continues), strict=True)), others


def template_variables(chat_template_kwargs: object, reasoning_effort: object) -> dict[str, Any]:
    """Merge the variables of a chat template; as in vLLM, `reasoning_effort` is one of them.

    Raises:
        ConfigError: `chat_template_kwargs` is not a mapping, or `reasoning_effort` not a string.
    """
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise ConfigError(
            f"chat_template_kwargs must be a mapping of names to values, not {short(chat_template_kwargs)}"
        )
    if not isinstance(reasoning_effort, str | None):
        raise ConfigError(f"reasoning_effort must be a string such as 'low', not {short(reasoning_effort)}")
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    return {**effort, **(chat_template_kwargs or {})}


def is_chat(prompt: PromptLike) -> bool:
    """Whether a prompt is the messages of a chat."""
    return not isinstance(prompt, str | Mapping)


def as_list(prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    """Return a list of prompts; a list of messages with roles is one chat, and vLLM's ``{"prompt": text}`` a text."""
    is_one = isinstance(prompts, str | Mapping)
    several = [cast(PromptLike, prompts)] if is_one else list(prompts)  # a generator can be iterated only once
    if several and not is_one and all(isinstance(item, Mapping) and "role" in item for item in several):
        return [cast(Sequence[Mapping[str, Any]], several)]
    return [each["prompt"] if isinstance(each, Mapping) and set(each) == {"prompt"} else each for each in several]


def _with_plain_content(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Replace content that is a list of text parts, as OpenAI's clients send it, by one text.

    Parts are joined by line breaks, as in vLLM: most templates would print a list in Python syntax.

    Raises:
        ConfigError: the content is not text, for example an image, or there is none beside which the message says
            nothing else, such as calls of tools.
    """
    where, parts = f"messages: the content of message {number}", message.get("content")
    if isinstance(parts, str):
        return message
    if parts is None:
        if any(value for name, value in message.items() if name not in _SAYS_NOTHING):
            return message
        raise ConfigError(f"{where} is null or missing; give a text, or '' for an empty one")
    if not isinstance(parts, list | tuple) or not parts:
        raise ConfigError(f"{where} must be a text or a list of text parts, not {short(parts)}")
    for place, part in enumerate(parts, start=1):
        if (
            not isinstance(part, Mapping)
            or not _TEXT_PART <= set(part) <= _TEXT_PART | _HINTS
            or part["type"] != "text"
        ):
            kind = part.get("type") if isinstance(part, Mapping) else part
            remedy = 'only {"type": "text", "text": "..."} is supported'
            raise ConfigError(f"{where}: part {place} ({short(kind)}) is not a text part; {remedy}")
        if not isinstance(part["text"], str):
            raise ConfigError(f"{where}: the text of part {place} must be a string, not {short(part['text'])}")
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def find_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a model's folder, or None; downloads nothing.

    Raises:
        CheckpointError: it does not load.
    """
    if not any(file.is_file() for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself, and custom Python code anything
        said = next(iter(str(error).strip().splitlines()), "no reason given")
        raise CheckpointError(
            f"model {folder} has no tokenizer that loads ({type(error).__name__}: {said:.400}); "
            + (_packages_remedy(folder) or "put the model's tokenizer files into the folder")
        ) from error


def _packages_remedy(folder: Path) -> str | None:
    """Return what to do about packages that the only tokenizer file of a folder needs; None if that is not it."""
    if (folder / "tokenizer.json").is_file():
        return None
    for pattern, kind, packages in _NEEDED_PACKAGES:
        found = sorted(file.name for file in folder.glob(pattern))
        lacking = [package for package, is_there in packages.items() if not is_there()]
        if found and lacking:
            return (
                f"the folder has {found[0]}, {kind}, and no tokenizer.json; reading it needs {' and '.join(lacking)}: "
                f"run `pip install {' '.join(lacking)}`, or put the model's tokenizer.json into the folder"
            )
    return None
