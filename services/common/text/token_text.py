"""Text of tokens, and the end of each token in it.

Several tokens may hold one character, and some tokenizers drop the space before a word. Ends are empty if
tokens and text do not match to the end.
"""

from collections.abc import Callable, Sequence

import numpy as np

from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import Span, parts_of

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Replacement for bytes that are not a character, such as half of one."""
MAX_JOINED = 16
"""Most tokens of one piece of text."""
Decode = Callable[[Int32Array], str]


class TokenTexts:
    """Decodes tokens; caches the text of each token."""

    def __init__(self, *, decode: Decode, decode_given: Decode) -> None:
        """Keep the two decoders.

        `decode` gives the text of drawn tokens, without special tokens; `decode_given` the text of given tokens,
        with special tokens, which show the speaker.
        """
        self._decode = {True: decode, False: decode_given}
        self._pieces: dict[tuple[int, bool], str] = {}

    def read(self, token_ids: Int32Array, spans: Sequence[Span]) -> tuple[str, Int32Array]:
        """A rollout's text and each token's end; no ends without a match.

        Turns and the text between them are decoded separately. Spans of other tokens are ignored: all tokens are one
        completion.
        """
        parts = parts_of(spans)
        if not parts or (parts[0].start, parts[-1].end) != (0, token_ids.size):
            text = self._decode[True](token_ids)
            return text, self.ends(token_ids, text)
        text, ends, is_even = "", [_no_ends()], True
        for part in parts:
            own_ids = token_ids[part.start : part.end]
            own = self._decode[part.is_drawn](own_ids)
            own_ends = self.ends(own_ids, own, is_drawn=part.is_drawn)
            is_even = is_even and own_ends.size == own_ids.size
            ends.append(own_ends + len(text))
            text += own
        return text, np.concatenate(ends) if is_even else _no_ends()

    def ends(self, token_ids: Int32Array, text: str, *, is_drawn: bool = True) -> Int32Array:
        """Each token's end in `text`; empty where tokens do not match it."""
        ends: list[int] = []
        position = 0
        joined: list[int] = []
        for token_id in token_ids.tolist():
            joined.append(token_id)
            piece = self._piece(joined, is_drawn=is_drawn)
            length = _length_at(text, position, piece)
            if length is None:
                if len(joined) > MAX_JOINED:
                    return _no_ends()
                continue
            # The last of the tokens that share a character ends at its end, the others at its start.
            ends += [position] * (len(joined) - 1)
            position += length
            ends.append(position)
            joined.clear()
        rest = text[position:]
        if joined and rest and not rest.strip(UNKNOWN):
            # A text may end with half a character.
            ends += [position] * (len(joined) - 1) + [len(text)]
        elif joined or rest:
            return _no_ends()
        return np.array(ends, np.int32)

    def _piece(self, token_ids: list[int], *, is_drawn: bool) -> str:
        decode = self._decode[is_drawn]
        if len(token_ids) > 1:
            return decode(np.array(token_ids, np.int32))
        key = (token_ids[0], is_drawn)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = decode(np.array(token_ids, np.int32))
        return piece


def _length_at(text: str, position: int, piece: str) -> int | None:
    if UNKNOWN in piece:
        return None
    for candidate in (piece, f" {piece}"):
        if text.startswith(candidate, position):
            return len(candidate)
    return None


def _no_ends() -> Int32Array:
    return np.zeros(0, np.int32)
