"""Groups taken in together leave the store, and get the outcomes, that they would one after another."""

import dataclasses
import random

import pytest

from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import DropReason, FinishReason, PushStatus
from heterorl.common.wire.sealed_groups import seal
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.clock import ManualClock
from tests.support.run import CONTRACT, Run, rollout

ROOM = {"site_pending_bytes": 400}
"""For one group that waits, and not for two."""
TABLES = ("groups", "ledger", "sites", "beyond_watermark", "work", "lost_shares")


async def _open(directory, **changes):
    config = CoordinatorConfig(
        run_id="run", data_dir=directory / "data", groups_per_version=64, max_outstanding_groups=64
    )
    # As they are: a bound of a few small groups is below the least one.
    config = config.model_copy(update=changes)
    core = await Coordinator.open(config, ManualClock())
    run = Run(core, directory)
    run.contract = dataclasses.replace(CONTRACT, min_members=1)
    await run.begin()
    await run.publish()
    await run.register()
    return core, run


def _numbered(group, sequence, **changes):
    return dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=sequence), **changes)


async def _groups(run):
    """Pushes of all kinds: usual ones, one more for an answered assignment, wrong ones, gaps, known ids."""
    work = await run.lease(12)
    usual = [run.group(each) for each in work]
    lossy = rollout(run.head, finish_reason=FinishReason.TOOL_LOST), rollout(run.head)
    for number in (1, 4, 7):
        usual[number] = dataclasses.replace(usual[number], rollouts=lossy)
    return [
        usual[0], usual[1],
        _numbered(usual[1], 3),
        _numbered(usual[2], 4, state_root=Digest("0" * 64)),
        _numbered(usual[3], 5),
        usual[0],
        dataclasses.replace(usual[1], generation_s=9.0),
        _numbered(usual[4], 8), _numbered(usual[5], 7), _numbered(usual[6], 6),
        _numbered(usual[7], 9),
        _numbered(usual[8], 10, oldest_version=7),
        _numbered(usual[9], 11, prompt_index=usual[9].prompt_index + 1),
        _numbered(usual[9], 12),
        _numbered(usual[10], 13), _numbered(usual[10], 14), _numbered(usual[11], 15),
        _numbered(usual[11], 500_000),
        _numbered(usual[11], 16, assignment=10_000),
    ]  # fmt: skip


async def _dump(core):
    def read(connection):
        return {name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in TABLES}

    return await core.database.run(read)


async def _taken(directory, order, sizes, **changes):
    """(outcomes, tables) where groups come so many at a time."""
    directory.mkdir()
    core, run = await _open(directory, **changes)
    try:
        groups = await _groups(run)
        groups = [groups[number] for number in order]
        outcomes, first = [], 0
        for size in sizes:
            outcomes += await core.push_groups([seal(group) for group in groups[first : first + size]])
            first += size
        status = await core.get_status()
        assert status.ledger.is_balanced
        return outcomes, await _dump(core)
    finally:
        await core.close()


@pytest.mark.parametrize(
    "changes",
    [{}, {"site_groups_per_s": 0.01, "site_burst_s": 700.0}, ROOM, {"max_lost_share": 0.015}],
    ids=["free", "quota", "queue", "lost"],
)
@pytest.mark.parametrize("seed", range(4))
async def test_together_or_one_after_another_is_the_same(tmp_path, seed, changes):
    order = list(range(19))
    if seed:
        random.Random(seed).shuffle(order)

    one_by_one = await _taken(tmp_path / "one", order, [1] * 19, **changes)
    together = await _taken(tmp_path / "all", order, [19], **changes)
    in_parts = await _taken(tmp_path / "parts", order, [5, 2, 12], **changes)

    assert together == one_by_one
    assert in_parts == one_by_one
    statuses = {outcome.status for outcome in together[0]}
    assert statuses >= {PushStatus.ACCEPTED, PushStatus.RETRY} | ({PushStatus.DROPPED} if changes != ROOM else set())
    reasons = {outcome.reason for outcome in together[0]}
    assert (DropReason.LOST_MEMBERS in reasons) == ("max_lost_share" in changes)
    if not seed and not changes:
        assert reasons >= {
            None, DropReason.SURPLUS, DropReason.WRONG_DIGEST, DropReason.CONFLICT, DropReason.INVALID,
        }  # fmt: skip


async def test_groups_taken_in_together_are_counted_one_by_one(tmp_path):
    core, run = await _open(tmp_path)
    try:
        outcomes = await core.push_groups([seal(run.group(each)) for each in await run.lease(5)])
        status = await core.get_status()

        assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * 5
        assert status.ledger.acked == 5
        assert status.ledger.is_balanced
    finally:
        await core.close()


@pytest.mark.sqlite
async def test_statements_of_a_push_do_not_grow_with_its_groups(tmp_path):
    core, run = await _open(tmp_path)
    try:
        work = await run.lease(40)
        groups = [seal(run.group(each)) for each in work]
        statements = []

        def note(text):
            # A statement is told again for every row that its triggers count in memory.
            if statements[-1:] != [text]:
                statements.append(text)

        async def count(some):
            statements.clear()
            await core.database.run(lambda connection: connection.set_trace_callback(note))
            await core.push_groups(some)
            await core.database.run(lambda connection: connection.set_trace_callback(None))
            # A trigger names the statement that fired it once more for each row.
            return len(set(statements))

        few = await count(groups[:4])
        many = await count(groups[4:])
    finally:
        await core.close()
    assert many == few
