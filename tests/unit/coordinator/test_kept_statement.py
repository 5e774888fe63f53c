"""What a learner states with its lease is kept beside the contract, and no later learner changes it."""

import dataclasses
import logging

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.versions.lineage import read_statement
from tests.support.clock import ManualClock
from tests.support.run import CONTRACT
from tests.support.statements import stated


@pytest.fixture
async def opened(tmp_path):
    cores = []

    async def open_it():
        core = await Coordinator.open(
            CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=2), ManualClock()
        )
        cores.append(core)
        return core

    yield open_it
    for core in cores:
        await core.close()


async def kept(core):
    return await core.context.database.run(read_statement)


async def test_statement_outlives_the_coordinator(opened):
    core = await opened()
    assert await kept(core) == b""
    await core.acquire_lease(holder="a", contract=CONTRACT, request_id="1", statement=stated(CONTRACT))
    await core.close()

    assert await kept(await opened()) == stated(CONTRACT)


async def test_run_of_an_earlier_learner_gets_its_statement_from_the_next_one(opened):
    core = await opened()
    await core.acquire_lease(holder="a", contract=CONTRACT, request_id="1")
    assert await kept(core) == b""
    await core.acquire_lease(holder="a", contract=CONTRACT, request_id="2", statement=stated(CONTRACT))

    assert await kept(core) == stated(CONTRACT)


async def test_versions_of_another_size_than_pacing_counts_are_named_in_the_log(opened, caplog):
    core = await opened()
    for holder, groups in (("a", 0), ("a", 2), ("a", 4)):
        assert "groups_per_version" not in caplog.text
        await core.acquire_lease(
            holder=holder, contract=CONTRACT, request_id=str(groups), groups_per_version=groups, incarnation="one"
        )

    assert "a version of learner a takes 4 groups, and groups_per_version is 2: set it to 4" in caplog.text


async def test_second_learner_does_not_change_what_was_stated_and_the_log_says_so(opened, caplog):
    core = await opened()
    first = stated(CONTRACT, task={"name": "jsonl:/data/a.jsonl"})
    await core.acquire_lease(holder="a", contract=CONTRACT, request_id="1", statement=first)
    with caplog.at_level(logging.WARNING):
        await core.acquire_lease(
            holder="a", contract=CONTRACT, request_id="2", statement=stated(CONTRACT, task={"name": "jsonl:/b.jsonl"})
        )

    assert await kept(core) == first
    assert "task.name: the run has 'jsonl:/data/a.jsonl', this node 'jsonl:/b.jsonl'" in caplog.text


async def test_statement_of_another_contract_gives_no_lease(opened):
    core = await opened()
    other = dataclasses.replace(CONTRACT, num_prompts=51)
    with pytest.raises(InvalidRequest, match=r"statement\.contract"):
        await core.acquire_lease(holder="a", contract=CONTRACT, request_id="1", statement=stated(other))
    grant = await core.acquire_lease(holder="b", contract=CONTRACT, request_id="2", statement=stated(CONTRACT))

    assert grant.epoch == 1
    assert await kept(core) == stated(CONTRACT)
