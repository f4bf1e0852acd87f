"""Compiles the form that an output must have into a grammar over a model's tokens, by llguidance.

Compiling takes milliseconds for forms as people write them, but some small ones take hours, or more memory than there
is. So a new form is first compiled over single bytes by a subprocess with limits (`LimitedWorker`). llguidance's own
limits bound the work for each token.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.limited_worker import LimitedWorker
from zinfer.requests.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LIMITS: Final[Mapping[str, Any]] = {"max_lexer_states": 25_000, "verbose_errors": False}
"""A state takes up to 2 kB; those of common forms are hundreds. Messages without the compiler's inner state."""
_MOST_CPU_S: Final = 4
_MOST_KEPT: Final = 64
_WHITESPACE: Final = r"[ \t\r\n]{1,20}"
"""Between the tokens of JSON. Without a bound a model may write spaces until its tokens are used up."""
_PLACE: Final = re.compile(r"at \d+\(\d+\): ")  # in a grammar's text
_ERROR_LINE: Final = re.compile(r"^error: (.*)$", re.MULTILINE)
_MOST_SHOWN: Final = 300


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar.

    Attributes:
        start: state before the first token; copied for each sequence, never changed.
        vocab_size: tokens of a mask, at least the model's.
        never_ids: special tokens, which have no text, and those that the model lacks.
    """

    start: "LLMatcher"
    vocab_size: int
    never_ids: Collection[int]


class GrammarCompiler:
    """Compiles forms for one model, and keeps the last ones. Thread-safe.

    Args:
        tokenizer: None: there is none.
        vocab_size: of the model.
        end_token_ids: the model's.
        lock: held while the tokenizer is read.
        most_cpu_s: limit of CPU seconds to compile a form.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        end_token_ids: Collection[int],
        lock: threading.Lock,
        most_cpu_s: int = _MOST_CPU_S,
    ) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, end_token_ids
        self._reading = lock
        self._worker = LimitedWorker("grammars", "compiles grammars", most_cpu_s)
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutputsParams, Grammar | str] = OrderedDict()
        self._keeping = threading.Lock()

    def compile(self, form: StructuredOutputsParams, *, is_checked: bool = False) -> Grammar:
        """Return the grammar of a form.

        Args:
            is_checked: whether another rank has compiled it, so that limits of time and memory need not be checked.

        Raises:
            ConfigError: it cannot be compiled, needs too much time or memory, or no output is possible; llguidance is
                not installed; or the tokenizer is not supported.
        """
        with self._keeping:
            found = self._kept.get(form)
            if found is not None:
                self._kept.move_to_end(form)
        if found is None:
            vocabulary = self._open_vocabulary()
            found = self._compile(vocabulary, form, is_checked=is_checked)
            with self._keeping:
                self._kept[form] = found
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        if isinstance(found, str):
            raise ConfigError(found)
        return found

    def close(self) -> None:
        """End the process that compiles, if there is one."""
        self._worker.close()

    def _compile(self, vocabulary: "LLTokenizer", form: StructuredOutputsParams, *, is_checked: bool) -> Grammar | str:
        """Return the grammar, or what is wrong with it."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _source(form)
        except ValueError as error:
            return _refusal(form, str(error))
        if not is_checked:
            answer = self._worker.ask(json.dumps({"grammar": text, "limits": dict(_LIMITS)}))
            if "failed" in answer:
                return f"structured_outputs: the {form.kind} cannot be compiled: {answer['failed']}; give a simpler one"
            if answer["message"]:
                return _refusal(form, answer["message"])
        start = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**_LIMITS))
        start.compute_bitmask()  # finds the first problem now, and what it computes is copied
        if start.is_error():
            return _refusal(form, start.get_error())
        missing = range(self._vocab_size, vocabulary.vocab_size)
        never_ids = {*self._tokenizer.all_special_ids, *vocabulary.eos_tokens, *missing}
        return Grammar(start, vocabulary.vocab_size, never_ids)

    def _open_vocabulary(self) -> "LLTokenizer":
        if find_spec("llguidance") is None:
            raise ConfigError("structured_outputs needs llguidance; run `pip install '.[structured]'`")
        if self._tokenizer is None:
            raise ConfigError("structured_outputs needs a tokenizer; put the model's tokenizer files into its folder")
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = _open_vocabulary(self._tokenizer, self._vocab_size, self._end_token_ids)
            return self._vocabulary


def _source(form: StructuredOutputsParams) -> str:
    """Return the form as llguidance's grammar. Raises ValueError."""
    from llguidance import LLMatcher

    if form.json is not None or form.json_object:
        schema = form.json or {"type": "object"}
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
    if form.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, form.choice)))
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    assert form.grammar is not None
    return LLMatcher.grammar_from_lark(form.grammar)


def _refusal(form: StructuredOutputsParams, message: str) -> str:
    """Return llguidance's message as one sentence."""
    first = message.partition("\n")[0].removesuffix(": regex parse error:")
    if form.grammar is None:
        first = _PLACE.sub("", first, count=1)
    if first.startswith("NoExtension"):
        return f"structured_outputs: no text of the model's tokens matches the {form.kind}"
    if (inner := _ERROR_LINE.search(message)) is not None:
        first = f"{first}: {inner[1]}" if not first.startswith("regex parse error") else inner[1]
    return f"structured_outputs: the {form.kind} cannot be used: {first:.{_MOST_SHOWN}}"


def _open_vocabulary(tokenizer: Any, vocab_size: int, end_token_ids: Collection[int]) -> "LLTokenizer":
    """Return the bytes of each token.

    Raises:
        ConfigError: they are not known.
    """
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer
    from tokenizers.decoders import Fuse

    backend, num_tokens = getattr(tokenizer, "backend_tokenizer", None), max(len(tokenizer), vocab_size)
    if backend is None:
        raise ConfigError(
            f"structured_outputs needs a tokenizer of the tokenizers library, not a {type(tokenizer).__name__}; "
            "put its tokenizer.json into the model's folder"
        )
    try:
        if isinstance(backend.decoder, Fuse):
            return LLTokenizer(TokenizerWrapper(_FusedTokens(tokenizer, num_tokens)))
        ends = [token_id for token_id in end_token_ids if token_id < len(tokenizer)]
        return from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=ends or None)
    except ValueError as error:
        raise ConfigError(f"structured_outputs: the model's tokenizer is not supported: {error!s:.300}") from error


class _FusedTokens:
    """A tokenizer whose texts are those of its tokens, one after the other, as llguidance wants it.

    Args:
        tokenizer: of the tokenizers library, with a Fuse decoder.
        num_tokens: of the vocabulary; tokens that the tokenizer lacks have no text.
    """

    def __init__(self, tokenizer: Any, num_tokens: int) -> None:
        texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.tokens = [*((text or "").encode() for text in texts), *[b""] * (num_tokens - len(texts)), b"<end>"]
        self.eos_token_id, self.bos_token_id = num_tokens, None
        self.special_token_ids = [*tokenizer.all_special_ids, num_tokens]
        special = set(self.special_token_ids)
        self._ids = {text: number for number, text in enumerate(self.tokens) if text and number not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text by longest match, as far as the vocabulary has them."""
        found: list[int] = []
        begin = 0
        while begin < len(text):
            ends = range(min(begin + self._longest, len(text)), begin, -1)
            end = next((end for end in ends if text[begin:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[text[begin:end]])
            begin = end
        return found
