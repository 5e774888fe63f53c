"""Thoughts of a completion, written in `<think>` and `</think>`.

A tokenizer may hold the marks as special tokens, which decoding drops. Then a thought would join the answer behind it.
"""

import re
from typing import Any

from heterorl.common.types.common import Int32Array

THINK, THOUGHT = "<think>", "</think>"
_PAIRS = (
    (THINK, THOUGHT),
    ("[THINK]", "[/THINK]"),
    ("<|channel>", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Starts and ends: of Qwen, Magistral, Gemma 4, Seed-OSS, Command A, Kimi."""
_MESSAGE, _ANALYSIS = "<|message|>", "<|channel|>analysis<|message|>"
_OPENINGS = (*(start for start, _ in _PAIRS), "<|channel>thought", _ANALYSIS)
"""Ends of a prompt whose completion begins inside its thoughts."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_HEADER = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
"""Signs of gpt-oss behind which no text of a message stands."""
_RECIPIENT = re.compile(r"\s*+(?:assistant|analysis|commentary|final)?+\s*+(?:to=\S*+)?+\s*+")
"""Rest of a header that the prompt began."""
_OF_CHANNELS = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, "<|end|>", "<|return|>", "<|call|>")
_SIGN = re.compile("|".join(map(re.escape, _OF_CHANNELS)))


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt's completion begins inside thoughts."""
    return prompt.rstrip().endswith(_OPENINGS)


class Thoughts:
    """The marks of thoughts among a tokenizer's added tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items()}
        names = set(added.values())
        self._has_channels = {"<|channel|>", _MESSAGE} <= names
        tags = {mark: tag for pair in _PAIRS for mark, tag in zip(pair, (THINK, THOUGHT), strict=True) if mark in names}
        self._tags = tags
        kept = {*tags, *(_OF_CHANNELS if self._has_channels else ())}
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._dropped = frozenset(
            number for number in {*special, *tokenizer.all_special_ids} if added.get(number) not in kept
        )

    def text(self, token_ids: Int32Array, *, is_open: bool) -> str:
        """Text of drawn tokens without special tokens, thoughts in tags.

        With `is_open` the prompt opened thoughts. Thoughts without an end have no end tag.
        """
        ids = [number for number in token_ids.tolist() if number not in self._dropped]
        # Keep spaces that a tokenizer file would have cleaned up.
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._has_channels:
            text = _of_channels(f"{_ANALYSIS}{text}" if is_open else text)
        for mark, tag in self._tags.items():
            text = text.replace(mark, tag)
        if not is_open or THOUGHT in text or text.startswith(THINK):
            return text
        return f"{THINK}{text}"


def _of_channels(text: str) -> str:
    """Text of gpt-oss's messages; only the channel `final` holds an answer."""
    header, *behind = text.split(_MESSAGE)
    first = _HEADER.search(header)
    # The prompt may have opened a message, whose text stands here.
    opened = header if first is None else header[: first.start()]
    opened = "" if _RECIPIENT.fullmatch(opened) else opened
    header = header[len(opened) :]
    if not behind:
        # A header that was cut.
        return _SIGN.sub("", f"{opened}{THINK}{header}" if _CHANNEL.search(header) else f"{opened}{header}")
    pieces = [opened]
    is_answer = bool(opened)
    for piece in behind:
        found = _CHANNEL.findall(header)
        end = _HEADER.search(piece)
        body, header = (piece, "") if end is None else (piece[: end.start()], piece[end.start() :])
        if not found or found[-1] == "final":
            pieces.append(f"\n{body}" if is_answer else body)
            is_answer = True
        else:
            pieces.append(f"{THINK}{body}" if end is None else f"{THINK}{body}{THOUGHT}")
    return _SIGN.sub("", "".join(pieces))
