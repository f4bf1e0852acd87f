"""`NGramDrafter`: guesses the next tokens of a sequence from its own text (prompt lookup, Saxena 2023).

Answers repeat what they are about: quoted passages, code that is changed, names; and models repeat themselves. What
followed the last tokens where they occurred before is guessed to follow them again.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from zinfer.scheduling.sequence import Sequence as TokenSequence

_LENGTHS: Final = (4, 3, 2)  # of the last tokens that are looked for, the longest first
_WIDTH: Final = array("i").itemsize


class NGramDrafter:
    """Guesses by looking up. Keeps the bytes of each sequence's tokens while it is asked for."""

    def __init__(self) -> None:
        self._texts: dict[int, bytearray] = {}

    def guess(self, sequences: Sequence[TokenSequence], most: int) -> Mapping[int, tuple[int, ...]]:
        """Return up to ``most`` tokens for each sequence that has any guess, by its number; all tokens are known."""
        self._texts = {each.number: self._text_of(each) for each in sequences}
        guesses = {number: look_up(text, most) for number, text in self._texts.items()}
        return {number: found for number, found in guesses.items() if found}

    def _text_of(self, sequence: TokenSequence) -> bytearray:
        text, num_known = self._texts.get(sequence.number, bytearray()), sequence.num_known
        del text[num_known * _WIDTH :]  # it was restarted
        text += sequence.tokens(len(text) // _WIDTH, num_known).tobytes()
        return text


def look_up(text: bytes | bytearray, most: int) -> tuple[int, ...]:
    """Return the tokens that followed the last ones of ``text`` where these occurred before, most recently.

    Args:
        text: tokens as 4-byte integers.
        most: tokens returned; fewer only if there is no occurrence. If they reach the end of the text, they go on with
            what was guessed.
    """
    for length in _LENGTHS:
        last, end = text[-length * _WIDTH :], len(text) - _WIDTH
        if len(last) < length * _WIDTH:
            continue
        place = text.rfind(last, 0, end)
        while place > 0 and place % _WIDTH:  # between two tokens
            place = text.rfind(last, 0, place + len(last) - 1)
        if place >= 0:
            following = array("i", bytes(text[place + len(last) :]))
            return tuple((following * (most // len(following) + 1))[:most])
    return ()
