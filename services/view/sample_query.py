"""Query of a list: filters, search text and place from a URL.

SQLite's trigram index finds any part of a text, so formulas and languages without blanks work.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sqlite3
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from heterorl.common.errors import OperatorError
from heterorl.common.types.rollout import DropReason
from heterorl.common.types.sample import CONSUMED, EVALUATED, Sample, SampleKind

MAX_TEXT = 200
"""Characters of a search."""
MAX_FIELDS = 20
MAX_FIELD = 500
LARGEST = (1 << 63) - 1
"""Largest integer of SQLite."""
ANY_DROP = "dropped"
"""Dropped for any reason."""
FATES = (CONSUMED, EVALUATED, ANY_DROP, *(reason.value for reason in DropReason))
COUNTED = 1000
"""Hits of a search are counted up to this number."""
_PART = 3
"""Shortest text in the trigram index; for a shorter one the search reads all texts, 0.2 s for 150 MB."""
BEFORE, AFTER = 50, 110
"""Characters shown before and after a hit."""
_WORDS = {CONSUMED: "trained on", EVALUATED: "held-out", ANY_DROP: "dropped, any reason"}


class BadQuery(OperatorError):
    """A field of a URL has a bad value."""

    def __init__(self, name: str, problem: str, *, action: str) -> None:
        super().__init__(f"{name}: {problem}", action=action)


def fate_words(fate: str) -> str:
    """A fate as text, such as "reward mismatch" for "reward_mismatch"."""
    return _WORDS.get(fate, fate.replace("_", " "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filters and place of a list; empty and None fields are ignored.

    A reward range means samples with a completion of at least `reward_from` and one of at most `reward_to`.

    Example: Query(text="wait", site="eu-1", fate="dropped", truncated=True)
    """

    text: str = ""
    """Part of a prompt or completion; case does not matter."""
    site: str = ""
    fate: str = ""
    """One of FATES."""
    version_from: int | None = None
    version_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    truncated: bool | None = None
    """Whether a completion reached the length limit."""
    lost: bool | None = None
    """Whether a member of the group was lost."""
    before: int = 0
    """Only smaller ids, largest first; 0 is all."""
    after: int = 0
    """Only larger ids, nearest first; 0 is all."""

    @property
    def is_filtered(self) -> bool:
        return self.at() != Query()

    def at(self, *, before: int = 0, after: int = 0) -> Query:
        return dataclasses.replace(self, before=before, after=after)

    def url(self, path: str = "/") -> str:
        said = {name: value for name, value in dataclasses.asdict(self).items() if value != _DEFAULTS[name]}
        pairs = {name: ("yes" if value else "no") if isinstance(value, bool) else value for name, value in said.items()}
        return f"{path}?{urlencode(pairs)}" if pairs else path


_DEFAULTS = dataclasses.asdict(Query())


def parse_query(text: str) -> Query:
    """Read a URL's query, unknown fields ignored; raises BadQuery for bad values."""
    try:
        fields = dict(parse_qsl(text, max_num_fields=MAX_FIELDS))
    except ValueError:
        raise BadQuery("URL", f"has more than {MAX_FIELDS} fields", action="start again from the list") from None
    for name, value in fields.items():
        if len(value) > (MAX_TEXT if name == "text" else MAX_FIELD):
            raise BadQuery(name[:MAX_FIELD], "too long", action=f"a search has at most {MAX_TEXT} characters")
    fate = fields.get("fate", "")
    if fate and fate not in FATES:
        raise BadQuery("fate", "unknown", action=f"one of {', '.join(FATES)}")
    return Query(
        text=clean(fields.get("text", "")),
        site=clean(fields.get("site", "")),
        fate=fate,
        version_from=_whole(fields, "version_from"),
        version_to=_whole(fields, "version_to"),
        reward_from=_number(fields, "reward_from"),
        reward_to=_number(fields, "reward_to"),
        truncated=_choice(fields, "truncated"),
        lost=_choice(fields, "lost"),
        before=_whole(fields, "before") or 0,
        after=_whole(fields, "after") or 0,
    )


def _choice(fields: dict[str, str], name: str) -> bool | None:
    text = fields.get(name, "")
    if text not in ("", "yes", "no"):
        raise BadQuery(name, "unknown", action="yes, no or empty")
    return {"yes": True, "no": False}.get(text)


def _whole(fields: dict[str, str], name: str) -> int | None:
    text = fields.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text) if len(text) <= 20 and text.isascii() else LARGEST + 1
    except ValueError:
        value = LARGEST + 1
    if not 0 <= value <= LARGEST:
        raise BadQuery(name, "must be a whole number, 0 or more", action="for example 120")
    return value


def _number(fields: dict[str, str], name: str) -> float | None:
    text = fields.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadQuery(name, "must be a number", action="for example 0.5")
    return value


def look_up(connection: sqlite3.Connection, query: Query, *, limit: int) -> list[int]:
    """Ids next to a query's place, nearest first."""
    source, where, values = _hits(query)
    key = "p.rowid" if query.text else "s.id"
    place, order = (f"{key} > {query.after}", "ASC") if query.after else (f"{key} < {query.before or LARGEST}", "DESC")
    found = connection.execute(
        f"SELECT {key} FROM {source} WHERE {where} AND {place} ORDER BY {key} {order} LIMIT {limit}", values
    )
    return [row[0] for row in found]


def count_hits(connection: sqlite3.Connection, query: Query) -> int:
    """All hits of a query; of a search COUNTED at most."""
    source, where, values = _hits(query)
    most = COUNTED if query.text else -1
    found = connection.execute(f"SELECT count(*) FROM (SELECT 1 FROM {source} WHERE {where} LIMIT {most})", values)
    return int(found.fetchone()[0])


def clean(text: str) -> str:
    """The text with question marks for lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def folded(text: str) -> str:
    """Casefolded text for comparison, without NUL, which would end it in SQLite."""
    return clean(text).replace("\0", "\ufffd").casefold()


def _hits(query: Query) -> tuple[str, str, list[object]]:
    """Tables, condition and its values, without the query's place."""
    where, values = _conditions(query)
    if not query.text:
        return "samples s", where, values
    needle, source = folded(query.text), "parts p CROSS JOIN samples s ON s.id = p.rowid"
    if len(needle) < _PART:
        return source, f"instr(p.folded, ?) AND {where}", [needle, *values]
    return source, f"parts MATCH ? AND {where}", ['"' + needle.replace('"', '""') + '"', *values]


def _conditions(query: Query) -> tuple[str, list[object]]:
    given = {
        "s.site = ?": query.site or None,
        "s.fate = ?": None if query.fate in ("", ANY_DROP) else query.fate,
        "s.version >= ?": query.version_from,
        "s.version <= ?": query.version_to,
        "s.reward_max >= ?": query.reward_from,
        "s.reward_min <= ?": query.reward_to,
    }
    terms: list[tuple[str, list[object]]] = [(term, [value]) for term, value in given.items() if value is not None]
    if query.fate == ANY_DROP:
        terms.append(("s.kind IN (?, ?)", [SampleKind.REJECTED.value, SampleKind.DROPPED.value]))
    for column, wanted in (("s.num_truncated", query.truncated), ("s.num_lost", query.lost)):
        if wanted is not None:
            terms.append((f"{column} > 0" if wanted else f"{column} = 0", []))
    return " AND ".join(term for term, _ in terms) or "1", [value for _, values in terms for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A hit with its context; `where` is "prompt" or "completion N"."""

    where: str
    before: str
    hit: str
    after: str


def excerpt_of(sample: Sample, needle: str) -> Excerpt | None:
    """The first hit, completions before the prompt; None if only casefolding matches."""
    pattern = re.compile(re.escape(needle), re.IGNORECASE)
    texts = [(f"completion {i + 1}", rollout.completion) for i, rollout in enumerate(sample.rollouts)]
    for where, text in (*texts, ("prompt", sample.prompt)):
        found = pattern.search(text)
        if found is not None:
            begin, end = found.span()
            return Excerpt(
                where=where,
                before=("..." if begin > BEFORE else "") + text[max(0, begin - BEFORE) : begin],
                hit=text[begin:end],
                after=text[end : end + AFTER] + ("..." if len(text) > end + AFTER else ""),
            )
    return None
