"""The last tokens of a prompt: what is generated is decoded behind them, as it reads in the whole text.

Decoders treat the first token of a text differently: those of Llama 2 and early Mistral models drop its leading space.
"""

import re
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any, Final, NamedTuple

from transformers.convert_slow_tokenizer import bytes_to_unicode

UNDECODED: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-F]{2})>")
_NUM_TOKENS: Final = 6  # a character has at most four bytes, and decoders look back at a word or two
_MOST_SEEN: Final = 4096
_ANY_TEXT: Final = "a"


class PromptEnd(NamedTuple):
    """The last tokens of a prompt.

    Attributes:
        token_ids: a few; none if the prompt has no text, such as one of special tokens, so that the first token behind
            it is the text's first.
        text: theirs.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""


NO_PROMPT: Final = PromptEnd()


def byte_of(tokenizer: Any, token_id: int) -> int | None:
    """Return the byte that a token stands for, if it is one that is decoded together with the bytes beside it."""
    found = _BYTE_TOKEN.fullmatch(tokenizer.convert_ids_to_tokens(token_id) or "")
    return None if found is None else int(found[1], 16)


def token_bytes(tokenizer: Any, token_id: int) -> bytes | None:
    """Return the bytes of a token that holds part of a character; None: it holds none, or its bytes are not known."""
    if (byte := byte_of(tokenizer, token_id)) is not None:
        return bytes([byte])
    token = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(token, bytes):
        return token
    if UNDECODED in (token or UNDECODED):  # the character itself
        return None
    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level vocabularies
    found = [bytes_of.get(character) for character in token]
    return None if None in found else bytes(byte for byte in found if byte is not None)


def decode(tokenizer: Any, token_ids: Sequence[int], *, skips_special: bool) -> str:
    """Return the text of tokens alone, without special ones if they are skipped."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False)
    return text


def added_text(known: str, text: str) -> str:
    """Return what a text adds to the known one that it begins with, whose last character may have been unfinished."""
    if text.startswith(known):
        return text[len(known) :]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(known, text, strict=False))
    return text[sum(1 for _ in same) :]


def find_prompt_end(
    tokenizer: Any, prompt_ids: Sequence[int], *, skips_special: bool, is_formed: bool = False
) -> PromptEnd:
    """Return the end of a prompt.

    Args:
        tokenizer: None: tokens have no text.
        skips_special: whether special tokens have no text.
        is_formed: whether a grammar decides on all that follows, so that the first space counts behind any prompt.
    """
    if tokenizer is None:
        return NO_PROMPT
    token_ids = list(prompt_ids[-_NUM_TOKENS:])
    text = decode(tokenizer, token_ids, skips_special=skips_special)
    if not text or any(byte_of(tokenizer, each) is not None for each in token_ids):
        token_ids = _last_with_text(tokenizer, prompt_ids, skips_special=skips_special, is_formed=is_formed)
        text = decode(tokenizer, token_ids, skips_special=skips_special)
    return PromptEnd(tuple(token_ids), text)


def _last_with_text(tokenizer: Any, prompt_ids: Sequence[int], *, skips_special: bool, is_formed: bool) -> list[int]:
    """Return the last tokens with text, and of the bytes behind them only those of an unfinished character.

    A run of byte tokens is decoded as a whole: a wrong byte behind it would change characters of the prompt.
    """
    found: list[int] = []
    run: list[tuple[int, int]] = []  # bytes behind those found, the last one first, and their tokens
    for token_id in islice(reversed(prompt_ids), _MOST_SEEN):
        if not found and (byte := byte_of(tokenizer, token_id)) is not None:
            run.append((byte, token_id))
        elif decode(tokenizer, [token_id] * 2, skips_special=skips_special):  # twice: the first one may lose its space
            found.append(token_id)
            if len(found) == _NUM_TOKENS:
                break
    if not found and (run or is_formed):
        anchor = tokenizer.convert_tokens_to_ids(_ANY_TEXT)
        found = [] if anchor is None or anchor == tokenizer.unk_token_id else [anchor]
    unfinished = run[: _num_unfinished([byte for byte, _ in run])]
    return [*reversed(found), *(token_id for _, token_id in reversed(unfinished))]


def _num_unfinished(last_bytes: Sequence[int]) -> int:
    """Return how many of the bytes, the last one first, begin a character of more."""
    for count, byte in enumerate(last_bytes[:3], start=1):
        if byte < 0x80:
            break
        if byte >= 0xC0:
            return count if count < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
    return 0
