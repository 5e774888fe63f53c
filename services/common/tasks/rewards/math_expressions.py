"""Mathematics of datasets and models, read as one expression by math-verify's parser.

`$`, `\\(` and `\\boxed` mark mathematics. Unicode signs, numbers, units and words become LaTeX.

An answer that cannot be read to its end is None, never a part of itself. Units, currencies, names before `=` and signs
around mathematics are set apart; other words make a text unreadable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from string import ascii_lowercase
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify.parser import LatexExtractionConfig, parse_latex_cached

from heterorl.common.tasks.rewards.latex_signs import signs_as_latex
from heterorl.common.tasks.rewards.stated_answers import CLAUSE_END, boxed
from heterorl.common.tasks.rewards.units import PERCENT, Unit, unit_of

MAX_WORDS = 6
"""Most words of an answer in words, such as a name; more are prose."""
_CLOSED = r"(?<!\\)\$\$?(?P<dollars>(?:[^$\\]|\\.)+)\$\$?|\\\((?P<round>.+?)\\\)|\\\[(?P<square>.+?)\\\]"
_MATHS = re.compile(_CLOSED, re.DOTALL)
_PRICE = re.compile(r"^\s*(?P<minus>-?)\s*\\?(?P<sign>[$\u00a3\u20ac\u00a5\u20b9])\s*(?=-?[\d.])")
_CURRENCY_BEHIND = re.compile(r"(?<=\d)\s*\\?(?P<sign>[$\u00a2\u00a3\u20ac\u00a5\u20b9])\s*$")
_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3}(?:(?:\\[,;:! ]|~|\{,\}|\s)\s*\d{3})+)(?!\d)")
_COMMAS = re.compile(r"(?<![\d.,(\[{])(\d{1,3}(?:,\d{3})+)(?!,?\d)")
_BRACKETED = re.compile(r"[(\[{|]")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.\\}])(\d++\.?\d*+|\.\d++)[eE]([+-]?\d+)(?![\w.])")
MIXED = re.compile(r"(?<![\w.}/^])(\d{1,99})(?:[ \t]+|\s*\\[ ,;]\s*)(\d{1,99})\s*/\s*(\d{1,99})(?![\w/]|\.\d)")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,99})\.(\d{0,99})\\(?:overline|bar|dot)\s*(?:\{(\d{1,99})\}|(\d))(?!\d)")
_SPACE = r"\\[ ,;:!]|~"
ENDED = re.compile(rf"(?:{_SPACE}|[\s.;,]|\\{{1,2}}$)+$")
_BEGUN = re.compile(rf"^(?:{_SPACE}|\s|=|\\approx\b|\\therefore\b|\\text\s*\{{[^{{}}]*:\s*\}})+")
_FONT = re.compile(
    r"\\(?:boldsymbol|underline|bm|num|mathbf)\s*\{([^{}]*)\}|\\(?:bf|large|Large|displaystyle)(?![a-zA-Z])"
    r"|\\(?:text)?color\s*\{\w+\}"
)
_UPRIGHT = re.compile(r"\\(?:mathrm|rm)\s*\{\s*([ei])\s*\}|(?<=.)\\text\s*\{\s*([ei])\s*\}")
_NAMED_FUNCTION = re.compile(r"\\operatorname\s*\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc))\s*\}")
_MAX_OF_SET = re.compile(r"(\\(?:max|min))\s?(?:\\left)?\\\{([^{}\\]*)(?:\\right)?\\\}")
_DECIMAL_LOG = re.compile(r"\\lg(?![A-Za-z])")
_JOINED = re.compile(r"\\text\s*\{\s*(and|or)\s*\}")
_JOIN = re.compile(r"\b(?:and|or)\b")
_EITHER_SIGN = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_ASCENDING = re.compile("A?B?C?D?E?F?G?H?I?J?")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|textnormal|textsf|operatorname)\s*\{([^{}]*)\}"
)
_WORDS = re.compile(r"[^\W\d_][^\d_\\${}^=<>|+*/]*", re.DOTALL)
_OPTION = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\].:]?")
_LETTER = re.compile(r"[(\[]?[A-J][)\].]*")
_OPTION_AND_VALUE = re.compile(
    r"(?:\\text(?:bf|rm)?\s*\{\s*)?(?:\(([A-J])\)\**[.:]?|([A-J])\**(?:\s*[).:]|\s[-\u2014](?=\s[A-Za-z]{3})))"
    r"(?:[\s}*]|\\[ ,;:])+(\S.*)",
    re.DOTALL,
)
_OPTION_NAMED = re.compile(
    r"(?i:(?:the\s+)?(?:correct\s+|right\s+)?(?:option|choice|letter|answer)\s*:?\s*)(?=[(\[]?[A-J]\b)"
)
_OPTION_COMMA = re.compile(r"^(\(?[A-J]\)?),(?=\s[\d$])(?!.*\b[A-J]\b)", re.DOTALL)
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
COMMAND = re.compile(r"\\[A-Za-z]+")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}(?:\{[lcr|]+\})?")
_NOT_WORDS = re.compile(r"\d|(?i:\b(?:hundred|thousand|[mbtr]+illion)s?\b)")
_UNREAD = re.compile(r"(?<![_\d])\d+\s+\d|\d_|\d\.\d+\.\d")
_RAISED_BY = re.compile(r"(?:\*\*|\^)\s*(?:\((-?[^()]*)\)|(-?\d+(?:\.\d+)?))")
_PHRASE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_NUMBER = re.compile(r"-?\s*[\d.,]+")
FUNCTIONS = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "max", "min", "gcd", "lcm", "mod", "inf",
    "infinity", "and", "arcsin", "arccos", "arctan", "det", "percent", "percentage", "pct", "degree",
    "degrees",
])  # fmt: skip
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(r"(?<=[\d}])\s*(" + "|".join(SCALES) + r")s?\b", re.IGNORECASE)
GAP = r"(?:\s|\\[ ,;:!]|~)*"
_AND = r"(?:,\s*and\b|,|;|\\?&|\b(?:and|plus)(?:\s+also)?\b|\bas\s+well\s+as\b)"
_MARK = r"(?:[A-J]|[IVX]{1,4})"
"""A letter of an option, or a Roman number of a statement."""
_LETTERS = re.compile(
    rf"[(\[]*{_MARK}(?:(?:[.)\]]{{0,2}}{GAP}{_AND}|\)[.:]?{GAP}(?=\()){GAP}[(\[]?{_MARK}\b)+[)\].]*(?:\s+only)?"
)
MODULO = (
    rf"(?:\(\s*+)?(?:\\[pb]?|(?<![A-Za-z\\]))mod(?:ulo)?(?![a-z]){GAP}+[({{]?(?P<by>[1-9]\d{{0,9}}|[A-Za-z])"
    r"[)}]{0,2}"
)
_MODULO = re.compile(rf"{MODULO}$")
_LISTED = re.compile(
    rf"\(?[A-J](?:[).:]{{1,2}}|\s[-\u2014])(?:(?:\s|\\ )+(?!(?:both|all|none|neither|either|only)\b)[^()\n]{{0,80}}?)?"
    rf"\s*(?:{_AND}|\bor\b)\s+\(?[A-J](?:[):]|\s[-\u2014]\s)"
)
"""Two options with their values, such as (A) 3 and (B) 4."""
_POWER = r"(?:\s*\^\s*\{?-?\d\}?|(?<=m)[23])?"
_UNIT = re.compile(
    rf"(?:(?<=[\d}})%])|(?<=\\pi)){GAP}"
    rf"(?P<words>[A-Za-z][A-Za-z./ -]*?){_POWER}(?:\s*\([A-Za-z .-]+\))?\s*$"
)
_UNIT_IN_TEXT = re.compile(
    rf"(?<=[\w)}}%]){GAP}\\(?:text|textrm|mathrm|mbox|rm)\s*\{{(?P<words>[^{{}}\d^]*){_POWER}\s*\}}{_POWER}\s*$"
)
_CJK_SCALES = "\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104\u534a\u591a\u4ee5\u51e0"
"""Ten to 10^8, and words such as half, that change the number in front of them."""
_CJK_UNIT = re.compile(rf"(?<=[\d}}%]){GAP}(?![!-~]|\S*[{_CJK_SCALES}])[\u4e00-\u9fff\uac00-\ud7a3]{{1,4}}\s*$")
_SHORT_UNITS = frozenset(
    ["st", "nd", "rd", "th", "nm", "cl", "dl", "rpm", "am", "pm", "ns", "hz", "kw", "mw", "sq", "cu"]
)
"""Units of a few letters that `units` does not compare."""
_LETTER_UNITS = frozenset(["m", "s", "g", "h", "l", "L", "N", "J", "W", "V", "K", "C", "F", "d"])
_NO_UNITS = frozenset(["and", "or", "mod"])
_IN_TEXT = r"\s*(?(1)\{\s*|)\\(?:text|mathrm)\s*\{([^{}\d]*)\}"
_UNIT_FRACTION = re.compile(
    rf"(?<=[\d}})]){GAP}(\\[dt]?frac)?{_IN_TEXT}(?(1)\s*\}}|\s*/)(?:{_IN_TEXT}|(?(1)\s*\{{|)\s*([A-Za-z]+))({_POWER})"
    r"(?(1)\s*\}|)\s*$"
)
_UNIT_SIGNS = re.compile(r"[{}~]|\\[ ,;:!]")
_SMALL_WORDS = re.compile(r"(?<![A-Za-z\\])(?:in|is|of|to|at|by|it|we|he|an|as)(?![A-Za-z])")
_CIRCLE = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?P<scale>[CFK]\b)?")
_ANGLE = re.compile(r"(?<!\d)(\d++(?:\.\d++)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_TURNS = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)\b")
_ORDINAL = re.compile(r"\^\s*\{\s*\\(?:text|mathrm|textrm)\s*\{(?:st|nd|rd|th)\}\s*\}\s*$")


@dataclass(frozen=True, slots=True)
class Text:
    """An answer in words, compared without case and blanks.

    No tuple: sympy runs texts of a tuple as Python when it compares one with a number.
    """

    words: str


class Option(NamedTuple):
    """An option's letter with its value, such as (D) 12."""

    letter: Text
    value: Any


class Measured(NamedTuple):
    """A value with a known unit, such as a percentage of it."""

    value: Any
    unit: Unit

    def is_same(self, other: Measured) -> bool:
        """Whether it is the same quantity: 3 hours, 180 minutes."""
        if not all(isinstance(one.value, sympy.Expr) and one.value.is_number for one in (self, other)):
            return False
        sizes = (self.value * sympy.Rational(ratio) for ratio in self.unit.ratios_to(other.unit))
        least = _NEAR if self.value.has(sympy.Float) or other.value.has(sympy.Float) else _EXACT
        return any(bool(abs(sympy.N(size - other.value)) <= least * abs(sympy.N(size))) for size in sizes)


@dataclass(frozen=True, slots=True)
class Clock:
    """A time of day, or a ratio such as 3:20."""

    hour: int
    minute: int
    half: str
    """`a` or `p`; empty without one."""
    is_time: bool

    @property
    def number(self) -> Any:
        if self.is_time and self.minute:
            return sympy.Symbol(f"{self.hour}:{self.minute:02d}")
        return sympy.Rational(self.hour, self.minute) if self.minute else sympy.Integer(self.hour)

    def is_at(self, other: Clock) -> bool:
        is_hour = self.hour == other.hour or (self.hour % 12 == other.hour % 12 and max(self.hour, other.hour) <= 24)
        known = {0: "a", 24: "a"} | dict.fromkeys(range(13, 24), "p")
        halves = {one.half or known.get(one.hour, "") for one in (self, other)} - {""}
        return is_hour and self.minute == other.minute and len(halves) < 2


def unwrap(text: str) -> str:
    """Text without the signs around mathematics; of prose, the last formula."""
    text = text.strip().strip("*")
    found = list(_MATHS.finditer(text))
    if not found:
        return text
    inner = [next(part for part in match.groups() if part is not None) for match in found]
    outside = _MATHS.sub(" ", text)
    if _LONG_WORD.search(re.sub(r"(?i)\b(?:and|or)\b", " ", _UNIT.sub("", f"0{outside.rstrip(' .')}"))) is None:
        # Formulas with what joins them, such as $x = 3$, $y = 4$: one expression.
        return _MATHS.sub(lambda match: next(part for part in match.groups() if part is not None), text)
    return inner[-1]


def words_of(text: str) -> Text | None:
    """An answer in words (a name, an option's letter), else None."""
    plain = _TEXT.sub(r"\1", text).replace("\\ ", " ").replace("~", " ").strip()
    plain = ENDED.sub("", plain)
    if (option := _OPTION.fullmatch(plain)) is not None and (plain != option[1] or plain != text):
        return Text(option[1].casefold())
    if len(plain) == 1 and plain.isupper():
        return Text(plain.casefold())
    if not _WORDS.fullmatch(plain) or len(plain.split()) > MAX_WORDS:
        return None
    # Such as salt and pepper, but not x and y.
    joined = plain.replace(" and ", " ")
    if any(word in FUNCTIONS for word in joined.split()):
        return None
    if (plain == text or joined != plain) and not _LONG_WORD.search(joined) and plain.casefold() not in ("no", "yes"):
        return None
    return Text(" ".join(plain.casefold().split()))


def latex_of(text: str) -> tuple[str, Unit] | None:
    """LaTeX of an expression, and its unit; None for other words."""
    text = _JOINED.sub(r" \\text{ \1 } ", text)
    text = _TEXT.sub(lambda part: part[1] if _NOT_WORDS.search(part[1]) else part[0], text)
    text, price = _without_price(_UNIT_FRACTION.sub(r"\\text{\2/\3\4}\5", text))
    text = _GROUPED.sub(lambda group: re.sub(r"\D", "", group[1]), text)
    if not _BRACKETED.search(text):
        text = _COMMAS.sub(lambda group: group[1].replace(",", ""), text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    text = _REPEATING.sub(_repeated, text)
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _SCALED.sub(lambda scale: f" \\times 10^{{{SCALES[scale[1].lower()]}}}", text)
    text = text.replace("\\varnothing", "\\emptyset").replace("\\degree", "^\\circ")
    text = _RAISED_BY.sub(lambda power: f"^{{{power[1] or power[2]}}}", text)
    text = _DECIMAL_LOG.sub(r"\\log_{10}", _MAX_OF_SET.sub(r"\1(\2)", text))
    text = text.replace("\\langle", "(").replace("\\rangle", ")").replace("\\bigcup", "\\cup")
    text, angle = (_ANGLE.sub(r"\\frac{\1\\pi}{180}", text), Unit()) if _TURNS.search(text) else _without_circle(text)
    text, named = _without_unit(_ORDINAL.sub("", text))
    if any(_PHRASE.search(part[1]) for part in _TEXT.finditer(text)):
        return None
    rest = COMMAND.sub(" ", _TEXT.sub(" ", _ENVIRONMENT.sub(" ", text)))
    # Such as xyz: a product of variables.
    words = [word for word in _LONG_WORD.findall(rest) if word not in ascii_lowercase]
    if any(word.lower() not in FUNCTIONS for word in words) or _SMALL_WORDS.search(rest):
        return None
    # Adjacent numbers, or a number with a base inside an expression, cannot be read.
    if _UNREAD.search(text):
        return None
    return text.strip(), Unit(over=named.over or angle.over or price.over, under=named.under)


def _without_price(text: str) -> tuple[str, Unit]:
    sign = _PRICE.search(text) or _CURRENCY_BEHIND.search(text)
    text = _CURRENCY_BEHIND.sub("", _PRICE.sub(r"\g<minus>", text)).replace("\\$", "")
    return text, unit_of(sign["sign"]) if sign else Unit()


def _without_circle(text: str) -> tuple[str, Unit]:
    angle = _CIRCLE.search(text)
    return _CIRCLE.sub("", text), unit_of(angle["scale"] or "degree") if angle else Unit()


def _without_unit(text: str) -> tuple[str, Unit]:
    if (unit := _CJK_UNIT.search(text)) is not None:
        return text[: unit.start()], unit_of(unit[0])
    if (unit := _UNIT_IN_TEXT.search(text)) is not None and not set(unit["words"].split()) & _NO_UNITS:
        return text[: unit.start()], unit_of(_UNIT_SIGNS.sub("", _TEXT.sub(r"\1", unit[0])))
    unit = _UNIT.search(text)
    if unit is None:
        return text, Unit()
    words, before = unit["words"].strip(), text[: unit.start()]
    is_apart = not text[unit.start()].isalpha()
    known = unit_of(_UNIT_SIGNS.sub("", unit[0]))
    is_known = len(words) > 1 and any(known)
    if not is_known and set(words.split()) & (FUNCTIONS | _NO_UNITS):
        return text, Unit()
    is_one = is_known or words.lower() in _SHORT_UNITS or (_LONG_WORD.search(words) and words not in ascii_lowercase)
    if is_one or (is_apart and words in _LETTER_UNITS and _NUMBER.fullmatch(before)):
        return before, known
    return text, Unit()


def _repeated(number: re.Match[str]) -> str:
    whole, once, again = number[1] or "0", number[2], number[3] or number[4]
    above = int(whole + once + again) - int(whole + once)
    return f"\\frac{{{above}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


_EXACT, _NEAR = 1e-9, 1e-2
_CONVERTED = re.compile(
    r"(.{1,60}?)(?:,?\s(?:which\s(?:is|equals|makes)|that\sis,?|or)\s(.{1,60})|\s?(?:=|\\approx)\s?([^=]{1,60})"
    r"|\s\((.{1,60})\))"
)
"""A value, and perhaps the same in another form."""
_BASED = re.compile(r"([0-9A-Za-z]+)_\{?(\d+|\\text\{[a-z]+\})\}?")
_CLOCK = re.compile(rf"(\d{{1,2}})(?::(\d\d))?(?:{GAP}([ap])\.?\s?m\.?)?", re.IGNORECASE)
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DAY, _MONTH = r"([12]\d|3[01]|0?[1-9])(?:\s?(?:st|nd|rd|th))?", r"([a-z]{3,9})\.?"
_DATE = re.compile(
    rf"(?:{_MONTH}\s{{1,3}}(?:the\s)?{_DAY}|(?:the\s)?{_DAY}\s{{1,3}}(?:of\s)?{_MONTH})(?:,?\s{{1,3}}(\d{{4}}))?",
    re.IGNORECASE,
)
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_PERCENT = re.compile(rf"{GAP}(?:\\?%|\b(?:percent|percentage|pct)\b|\\text\{{\s*percent\s*\}})\s*$")
_BRACED = re.compile(r"(?:\\left)?\s*\\\{.*\\\}", re.DOTALL)
_BARE_PERCENT = re.compile(r"(?<!\\)%")
_NAMED = re.compile(r"(?=[^=]*[A-Za-z])(?:\\[ ,;]|[A-Za-z\\\s\[\](){}_|'~])++=(?P<value>.+)", re.DOTALL)
"""A value behind a name that is no mathematics, such as the area [ABC]."""
_NUMBER_OR_LIST = re.compile(r"-?[1-9]\d{0,2}(?:,[1-9]\d\d)+")
# Units are removed here: the library reads t of 4s+3t as tons.
_NORMAL = replace(LatexExtractionConfig().normalization_config, units=False)


def readings(text: str) -> list[Any]:
    """Meanings of a stated answer; option and value count apart and together."""
    inner = unwrap(signs_as_latex(text))
    if _OPTION_NAMED.match(plain := _TEXT.sub(r"\1", inner)):
        inner = plain = _OPTION_COMMA.sub(r"\1.", _OPTION_NAMED.sub("", plain))
    plain = plain.replace("**", "")
    if (said := _CONVERTED.fullmatch(inner)) is not None:
        both = [read_expression(part) for part in said.groups() if part is not None]
        first, second = (one if isinstance(one, Measured) else Measured(one, Unit()) for one in both)
        if first.is_same(second):
            # 300 % would also equal 300.
            return both[:1] if second.unit == PERCENT != first.unit else both
    is_list = _LETTERS.fullmatch(plain) is not None
    if not is_list and _LISTED.match(own := CLAUSE_END.split(plain, maxsplit=1)[0]):
        return [one for one in (Option(Text(own), None), words_of(inner)) if one is not None]
    option = None if is_list else _OPTION_AND_VALUE.fullmatch(inner)
    if option is None:
        found = [read_expression(inner if _OPTION.fullmatch(inner) else text)]
        if _NUMBER_OR_LIST.fullmatch(inner) and len(parts := set(inner.split(","))) > inner.count(","):
            found.append(sympy.FiniteSet(*map(sympy.Integer, parts)))
    else:
        letter, value = Text((option[1] or option[2]).casefold()), read_expression(option[3])
        # B. D is no answer D.
        alone = None if _LETTER.fullmatch(option[3]) else value
        found = [alone, letter, words_of(inner), None if value is None else Option(letter, value)]
    return [one for one in found if one is not None]


def letters_of(text: str) -> Text | None:
    """Letters of several options in a row, such as ABD; else None."""
    letters = _TEXT.sub(r"\1", unwrap(text)).strip(" .")
    return Text(" ".join(letters).casefold()) if len(letters) > 1 and _ASCENDING.fullmatch(letters) else None


def read_expression(text: str) -> Any:
    """One expression, Text or Clock to the text's end, else None."""
    text = signs_as_latex(text)
    box = boxed(text)
    text = ENDED.sub("", _BEGUN.sub("", unwrap(text if box is None else box[0]))).strip()
    text = _UPRIGHT.sub(r"\1\2", _NAMED_FUNCTION.sub(r"\\\1", _FONT.sub(r"\1", text)))
    if (letters := _LETTERS.fullmatch(_TEXT.sub(r"\1", text).replace("**", ""))) is not None:
        return Text(" ".join(sorted(re.findall(rf"\b{_MARK}\b", letters[0]))).casefold())
    if (words := words_of(text)) is not None:
        return words
    if (based := _BASED.fullmatch(text)) is not None and _is_based(based):
        # As written: 101 in base 2 is not 101.
        return sympy.Function("InBase")(sympy.Symbol(based.group(1).upper()), sympy.Symbol(based.group(2)))
    if (date := _date_of(_TEXT.sub(r"\1", text))) is not None:
        return date
    clock = _CLOCK.fullmatch(_TEXT.sub(r"\1", text))
    if clock is not None and (clock[2] or clock[3]):
        minute, half = clock[2] or "0", (clock[3] or "").lower()
        is_time = bool(half) or minute.startswith("0")
        return Clock(hour=int(clock[1]), minute=int(minute), half=half, is_time=is_time)
    found = _measured_in(text)
    if found is None and (named := _NAMED.fullmatch(text)) is not None:
        return _measured_in(named["value"])
    return found


def _date_of(text: str) -> Text | None:
    """A day as 2021-06-20, or without a year 06-20."""
    if _ISO_DATE.fullmatch(text):
        return Text(text)
    if (date := _DATE.fullmatch(text)) is None:
        return None
    word = (date[1] or date[4]).lower()
    for number, month in enumerate(_MONTHS, start=1):
        if month.startswith(word):
            return Text(f"{date[5]}-" * bool(date[5]) + f"{number:02d}-{int(date[2] or date[3]):02d}")
    return None


def _measured_in(text: str) -> Any:
    if (residue := _MODULO.search(plain := _TEXT.sub(r"\1", text))) is not None:
        text = ENDED.sub("", plain[: residue.start()].replace("\\equiv", "="))
    if (read := latex_of(text)) is None or not read[0]:
        return None
    maths, unit = read
    if "," not in maths and (percent := _PERCENT.search(maths)) is not None:
        maths, unit = maths[: percent.start()], PERCENT
    maths = _BARE_PERCENT.sub(r"\%", maths)
    if _EITHER_SIGN.search(maths) is None:
        found = _parsed(maths)
    else:
        both = [_parsed(_EITHER_SIGN.sub(lambda sign: signs[sign[1] == "mp"], maths)) for signs in ("+-", "-+")]  # noqa: B023
        kinds = {sympy.Union if isinstance(one, sympy.Set) else sympy.FiniteSet for one in both}
        found = None if None in both or len(kinds) > 1 else kinds.pop()(*both)
    if isinstance(found, sympy.FiniteSet) and _BRACED.fullmatch(maths) and not found.has(sympy.Eq):
        # Without braces it may be a tuple too; names give an order.
        found = sympy.FiniteSet(*found.args)
    if residue is not None and found is not None:
        # Its modulus is a unit: 3 modulo 7 is 3, and not 3 modulo 5.
        return Measured(_reduced(found, residue["by"]), Unit(over=frozenset({f"mod {residue['by']}"})))
    if isinstance(found, sympy.FiniteSet) and len(joins := set(_JOIN.findall(maths))) == 1:
        # Of values the word makes a list, of relations a condition.
        kinds = {isinstance(one, sympy.And | sympy.Rel) + isinstance(one, sympy.Eq) for one in found.args}
        if kinds in ({1}, {1, 2}):
            found = (sympy.Or if joins == {"or"} else sympy.And)(*found.args, evaluate=False)
    return Measured(found, unit) if found is not None and any(unit) else found


def _reduced(found: Any, by: str) -> Any:
    if isinstance(found, sympy.Eq):
        return found.func(found.lhs, _reduced(found.rhs, by), evaluate=False)
    is_number = by.isdigit() and isinstance(found, sympy.Expr) and found.is_number
    return sympy.Mod(found, int(by)) if is_number else found


def _parsed(text: str) -> Any:
    normal = normalize_latex(text, _NORMAL)
    if not normal or not _is_balanced(normal):
        return None
    try:
        found = parse_latex_cached(normal)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - the parser raises anything
        return None
    return None if found is None or isinstance(found, str | bool) else found


def _is_based(number: re.Match[str]) -> bool:
    return any(sign.isdigit() for sign in number.group(1)) or number.group(2) == "16"


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth < 0:
            return False
    return depth == 0
