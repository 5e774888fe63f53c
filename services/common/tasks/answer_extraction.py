"""What of a completion counts: its answer without thoughts, and the last block of Python in it.

Blocks are those of Markdown as CommonMark defines them and as models write them. A fence is three or more back-ticks,
or tildes. It opens at the end of its line, at most followed by a word, whatever stands before it; of tildes at the
start of its line. One closes at the start of a line with at least as many of the same sign, or behind the code of the
last line. A fence with a word inside a block opens the next one. Of other back-ticks inside a block nobody knows
whether they are part of the code, as in a string: the block ends at the first of them only where nothing else closes
it. A block that nothing closes goes to the end. Code that stands further in as a whole, as in a list, loses those
blanks; in a quote it loses the signs of the quote.

Guarantees: time and memory are linear in the text. Imports nothing of heterorl, so that workers load it quickly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_TAG = re.compile(r"<(/?)think>")


def answer_of(completion: str) -> str:
    """The completion without its thoughts: inside `<think>...</think>`, before a lone end, and behind a lone beginning.

    A template may open the thoughts in the prompt, so the end alone tells that what stands before it is thought.
    """
    kept: list[str] = []
    start, is_thinking = 0, False
    for tag in _TAG.finditer(completion):
        if tag.group(1):
            if not is_thinking:
                kept.clear()
            start, is_thinking = tag.end(), False
        elif not is_thinking:
            kept.append(completion[start : tag.start()])
            is_thinking = True
    if not is_thinking:
        kept.append(completion[start:])
    return "".join(kept)


_PYTHON = frozenset({"python", "python3", "py"})
_RUN = re.compile(r"`{3,}|~{3,}")
_WORD = re.compile(r"[A-Za-z{][^\s`]*")
_NAME = re.compile(r"\{?\.?([a-z0-9_+#-]+)(?:[:}].*)?")
_BEFORE_TILDES = re.compile(r"[\s>]*(?:[-*+]\s+|\d+[.)]\s+)*[\s>]*")
_QUOTE = re.compile(r"(?:\s{0,3}>\s?)+")
_BLANKS = " \t\r"
_BY_WORTH = ((True, True), (False, True), (True, False), (False, False))
"""Closed and named first; a name says more than an end."""
_MAX_INDENT = 3
"""Blanks before a closing fence, beyond those of the line that opened the block; with more it is part of the code."""


def load(_job: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """What a worker answers: whether a completion's text is that of the answer."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        given = answer_of(request["completion"])
        return {"parts": {"correct": float(given.strip() == request["answer"].strip())}}

    return answer, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block: the word behind its opening fence in small letters, empty where there is none, and its text."""

    word: str
    text: str
    is_closed: bool = True


@dataclass(slots=True, kw_only=True)
class _Opened:
    """A block under way: how its fence was, where its text starts, and the first doubtful end (-1: none)."""

    word: str
    fence: str
    is_quoted: bool
    indent: int
    start: int
    doubtful_end: int = -1

    def block(self, text: str, end: int, *, is_closed: bool = True) -> Block:
        """What it is when it ends."""
        lines = text[self.start : end].split("\n")
        if self.is_quoted:
            lines = [_QUOTE.sub("", line, count=1) for line in lines]
        first = next((line for line in lines if line.strip()), "")
        if (depth := _depth(first)) and self.word in ("", *_PYTHON):
            # The first line of code stands at the margin.
            lines = [line[min(depth, _depth(line)) :] for line in lines]
        return Block(word=self.word, text="\n".join(lines), is_closed=is_closed)


def python_of(text: str) -> str | None:
    """The last block that is named as Python, or else the last without a name; None where there is neither.

    One that nothing closes, as where a completion was cut, counts where no other one does.
    """
    found: dict[tuple[bool, bool], str] = {}
    for block in blocks_of(text):
        if not block.word or block.word in _PYTHON:
            found[block.is_closed, bool(block.word)] = block.text
    return next((found[kind] for kind in _BY_WORTH if kind in found), None)


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a text, in order."""
    opened: _Opened | None = None
    start = 0
    for line in text.split("\n"):
        if "```" in line or "~~~" in line:
            runs = [run for run in _RUN.finditer(line) if opened is None or run[0][0] == opened.fence[0]]
            num_used = 0
            if opened is not None and runs:
                end, num_used = _closing(line, runs, opened, start=start)
                if end >= 0:
                    yield opened.block(text, end)
                    opened = None
            if opened is None:
                opened = _opening(line, runs[num_used:], next_start=start + len(line) + 1)
        start += len(line) + 1
    if opened is not None:
        block = (
            opened.block(text, opened.doubtful_end)
            if opened.doubtful_end >= 0
            else opened.block(text, len(text), is_closed=False)
        )
        if block.is_closed or block.text.strip():
            yield block


def _closing(line: str, runs: Sequence[re.Match[str]], opened: _Opened, *, start: int) -> tuple[int, int]:
    """Where in the text a block ends by a line of it, -1 where it does not, and how many runs of ticks that took."""
    first = runs[0]
    is_bare = not line[: first.start()].strip(_BLANKS + ">" * opened.is_quoted)
    is_long = len(first.group()) >= len(opened.fence)
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
    fence, before = runs[-1].group(), line[: runs[-1].start()]
    if fence[0] == "~" and not _BEFORE_TILDES.fullmatch(before):
        return None
    is_quoted = before.lstrip().startswith(">")
    return _Opened(word=word, fence=fence, is_quoted=is_quoted, indent=_depth(line), start=next_start)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(_BLANKS))


def _word_behind(line: str, run: re.Match[str]) -> str | None:
    """The word of a fence, empty where there is none; None where what stands behind the ticks makes them no fence."""
    behind = line[run.end() :].strip(_BLANKS)
    if not behind or _WORD.fullmatch(behind):
        return _name_of(behind)
    # Attributes, such as ```python title="x.py": of a line that is a fence from its start.
    word = _WORD.match(line, run.end())
    if word is not None and not line[: run.start()].strip(_BLANKS + ">"):
        return _name_of(word.group())
    return None


def _name_of(word: str) -> str:
    """The language that a word names: of {.python} and python:x.py it is python."""
    name = _NAME.fullmatch(word.lower())
    return name[1] if name is not None else word.lower()
