"""Reading the ring, as store operations: pages of a list, and one sample.

A page is read along an index: ids, or a column that must equal something, in the order of ids. What is asked for beyond
that is looked at row by row, so many rows at most in one operation: then the page is short and says how far it came.
"""

from __future__ import annotations

from collections.abc import Iterator

from heterorl.common.errors import UnknownSample
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GroupId
from heterorl.common.types.sample import SampleFilter, SampleKind, SamplePage, SampleSummary
from heterorl.common.wire.sample import StoredSample
from heterorl.coordinator.store.connection import Connection

ROWS_AT_ONCE = 1000
"""Rows that one operation looks at: some milliseconds of the store's only thread."""
_MAX_ID = 2**62
_COLUMNS = (
    "id, kind, kept_because, detail, site, incarnation, sequence, version, oldest_version, kept, prompt_index,"
    " num_rollouts, num_truncated, num_lost, num_tokens, reward_min, reward_mean, reward_max, has_texts,"
    " prompt_preview, completion_preview"
)


def read_page(connection: Connection, wanted: SampleFilter, page: SamplePage) -> tuple[list[SampleSummary], int | None]:
    """Up to `page.limit` samples, and the id up to which it was looked; None at the end."""
    found: list[SampleSummary] = []
    number = 0
    for number, summary in enumerate(_along(connection, wanted, page), start=1):
        if matches(summary, wanted):
            found.append(summary)
        if number == ROWS_AT_ONCE or len(found) == page.limit:
            return found, summary.id
    return found, None


def _along(connection: Connection, wanted: SampleFilter, page: SamplePage) -> Iterator[SampleSummary]:
    order = "ASC" if page.is_oldest_first else "DESC"
    bounds = (page.after, page.before or _MAX_ID)
    column, value = _driving(wanted)
    equal, values = (f"{column} = ? AND ", (value,)) if column else ("", ())
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM samples WHERE {equal}id > ? AND id < ? ORDER BY id {order}", (*values, *bounds)
    )
    return map(_summary, rows)


def _driving(wanted: SampleFilter) -> tuple[str, object]:
    """The column whose index leads to fewest rows, of those that must equal something."""
    if wanted.kept_because:
        return "kept_because", wanted.kept_because
    if wanted.first_version is not None and wanted.first_version == wanted.last_version:
        return "version", wanted.first_version
    if wanted.site:
        return "site", wanted.site
    if wanted.kind is not None:
        return "kind", wanted.kind.value
    return "", None


def matches(summary: SampleSummary, wanted: SampleFilter) -> bool:
    """Whether a sample meets all that is asked for; one with a reward that is not finite is in no range of rewards."""
    best, worst = summary.reward_max, summary.reward_min
    return (
        wanted.site in ("", summary.site)
        and wanted.kind in (None, summary.kind)
        and wanted.kept_because in ("", summary.kept_because)
        and (wanted.first_version is None or summary.version >= wanted.first_version)
        and (wanted.last_version is None or summary.version <= wanted.last_version)
        and (wanted.min_reward is None or (best is not None and best >= wanted.min_reward))
        and (wanted.max_reward is None or (worst is not None and worst <= wanted.max_reward))
        and (wanted.is_truncated is None or wanted.is_truncated == (summary.num_truncated > 0))
    )


def read_sample(connection: Connection, number: int) -> StoredSample:
    """One sample.

    Raises:
        UnknownSample: it is kept no more, or never was.
    """
    row = connection.execute(f"SELECT {_COLUMNS} FROM samples WHERE id = ?", (number,)).fetchone()
    if row is None:
        raise UnknownSample(f"sample {number} is not kept")
    content, note = connection.execute("SELECT content, note FROM sample_payloads WHERE id = ?", (number,)).fetchone()
    return StoredSample(summary=_summary(row), content=bytes(content), note=bytes(note or b""))


def _summary(row: tuple[object, ...]) -> SampleSummary:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    incarnation, sequence = values.pop("incarnation"), values.pop("sequence")
    site, kind = SiteId(str(values.pop("site"))), SampleKind(values.pop("kind"))
    group = None
    if kind is not SampleKind.EVALUATION:
        group = GroupId(site=site, incarnation=str(incarnation), sequence=int(str(sequence)))
    has_texts, kept_time = bool(values.pop("has_texts")), values.pop("kept")
    known: dict[str, object] = {**values, "site": site, "kind": kind, "group": group}
    return SampleSummary(**known, has_texts=has_texts, kept_time=kept_time)  # type: ignore[arg-type]
