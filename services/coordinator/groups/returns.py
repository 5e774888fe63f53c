"""Assignments that come back because their row gives no group: put behind others, and closed in the end; store
operations.

    work        returned (JSON: counted returns by site), open_from (no new assignment below it: others go first)
    returners   site, accepted (its groups at its newest counted return), num_returns (counted since such a group)
    ledger      closed/<reason>    assignments closed, beside the conservation law: they have no group

Guarantees: what comes back waits while the assignments of a version are handed out, of twice as many after the next
return and so on, so it never stands before all others. After MAX_RETURNS counted returns it is closed: it is handed out
no more, and a group of an earlier holder is dropped as one too many.

What a hostile site can do: it returns what it holds, which it could leave to expire, or answer with a group that
teaches nothing. So a return counts only for the newest holder, and only MAX_IN_ROW times after a group of the site was
taken: a site whose rewards all fail, by malice or for a service that is down, closes a few assignments and no more.
While other sites want work nothing is closed before two of them have returned it. Each closing is in the log, with site
and reason.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import ReturnReason
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.groups import ledger, work
from heterorl.coordinator.sites.sites import Holder
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.database import get_meta

_LOG = logging.getLogger(__name__)
MAX_RETURNS = 3
"""Counted returns after which an assignment is closed."""
MAX_IN_ROW = 32
"""Returns of a site that count before a group of it is taken."""
_MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """An assignment that is handed out no more, and who returned it last."""

    assignment: int
    prompt_index: int
    site: SiteId
    reason: ReturnReason


def is_hopeless(returned: Mapping[str, int], *, is_shared: bool) -> bool:
    """Whether so many counted returns by site close an assignment; `is_shared` while several sites want work."""
    return sum(returned.values()) >= MAX_RETURNS and (len(returned) > 1 or not is_shared)


def take(
    connection: Connection,
    holder: Holder,
    assignments: Sequence[int],
    reason: ReturnReason | None,
    *,
    config: CoordinatorConfig,
) -> list[Closed]:
    """Take assignments back from who holds them, and what that closes.

    Args:
        connection: of the store.
        holder: site and incarnation.
        assignments: those of them that it does not hold stay as they are.
        reason: why their rows give no group; None counts nothing.
        config: of the coordinator.
    """
    site, incarnation = SiteId(holder[0]), holder[1]
    if reason is None:
        work.give_back(connection, site=site, incarnation=incarnation, assignments=assignments)
        return []
    is_shared = tallies.read(connection, "wanting") > 1
    accepted, in_row = _standing(connection, site)
    following = int(get_meta(connection, "next_assignment") or 0)
    closed = []
    for assignment in assignments:
        row = work.held_by(connection, assignment, site=site, incarnation=incarnation)
        if row is None:
            continue
        prompt, returned = row
        if in_row < MAX_IN_ROW:
            in_row += 1
            returned[site] = returned.get(site, 0) + 1
            if is_hopeless(returned, is_shared=is_shared):
                work.answer(connection, assignment)
                ledger.add(connection, ledger.closed_account_of(reason), 1)
                closed.append(Closed(assignment=assignment, prompt_index=prompt, site=site, reason=reason))
                continue
        work.give_back(connection, site=site, incarnation=incarnation, assignments=[assignment])
        doublings = min(max(0, sum(returned.values()) - 1), _MAX_DOUBLINGS)
        connection.execute(
            "UPDATE work SET returned = ?, open_from = ? WHERE assignment = ?",
            (json.dumps(returned), following + (config.groups_per_version << doublings), assignment),
        )
    connection.execute(
        "INSERT INTO returners VALUES (?, ?, ?) ON CONFLICT (site)"
        " DO UPDATE SET accepted = excluded.accepted, num_returns = excluded.num_returns",
        (site, accepted, in_row),
    )
    return closed


def say(closed: Sequence[Closed]) -> None:
    """Log what was closed."""
    for each in closed:
        _LOG.warning(
            "assignment %d is closed without a group: prompt %d gave none %d times or more, the last at site %s: %s",
            each.assignment, each.prompt_index, MAX_RETURNS, each.site, each.reason.value,
        )  # fmt: skip


def _standing(connection: Connection, site: SiteId) -> tuple[int, int]:
    """Groups that were ever taken of a site, and its counted returns since the newest."""
    (accepted,) = connection.execute("SELECT coalesce(sum(accepted), 0) FROM sites WHERE site = ?", (site,)).fetchone()
    row = connection.execute("SELECT accepted, num_returns FROM returners WHERE site = ?", (site,)).fetchone()
    in_row = int(row[1]) if row is not None and row[0] == accepted else 0
    return int(accepted), in_row
