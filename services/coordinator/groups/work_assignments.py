"""Assignments: prompts leased to sites, and prompts returned without a group.

Store operations.

    work        holders, returned (JSON: counted returns by site), open_from (assignments below it are new ones first)
    returners   site, accepted (its groups at its newest counted return), num_returns (counted since such a group)
    ledger      closed/<reason>    assignments closed without a group

An assignment is a row until its group is accepted, so no prompt is lost. Expired or returned ones are handed out first,
with the same prompt and seed. The newest MAX_HOLDERS holders may still answer, once.

A row that gives no group, or an invalid or late one, waits for one version's assignments, then for twice as many, ...
After MAX_RETURNS counted returns it is closed, and a late group is dropped as surplus.

A held-out prompt (HELD_OUT or more) is a row until it is answered or its evaluation ends. When all are out, an idle
site gets other sites' prompts; the first answer counts.

A hostile site could close prompts by returning them. So only the newest holder's return counts, at most MAX_IN_ROW
times until a group of that site is taken. While several sites want work, two must have returned a prompt.
"""

from __future__ import annotations

import itertools
import json
import logging
import zlib
from collections.abc import Collection, Mapping, Sequence

from heterorl.common.types.common import SiteId
from heterorl.common.types.evaluation import HELD_OUT
from heterorl.common.types.rollout import DropReason, GroupId, ReturnReason, WorkAssignment
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups import ledger, schedule
from heterorl.coordinator.groups.schedule import prompt_of, seed_of
from heterorl.coordinator.sites.sites import Holder
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import NUMBERS, Connection, get_meta, set_meta

_LOG = logging.getLogger(__name__)
REOPENED = {
    DropReason.STALE_AT_LEASE, DropReason.STALE_AT_COMMIT, DropReason.INVALID, DropReason.UNKNOWN_VERSION,
    DropReason.WRONG_DIGEST, DropReason.LINEAGE_ABANDONED, DropReason.QUARANTINED, DropReason.LOST_MEMBERS,
}  # fmt: skip
"""Drops after which the prompt is handed out again. After a drop of the learner (failed check, too long, not finite,
equal rewards) the same prompt and seed would fail again, and a site that does not cheat would be blamed."""
RETURNED = {
    DropReason.INVALID: ReturnReason.GROUP_INVALID, DropReason.STALE_AT_INGEST: ReturnReason.GROUP_STALE
}  # fmt: skip
"""Drops at arrival that count as a return: every group of the row may meet the same end."""
MAX_HOLDERS = 3
"""Sites that may answer an assignment: the holder and the two before it."""
MAX_EVALUATORS = 64
"""The same of a held-out prompt: a refusal would end the evaluation of a slow site, and the first answer counts."""
MAX_SEEN = 64
"""Unanswered held-out prompts that a question looks at, twice, if none is open."""
REOPENED_AT_ONCE = 256
"""Rows of one statement. SQLite takes longer for each one the more pages its operation has changed before."""


def hand_out(
    connection: Connection, holder: Holder, *, count: int, num_prompts: int, config: CoordinatorConfig, request_id: str
) -> list[WorkAssignment]:
    """Lease `count` assignments to a site under a request's id.
    Open ones come first, then new ones of the window. `Deadlines.begin` states their `lease_s`."""
    first = int(get_meta(connection, "next_assignment") or 0)
    rows = connection.execute(
        "SELECT assignment, prompt_index, seed, holders FROM work WHERE is_leased = 0 AND open_from <= ?"
        " AND assignment < ? ORDER BY assignment LIMIT ?",
        (first, HELD_OUT, count),
    ).fetchall()
    handed = _lease(connection, rows, holder, request_id)
    chosen, last = schedule.choose_prompts(
        connection, first, count - len(handed), num_prompts=num_prompts, seed=config.seed, config=config.difficulty
    )
    new = [
        WorkAssignment(id=assignment, prompt_index=prompt, seed=seed_of(assignment, seed=config.seed), lease_s=0.0)
        for assignment, prompt in chosen
    ]
    names = json.dumps([_holder(*holder)])
    connection.executemany(
        "INSERT INTO work (assignment, prompt_index, seed, site, incarnation, is_leased, holders, request_id)"
        " VALUES (?, ?, ?, ?, ?, 1, ?, ?)",
        [(each.id, each.prompt_index, each.seed, *holder, names, request_id) for each in new],
    )
    if new:
        set_meta(connection, "next_assignment", str(last))
    return [*handed, *new]


def open_held_out(connection: Connection, numbers: range, *, seed: int) -> None:
    """Open an assignment for each held-out prompt of an evaluation."""
    connection.executemany(
        "INSERT INTO work (assignment, prompt_index, seed, site, incarnation, is_leased, holders)"
        " VALUES (?, ?, ?, '', '', 0, '[]')",
        [(number, index, seed) for index, number in enumerate(numbers)],
    )


def hand_out_held_out(
    connection: Connection, numbers: range, *, holder: Holder, count: int, request_id: str, from_others: bool
) -> list[WorkAssignment]:
    """Lease open held-out prompts of an evaluation.
    With `from_others`, some that fewer than MAX_HOLDERS other sites had."""
    if from_others:
        rows = _held_by_others(connection, numbers, holder=holder, count=count, request_id=request_id)
    else:
        rows = connection.execute(
            "SELECT assignment, prompt_index, seed, holders FROM work WHERE is_leased = 0 AND assignment >= ?"
            " AND assignment < ? ORDER BY assignment LIMIT ?",
            (numbers.start, numbers.stop, count),
        ).fetchall()
    return _lease(connection, rows, holder, request_id)


def _held_by_others(
    connection: Connection, numbers: range, *, holder: Holder, count: int, request_id: str
) -> list[tuple[int, int, int, str]]:
    """Unanswered prompts that the site may take as well.

    It looks at the MAX_SEEN lowest ones, then at as many from a place that the request's id decides: every site may
    hold all of them, and each question is answered on the store's thread.
    """
    found: list[tuple[int, int, int, str]] = []
    first = numbers.start
    for _ in range(2):
        seen = connection.execute(
            "SELECT assignment, prompt_index, seed, holders FROM work WHERE assignment >= ? AND assignment < ?"
            " ORDER BY assignment LIMIT ?",
            (first, numbers.stop, MAX_SEEN),
        ).fetchall()
        others = [(row, json.loads(row[3])) for row in seen]
        found += [row for row, names in others if _holder(*holder) not in names and len(names) < MAX_HOLDERS]
        if len(found) >= count or len(seen) < MAX_SEEN:
            break
        (last,) = connection.execute(
            "SELECT max(assignment) FROM work WHERE assignment < ?", (numbers.stop,)
        ).fetchone()
        first = seen[-1][0] + 1
        first += zlib.crc32(f"{_holder(*holder)}/{request_id}".encode()) % max(1, last - first + 1)
    return found[:count]


def held_out_of(connection: Connection, assignment: int, holder: Holder) -> tuple[int | None, bool]:
    """The prompt of a held-out assignment if the site held it.
    Also returns whether the assignment is answered or over."""
    row = connection.execute("SELECT prompt_index, holders FROM work WHERE assignment = ?", (assignment,)).fetchone()
    if row is None:
        return None, True
    return (int(row[0]) if _holder(*holder) in json.loads(row[1]) else None), False


def has_any(connection: Connection, numbers: range) -> bool:
    """Whether one of these assignments is unanswered."""
    row = connection.execute(
        "SELECT 1 FROM work WHERE assignment >= ? AND assignment < ? LIMIT 1", (numbers.start, numbers.stop)
    ).fetchone()
    return row is not None


def forget(connection: Connection, numbers: range) -> None:
    """Forget assignments of held-out prompts."""
    connection.execute("DELETE FROM work WHERE assignment >= ? AND assignment < ?", (numbers.start, numbers.stop))


def handed_before(connection: Connection, holder: Holder, request_id: str) -> list[WorkAssignment]:
    """Assignments of a repeated request that the site still holds."""
    if not request_id:
        return []
    rows = connection.execute(
        "SELECT assignment, prompt_index, seed FROM temp.out_work o JOIN work USING (assignment)"
        " WHERE o.site = ? AND o.incarnation = ? AND o.request_id = ? ORDER BY assignment",
        (*holder, request_id),
    )
    return [WorkAssignment(id=number, prompt_index=prompt, seed=seed, lease_s=0.0) for number, prompt, seed in rows]


def lookup(connection: Connection, wanted: Sequence[tuple[int, GroupId]]) -> dict[int, tuple[int | None, bool]]:
    """Each assignment's prompt, and whether it has its group.
    The prompt is None unless the named group's site held it."""
    following = int(get_meta(connection, "next_assignment") or 0)
    numbers = json.dumps([assignment for assignment, _ in wanted])
    rows = {
        assignment: (prompt, holders)
        for assignment, prompt, holders in connection.execute(
            f"SELECT assignment, prompt_index, holders FROM work WHERE assignment IN {NUMBERS}", (numbers,)
        ).fetchall()
    }
    found: dict[int, tuple[int | None, bool]] = {}
    for assignment, group_id in wanted:
        prompt, holders = rows.get(assignment, (None, "[]"))
        is_holder = _holder(group_id.site, group_id.incarnation) in json.loads(holders)
        found[assignment] = (
            int(prompt) if is_holder and assignment < following else None,
            prompt is None and assignment < following,
        )
    return found


def answer(connection: Connection, assignments: Sequence[int]) -> None:
    """Remove assignments that have their groups; each is named once."""
    cursor = connection.execute(f"DELETE FROM work WHERE assignment IN {NUMBERS}", (json.dumps(assignments),))
    assert cursor.rowcount == len(assignments), "admission checked that the assignments are open"


def reopen(connection: Connection, assignments: Sequence[int]) -> None:
    """Hand the assignments of dropped groups out again.
    Prompts and seeds follow from the run's seed."""
    (num_prompts, seed) = (int(get_meta(connection, key) or 0) for key in ("num_prompts", "seed"))
    for first in range(0, len(assignments), REOPENED_AT_ONCE):
        some = [
            (each, prompt_of(each, num_prompts=num_prompts, seed=seed), seed_of(each, seed=seed))
            for each in assignments[first : first + REOPENED_AT_ONCE]
        ]
        marks = ", ".join(["(?, ?, ?, '', '', 0, '[]')"] * len(some))
        connection.execute(
            "INSERT INTO work (assignment, prompt_index, seed, site, incarnation, is_leased, holders)"
            f" VALUES {marks} ON CONFLICT DO NOTHING",
            list(itertools.chain.from_iterable(some)),
        )


def put_behind(connection: Connection, assignment: int, *, at_least: int) -> None:
    """Put an open assignment behind as many new ones as followed it.
    So a failing row comes ever more rarely."""
    following = int(get_meta(connection, "next_assignment") or 0)
    connection.execute(
        "UPDATE work SET open_from = ? WHERE assignment = ? AND is_leased = 0",
        (following + max(at_least, following - assignment), assignment),
    )


def give_back(connection: Connection, holder: Holder, assignments: Sequence[int]) -> None:
    """Open the holder's assignments; it may not answer them any more."""
    wanted = json.dumps([assignment for assignment in assignments if assignment < 2**63])
    rows = connection.execute(
        "SELECT assignment, holders FROM work WHERE site = ? AND incarnation = ? AND is_leased = 1"
        f" AND assignment IN {NUMBERS}",
        (*holder, wanted),
    ).fetchall()
    own = _holder(*holder)
    connection.executemany(
        "UPDATE work SET is_leased = 0, holders = ? WHERE assignment = ?",
        [(json.dumps([name for name in json.loads(names) if name != own]), each) for each, names in rows],
    )


def held_by(
    connection: Connection, assignments: Sequence[int], holder: Holder
) -> list[tuple[int, int, dict[str, int]]]:
    """Training assignments among these that the holder has, in order.
    Each comes with its prompt and its counted returns by site."""
    rows = connection.execute(
        "SELECT assignment, prompt_index, returned FROM work WHERE site = ? AND incarnation = ? AND is_leased = 1"
        f" AND assignment IN {NUMBERS} ORDER BY assignment",
        (*holder, json.dumps([each for each in assignments if each < HELD_OUT])),
    ).fetchall()
    return [(assignment, prompt, json.loads(returned)) for assignment, prompt, returned in rows]


def keep_only(connection: Connection, held: Collection[int], holder: Holder) -> None:
    """Open the holder's assignments outside `held`, which its restarted process lost."""
    rows = connection.execute(
        "SELECT assignment FROM temp.out_work WHERE site = ? AND incarnation = ?", holder
    ).fetchall()
    kept = set(held)
    lost = [assignment for (assignment,) in rows if assignment not in kept]
    give_back(connection, holder, lost)


def open_held(connection: Connection, site: SiteId) -> None:
    """Open all assignments of a site; it may still answer them."""
    rows = connection.execute("SELECT assignment FROM temp.out_work WHERE site = ?", (site,)).fetchall()
    expire(connection, [assignment for (assignment,) in rows])


def expire(connection: Connection, assignments: Sequence[int]) -> None:
    """Open assignments whose lease expired; their holders may still answer them."""
    connection.execute(
        f"UPDATE work SET is_leased = 0 WHERE is_leased = 1 AND assignment IN {NUMBERS}", (json.dumps(assignments),)
    )


def _holder(site: str, incarnation: str) -> str:
    return f"{site}/{incarnation}"


def _lease(
    connection: Connection, rows: Sequence[tuple[int, int, int, str]], to: Holder, request_id: str
) -> list[WorkAssignment]:
    holder = _holder(*to)
    for assignment, _, _, holders in rows:
        most = MAX_EVALUATORS if assignment >= HELD_OUT else MAX_HOLDERS
        names = [*(name for name in json.loads(holders) if name != holder), holder][-most:]
        connection.execute(
            "UPDATE work SET is_leased = 1, site = ?, incarnation = ?, holders = ?, request_id = ?"
            " WHERE assignment = ?",
            (*to, json.dumps(names), request_id, assignment),
        )
    return [WorkAssignment(id=number, prompt_index=prompt, seed=seed, lease_s=0.0) for number, prompt, seed, _ in rows]


MAX_RETURNS = 3
MAX_IN_ROW = 32
"""Returns of a site that count until a group of it is taken."""
_MAX_DOUBLINGS = 16


def is_hopeless(returned: Mapping[str, int], *, is_shared: bool) -> bool:
    """Whether counted returns by site close an assignment.
    `is_shared` while several sites want work."""
    return sum(returned.values()) >= MAX_RETURNS and (len(returned) > 1 or not is_shared)


def take_back(
    connection: Connection, holder: Holder, assignments: Sequence[int], reason: ReturnReason | None, *, at_least: int
) -> None:
    """Take assignments back from their holder; may close some.

    `reason` is why their rows give no group; returns with None are not counted. Returned ones wait for `at_least` new
    ones.
    """
    site = SiteId(holder[0])
    # A held-out prompt that cannot be drawn is answered without a score.
    give_back(connection, holder, [each for each in assignments if reason is None or each >= HELD_OUT])
    if reason is None:
        return
    is_shared = tallies.read(connection, "wanting") > 1
    accepted, in_row = _standing(connection, site)
    following = int(get_meta(connection, "next_assignment") or 0)
    for assignment, prompt, returned in held_by(connection, assignments, holder):
        if in_row < MAX_IN_ROW:
            in_row += 1
            returned[site] = returned.get(site, 0) + 1
            if is_hopeless(returned, is_shared=is_shared):
                answer(connection, [assignment])
                ledger.add(connection, ledger.closed_account_of(reason), 1)
                _LOG.warning(
                    "assignment %d is closed, correct prompt %d: no group in %d tries or more (last site=%s,"
                    " reason=%s); `heterorl check-config learner --prompt %d` shows its text",
                    assignment, prompt, MAX_RETURNS, site, reason.value, prompt,
                )  # fmt: skip
                continue
        give_back(connection, holder, [assignment])
        doublings = min(max(0, sum(returned.values()) - 1), _MAX_DOUBLINGS)
        connection.execute(
            "UPDATE work SET returned = ?, open_from = ? WHERE assignment = ?",
            (json.dumps(returned), following + (at_least << doublings), assignment),
        )
    connection.execute(
        "INSERT INTO returners VALUES (?, ?, ?) ON CONFLICT (site)"
        " DO UPDATE SET accepted = excluded.accepted, num_returns = excluded.num_returns",
        (site, accepted, in_row),
    )


def _standing(connection: Connection, site: SiteId) -> tuple[int, int]:
    (accepted,) = connection.execute("SELECT coalesce(sum(accepted), 0) FROM sites WHERE site = ?", (site,)).fetchone()
    row = connection.execute("SELECT accepted, num_returns FROM returners WHERE site = ?", (site,)).fetchone()
    in_row = int(row[1]) if row is not None and row[0] == accepted else 0
    return int(accepted), in_row
