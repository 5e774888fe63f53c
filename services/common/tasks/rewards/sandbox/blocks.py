"""Blocks of code between back-ticks in a completion, as models write them: CommonMark, and what is near it.

A fence opens at the end of its line, at most followed by a word, whatever stands before it. One closes at the start of
a line with at least as many back-ticks, or behind the code of the last line. A fence with a word inside a block opens
the next one. Of other back-ticks inside a block nobody knows whether they are part of the code, as in a string: the
block ends at the first of them only where nothing else closes it. A block that nothing closes is none.

Guarantees: time and memory are linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PYTHON = frozenset({"python", "python3", "py"})
_RUN = re.compile(r"`{3,}")
_WORD = re.compile(r"[A-Za-z{][^\s`]*")
_BLANKS = " \t\r"
_MAX_INDENT = 3
"""Blanks before a closing fence, beyond those of the line that opened the block; with more it is part of the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One closed block: the word behind its opening fence in small letters, empty where there is none, and its text."""

    word: str
    text: str


@dataclass(slots=True, kw_only=True)
class _Opened:
    """A block under way: how its fence was, where its text starts, and the first doubtful end (-1: none)."""

    word: str
    num_ticks: int
    indent: int
    start: int
    doubtful_end: int = -1


def python_of(text: str) -> str | None:
    """The last block that is named as Python, or else the last without a name; None where there is neither."""
    found: dict[bool, str] = {}
    for block in blocks_of(text):
        if not block.word or block.word in _PYTHON:
            found[bool(block.word)] = block.text
    return found.get(True, found.get(False))


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a text, in order."""
    opened: _Opened | None = None
    start = 0
    for line in text.split("\n"):
        if "```" in line:
            runs = list(_RUN.finditer(line))
            num_used = 0
            if opened is not None:
                end, num_used = _closing(line, runs, opened, start=start)
                if end >= 0:
                    yield Block(word=opened.word, text=text[opened.start : end])
                    opened = None
            if opened is None:
                opened = _opening(line, runs[num_used:], next_start=start + len(line) + 1)
        start += len(line) + 1
    if opened is not None and opened.doubtful_end >= 0:
        yield Block(word=opened.word, text=text[opened.start : opened.doubtful_end])


def _closing(line: str, runs: Sequence[re.Match[str]], opened: _Opened, *, start: int) -> tuple[int, int]:
    """Where in the text a block ends by a line of it, -1 where it does not, and how many runs of ticks that took."""
    first = runs[0]
    is_bare = not line[: first.start()].strip(_BLANKS)
    is_long = len(first.group()) >= opened.num_ticks
    if is_bare and first.start() <= opened.indent + _MAX_INDENT:
        if len(runs) == 1 and _word_behind(line, first):
            return (start if opened.doubtful_end < 0 else opened.doubtful_end), 0
        if is_long:
            return start, 1
    if not is_bare and is_long and not line[first.end() :].strip(_BLANKS):
        return start + first.start(), 1
    if opened.doubtful_end < 0:
        opened.doubtful_end = start + first.start()
    return -1, 0


def _opening(line: str, runs: Sequence[re.Match[str]], *, next_start: int) -> _Opened | None:
    """The block that a line opens by the last of its runs; two and two of them are code within the line."""
    word = _word_behind(line, runs[-1]) if runs else None
    if word is None or (len(runs) % 2 == 0 and word not in _PYTHON):
        return None
    indent = len(line) - len(line.lstrip(_BLANKS))
    return _Opened(word=word, num_ticks=len(runs[-1].group()), indent=indent, start=next_start)


def _word_behind(line: str, run: re.Match[str]) -> str | None:
    """The word of a fence, empty where there is none; None where what stands behind the ticks makes them no fence."""
    behind = line[run.end() :].strip(_BLANKS)
    if not behind or _WORD.fullmatch(behind):
        return behind.lower()
    # Attributes, such as ```python title="x.py": of a line that is a fence from its start.
    word = _WORD.match(line, run.end())
    return word.group().lower() if word is not None and not line[: run.start()].strip(_BLANKS) else None
