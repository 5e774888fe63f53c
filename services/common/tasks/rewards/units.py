"""Units of answers: one closed table, and whether two units differ.

Only two known units can differ. An unknown word, such as apples, is no unit here; only the number counts then.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

# A name of the unit, and its spellings without a plural s. One spelling may have several units.
_TABLE = {
    "mm": "mm millimeter millimetre \u6beb\u7c73",
    "cm": "cm centimeter centimetre \u5398\u7c73",
    "dm": "dm decimeter decimetre \u5206\u7c73",
    "m": "m meter metre \u7c73",
    "km": "km kilometer kilometre \u5343\u7c73 \u516c\u91cc",
    "inch": "in inch",
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "mg": "mg milligram",
    "g": "g gram \u514b",
    "kg": "kg kilogram kilo \u5343\u514b \u516c\u65a4",
    "ounce": "oz ounce",
    "pound": "lb pound",
    "ton": "ton tonne \u5428",
    "ms": "ms millisecond",
    "s": "s sec second \u79d2",
    "min": "m min minute \u5206\u949f",
    "h": "h hr hour \u5c0f\u65f6",
    "day": "d day \u5929",
    "week": "week wk \u5468",
    "month": "month \u6708",
    "year": "year yr \u5e74",
    # Volumes that have a length's name are the same volumes.
    "cm^3": "ml milliliter millilitre cc \u6beb\u5347",
    "dm^3": "l liter litre \u5347",
    "pint": "pt pint",
    "quart": "qt quart",
    "gallon": "gal gallon",
    "acre": "acre",
    "ha": "ha hectare",
    "dollar": "$ dollar usd buck",
    "cent": "\u00a2 cent",
    "euro": "\u20ac euro eur",
    "sterling": "\u00a3 pound gbp",
    "yen": "\u00a5 yen jpy",
    "yuan": "\u00a5 yuan rmb cny",
    "rupee": "\u20b9 rupee inr rs",
    "percent": "% percent pct",
    "degree": "degree deg",
    "radian": "radian rad",
    "celsius": "c celsius degree",
    "fahrenheit": "f fahrenheit degree",
    "kelvin": "k kelvin",
}
_WHOLE = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "kmph": "km/hour", "fps": "ft/s"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3, "\u5e73\u65b9": 2, "\u7acb\u65b9": 3}
_NAMES: dict[str, set[str]] = {}
for _name, _spellings in _TABLE.items():
    for _spelling in _spellings.split():
        _NAMES.setdefault(_spelling, set()).add(_name)

_SIZES = (
    {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "day": 86_400_000, "week": 604_800_000},
    {"mm": 1, "cm": 10, "dm": 100, "m": 1000, "km": 10**6},
    {"mg": 1, "g": 1000, "kg": 10**6, "ton": 10**9},
    {"inch": 1, "foot": 12, "yard": 36, "mile": 63_360},
    {"ounce": 1, "pound": 16}, {"cent": 1, "dollar": 100}, {"cm^3": 1, "dm^3": 1000}, {"month": 1, "year": 12},
)  # fmt: skip
_COSTS = {"dollar", "cent", "euro", "sterling", "yen", "yuan", "rupee", "percent"}
_UNKNOWN = "?"
_DAYS = {"day", "week", "month", "year", _UNKNOWN}
_OVER = re.compile(r"\s*(?:/|\b(?:per|an?)\b)\s*")
_ONE = re.compile(
    r"(?:(?P<before>square|sq|cubic|cu)\b\.?[\s-]*|(?P<cjk>\u5e73\u65b9|\u7acb\u65b9))?"
    r"(?P<word>[a-z]+|[^\W\d_]+|[%$\u00a2\u00a3\u00a5\u20ac\u20b9])\.?"
    r"(?:\s*\^?\s*(?P<power>[123])|\s+(?P<after>squared|cubed)\b)?"
)
_SCALE = re.compile(r"(?:degrees?|deg)\s*(?=(?:celsius|fahrenheit|kelvin|[cfk])\b)")


class Unit(NamedTuple):
    """Possible names above and below the stroke; empty where unknown."""

    over: frozenset[str] = frozenset()
    under: frozenset[str] = frozenset()

    def differs_from(self, other: Unit) -> bool:
        """Whether both name known units that cannot be one.

        `5 km` is not `5 km/h`, but a question may state the rest of `$5 per hour` or `5 km a day`.
        """
        pairs = zip(self, other, strict=True)
        if any(one and two and not one & two and _UNKNOWN not in one | two for one, two in pairs):
            return True
        shared, lower = self.over & other.over, self.under | other.under
        return bool(shared and lower - _DAYS and not shared & _COSTS) and not (self.under and other.under)

    def ratios_to(self, other: Unit) -> list[Fraction]:
        """How many of another unit are one of this; empty where unknown."""
        if self == other:
            return [Fraction(1)]
        if {self, other} == {Unit(), PERCENT}:
            return [Fraction(100) if other == PERCENT else Fraction(1, 100)]
        pairs = [(one, two) for one in self.over for two in other.over if not (self.under or other.under)]
        return [Fraction(each[one], each[two]) for each in _SIZES for one, two in pairs if each.keys() >= {one, two}]


PERCENT = Unit(over=frozenset({"percent"}))


def unit_of(words: str) -> Unit:
    """The unit that words or a sign behind a number name."""
    words = _SCALE.sub("", " ".join(words.lower().split()))
    over, under = (*_OVER.split(_WHOLE.get(words, words), maxsplit=1), "")[:2]
    known = _names_of(over)
    return Unit(over=known, under=_names_of(under) or frozenset({_UNKNOWN} if known and under else ()))


def _names_of(words: str) -> frozenset[str]:
    one = _ONE.fullmatch(words)
    if one is None:
        return frozenset()
    word = one["word"]
    names = next(
        (_NAMES[form] for form in (word, word.removesuffix("s"), word.removesuffix("es")) if form in _NAMES), ()
    )
    power = int(one["power"] or _POWERS.get(one["before"] or one["cjk"] or one["after"] or "", 1))
    return frozenset(name if power == 1 else f"{name}^{power}" for name in names)
