"""Who has the run's lease: a live learner keeps it, a restart has it back at once, and no optimizer is lost by mistake."""

import asyncio
import logging
import shutil
import threading

import pytest

from heterorl.common.errors import ConfigError, LeaseHeld
from heterorl.common.types.run import RUN_FILE, changed_steps
from heterorl.learner.run.state_directory import read_incarnation
from tests.support.learner_world import (
    FragileApi,
    Killed,
    NumpyBackend,
    fill,
    learn,
    learner_config,
    make_contract,
    open_coordinator,
)
from tests.support.limits import WAIT_S


@pytest.fixture
async def coordinator(tmp_path):
    # A term that no test outlives: whoever gets the lease of another gets it for another reason than time.
    core = await open_coordinator(tmp_path, learner_lease_s=1000.0)
    yield core
    await core.close()


class Blocked(NumpyBackend):
    """A backend whose first step waits for the test."""

    def __init__(self):
        super().__init__()
        self.entered, self.proceed = threading.Event(), threading.Event()
        self.on_step = self._block

    def _block(self):
        self.entered.set()
        assert self.proceed.wait(WAIT_S)


def _copy(tmp_path, **changes):
    """The same file on another machine: all keys are equal, the directory that they name is another one."""
    return learner_config(tmp_path / "elsewhere", **changes)


async def test_copied_configuration_waits_while_the_first_learner_lives(coordinator, tmp_path, caplog):
    backend, stop = Blocked(), asyncio.Event()
    first = asyncio.create_task(learn(learner_config(tmp_path), coordinator, backend))
    await fill(coordinator, 6)
    assert await asyncio.to_thread(backend.entered.wait, 30)

    api = FragileApi(coordinator)
    second = asyncio.create_task(learn(_copy(tmp_path, adopt_without_optimizer=True), api, stop=stop))
    await api.wait_for("acquire_lease", 3)
    backend.proceed.set()
    result = await first
    stop.set()
    await second

    assert (result.step, result.is_finished) == (3, True), "the first learner was not disturbed"
    said = [record.getMessage() for record in caplog.records if "is asked again" in record.getMessage()]
    assert len(said) == 1, "said once, not at each attempt"
    assert "holder is learner" in said[0]
    assert "state_dir" in said[0]


async def test_restart_from_its_own_disk_has_the_lease_at_once(coordinator, tmp_path):
    with pytest.raises(Killed):
        await learn(learner_config(tmp_path), FragileApi(coordinator, die_after=("publish_version", 1)))

    api = FragileApi(coordinator)
    result, _ = await asyncio.gather(learn(learner_config(tmp_path), api), fill(coordinator, 6))

    assert result.is_finished
    assert api.calls.count("acquire_lease") == 1


async def test_coordinator_remembers_the_incarnation_over_its_restart(tmp_path):
    core = await open_coordinator(tmp_path, learner_lease_s=1000.0)
    await core.acquire_lease(holder="learner", contract=make_contract(), request_id="a", incarnation="one")
    await core.close()
    core = await open_coordinator(tmp_path, learner_lease_s=1000.0)

    with pytest.raises(LeaseHeld, match="holder is learner"):
        await core.acquire_lease(holder="learner", contract=make_contract(), request_id="b", incarnation="two")
    again = await core.acquire_lease(holder="learner", contract=make_contract(), request_id="c", incarnation="one")

    assert again.epoch == 2
    await core.close()


def test_incarnation_is_of_the_directory(tmp_path):
    (tmp_path / "a").mkdir()
    name = read_incarnation(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    assert read_incarnation(tmp_path / "a") == name
    assert read_incarnation(tmp_path / "b") != name
    assert read_incarnation(tmp_path / "b") == read_incarnation(tmp_path / "b")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"0" * 32 + b" x\n", b"../../x 5"])
def test_incarnation_is_made_anew_when_its_file_is_damaged(tmp_path, content):
    (tmp_path / "incarnation").write_bytes(content)

    name = read_incarnation(tmp_path)

    assert len(name) == 32
    assert read_incarnation(tmp_path) == name


@pytest.mark.parametrize("holder", ["", "other"])
async def test_optimizer_is_not_thrown_away_unasked(coordinator, tmp_path, holder):
    await asyncio.gather(learn(learner_config(tmp_path), coordinator), fill(coordinator, 6))
    grant = None
    if holder:
        grant = await coordinator.acquire_lease(holder=holder, contract=make_contract(), request_id="r")

    with pytest.raises(ConfigError, match="adopt_without_optimizer = true") as refused:
        await learn(_copy(tmp_path, max_steps=4), coordinator)

    assert "version 3, step 3" in str(refused.value)
    refused_status = await coordinator.get_status()
    assert refused_status.learner == holder, "it waits for no lease, and the next learner not for its own"
    if grant:
        await coordinator.release_lease(epoch=grant.epoch)
    # It began nothing, so no configuration has changed.
    assert changed_steps(refused_status.facts) == ()
    assert not (_copy(tmp_path).state_dir / RUN_FILE).exists()
    # Whoever says so may.
    config = _copy(tmp_path, max_steps=4, adopt_without_optimizer=True)
    result, _ = await asyncio.gather(learn(config, coordinator), fill(coordinator, 2, incarnation="later"))
    assert (result.step, result.version) == (4, 4)
    assert changed_steps((await coordinator.get_status()).facts) == (3,)
    assert (_copy(tmp_path).state_dir / RUN_FILE).exists()


async def test_first_learner_that_returns_abandons_no_version_of_the_second(coordinator, tmp_path, caplog):
    await asyncio.gather(learn(learner_config(tmp_path, max_steps=2), coordinator), fill(coordinator, 4))
    config = _copy(tmp_path, max_steps=4, adopt_without_optimizer=True)
    await asyncio.gather(learn(config, coordinator), fill(coordinator, 4, incarnation="later"))
    assert (await coordinator.get_status()).head_version == 4

    caplog.set_level(logging.INFO)
    # Its newest checkpoint is version 2, which both share.
    with pytest.raises(ConfigError, match="adopt_without_optimizer = true") as refused:
        await learn(learner_config(tmp_path, max_steps=2), coordinator)
    assert f"remove {tmp_path / 'learner' / 'epochs'} to go back to 2" in str(refused.value.action)
    assert "version 4 is of an epoch that this directory does not know" in caplog.text
    assert (await coordinator.get_status()).head_version == 4

    config = learner_config(tmp_path, max_steps=6, checkpoint_every_versions=9, adopt_without_optimizer=True)
    filling = asyncio.create_task(fill(coordinator, 4, incarnation="latest"))
    with pytest.raises(Killed):
        await learn(config, FragileApi(coordinator, die_after=("publish_version", 1)))
    await filling
    # Version 5 is its own, but the way back to version 2 leads over those of the second.
    result = await learn(config, coordinator)

    assert (result.step, result.version, result.is_finished) == (6, 6, True)
    assert "ROLLS BACK" not in caplog.text


async def test_copy_made_before_a_restart_continues_without_its_epochs(coordinator, tmp_path, caplog):
    copy = _copy(tmp_path, max_steps=5)
    await asyncio.gather(learn(learner_config(tmp_path, max_steps=2), coordinator), fill(coordinator, 4))
    shutil.copytree(tmp_path / "learner", copy.state_dir)
    await asyncio.gather(
        learn(learner_config(tmp_path, max_steps=4), coordinator), fill(coordinator, 4, incarnation="later")
    )

    with pytest.raises(ConfigError, match="remove .*epochs to go back to 2"):
        await learn(copy, coordinator)
    (copy.state_dir / "epochs").unlink()
    api = FragileApi(coordinator)
    running = asyncio.create_task(learn(copy, api))
    # Groups of the versions that it abandons are dropped.
    await api.wait_for("publish_version", 1)
    await fill(coordinator, 6, incarnation="last")

    assert (await running).is_finished
    assert "ROLLS BACK from version 4 to version 2" in caplog.text


async def test_run_without_a_step_may_be_taken_over(coordinator, tmp_path):
    """Version 0 has seen no optimizer: there is nothing to lose."""
    with pytest.raises(Killed):
        await learn(learner_config(tmp_path), FragileApi(coordinator, die_before=("stream_groups", 1)))
    epoch = (await coordinator.get_status()).epoch
    await coordinator.release_lease(epoch=epoch)

    result, _ = await asyncio.gather(learn(_copy(tmp_path), coordinator), fill(coordinator, 6))

    assert result.is_finished


# ---- the last line of the log


async def test_stopped_learner_says_where_it_stopped(coordinator, tmp_path):
    api, stop = FragileApi(coordinator), asyncio.Event()
    running = asyncio.create_task(learn(learner_config(tmp_path, max_steps=100), api, stop=stop))
    await fill(coordinator, 4)
    await api.wait_for("publish_version", 3)
    async for update in coordinator.watch_head(after_version=1):
        assert update.version == 2
        break

    stop.set()
    result = await running

    assert (result.step, result.version, result.is_finished) == (2, 2, False)
    assert str(result) == "stopped at step 2, version 2"


async def test_stopped_learner_says_which_steps_are_in_no_version(coordinator, tmp_path):
    backend, stop, proceed = NumpyBackend(), asyncio.Event(), threading.Event()
    backend.on_step = lambda: len(backend.reports) != 2 or proceed.wait(WAIT_S)
    config = learner_config(tmp_path, max_steps=100, steps_per_version=2)
    api = FragileApi(coordinator)
    running = asyncio.create_task(learn(config, api, backend, stop=stop))
    await fill(coordinator, 6)
    await api.wait_for("publish_version", 2)

    stop.set()
    proceed.set()
    result = await running

    # Stopped in the thread of step 3, which is waited for and whose effect is dropped, or just behind it.
    assert result.version == 1
    assert result.step - result.num_unpublished == 2
    assert str(result).startswith("stopped at step 2, version 1")


async def test_learner_that_is_stopped_while_it_waits_for_the_lease_claims_no_step(coordinator, tmp_path):
    await coordinator.acquire_lease(holder="other", contract=make_contract(), request_id="r")
    api, stop = FragileApi(coordinator), asyncio.Event()
    running = asyncio.create_task(learn(learner_config(tmp_path), api, stop=stop))
    await api.wait_for("acquire_lease", 2)

    stop.set()

    assert str(await running) == "stopped before it began"


async def test_version_of_more_groups_than_are_ever_under_way_is_refused_and_the_lease_is_free_again(tmp_path):
    core = await open_coordinator(
        tmp_path, learner_lease_s=1000.0, groups_per_version=2, max_outstanding_groups=0, max_staleness_versions=2
    )
    config = learner_config(tmp_path)
    # Steps of 2 groups: 3 steps are as many as 3 versions' groups, 4 are more.
    fitting, too_long = {"steps_per_version": 3}, {"steps_per_version": 4}
    try:
        with pytest.raises(ConfigError, match=r"steps_per_version.* 8 groups.* 6 at once"):
            await learn(config.model_copy(update=too_long), core)
        run = asyncio.create_task(learn(config.model_copy(update=fitting), core))
        await fill(core, 6)
        assert (await run).is_finished
    finally:
        await core.close()
