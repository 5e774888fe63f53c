"""Signs of mathematics, in Unicode or in words, as LaTeX."""

from __future__ import annotations

import re
from fractions import Fraction

_SIGNS = {
    "\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\u2010": "-", "\u2011": "-", "\u2013": "-", "\uff0b": "+",
    "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2217": "*", "\u00f7": r"\div ", "\u2215": "/",
    "\u2044": "/", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2a7d": r"\le ", "\u2a7e": r"\ge ", "\u2260": r"\ne ",
    "\u2248": r"\approx ", "\u00b1": r"\pm ", "\u221e": r"\infty ", "\u2205": r"\emptyset ", "\u00f8": r"\emptyset ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}",
    "\u2115": r"\mathbb{N}", "\u211a": r"\mathbb{Q}", "\u00b0": r"^\circ ", "\u03c0": r"\pi ", "\u03b1": r"\alpha ",
    "\u03b2": r"\beta ", "\u03b3": r"\gamma ", "\u03b4": r"\delta ", "\u03b8": r"\theta ", "\u03bb": r"\lambda ",
    "\u03bc": r"\mu ", "\u03c1": r"\rho ", "\u03c3": r"\sigma ", "\u03c6": r"\phi ", "\u03c9": r"\omega ",
    "\uff0c": ",", "\uff05": "%", "\uff08": "(", "\uff09": ")", "\uff1a": ":", "\uff1d": "=", "\u2261": r"\equiv ",
    "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}", "\u2153": r"\frac{1}{3}",
    "\u2154": r"\frac{2}{3}", "\u2155": r"\frac{1}{5}", "\u2159": r"\frac{1}{6}", "\u215b": r"\frac{1}{8}",
    "\u3002": ".", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ", "\u2003": " ", "\u200b": "",
    "\ufeff": "",
    # Full-width digits and letters.
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF10, 0xFF5B) if chr(code).isalnum()},
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_RAISED = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a\u207f", "0123456789-+n"
)
_RAISED_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b\u207a\u207f]+")
_LOWERED = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789")
_LOWERED_RUN = re.compile("[\u2080-\u2089]+")
# Behind a value or a name, minus is a difference.
_NEGATIVE = re.compile(
    r"(?im)(?P<before>(?:^|[=:(\[{#>]|\b(?:is|are|was|be|equals?|to|gets?|gives?|answer)\b)[\s*$]{0,4})?"
    r"(?P<text>\\text\w{0,2}\{\s*)?\b(?(before)(?:negative|minus)|negative)(?(text)\s*\}\s*|\s+)"
    r"(?P<open>\*{0,3}(?:\$(?=[^$\n]{1,100}\$(?!\d))|\\\()?)(?=\\?[$\u20ac\u00a3]?\.?\d|\\[dt]?frac)"
)
_COUNT = (
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|[mb]illion"
    r"|hal(?:f|ves)|(?:third|quarter|fourth|(?:fif|six|seven|eigh|nin|ten)th)s?)"
)
_PARTS = {"hal": 2, "thi": 3, "quar": 4, "four": 4, "fif": 5, "six": 6, "seven": 7, "eigh": 8, "nin": 9, "ten": 10}
_PART = re.compile(rf"(?i)\b({'|'.join(_PARTS)})(?:f|ves|rds?|ters?|ths?)\b")
_COUNTED = re.compile(
    r"(?i)(?:(?P<digits>(?<![\d.,/])\d(?:[\d.,/]*\d)?)[ $*-]{0,4}(?:and[\s-]+)?)?"
    r"(?P<text>\\text\w{0,2}\{\s*)?\b"
    rf"(?:an?\s+)?{_COUNT}(?:(?:\s+and\s+(?:an?\s+)?|[\s-]){_COUNT}){{0,9}}"
    r"(?(text)\s*\}|)\s*\(\s*(?P<value>\$?-?(?:\d|\\[dt]?frac)[\d,./{}]*\$?)\s*\)(?!\s+of\s+(?:which|them|these)\b)"
)
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_TIMES_TEN = re.compile(r"(?<=\d)\s?[xX]\s?(?=10\s?(?:\^|\*\*))")
_LONGEST = 200
"""Most characters of a number in words."""
_ROOT = re.compile(
    r"([\u221a\u221b]|(?<![A-Za-z\\])sqrt(?=\s?\())\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+))"
)


def words_as_signs(text: str) -> str:
    """Words as signs; `five (5)` as 5, `2 thirds (2/3)` as 2/3."""
    counted = _COUNTED.sub(lambda one: one["value" if one["digits"] is None or _is_counted(one) else 0], text)
    return _NEGATIVE.sub(r"\g<before>\g<open>-", counted)


def _is_counted(found: re.Match[str]) -> bool:
    """Whether digits and words before brackets make the value in them."""
    part, numbers = _PART.search(found[0]), re.findall(r"\d+(?:\.\d+)?", found["value"])
    if part is None or len(found[0]) > _LONGEST or not found["digits"].isdecimal() or len(numbers) > 2:
        return False
    if part[1].lower() == "quar" and found["value"].startswith("$") and not found["value"].endswith("$"):
        # Coins.
        return False
    whole, divisor, above = int(found["digits"]), _PARTS[part[1].lower()], Fraction(numbers[0])
    below = Fraction(numbers[1]) if len(numbers) > 1 else 1
    is_mixed = whole * below < above < (whole + 1) * below and not above * divisor % below
    return bool(below) and (is_mixed or above * divisor == whole * below)


def signs_as_latex(text: str) -> str:
    """Unicode signs as LaTeX."""
    text = _ROOT.sub(
        lambda root: f"\\sqrt{'[3]' if root[1] == chr(0x221B) else ''}{{{root[2] or root[3] or root[4]}}}", text
    )
    text = _TIMES_TEN.sub(r" \\times ", _PI.sub(r"\\pi ", text))
    text = _RAISED_RUN.sub(lambda run: f"^{{{run[0].translate(_RAISED)}}}", text)
    text = _LOWERED_RUN.sub(lambda run: f"_{{{run[0].translate(_LOWERED)}}}", text)
    return _SIGN.sub(lambda sign: _SIGNS[sign[0]], text)
