"""Orders of operators: said again they have no effect again, however late the repetition comes."""

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.sites import audit, quarantine
from heterorl.coordinator.store import database
from tests.support.clock import ManualClock
from tests.support.run import SITE, Run


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=8)


@pytest.fixture
async def run(core, tmp_path):
    run = Run(core, tmp_path)
    await run.begin()
    for _ in range(4):
        await run.publish()
    await run.register()
    return run


async def ordered(core):
    return (await core.get_status()).rollback_to


async def kinds(core, kind):
    return [row.detail for row in await core.database.run(audit.read) if row.kind == kind]


async def test_late_repetition_of_an_order_does_not_undo_the_one_after_it(core, run):
    await core.rollback(to_version=1, request_id="first")
    await core.rollback(to_version=2, request_id="second")
    await core.rollback(to_version=1, request_id="first")
    assert await ordered(core) == 2
    assert await kinds(core, "rollback_order") == ["to version 1", "to version 2"]

    await core.rollback(to_version=-1, request_id="third")
    await core.rollback(to_version=2, request_id="second")
    assert await ordered(core) == -1


async def test_release_said_again_is_answered_alike_and_frees_nobody_again(config, core, run):
    convict = "INSERT INTO convictions VALUES (?, ?, 0)"
    await core.database.run(lambda c: c.execute(convict, (SITE, "first reason")).rowcount)
    assert await core.release_site(site=SITE, reason="repaired", request_id="a") == "first reason"
    await core.database.run(lambda c: c.execute(convict, (SITE, "second reason")).rowcount)
    assert await core.release_site(site=SITE, reason="repaired", request_id="a") == "first reason"
    assert await core.database.run(lambda c: quarantine.conviction_of(c, SITE)) == "second reason"
    await core.close()
    again = await Coordinator.open(config, ManualClock())
    assert await again.release_site(site=SITE, reason="repaired", request_id="a") == "first reason"
    assert len(await kinds(again, "release")) == 1
    assert await again.release_site(site=SITE, reason="really", request_id="b") == "second reason"
    # Without an id, and of another site, each is another order.
    await run_register(again, run)
    assert await again.release_site(site="us-1", reason="repaired", request_id="a") == ""
    assert len(await kinds(again, "release")) == 3
    await again.close()


async def run_register(core, run):
    await core.register(run.registration(site="us-1"))


async def test_what_is_remembered_is_bounded(core):
    def place(connection):
        for number in range(database.MAX_KEPT + 3):
            database.remember_order(connection, "test", f"r{number}", str(number))
        return [database.answer_to_order(connection, "test", f"r{number}") for number in (2, 3, database.MAX_KEPT + 2)]

    assert await core.database.run(place) == [None, "3", str(database.MAX_KEPT + 2)]
    with pytest.raises(InvalidRequest, match="request_id"):
        await core.database.run(lambda c: database.remember_order(c, "test", "x" * 65, ""))
    await core.database.run(lambda c: database.remember_order(c, "test", "", "none"))
    assert await core.database.run(lambda c: database.answer_to_order(c, "test", "")) is None
