"""Query of a list: filters, search text and place from a URL.

SQLite's trigram index finds any part of a text, so formulas and languages without blanks work. A search that exceeds
SEARCH_S returns its hits and the id to continue from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sqlite3
import time
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
SEARCH_S = 0.06
"""Longest time of a search."""
COUNTED = 1000
"""Hits are counted up to this number."""
_PART = 3
"""Shortest text in the trigram index; for a shorter one the search reads all texts."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Ids next to a query's place, up to one beyond the limit.
    The other fields are as in `sample_index.Found`."""

    ids: list[int]
    count: int
    is_more: bool
    looked_up_to: int | None


def look_up(connection: sqlite3.Connection, query: Query, *, limit: int, is_counted: bool = True) -> Hits:
    """Look up a query's ids from its place on.
    Without `is_counted` a search ends with the page."""
    most = COUNTED if is_counted else limit + 1
    return _search(connection, query, limit=limit, most=most) if query.text else _filter(connection, query, limit=limit)


def clean(text: str) -> str:
    """The text with question marks for lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def folded(text: str) -> str:
    """Casefolded text for comparison, without NUL, which would end it in SQLite."""
    return clean(text).replace("\0", "\ufffd").casefold()


def _filter(connection: sqlite3.Connection, query: Query, *, limit: int) -> Hits:
    where, values = _conditions(query)
    place, place_values, order = _place(query, "s.id")
    rows = connection.execute(
        f"SELECT s.id FROM samples s WHERE {where} AND {place} ORDER BY s.id {order} LIMIT ?",
        (*values, *place_values, limit + 1),
    )
    ids = [row[0] for row in rows]
    (count,) = connection.execute(f"SELECT count(*) FROM samples s WHERE {where}", values).fetchone()
    return Hits(ids=ids, count=count, is_more=False, looked_up_to=None)


def _search(connection: sqlite3.Connection, query: Query, *, limit: int, most: int) -> Hits:
    needle = folded(query.text)
    where, values = _conditions(query)
    if len(needle) >= _PART:
        where, values = f"parts MATCH ? AND {where}", ['"' + needle.replace('"', '""') + '"', *values]
    place, place_values, order = _place(query, "p.rowid")
    rows = connection.execute(
        "SELECT p.rowid, p.folded FROM parts p CROSS JOIN samples s ON s.id = p.rowid"
        f" WHERE {where} AND {place} ORDER BY p.rowid {order}",
        (*values, *place_values),
    )
    ids: list[int] = []
    count, deadline = 0, time.monotonic() + SEARCH_S
    with contextlib.closing(rows):
        for sample_id, text in rows:
            if needle in text:
                count += 1
                if len(ids) <= limit:
                    ids.append(sample_id)
                if count >= most:
                    return Hits(ids=ids, count=count, is_more=True, looked_up_to=None)
            if time.monotonic() > deadline:
                end = sample_id if len(ids) <= limit else None
                return Hits(ids=ids, count=count, is_more=True, looked_up_to=end)
    return Hits(ids=ids, count=count, is_more=bool(query.before or query.after), looked_up_to=None)


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


def _place(query: Query, column: str) -> tuple[str, list[object], str]:
    if query.after:
        return f"{column} > ?", [query.after], "ASC"
    return (f"{column} < ?", [query.before], "DESC") if query.before else ("1", [], "DESC")


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
