"""Answer of a completion without thoughts, and its last block of Python.

Blocks are fenced as in CommonMark, and as models write them. A fence is three or more back-ticks or tildes at the end
of a line, perhaps followed by a word; tildes start their line. As many of the same sign, or more, end a block: at the
start of a line, or behind the code of its last line. A fence with a word inside a block opens the next block.
Other back-ticks may be code, as in a string: they end a block only where it has no other end. A block without an end
goes to the end of the text. Code that is indented as a whole loses the indent; in a quote it loses the quote signs.

Time and memory are linear in the text. It does not import heterorl, so workers load it quickly.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_TAG = re.compile(r"<(/?)think>")


def answer_of(completion: str) -> str:
    """The completion without its thoughts, which `<think>` and `</think>` enclose.

    Text behind a lone start is thoughts too. A template may open the thoughts in the prompt, so a lone end marks all
    text before it as thoughts.
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
_BEFORE_TILDES = re.compile(r"[\s>]*+(?:(?:[-*+]|\d++[.)])\s++)*+[\s>]*+")
_QUOTE = re.compile(r"\A(?:\s{0,3}>\s?)+")
_BLANKS = " \t\r"
_BY_WORTH = ((True, True), (False, True), (True, False), (False, False))
"""Closed and named first; a name counts more than an end."""
_MAX_INDENT = 3
"""Most blanks before a closing fence beyond the indent of the opening line; with more it is code."""


def is_exact(answer: str, completion: str) -> bool:
    """Whether a completion's answer equals the row's or one of its texts."""
    given = answer_of(completion).strip()
    return given in (answer.strip(), *map(str.strip, texts_of(answer)))


def texts_of(answer: str) -> list[str]:
    """Texts of an answer column that lists them, without blank ones."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(answer) if answer.startswith('["') else []
        return [one for one in found if one.strip()] if all(isinstance(one, str) for one in found) else []
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block: text and lower-case word of its fence, empty without one."""

    word: str
    text: str
    is_closed: bool = True


@dataclass(slots=True, kw_only=True)
class _Opened:
    """Open block: fence, start of its text, first doubtful end or -1."""

    word: str
    fence: str
    is_quoted: bool
    indent: int
    start: int
    doubtful_end: int = -1

    def block(self, text: str, end: int, *, is_closed: bool = True) -> Block:
        lines = text[self.start : end].split("\n")
        if self.is_quoted:
            lines = [_QUOTE.sub("", line, count=1) for line in lines]
        first = next((line for line in lines if line.strip()), "")
        if (depth := _depth(first)) and self.word in ("", *_PYTHON):
            # The first line of code stands at the margin.
            lines = [line[min(depth, _depth(line)) :] for line in lines]
        return Block(word=self.word, text="\n".join(lines), is_closed=is_closed)


def python_of(text: str) -> str | None:
    """The last block named Python, else the last one without a name.

    An unclosed one, such as in a cut completion, counts only without a closed one of its kind.
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
    """End of the block, -1 for none here; number of used fences."""
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
    """Block that a line's last fence opens; pairs of fences are code."""
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
    behind = line[run.end() :].strip(_BLANKS)
    if not behind or _WORD.fullmatch(behind):
        return _name_of(behind)
    # Attributes, such as ```python title="x.py": of a line that is a fence from its start.
    word = _WORD.match(line, run.end())
    if word is not None and not line[: run.start()].strip(_BLANKS + ">"):
        return _name_of(word.group())
    return None


def _name_of(word: str) -> str:
    """The language of a word: python for {.python} and python:x.py."""
    name = _NAME.fullmatch(word.lower())
    return name[1] if name is not None else word.lower()
