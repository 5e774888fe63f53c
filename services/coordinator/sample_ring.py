"""The ring of kept samples: groups kept and evicted, pages to read.

Store operations.

    consumed    one of k groups that versions consumed      half of the bytes
    rejected    every group that failed a check             a quarter
    dropped     one of k that were dropped otherwise        an eighth
    evaluation  all                                         an eighth

A part may use the bytes that the others leave free. When the ring is full, the part farthest above its share loses its
oldest sample. The transaction that settles a group keeps its sample, so samples agree with the ledger. On a full disk
the ring takes no group.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from heterorl.common.errors import UnknownSample
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, GroupId, SealedGroup
from heterorl.common.types.sample import (
    CONSUMED,
    EVALUATED,
    MAX_PREVIEW,
    EvaluationSample,
    RolloutNote,
    SampleFilter,
    SampleKind,
    SampleNote,
    SamplePage,
    SampleRollout,
    SampleSummary,
    beginning,
    kind_of,
)
from heterorl.common.wire.sample_messages import (
    Outline,
    StoredSample,
    evaluation_to_bytes,
    outline,
    outline_of_rollouts,
)
from heterorl.coordinator.store.database import Connection

SHARES = {SampleKind.CONSUMED: 0.5, SampleKind.REJECTED: 0.25, SampleKind.DROPPED: 0.125, SampleKind.EVALUATION: 0.125}
MAX_DETAIL = 300
TRIM_ROWS = 256
"""Samples evicted in one operation, at a start with a smaller bound."""
_PAGE_BYTES, _ROW_BYTES = 4096, 2048
"""Largest overhead of SQLite for a payload, and for a row, of texts of so many bytes, with its indexes."""
_COLUMNS = (
    "kind, kept_because, detail, site, incarnation, sequence, version, oldest_version, kept, prompt_index,"
    " num_rollouts, num_truncated, num_lost, num_tokens, reward_min, reward_mean, reward_max, has_texts,"
    " prompt_preview, completion_preview"
)
_NAMES = ("id", *_COLUMNS.split(", "))
_INSERT = f"INSERT INTO samples (num_bytes, {_COLUMNS}) VALUES ({', '.join('?' * len(_NAMES))}) RETURNING id"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRing:
    """The rule of keeping; samples are in the store.
    `wall` gives seconds since the epoch."""

    limit_bytes: int
    every: int
    """k, for groups that were trained on, and for those dropped without a fault."""
    max_sample_bytes: int
    """Size of a group with its note, which one message must hold."""
    wall: Callable[[], float]
    may_write: Callable[[], bool] = lambda: True

    def wants(self, kind: SampleKind, arrival: int) -> bool:
        """Whether a group with this arrival number is kept.
        The answer is the same at its lease and at its end."""
        # Not each k-th: slow groups of a mixture arrive last of their batch, and would be all that people see.
        block, place = divmod(arrival - 1, self.every)
        is_drawn = place == zlib.crc32(b"%d" % block) % self.every
        return self.limit_bytes > 0 and (kind is SampleKind.REJECTED or is_drawn)

    def keep_dropped(self, connection: Connection, group: SealedGroup, reason: DropReason, *, detail: str = "") -> None:
        (head,) = connection.execute("SELECT coalesce(max(version), -1) FROM versions").fetchone()
        self.keep_group(connection, group, reason, detail=detail, version=head)

    def keep_evaluation(
        self, connection: Connection, sample: EvaluationSample, data: bytes = b"", *, num_tokens: int | None = None
    ) -> None:
        """Keep a held-out prompt with its completions.
        `data` is its message, if it was serialized already; `num_tokens` counts tokens of a sample without ids."""
        # A repeat after a lost answer is kept once, under the key of a group that cannot exist.
        name, number = f"{sample.version}/{one_line(sample.task_set)}", sample.prompt_index + 1
        if connection.execute(_KNOWN, (sample.site, name, number)).fetchone() is not None:
            return
        found = outline_of_rollouts(sample.rollouts)
        self._keep(
            connection,
            data or evaluation_to_bytes(sample),
            found if num_tokens is None else replace(found, num_tokens=num_tokens),
            kind=SampleKind.EVALUATION,
            values=(EVALUATED, one_line(sample.task_set), sample.site, name, number, sample.version, sample.version),
            prompt_index=sample.prompt_index,
            previews=_previews(sample.prompt, sample.rollouts),
        )

    def note(self, connection: Connection, note: SampleNote, data: bytes) -> bool:
        """Replace the texts of a kept group; returns whether it did."""
        row = connection.execute(
            "SELECT s.id, kind, num_bytes, num_rollouts, length(content) FROM samples s JOIN sample_payloads p"
            " ON p.id = s.id WHERE site = ? AND incarnation = ? AND sequence = ? AND kind != 'evaluation'",
            (note.group.site, note.group.incarnation, note.group.sequence),
        ).fetchone()
        if row is None or row[3] != len(note.rollouts) or not self.may_write():
            return False
        number, kind, before, _, num_content = row
        if num_content + len(data) > self.max_sample_bytes:
            return False
        after = _stored_bytes(num_content, len(data))
        connection.execute("UPDATE sample_payloads SET note = ? WHERE id = ?", (data, number))
        connection.execute(
            "UPDATE samples SET num_bytes = ?, has_texts = 1, prompt_preview = ?, completion_preview = ? WHERE id = ?",
            (after, *_previews(note.prompt, note.rollouts), number),
        )
        _count(connection, SampleKind(kind), num_samples=0, num_bytes=after - before)
        self._make_room(connection)
        return True

    def trim(self, connection: Connection) -> bool:
        """Evict up to TRIM_ROWS samples; returns whether the rest fits."""
        return self._make_room(connection, most=TRIM_ROWS)

    def keep_group(
        self, connection: Connection, group: SealedGroup, reason: DropReason | None, *, detail: str = "", version: int
    ) -> None:
        """Keep a group, dropped for this reason or else trained on."""
        key, kept_because = group.id, CONSUMED if reason is None else reason.value
        self._keep(
            connection,
            group.data,
            outline(group.data),
            kind=SampleKind.CONSUMED if reason is None else kind_of(reason),
            values=(
                kept_because, one_line(detail), key.site, key.incarnation, key.sequence, version, group.oldest_version,
            ),
            prompt_index=group.prompt_index,
            previews=None,
        )  # fmt: skip

    def _keep(
        self,
        connection: Connection,
        content: bytes,
        found: Outline,
        *,
        kind: SampleKind,
        values: tuple[object, ...],
        prompt_index: int,
        previews: tuple[str, str] | None,
    ) -> None:
        num_bytes = _stored_bytes(len(content), 0)
        if num_bytes > self.limit_bytes or len(content) > self.max_sample_bytes or not self.may_write():
            return
        numbers = (
            found.num_rollouts, found.num_truncated, found.num_lost, found.num_tokens,
            found.reward_min, found.reward_mean, found.reward_max,
        )  # fmt: skip
        texts = (previews is not None, *(previews or ("", "")))
        row = (num_bytes, kind.value, *values, self.wall(), prompt_index, *numbers, *texts)
        (number,) = connection.execute(_INSERT, row).fetchone()
        connection.execute("INSERT INTO sample_payloads (id, content) VALUES (?, ?)", (number, content))
        _count(connection, kind, num_samples=1, num_bytes=num_bytes)
        self._make_room(connection)

    def _make_room(self, connection: Connection, *, most: int | None = None) -> bool:
        held = {kind: num_bytes for kind, (_, num_bytes) in totals(connection).items()}
        while sum(held.values()) > self.limit_bytes:
            if most is not None:
                most -= 1
                if most < 0:
                    return False
            fullest = max(held, key=lambda kind: held[kind] - SHARES[kind] * self.limit_bytes)
            number, num_bytes = connection.execute(
                "SELECT id, num_bytes FROM samples WHERE kind = ? ORDER BY id LIMIT 1", (fullest.value,)
            ).fetchone()
            connection.execute("DELETE FROM samples WHERE id = ?", (number,))
            connection.execute("DELETE FROM sample_payloads WHERE id = ?", (number,))
            _count(connection, fullest, num_samples=-1, num_bytes=-num_bytes)
            held[fullest] -= num_bytes
        return True


_KNOWN = "SELECT 1 FROM samples WHERE site = ? AND incarnation = ? AND sequence = ?"


def totals(connection: Connection) -> dict[SampleKind, tuple[int, int]]:
    """Samples and bytes of each part of the ring."""
    rows = connection.execute("SELECT kind, num_samples, num_bytes FROM sample_totals")
    return {SampleKind(kind): (int(num), int(num_bytes)) for kind, num, num_bytes in rows}


def one_line(text: str, limit: int = MAX_DETAIL) -> str:
    """The first `limit` bytes of an untrusted text as one line."""
    return "".join(c if c.isprintable() else " " for c in beginning(text, limit))


def _previews(prompt: str, rollouts: Sequence[SampleRollout | RolloutNote]) -> tuple[str, str]:
    return one_line(prompt, MAX_PREVIEW), one_line(rollouts[0].completion if rollouts else "", MAX_PREVIEW)


def _count(connection: Connection, kind: SampleKind, *, num_samples: int, num_bytes: int) -> None:
    connection.execute(
        "INSERT INTO sample_totals VALUES (?, ?, ?) ON CONFLICT (kind) DO UPDATE"
        " SET num_samples = sample_totals.num_samples + excluded.num_samples,"
        " num_bytes = sample_totals.num_bytes + excluded.num_bytes",
        (kind.value, num_samples, num_bytes),
    )


def _stored_bytes(num_content: int, num_note: int) -> int:
    pages = -(-(num_content + num_note) // _PAGE_BYTES)
    return pages * _PAGE_BYTES + _ROW_BYTES


_MAX_ID = 2**62


def read_page(connection: Connection, wanted: SampleFilter, page: SamplePage) -> list[SampleSummary]:
    """Up to `page.limit` samples.
    One with a reward that is not finite is in no range of rewards."""
    conditions = {
        "id > ?": page.after,
        "id < ?": page.before or _MAX_ID,
        "site = ?": wanted.site or None,
        "kind = ?": None if wanted.kind is None else wanted.kind.value,
        "kept_because = ?": wanted.kept_because or None,
        "version >= ?": wanted.first_version,
        "version <= ?": wanted.last_version,
        "reward_max >= ?": wanted.min_reward,
        "reward_min <= ?": wanted.max_reward,
        "(num_truncated > 0) = ?": wanted.is_truncated,
    }
    stated = {condition: value for condition, value in conditions.items() if value is not None}
    order = "ASC" if page.is_oldest_first else "DESC"
    rows = connection.execute(
        f"SELECT id, {_COLUMNS} FROM samples WHERE {' AND '.join(stated)} ORDER BY id {order} LIMIT ?",
        (*stated.values(), page.limit),
    )
    return [_summary(row) for row in rows]


def read_sample(connection: Connection, number: int) -> StoredSample:
    """One sample. Raises UnknownSample: it is not kept."""
    row = connection.execute(f"SELECT id, {_COLUMNS} FROM samples WHERE id = ?", (number,)).fetchone()
    if row is None:
        raise UnknownSample(f"sample {number} is not kept")
    content, note = connection.execute("SELECT content, note FROM sample_payloads WHERE id = ?", (number,)).fetchone()
    return StoredSample(summary=_summary(row), content=bytes(content), note=bytes(note or b""))


def _summary(row: tuple[object, ...]) -> SampleSummary:
    values = dict(zip(_NAMES, row, strict=True))
    incarnation, sequence = values.pop("incarnation"), values.pop("sequence")
    site, kind = SiteId(str(values.pop("site"))), SampleKind(values.pop("kind"))
    group = None
    if kind is not SampleKind.EVALUATION:
        group = GroupId(site=site, incarnation=str(incarnation), sequence=int(str(sequence)))
    has_texts, kept_time = bool(values.pop("has_texts")), values.pop("kept")
    known: dict[str, object] = {**values, "site": site, "kind": kind, "group": group}
    return SampleSummary(**known, has_texts=has_texts, kept_time=kept_time)  # type: ignore[arg-type]
