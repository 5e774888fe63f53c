"""Answers that completions state: by tag, box, `####`, words or prose.

A value that the text denies, or only compares with, is no answer: `not 7`, `rather than 7`, `less than 7`. Values
joined by "or" are one answer of several values, also behind a hedge such as `(or maybe 4)`. A later statement replaces
an earlier one, also on the same line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from latex2sympy2_extended.math_normalization import extract_boxed_content

from heterorl.common.tasks.rewards.latex_signs import words_as_signs

# Without long runs of blanks the searches below stay linear.
_BLANKS = re.compile(r"[^\S\n]{2,}")
_EMPTY_LINES = re.compile(r"\n(?: ?\n)+")
_NUMBER = (
    r"[-+\u2212]?(?:\\?[$\u20ac\u00a3])?(?<!\d)(?:\d++(?:,\d{3})*+(?:\.\d++)?|\.\d++)"
    r"(?:/\d++)?(?:\s?\\?%)?(?![\w/^])"
)
# Bounds keep the search linear. A dollar with a blank before it, or a digit behind it, is a price and ends no formula.
FORMULA = r"\$\$.{1,500}?\$\$|(?<!\\)\$(?=\S)[^$\n]{0,500}?(?<=\S)\$(?!\d)|\\\(.{1,500}?\\\)|\\\[.{1,500}?\\\]"
_BOX = r"\\f?box(?:ed)?\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}\}){0,200}\}){0,400}\}"
_FRACTION = r"-?\\[dt]?frac\{[^{}]*\}\{[^{}]*\}"
_VALUE = rf"\*{{0,3}}(?:{_BOX}|{FORMULA}|{_FRACTION}|(?:[a-z]\s*=\s*)?{_NUMBER}|\([A-J]\))\*{{0,3}}"
_VERB = (
    r"\b(?:(?:is|are|was|were|ca|could|does|do|did|would)n['\u2019]t|cannot"
    r"|(?:can|could|do|does|did|must|should|would|may|might)\s(?:not|never))\b"
)
_COMPARED = (
    r"(?<!\bno\s)(?<!\bnot\s)(?:\b(?:rather|other)"
    rf"|(?:{_NUMBER}\s)?\b(?:more|less|greater|fewer|larger|bigger|smaller|higher|lower))\sthan\b"
)
_DENIED = re.compile(
    rf"(?i)(?:(?P<verb>{_VERB})|\bnot\b|\bnever\b|\bneither\b|\bnor\b|{_COMPARED}|\binstead\sof\b"
    r"|\b(?:wrong|incorrect)\s(?:answer|option|choice)s?(?:\s(?:is|are|was|were))?:?"
    r"|(?P<aside>[\uff0c,]\s*)?\u800c?(?P<cjk>\u4e0d(?:\u662f|\u4e3a|\u7b49\u4e8e)|\u5e76\u975e))"
    rf"\*{{0,3}}(?:[ \t]+(?:be|equal|to|simply|just|necessarily|exactly|the|number|value|by))*[ \t]*"
    rf"{_VALUE}(?:[ \t]+n?or[ \t]+{_VALUE})?|\bbetween[ \t]+{_VALUE}[ \t]+and[ \t]+{_VALUE}",
    re.DOTALL,
)
_REFUTED = re.compile(
    rf"(?i){_VALUE}\s(?:(?:is|was)(?:\snot|n['\u2019]t)(?:\s(?:the|a|our|correct|right|final))*"
    r"\s(?:answer|solution|correct|right|valid)\b|(?:is|was)\s(?:wrong|incorrect|invalid)\b|\((?:wrong|incorrect)\))",
    re.DOTALL,
)
_CUE = (
    r"(?:no|wait|sorry|oops|actually|correction|scratch\sthat|i\smean(?:t|\sto\ssay)?|or\srather|my\smistake|make\sthat"
    r"|(?:that|this|it)(?:['\u2019]s|\s(?:is|was))\s(?:wrong|incorrect|not\s(?:right|correct)))\b"
)
_IT = (
    r"(?P<it>(?:it|that|this|x|the\s(?:result|value|total|number))"
    r"(?:['\u2019]s|\s(?:is|was|=|(?:should|must)\sbe))\s(?:actually\s|really\s)?)?"
)
_NAME = r"(?-i:[A-J]|[A-Z]\w{2,20}(?:\s[A-Z]\w{0,20}){0,2})"
_UNITS = r"(?:\s[a-z][\w/^]{0,20}(?:\sper\s[a-z]+)?){0,2}?"
_GOES_ON = (
    r"\s*(?:[*/+<>=-]|(?:is|are|was|were)\b(?!\s(?:the|correct|right)\b)|(?:,?\s?(?:plus|minus|times)|more|less)\b"
    r"|,\s*(?:and\s)?(?:\d|(?-i:\(?[A-J]\b)))"
)
_CORRECTED = re.compile(
    rf"(?i)(?:(?P<value>{_VALUE}){_UNITS}(?P<short>(?<=\s[a-z]))?+"
    rf"|\*{{0,2}}\b(?:(?P<verdict>yes|no|true|false)|{_NAME}))"
    rf"[*?.,;!\u2026]*\s{{1,3}}(?:[\u2013\u2014-]+\s)?\(?"
    rf"{_CUE}(?:[\s.,:;!\u2013\u2014-]+{_CUE}){{0,3}}[\s.,:;!\u2026\u2013\u2014-]*\s{_IT}"
    rf"(?(value)(?={_VALUE}(?!{_GOES_ON})(?(it)"
    rf"|(?(short)(?:\s[a-z][\w/^]{{0,3}})?|{_UNITS})\s*(?:\*{{1,3}}+(?!\s*[\w(])|[.,;:!?)]|$)))"
    rf"|(?<!\n)(?=\*{{0,2}}(?(verdict)(?:yes|no|true|false)|{_NAME})\**(?!{_GOES_ON})\s*(?:[.;!)]|$)))",
    re.DOTALL | re.MULTILINE,
)
"""A value, a verdict or a name that another of its kind replaces."""
_MAYBE = r"(?:maybe|possibly|perhaps|(?:(?:but|though|although)\s(?:it\s)?)?(?:could|might|may)(?:\salso)?\sbe)"
_HEDGED = re.compile(
    rf"(?i)\s\((?:or\s(?:{_MAYBE}\s)?|{_MAYBE}\s)(?P<inner>(?:\\?\([^()\n]{{1,60}}\)|[^()\n]){{1,80}})\)"
    rf"|(?:,?\s(?:or|but|though|although)|,)\s(?:it\s)?{_MAYBE}\s"
)
_OR = r"\s*,?\s*\bor\b(?:\s(?:even|else))?\s+(?:[a-z]\s*=\s*)?"
_ALTERNATIVES = re.compile(
    rf"(?i){FORMULA}|{_BOX}|(?<![\w.^=/({{]){_NUMBER}(?:\s?,\s{_NUMBER}){{0,8}}(?P<last>{_OR}{_NUMBER})+", re.DOTALL
)

_TAGGED = re.compile(r"(?i)<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_BOXES = re.compile(r"\\(?:boxed|fbox)(?![a-z])")
_SIDE = r"[\s$*.]*(?:\\[()\[\]])?[\s$*]*"
_BETWEEN = re.compile(
    rf"(?P<blank>[ $]{{0,9}})|(?i:{_SIDE}(?:[,;&]|\band\b|\bor\b)[\s,]*(?:and\b|or\b)?{_SIDE}(?:[a-z]\s*=\s*)?)"
)
_HEADED = re.compile(r"(?m)(?<!#)####(?!#)[ \t]*([^#\n]*)$")
_HAS_VALUE = re.compile(r"\d|[\\$]|\([A-J]\)|\b[A-J]\b\W*$")
_IS_CORRECT = re.compile(
    r"(?P<open>(?i:if|whether|suppose|assume|assuming|that|neither|nor|not)\s+)?"
    r"(?P<choice>\bI(?:['\u2019](?:d|ll|m)|\s+(?:would|will))?\s+(?:choose|pick|select|go\s+with|going\s+with)\s+)?"
    r"(?:\b[Oo]ption\s+)?(?<!\w)\**(?P<letter>\([A-J]\)|[A-J])\**(?(choice)(?=[.;:!)]|,(?!\s*(?:\w+\s+)?\(?[A-J]\b)|\s*$|\s+(?:because|since|as)\b)"
    r"|\s+is\s+(?:(?:the\s+)?(?:correct|right)\b(?!\s+(?:that|to)\b)|the\s+answer\b))"
)
# The text behind is only looked at: it may hold the next statement.
_SAID = re.compile(
    r"(?i)(?:\b(?:correct|right|best|answer|my)\s+(?:option|choice)\b|(?<![</])\banswers?\b|\u7b54\u6848)"
    r"(?P<says>(?:\s+(?:is|are|to .{0,80}? is|(?:must|should)\s+be(?=\s+[*$\\(]{0,3}(?:-?\d|(?-i:[A-J])\b)))\b"
    r"|[\s\uff0c,]*\u800c?[\u662f\u4e3a])?\**\s*[:\uff1a=]?)\**\s*"
    r"(?=(?P<said>[^\n]+))"
)
_JUDGED = re.compile(
    r"(?i)(?:correct|right|reasonable|valid|consistent|verified|above(?!\s+[$\d])|in (?:its )?(?:simplest|lowest))\b"
)
_OF_ANOTHER = re.compile(
    r"(?i)\b(?:this|that|(?:if|whether|(?:check|verify|confirm|ensure|sure)(?:\s+that)?)\s+(?:the|my|our))\s+\Z"
)
"""Words before an answer that is judged: `whether the answer is valid`."""
_LONGEST_BEFORE = 40
_CUED = re.compile(rf"(?i)\b{_CUE}")
_SENTENCE_END = re.compile(r"\.(?:[\s*]|$)|\u3002")
_BUT_NOT = re.compile(r"(?i)\s*(?:[,;(]\s*(?:and |but )?not|\brather than|\binstead of)\b[^.,;\n]*")
MULTIPLE = (
    r"(?:twice|half|double|triple|(?:an?|one|two|three|four|five)[\s-](?:third|quarter|fourth|fifth|sixth|eighth|tenth)"
    r"s?\s+of|(?:the\s+)?(?:square|cube)\s+root|(?:the\s+)?(?:square|cube|sum|product)\s+of(?=\s\S{0,3}\d))\b"
)
_HEAD = re.compile(
    r"(?i)(?:[\s,;:\uff0c]|\u800c?\u662f|\b(?:is|but|actually|therefore|thus|so|exactly|simply|just|either|both|definitely"
    r"|probably|possibly|maybe|perhaps|indeed)\b)*"
    rf"(?:(?:{MULTIPLE}|(?:{_VALUE}\s(?:times|plus|minus)|(?:\d[\d.]*(?:\s?\\?%|/\d+)|{_FRACTION})\sof)\s\S{{0,3}}\d)"
    r".{0,80}?(?:,?\swhich\s(?:is|equals|gives|makes)"
    rf"|,\s(?:that\sis,?|so|namely))\s(?={_VALUE}(?!{_GOES_ON})))?"
)
"""Words in front of a value, such as `a third of 36, which is`."""
_OTHERS = (
    r"(?:[,;]\s+(?:and\s+|but\s+)?|\s+and\s+(?=\())(?=\(?[A-J]\b\)?(?:(?:,|,?\s+and|,?\s+or)\s+\(?[A-J]\b\)?){0,9}"
    r"\s+(?!(?:is|are)\s+(?:also|both|the|correct|right|true)\b)(?:is|are|was|were|has|have|does|do|did|can|cannot|could|would|seems?|gives?|fails?"
    r"|[a-z]+n['\u2019]t)\b)"
)
"""A clause about other options, such as `, (B) is wrong`."""
CLAUSE_END = re.compile(
    r"[,;]\s+(?!or\b|and\s+[\d$\\(])(?=[A-Za-z]{2,}|I\s)|(?<!\s)(?<!\band)(?<!\bor)(?<!\bplus)(?<!\bas)(?<!\balso)(?<![,;&/])\s+\("
    rf"|\s+(?:because|since|(?<!well\s)as(?!\s+well\b)|which|so|where|when|while|for"
    rf"|and\s+(?:all\s+|the\s+)*(?:others|other\s+(?:options|choices|answers)|rest|nothing\s+else))\b|{_OTHERS}"
)
MAX_APART = 70
"""Most characters between boxes of one answer."""
_STATED = 2
"""Weight of a statement with a value."""


class Statement(NamedTuple):
    """Stated answer of a completion, in its possible readings."""

    texts: tuple[str, ...]
    """Forms of the stated answer, the longest first; empty for mere prose."""
    is_marked: bool
    """Whether a box or a tag marks it; then no other text counts."""
    prose: str
    """Text that math-verify searches if no form can be read."""
    judged: tuple[str, ...] = ()
    """Forms of a word such as "valid": the answer, or a judgement of one."""


def statement_of(completion: str) -> Statement:
    """The last answer that a completion states."""
    tagged = _TAGGED.findall(completion)
    text = _EMPTY_LINES.sub("\n\n", _BLANKS.sub(" ", tagged[-1] if tagged else completion))
    text = _CORRECTED.sub("", words_as_signs(text))
    text = _HEDGED.sub(lambda hedged: f" or {hedged['inner'] or ''}", text)
    text = _DENIED.sub(_without, _REFUTED.sub(" ", text))
    if (marked := boxed(text)) is not None:
        return Statement(texts=marked, is_marked=True, prose="")
    said = _said_in(text)
    return Statement(texts=(*said.texts, text), is_marked=True, prose=said.prose) if tagged else said


def _said_in(completion: str) -> Statement:
    headed = list(_HEADED.finditer(completion))
    spoken = _ALTERNATIVES.sub(_as_formula, completion[headed[-1].end() :] if headed else completion)
    found: list[re.Match[str]] = []
    words: list[re.Match[str]] = []
    for one in _SAID.finditer(spoken):
        (words if _JUDGED.match(one["said"]) else found).append(one)
    if headed and not any(_weight(one) == _STATED and _HAS_VALUE.search(one["said"]) for one in found):
        # A last heading with text below it may be a title.
        is_end = not completion[headed[-1].end() :].strip()
        lines = [one[1].strip() for one in headed if is_end or _HAS_VALUE.search(one[1])] or [headed[-1][1].strip()]
        return Statement(texts=(lines[-1], _HEAD.sub("", lines[-1], count=1)), is_marked=False, prose=completion)
    completion = spoken
    correct = [one["letter"] for one in _IS_CORRECT.finditer(completion) if one["open"] is None]
    has_value = correct or any(_weight(one) == _STATED for one in found)
    judged = () if has_value else _judged_by(words)
    if not found or (correct and not any(_says(one) for one in found)):
        return Statement(texts=tuple(correct[-1:]), is_marked=False, prose=completion, judged=judged)
    last = max(reversed(found), key=_weight)
    # A statement ends all that stands before it; a mere mention does not.
    prose = completion[last.start() :] if _says(last) else completion
    return Statement(texts=_forms_of(last), is_marked=False, prose=prose, judged=judged)


def _judged_by(words: list[re.Match[str]]) -> tuple[str, ...]:
    """Forms of the last word that may be the answer."""
    before = (one.string[max(0, one.start() - _LONGEST_BEFORE) : one.start()] for one in words)
    own = [one for one, text in zip(words, before, strict=True) if _says(one) and not _OF_ANOTHER.search(text)]
    return _forms_of(own[-1]) if own and not _CUED.search(own[-1].string, own[-1].end()) else ()


def _forms_of(statement: re.Match[str]) -> tuple[str, ...]:
    said = _BUT_NOT.sub("", statement["said"])
    sentence = _SENTENCE_END.split(said, maxsplit=1)[0]
    bare = _HEAD.sub("", sentence, count=1)
    return said, sentence, bare, CLAUSE_END.split(bare, maxsplit=1)[0]


def boxed(text: str) -> tuple[str, ...] | None:
    """Content of the last box; None without one.

    Boxes with a comma or a word such as "and" between them are one answer. After a blank, the last also counts apart.
    """
    starts = [one.start() for one in _BOXES.finditer(text)]
    if not starts:
        return None
    joined, is_joined, following = [_content(text[starts[-1] :])], True, starts[-1]
    for start in reversed(starts[:-1]):
        own = _content(segment := text[start:following])
        apart = segment.partition(f"{{{own}}}")[2] if f"{{{own}}}" in segment else segment
        between = _BETWEEN.fullmatch(apart) if len(apart) <= MAX_APART else None
        if between is None or own in joined:
            break
        joined, following, is_joined = [own, *joined], start, is_joined and between["blank"] is None
    return (", ".join(joined),) if is_joined else (", ".join(joined), joined[-1])


def _content(text: str) -> str:
    return str(extract_boxed_content(text, mode="last"))


def _weight(said: re.Match[str]) -> int:
    """Rank of a statement: with a value, denied, and a mere mention."""
    return _says(said) + (_says(said) and re.match(r"[\s.,;*]*(?:is\s*)?(?:[.,;]|$)", said["said"]) is None)


def _says(said: re.Match[str]) -> bool:
    return bool(said["says"].strip("* \t\n"))


def _without(denied: re.Match[str]) -> str:
    # A statement stays one, though without a value.
    return "\u662f" if denied["cjk"] and not denied["aside"] else " is " if denied["verb"] else " "


def _as_formula(found: re.Match[str]) -> str:
    if found["last"] is None:
        return found[0]
    each = (re.sub(r"[$\u20ac\u00a3\\,\s]", "", one).replace("%", r"\%") for one in re.findall(_NUMBER, found[0]))
    return f"${', '.join(each)}$"
