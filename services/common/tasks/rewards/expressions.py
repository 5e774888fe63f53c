"""Mathematics as authors of data sets and models write it, read as one expression by math-verify's parser.

Runs in a worker process. An answer of a data set is what follows its last `####`, else all of its text; `$`, `\\(` and
`\\boxed` of its own say which part is mathematics. Of a completion the last box, what follows the last `####` or the
last "answer is" is read in the same way; where none can be read, math-verify looks for mathematics in its prose.

Guarantees: what is read was read to its end: an answer that is not is None, and never a part of itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import convert_to_pct
from latex2sympy2_extended.math_normalization import extract_boxed_content, normalize_latex
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig, parse_latex_cached

from heterorl.common.tasks.rewards.notation import ENDED, GAP, Text, signs, unwrapped, words_of, written

_BASED = re.compile(r"([0-9A-Za-z]+)_\{?(\d+|\\text\{[a-z]+\})\}?")
_PERCENT = re.compile(rf"{GAP}(?:\\?%|\b(?:percent|percentage|pct)\b|\\text\{{\s*percent\s*\}})\s*$")
_EXACT, _ROUNDED = 1e-12, 1e-3
"""Largest relative difference of two numbers that are equal: written exactly, or as decimals."""
# Units are taken off here: the library takes t of 4s+3t for tons.
_NORMAL = replace(LatexExtractionConfig().normalization_config, units=False)

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_SAID = re.compile(r"(?i)(?<![</])\banswers?\b(?:\s+(?:is|are|to .{0,80}? is)\b)?\s*[:=]?\**\s*(?P<said>[^\n]+)")
_HASHES = "####"


def answer_of_row(text: str) -> Any:
    """What an answer column says: an expression of sympy, Text, or None where it cannot be read to its end."""
    return read(text.rpartition(_HASHES)[2])


def is_right(answer: Any, completion: str) -> bool:
    """Whether the last answer that a completion states equals one that `answer_of_row` read."""
    given = answers_of(completion, wants_text=isinstance(answer, Text))
    return any(_is_equal(answer, one) for one in given)


def answers_of(completion: str, *, wants_text: bool) -> list[Any]:
    """What a completion states as its answer: one reading, or those that math-verify finds in prose."""
    if tagged := _TAGGED.findall(completion):
        completion = tagged[-1]
    boxed = _boxed(completion)
    if boxed is None and tagged:
        boxed = completion
    stated = boxed
    if stated is None and _HASHES in completion:
        stated = completion.rpartition(_HASHES)[2].strip().partition("\n")[0]
    if stated is None:
        said = list(_SAID.finditer(completion))
        stated = said[-1].group("said") if said else completion if wants_text else None
    if stated is not None:
        given = read(stated.strip().strip("*"))
        if given is not None and (boxed is not None or wants_text or not isinstance(given, Text)):
            return [given]
    if wants_text:
        return []
    # The library's own time limits use signals and swallow errors as "wrong"; those of this process count.
    found = parse(signs(completion), parsing_timeout=None)
    return [one for one in found if not isinstance(one, str)]


def read(text: str) -> Any:
    """One expression, Text, or None where the text is neither to its end."""
    text = signs(text)
    boxed = _boxed(text)
    text = ENDED.sub("", unwrapped(text if boxed is None else boxed)).strip()
    if (words := words_of(text)) is not None:
        return words
    if (based := _BASED.fullmatch(text)) is not None and _is_based(based):
        # As it is written: 101 in base 2 is not 101.
        return sympy.Function("InBase")(sympy.Symbol(based.group(1).upper()), sympy.Symbol(based.group(2)))
    maths = written(text)
    return _parsed(maths) if maths else None


def _parsed(text: str) -> Any:
    if (percent := _PERCENT.search(text)) is not None:
        of_hundred = _parsed(text[: percent.start()])
        return None if of_hundred is None else convert_to_pct(of_hundred)
    normal = normalize_latex(text, _NORMAL)
    if not normal or not _is_balanced(normal):
        return None
    try:
        found = parse_latex_cached(normal)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - of a parser that raises what it likes
        return None
    return None if found is None or isinstance(found, str | bool) else found


def _boxed(text: str) -> str | None:
    """What the last box holds, boxes that belong together joined by commas; None where there is none."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    return str(extract_boxed_content(text, mode="last"))


def _is_based(number: re.Match[str]) -> bool:
    return any(sign.isdigit() for sign in number.group(1)) or number.group(2) == "16"


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth < 0:
            return False
    return depth == 0


def _is_equal(answer: Any, given: Any) -> bool:
    if isinstance(answer, Text) and isinstance(given, sympy.Symbol):
        given = Text(str(given).casefold())
    if isinstance(answer, Text) or isinstance(given, Text):
        return bool(answer == given)
    return bool(verify(answer, given, timeout_seconds=None)) and not _are_apart(answer, given)


def _are_apart(answer: Any, given: Any) -> bool:
    """Whether two numbers differ that the library takes for equal, since both are near 0."""
    try:
        first, second = answer.doit(), given.doit()
        if not (first.is_number and second.is_number) or first == second:
            return False
        least = _ROUNDED if first.has(sympy.Float) or second.has(sympy.Float) else _EXACT
        largest = max(abs(sympy.N(first, 30)), abs(sympy.N(second, 30)))
        return bool(largest < _ROUNDED and abs(sympy.N(first - second, 30)) > least * largest)
    except (AttributeError, TypeError, ValueError):
        return False
