"""Answers of completions compared with a row's, as mathematics.

Runs in a worker process. The answer of a row is the text behind its last `####`, else all of it. A completion's
stated answer (`stated_answers`) is read in the same way; if it cannot be read, math-verify searches the prose.

Two known units must agree. An equation of one unknown gives its right side only to a name or a function, so `x^2=3`
is not 3.
"""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from math_verify import parse, verify
from math_verify.errors import TimeoutException
from math_verify.grader import get_pct_val
from sympy.core.function import AppliedUndef

from heterorl.common.tasks.rewards.latex_signs import signs_as_latex, words_as_signs
from heterorl.common.tasks.rewards.math_expressions import (
    COMMAND,
    FUNCTIONS,
    MIXED,
    MODULO,
    SCALES,
    Clock,
    Measured,
    Option,
    Text,
    letters_of,
    read_expression,
    readings,
)
from heterorl.common.tasks.rewards.stated_answers import FORMULA, MULTIPLE, boxed, statement_of
from heterorl.common.tasks.rewards.units import PERCENT, Unit, unit_of

MAX_BARE = 200
"""Most characters of a completion that is read as one value."""
MAX_WORDED = 1000
"""The same, where the row's answer is words."""
MAX_AROUND = 4
"""Most words of a bound or a multiple that is a whole completion."""
_TAGS = re.compile(r"(?i)</?(?:b|i|u|em|strong|span|br|p)\s*/?>")
_FACTORIAL = re.compile(r"(?<!!)!$|(?<!\d)\d!!$")
_OF_TWO = (
    r"[$\\(]*[\d.,]+[)$\\]*\s+(?:(?:times|plus|minus|less\s+than|more\s+than)\s+(?:[\d$\\(]|[b-hj-z]\b)"
    r"|to\s+[$\\(]*\d+(?!\d|\s+(?:decimal|significant|d\.?p|s\.?f)))"
)
_RANGE = re.compile(rf"(?i){_OF_TWO}")
"""Two values of which neither is the answer, also in a box or a tag."""
_CHANGED = re.compile(
    rf"(?i)(?!.*\d\s*=)(?:{MULTIPLE}|at\s+(?:least|most)\b)"
    r"|(?:over|under|above|below|up\s+to|no\s+(?:more|less|fewer)\s+than)\s+[$\\(]*\d"
    r"|[$\\(]*(?:[<>](?=[=\s\d$\\])|[\u2264\u2265]|[gl]eq?\b)"
    rf"|{_OF_TWO}|[$\\(]*[\d.,]+[)$\\]*(?:\+$|\s+(?:(?:squared|cubed)\W*$"
    r"|or\s+(?:more|less|fewer|greater|higher|lower|above|below)\b))"
    r"|(?:the\s+)?\d+(?:st|nd|rd|th)\s+of\s+(?-i:[A-Z])"
)
_IT_IS = re.compile(r"(?i)^(?:(?:so|thus|hence|therefore),?\s+)?(?:it|x|that|this)(?:['\u2019]s|\s+(?:is|=))\s+")
_WORD = re.compile(r"\w+")
_DIGITS = re.compile(r"\d[\d.,]*")
_VERDICT = re.compile(
    r"(?is)\A\W*((?:yes|true)(?=\**[,.;:!](?!.*(?:\b(?:no|not|false)\b|n['\u2019]t)))"
    r"|(?:no|false)(?=\**[,.;:!](?!.*\b(?:yes|true)\b))"
    r"|(?-i:[A-HJ])(?=\W{1,5}(?:because|since)\b"
    r"(?!.*\b(?:wait|actually|however|but|no|sorry|correction|so|therefore|thus|hence)\b)[^.!?;\n]*\W*\Z))"
)
"""The first word, unless its opposite follows; an option before its reason."""
_BARE = re.compile(
    rf"{FORMULA}|(?<=[a-z=]\s)"
    r"(?P<bare>-?[\d.]{0,20}\s?(?:\\sqrt\{[^{}]{1,20}\}|\\pi\b)(?:\s?/\s?\d+)?)"
    r"(?!\s{0,2}(?:[\d^(\[{+*/=<>\\-]|[A-Za-z](?![A-Za-z])))"
    r"|(?<![\d:.])(?P<over>\d{1,4}):(?P<under>(?!0)\d{1,4})(?![\d:])",
    re.DOTALL,
)
"""A formula; a root or a multiple of pi without other terms; a ratio."""
_MODULO = re.compile(MODULO)
_TERM = re.compile(r"(?i)\b(?:plus|minus|times|over|by|and|or|than|between|from|to)\s\Z")
_RATIO = re.compile(r"(?i)\b(?:ratio|proportion|scale|odds)\b")
_IN_YEAR = re.compile(r"(?i)\b(?:in|since|by|during|until|from)\s+(?:19|20)\d\d\s+\Z")
_SHORT_WORD = re.compile(r"[A-Za-z]{2,}")
_EXACT, _ROUNDED = 1e-12, 1e-3
"""Largest relative difference of equal numbers: exact ones, and decimals."""
_HASHES = "####"
_ENDLESS = re.compile(r"\d{400,}")
"""A number that no answer has; sympy would take minutes."""


def load(job: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Worker side of math-verify: reads a row's answer and judges a completion."""
    resource.setrlimit(resource.RLIMIT_AS, (job["max_memory_bytes"],) * 2)
    # The library warns at every call without its own time limits.
    logging.disable(logging.WARNING)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        right = answer_of_row(request["answer"])
        if "completion" not in request or not right:
            return {"readable": bool(right)}
        try:
            return {"readable": True, "correct": is_right(right, request["completion"])}
        except (MemoryError, RecursionError) as error:
            # It counts like too much time: wrong, and uncertain.
            is_full = isinstance(error, MemoryError)
            return {"readable": True, "correct": False, "used_s": request["cpu_s"], "is_full": is_full}

    # The library builds its parser at first use; no answer pays for it.
    is_right(answer_of_row("\\frac{1}{2}"), "$0.5$")
    return answer, {}


def answer_of_row(text: str) -> list[Any]:
    """Meanings of a row's answer, expressions or Text; empty where unreadable."""
    text = words_as_signs(text.rpartition(_HASHES)[2])
    box = boxed(text)
    text = text if box is None else box[0]
    found = readings(text)
    if len(found) < 2 or (isinstance(found[0], Text) and "(" not in text):
        # A letter without a value behind it is part of a name: E. coli.
        found = [read_expression(text)]
    return [one for one in [*found, letters_of(text)] if one is not None]


def is_right(answers: Sequence[Any], completion: str) -> bool:
    """Whether the last answer of a completion equals a meaning of `answer_of_row`."""
    completion = _ENDLESS.sub("?", completion)
    options = [one for one in answers if isinstance(one, Option)]
    alone = [one for one in answers if not isinstance(one, Option)]
    for wants_text in sorted({isinstance(one, Text) for one in alone}):
        given = answers_of(completion, wants_text=wants_text)
        stated = [one for one in given if isinstance(one, Option)]
        if options and stated:
            return any(_is_option(option, one) for option in options for one in stated)
        wanted = [one for one in alone if isinstance(one, Text) == wants_text]
        if any(_is_equal(answer, one) for answer in wanted for one in given if not isinstance(one, Option)):
            return True
    return False


def _is_option(answer: Option, given: Option) -> bool:
    """Whether letters are equal and values agree; one text may say more."""
    if given.value is None:
        return answer.letter == given.letter
    texts = [one.value.words for one in (answer, given) if isinstance(one.value, Text)]
    if answer.letter != given.letter or len(texts) == 1:
        return answer.letter == given.letter
    if len(texts) == 2:
        # One increases, two increase.
        few, many = sorted(({word.removesuffix("s") for word in _WORD.findall(text)} for text in texts), key=len)
        return few <= many and not {"no", "not", "never", "or"} & (many - few)
    return _is_equal(answer.value, given.value) or _is_rounded(answer.value, given.value)


def _is_rounded(answer: Any, given: Any) -> bool:
    """Whether numbers are equal to the decimals of one (0.33, 1/3)."""
    (first, unit), (second, other_unit) = _measured(answer), _measured(given)
    return not unit.differs_from(other_unit) and any(
        isinstance(short, sympy.Float)
        and getattr(full, "is_real", False)
        and full.is_number
        and abs(short - full) <= sympy.Rational(1, 2) / 10 ** len(str(float(short)).partition(".")[2])
        for short, full in ((first, second), (second, first))
    )


def answers_of(completion: str, *, wants_text: bool) -> list[Any]:
    """Answers of a completion: its readings, or math-verify's findings in prose."""
    stated = statement_of(completion)
    is_box = stated.is_marked and not stated.prose
    is_short = len(completion) <= (MAX_WORDED if wants_text else MAX_BARE)
    texts = stated.texts or (stated.prose,) * (is_short and (wants_text or _is_bare(stated.prose)))
    if wants_text and not stated.texts:
        texts = (*texts, *_VERDICT.findall(completion))
    if wants_text:
        texts = (*texts, *stated.judged)
    found: list[Any] = []
    whole = _IT_IS.sub("", (stated.texts or (stated.prose,))[-1].strip(" .*"))
    is_said = bool(stated.texts) and not stated.is_marked
    if not (wants_text or is_box) and (is_said or _is_one_value(whole)) and _CHANGED.match(whole):
        return []
    if stated.is_marked and not wants_text and _RANGE.match(whole):
        return []
    for one in texts:
        plain = _TAGS.sub("", one).strip().rstrip(".").strip('*`_"\u201c\u201d').strip()
        given = readings(plain)
        if stated.texts and not stated.is_marked and plain.endswith("!"):
            # An exclamation, or a factorial.
            given = readings(plain.rstrip("!")) + (given if _FACTORIAL.search(plain) else [])
        given = [each for each in given if stated.is_marked or wants_text or not isinstance(each, Text)]
        if not stated.is_marked:
            # Words behind an option's letter may end the sentence.
            given = [
                Option(each.letter, None) if isinstance(each, Option) and isinstance(each.value, Text) else each
                for each in given
            ]
        if wants_text and (letters := letters_of(plain)) is not None:
            given.append(letters)
        if given and not (is_box or (wants_text and not stated.is_marked)):
            return given
        found += given
    if wants_text or found or not stated.prose:
        return found
    # To the library \$ ends a formula.
    prose = _BARE.sub(_as_formula, MIXED.sub(_as_fraction, _MODULO.sub(" ", signs_as_latex(stated.prose))))
    # The library's time limits use signals; this process has its own.
    parsed = _tried(parse, prose.replace("\\$", ""), parsing_timeout=None) or []
    return [one for one in parsed if not isinstance(one, str)]


def _as_fraction(mixed: re.Match[str]) -> str:
    """A mixed number as one fraction; without a year before it."""
    whole, above, below = map(int, mixed.groups())
    is_year = _IN_YEAR.search(mixed.string[max(0, mixed.start() - 20) : mixed.start(2)])
    return f"{above if is_year else whole * below + above}/{below}"


def _as_formula(found: re.Match[str]) -> str:
    """Mathematics without dollars, and ratios, as a formula; times as "?"."""
    if found["over"]:
        return rf"$\frac{{{found['over']}}}{{{found['under']}}}$" if _RATIO.search(found.string) else "?"
    is_term = _TERM.search(found.string[max(0, found.start() - 9) : found.start()])
    return f"${found['bare']}$" if found["bare"] and not is_term else found[0]


def _tried(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A result of the library; None for errors, except MemoryError."""
    try:
        return function(*arguments, **options, raise_on_error=True)
    except MemoryError:
        raise
    except (Exception, TimeoutException):  # noqa: BLE001 - the library raises anything
        return None


def _is_one_value(text: str) -> bool:
    """Whether a text is one number with few words: 12 or more."""
    return len(text.split()) <= MAX_AROUND and len(_DIGITS.findall(text)) == 1


def _is_bare(completion: str) -> bool:
    """Whether a completion is only a value: (3,4) or 5 km."""
    words = _SHORT_WORD.findall(COMMAND.sub(" ", completion).lower())
    return all(
        word in FUNCTIONS | {"am", "pm", "per", "sq", "square", "cubic", *SCALES} or any(unit_of(word))
        for word in words
    )


def _is_equal(answer: Any, given: Any) -> bool:
    (answer, unit), (given, given_unit) = _measured(answer), _measured(given)
    if unit.differs_from(given_unit):
        return False
    answer, given = map(_named, (answer, given))
    if not isinstance(answer, sympy.Basic) or not answer.has(sympy.Eq):
        given = _solved(given)
    elif isinstance(given, sympy.Tuple | sympy.Interval) and isinstance(answer, sympy.FiniteSet):
        # A tuple has the order of the names.
        answer, given = given, answer
    else:
        answer, given = _unnumbered(answer, given)
    if isinstance(given, sympy.FiniteSet) and given.args and not _is_several(answer):
        # Several values are one answer only where each is right, such as 1/2 or 0.5.
        return all(_is_equal(Measured(answer, unit), one) for one in given.args)
    if _is_same(answer, given):
        return True
    # A percentage equals its number, and its hundredth where the other side states no unit.
    if unit == PERCENT and not any(given_unit) and isinstance(answer, sympy.Expr):
        return _is_same(answer / 100, given)
    return given_unit == PERCENT and not any(unit) and isinstance(given, sympy.Expr) and _is_same(answer, given / 100)


def _named(read: Any) -> Any:
    """Equations with a name in place of f(2)."""
    if isinstance(read, sympy.FiniteSet | sympy.Tuple | sympy.And):
        return read.func(*map(_named, getattr(read, "_unsorted_args", read.args)), evaluate=False)
    # To the library f(2) = 3 equals f(2) = 4, and not 3.
    is_function = isinstance(read, sympy.Eq) and isinstance(read.lhs, AppliedUndef)
    return sympy.Eq(sympy.Symbol(str(read.lhs)), read.rhs, evaluate=False) if is_function else read


def _unnumbered(answer: Any, given: Any) -> tuple[Any, Any]:
    """Both as sets of values if only one numbers its names."""
    sides = [one.args if isinstance(one, sympy.FiniteSet) else (one,) for one in (answer, given)]
    if not all(isinstance(one, sympy.Eq) and one.lhs.is_Symbol for side in sides for one in side):
        return answer, given
    first, second = ({one.lhs.name for one in side} for side in sides)
    plain = {name.partition("_")[0] for name in first | second}
    numbered = [names for names in (first, second) if names != plain]
    if len(plain) > 1 or len(numbered) != 1 or not all(re.fullmatch(r"\w+?_\{?\d+\}?", name) for name in numbered[0]):
        return answer, given
    return sympy.FiniteSet(*(one.rhs for one in sides[0])), sympy.FiniteSet(*(one.rhs for one in sides[1]))


def _measured(read: Any) -> Measured:
    if isinstance(read, Measured):
        return read
    if isinstance(read, sympy.Eq) and isinstance(read.rhs, sympy.Set):
        read = read.rhs
    of_hundred = get_pct_val(read)
    return Measured(read, Unit()) if of_hundred is None else Measured(of_hundred, PERCENT)


def _solved(given: Any) -> Any:
    """The value that an equation states; None where it is unsolved."""
    if isinstance(given, sympy.FiniteSet | sympy.Tuple) and given.has(sympy.Eq):
        values = [_solved(one) for one in given.args]
        return None if None in values else given.func(*values)
    chain = getattr(given, "_unsorted_args", given.args) if isinstance(given, sympy.And) else (given,)
    if not all(isinstance(one, sympy.Eq) for one in chain):
        return given
    left, right = chain[0].lhs, chain[-1].rhs
    if right.is_Symbol and not left.free_symbols:
        return left
    # One unknown inside powers, products or sums is an equation yet to be solved.
    is_name = left.is_Symbol or len(left.free_symbols) != 1 or left.has(sympy.Function, sympy.Derivative)
    return right if is_name else None


def _is_same(answer: Any, given: Any) -> bool:
    if given is None:
        return False
    if isinstance(answer, Text) and isinstance(given, sympy.Symbol):
        given = Text(str(given).casefold())
    if isinstance(answer, Text) and isinstance(given, sympy.Mul) and all(one.is_Symbol for one in given.args):
        given = Text(" ".join(sorted(str(one).casefold() for one in given.args)))
    if isinstance(answer, Text) or isinstance(given, Text):
        return bool(answer == given)
    if isinstance(answer, Clock) and isinstance(given, Clock) and (answer.is_time or given.is_time):
        return answer.is_at(given)
    answer, given = (one.number if isinstance(one, Clock) else one for one in (answer, given))
    if any(_is_joined(one) for one in (answer, given)):
        answer, given = _as_sets(answer, given)
        if None in (answer, given):
            return False
    if any(type(one) is sympy.FiniteSet for one in (answer, given)) and any(
        isinstance(one, sympy.Tuple | sympy.Interval) for one in (answer, given)
    ):
        # A set in braces is no tuple; the library takes (3,4) for an interval.
        return False
    answer, given = map(_with_one_i, (answer, given))
    is_same = _tried(verify, answer, given, timeout_seconds=None, allow_set_relation_comp=True)
    return bool(is_same) and not _are_apart(answer, given)


def _is_several(read: Any) -> bool:
    return isinstance(read, sympy.Set | sympy.Tuple) or _is_joined(read)


def _is_joined(read: Any) -> bool:
    # The library's own And is a chain such as 2 < x < 3.
    return type(read) in (sympy.And, sympy.Or)


def _as_sets(answer: Any, given: Any) -> tuple[Any, Any]:
    """Conditions as sets of relations, else of one name's values."""
    if type(answer) is type(given) or any(isinstance(one, sympy.FiniteSet) for one in (answer, given)):
        return sympy.FiniteSet(*answer.args), sympy.FiniteSet(*given.args)
    if len(answer.free_symbols | given.free_symbols) != 1:
        return None, None
    first, second = (
        one if isinstance(one, sympy.Set) else _tried(lambda read, **_: read.as_set(), one) for one in (answer, given)
    )
    return first, second


def _with_one_i(read: Any) -> Any:
    # The library reads i as a real symbol, another symbol, or I.
    small = [one for one in getattr(read, "free_symbols", ()) if one.name == "i"]
    return read.subs(dict.fromkeys(small, sympy.I)) if small else read


def _are_apart(answer: Any, given: Any) -> bool:
    """Whether two numbers near 0 differ that the library takes as equal."""
    try:
        first, second = answer.doit(), given.doit()
        if not (first.is_number and second.is_number) or first == second:
            return False
        least = _ROUNDED if first.has(sympy.Float) or second.has(sympy.Float) else _EXACT
        largest = max(abs(sympy.N(first, 30)), abs(sympy.N(second, 30)))
        return bool(largest < _ROUNDED and abs(sympy.N(first - second, 30)) > least * largest)
    except (AttributeError, TypeError, ValueError):
        return False
