"""The whole learner against a real coordinator in this process."""

import asyncio
import dataclasses
import math
import shutil
import threading

import pytest

from heterorl.common.errors import (
    ConfigError,
    ContractMismatch,
    LeaseHeld,
    OperatorError,
    RunFinished,
    StaleEpoch,
    Unreachable,
)
from heterorl.common.types.common import StepReport, value_of_row
from heterorl.common.types.rollout import GroupId
from heterorl.coordinator.versions import rollback_order
from heterorl.learner.run.inbox import Inbox
from heterorl.learner.run.state_directory import read_incarnation
from tests.support.learner_world import (
    INCARNATION,
    SITE,
    FragileApi,
    Killed,
    ManualClock,
    NumpyBackend,
    fill,
    head_root,
    learn,
    learner_config,
    make_contract,
    open_coordinator,
    queued,
    rows,
)
from tests.support.limits import WAIT_S

STEPS, GROUPS_PER_STEP = 3, 2
QUEUE = STEPS * GROUPS_PER_STEP


@pytest.fixture
async def coordinator(tmp_path):
    core = await open_coordinator(tmp_path)
    yield core
    await core.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """State root of the head after a run that nothing disturbs, over the same groups in the same order."""
    directory = tmp_path_factory.mktemp("reference")

    async def uninterrupted():
        core = await open_coordinator(directory)
        await asyncio.gather(learn(learner_config(directory), core), fill(core, QUEUE))
        root = await head_root(core)
        await core.close()
        return root

    return asyncio.run(uninterrupted())


async def _train(config, api, core, backend=None):
    """Run a learner on a queue that is filled once version 0 is there."""
    filling = asyncio.create_task(fill(core, QUEUE))
    try:
        return await learn(config, api, backend)
    finally:
        if (await core.get_status()).head_version < 0:
            filling.cancel()
        await asyncio.wait([filling])


async def test_learner_consumes_the_queue_and_ends(coordinator, tmp_path):
    result, _ = await asyncio.gather(learn(learner_config(tmp_path), coordinator), fill(coordinator, QUEUE))

    status = await coordinator.get_status()
    assert (result.step, result.version, result.is_finished) == (3, 3, True)
    assert status.head_version == 3
    assert status.encode_s > 0, "the learner says how long encoding took"
    assert status.ledger.consumed == QUEUE
    assert status.ledger.is_balanced
    assert status.is_draining
    assert status.learner == ""


async def test_learner_drains_the_run_under_its_own_epoch(coordinator, tmp_path, monkeypatch):
    honest, epochs = coordinator.drain, []

    async def drain(*, reason, epoch=None):
        epochs.append((epoch, (await coordinator.get_status()).epoch))
        await honest(reason=reason, epoch=epoch)

    monkeypatch.setattr(coordinator, "drain", drain)
    await asyncio.gather(learn(learner_config(tmp_path), coordinator), fill(coordinator, QUEUE))

    assert epochs == [(1, 1)]


async def test_learner_writes_a_row_for_every_version_and_step(coordinator, tmp_path):
    config = learner_config(tmp_path)
    await asyncio.gather(learn(config, coordinator), fill(coordinator, QUEUE))

    versions = rows(config.state_dir / "versions.jsonl")
    assert [row["version"] for row in versions] == [0, 1, 2, 3]
    # 96 elements of 2 bytes; version 0 is a snapshot of all of them.
    assert all(row["full_bytes"] == 192 and row["num_elements"] == 96 for row in versions)
    assert set(versions[0]) == {
        "version", "state_root", "bytes", "full_bytes", "num_changed", "num_elements", "encode_s", "publish_s"
    }  # fmt: skip
    assert [row["step"] for row in rows(config.state_dir / "steps.jsonl")] == [1, 2, 3]
    assert [report.step for report in await coordinator.list_steps(after_step=0, limit=10)] == [1, 2, 3]


async def test_learner_publishes_once_per_steps_per_version_and_at_the_end(coordinator, tmp_path):
    config = learner_config(tmp_path, steps_per_version=2)

    result, _ = await asyncio.gather(learn(config, coordinator), fill(coordinator, QUEUE))

    # Steps 1 and 2 make version 1; step 3 is the last and makes version 2 alone.
    assert (result.step, result.version) == (3, 2)
    assert (await coordinator.get_status()).ledger.consumed == QUEUE
    # Step 2 learns from the version that step 1 has left: no mismatch of engines.
    first, second, _ = rows(config.state_dir / "steps.jsonl")
    assert (first["staleness_max"], second["staleness_max"]) == (0, 0)
    assert first["kl_token_fresh"] is not None
    assert second["kl_token_fresh"] is None


async def test_learner_finishes_when_fewer_steps_are_wanted_than_samplers_lag(coordinator, tmp_path):
    """T21: max_steps below the asynchronous lag must not wait for groups that nobody will generate."""
    config = learner_config(tmp_path, max_steps=1, prefetch_steps=8)

    result, _ = await asyncio.gather(learn(config, coordinator), fill(coordinator, GROUPS_PER_STEP))

    assert result.is_finished


@pytest.mark.parametrize("num_groups", [2, 4], ids=["queue-is-empty", "queue-has-more"])
async def test_learner_ends_with_the_version_that_ends_the_run(tmp_path, num_groups):
    """No site makes groups any more, so that it would wait for them without end."""
    core = await open_coordinator(tmp_path, max_versions=1)
    async with asyncio.timeout(WAIT_S):
        result, _ = await asyncio.gather(learn(learner_config(tmp_path), core), fill(core, num_groups))
        again = await learn(learner_config(tmp_path), core)
    assert (result.version, again.version, again.step) == (1, 1, 1)
    await core.close()


async def test_learner_that_died_beyond_the_last_version_ends_well_when_started_again(tmp_path):
    core = await open_coordinator(tmp_path, max_versions=1)
    filling = asyncio.create_task(fill(core, 4))
    with pytest.raises(Killed):
        await learn(learner_config(tmp_path), FragileApi(core, die_before=("publish_version", 3)))
    await filling

    result = await learn(learner_config(tmp_path), core)

    assert (result.version, result.step, result.num_unpublished) == (1, 1, 0)
    assert sorted(path.name for path in (tmp_path / "learner" / "checkpoints").iterdir()) == ["v00000001"]
    await core.close()


@pytest.mark.parametrize("needs", ["an older checkpoint", "an order", "a variant"])
async def test_start_after_the_last_version_that_needs_one_more_ends_without_an_error(tmp_path, needs):
    core = await open_coordinator(tmp_path, max_versions=1)
    cadence = 5 if needs == "an older checkpoint" else 1
    config = learner_config(tmp_path, checkpoint_every_versions=cadence)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(learn(config, core), fill(core, 4))
        if needs == "an order":
            # Given before the last version, and met by no learner.
            await core.database.run(lambda c: rollback_order.place(c, to_version=0, request_id="one"))
            with pytest.raises(RunFinished, match="max_versions"):
                await core.rollback(to_version=0, request_id="two")
        if needs == "a variant":
            config = config.model_copy(update={"variants": ("int8",)})
        result = await learn(config, core)

    assert result.version == (await core.get_status()).head_version == 1
    await core.close()


class OtherBackend(NumpyBackend):
    """Takes other steps from the same groups."""

    def train_step(self, groups, *, head_version, step):
        report = super().train_step(groups, head_version=head_version, step=step)
        self.weights += 1.0
        return report


async def test_checkpoint_of_a_history_that_a_restore_lost_is_not_published(tmp_path):
    core = await open_coordinator(tmp_path)
    config = learner_config(tmp_path)
    with pytest.raises(Killed):
        await learn(config, FragileApi(core, die_before=("stream_groups", 1)))
    await fill(core, QUEUE)
    await core.close()
    shutil.copytree(tmp_path / "coordinator", tmp_path / "backup")
    core = await open_coordinator(tmp_path)
    await learn(config, core)
    lost = await head_root(core)
    await core.close()
    shutil.rmtree(tmp_path / "coordinator")
    (tmp_path / "backup").rename(tmp_path / "coordinator")
    shutil.rmtree(tmp_path / "learner" / "checkpoints" / "v00000002")
    core = await open_coordinator(tmp_path)
    config = learner_config(tmp_path, max_steps=4, checkpoint_every_versions=10)
    with pytest.raises(Killed):
        await learn(config, FragileApi(core, die_before=("publish_version", 3)), OtherBackend())
    assert (await core.get_status()).head_version == 2

    with pytest.raises(Killed):
        await learn(config, FragileApi(core, die_after=("publish_version", 1)), OtherBackend())

    assert (await core.get_status()).head_version == 3
    assert await head_root(core) != lost
    await core.close()


async def test_finished_run_does_nothing_when_started_again(coordinator, tmp_path):
    config = learner_config(tmp_path)
    await asyncio.gather(learn(config, coordinator), fill(coordinator, QUEUE))

    result = await learn(config, coordinator)

    assert (result.step, result.version, result.is_finished) == (3, 3, True)


# ---- crashes

CRASHES = [
    ("before", "acquire_lease", 1),
    ("after", "acquire_lease", 1),
    ("before", "stream_groups", 1),
    ("after", "stream_groups.item", 3),
    *[(when, "query_upload", number) for when in ("before", "after") for number in (1, 2, 3)],
    *[(when, "upload_payload", number) for when in ("before", "after") for number in (1, 2, 3, 4)],
    *[(when, "publish_version", number) for when in ("before", "after") for number in (1, 2, 3, 4)],
    ("before", "release_lease", 1),
]


@pytest.mark.parametrize(("when", "method", "number"), CRASHES)
async def test_learner_ends_with_the_same_weights_when_killed_at_a_call(
    coordinator, tmp_path, expected, when, method, number
):
    """T10: a crash at any point skips no prompt, trains none twice, and changes no bit of the result."""
    config = learner_config(tmp_path)
    api = FragileApi(coordinator, **{f"die_{when}": (method, number)})
    filling = asyncio.create_task(fill(coordinator, QUEUE))
    with pytest.raises(Killed):
        await learn(config, api)

    result = await learn(config, coordinator)

    await filling
    status = await coordinator.get_status()
    assert result.is_finished
    assert await head_root(coordinator) == expected
    assert (status.ledger.consumed, status.ledger.pending, status.ledger.leased) == (QUEUE, 0, 0)
    assert status.ledger.is_balanced
    assert [row["version"] for row in rows(config.state_dir / "versions.jsonl")] == [0, 1, 2, 3]
    assert [row["step"] for row in rows(config.state_dir / "steps.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("is_partial", [False, True])
async def test_learner_ends_with_the_same_weights_when_killed_in_a_checkpoint(
    coordinator, tmp_path, expected, number, is_partial
):
    """T10, between the step and a checkpoint that is complete."""
    config = learner_config(tmp_path)
    backend, saves = NumpyBackend(), []

    def die(directory):
        saves.append(directory)
        if len(saves) == number:
            if is_partial:
                (directory / "weights.npy").write_bytes(b"half")
            raise Killed

    backend.on_save = die
    filling = asyncio.create_task(fill(coordinator, QUEUE))
    with pytest.raises(Killed):
        await learn(config, coordinator, backend)

    await learn(config, coordinator)

    await filling
    assert await head_root(coordinator) == expected
    assert (await coordinator.get_status()).ledger.consumed == QUEUE


async def test_learner_ends_with_the_same_weights_when_killed_again_and_again(coordinator, tmp_path, expected):
    """T10: also a restart that is killed leaves everything in order."""
    config = learner_config(tmp_path)
    filling = asyncio.create_task(fill(coordinator, QUEUE))
    for method in ("upload_payload", "publish_version", "get_step", "publish_version", "get_signed_manifest"):
        with pytest.raises(Killed):
            await learn(config, FragileApi(coordinator, die_after=(method, 1)))

    await learn(config, coordinator)

    await filling
    assert await head_root(coordinator) == expected


async def test_staleness_is_counted_from_the_head_when_resumed(coordinator, tmp_path):
    """T17: a restart neither inflates staleness nor takes more groups than before."""
    config = learner_config(tmp_path)
    filling = asyncio.create_task(fill(coordinator, QUEUE))
    with pytest.raises(Killed):
        await learn(config, FragileApi(coordinator, die_after=("publish_version", 3)))
    backend, seen = NumpyBackend(), []
    backend.on_step = lambda: seen.append(None)

    await learn(config, coordinator, backend)

    await filling
    # All groups are of version 0 and the third publication made version 2: the last step trains 2 versions behind.
    assert [(report.version, report.staleness_max) for report in backend.reports] == [(3, 2)]


async def test_policy_age_of_a_step_counts_the_time_that_the_learner_held_its_groups(
    coordinator, tmp_path, monkeypatch
):
    config = learner_config(tmp_path, max_steps=1)
    monkeypatch.setattr(Inbox, "held_s", lambda *_: 100.0)

    await asyncio.gather(learn(config, coordinator, NumpyBackend()), fill(coordinator, GROUPS_PER_STEP))

    (report,) = await coordinator.list_steps(after_step=0, limit=10)
    assert report.policy_age_p50_s >= 100.0


# ---- the lease


async def test_lease_is_renewed_while_a_step_computes(tmp_path):
    clock = ManualClock()
    core = await open_coordinator(tmp_path, clock, learner_lease_s=9.0)
    backend, entered, proceed = NumpyBackend(), threading.Event(), threading.Event()

    def block():
        entered.set()
        assert proceed.wait(WAIT_S)

    backend.on_step = block
    api = FragileApi(core)
    running = asyncio.create_task(learn(learner_config(tmp_path, max_steps=1), api, backend, clock=clock))
    await fill(core, GROUPS_PER_STEP)
    assert await asyncio.to_thread(entered.wait, 30)

    for number in range(1, 8):
        # A third of the term each: 21 s in all, over twice the term of 9 s.
        before = api.calls.count("renew_lease")
        clock.advance(3.0)
        await api.wait_for("renew_lease", before + 1)
        with pytest.raises(LeaseHeld):
            await core.acquire_lease(holder="other", contract=make_contract(), request_id=f"r{number}")
    proceed.set()

    assert (await running).is_finished
    await core.close()


async def test_learner_waits_for_the_lease_while_another_holds_it(coordinator, tmp_path):
    grant = await coordinator.acquire_lease(holder="other", contract=make_contract(), request_id="r")
    api = FragileApi(coordinator)
    running = asyncio.create_task(learn(learner_config(tmp_path), api))
    await api.wait_for("acquire_lease", 3)

    await coordinator.release_lease(epoch=grant.epoch)

    await fill(coordinator, QUEUE)
    assert (await running).is_finished


async def test_learner_has_no_effect_when_its_epoch_is_over(coordinator, tmp_path):
    backend, entered, proceed = NumpyBackend(), threading.Event(), threading.Event()

    def block():
        entered.set()
        assert proceed.wait(WAIT_S)

    backend.on_step = block
    running = asyncio.create_task(learn(learner_config(tmp_path), coordinator, backend))
    await fill(coordinator, QUEUE)
    assert await asyncio.to_thread(entered.wait, 30)
    # The same learner may take over at once, as a restarted process would.
    grant = await coordinator.acquire_lease(
        holder="learner",
        contract=make_contract(),
        request_id="takeover",
        incarnation=read_incarnation(tmp_path / "learner"),
    )
    proceed.set()

    with pytest.raises(StaleEpoch) as superseded:
        await running

    assert superseded.value.exit_code == 1, "its service manager starts it, and it waits for the lease"
    status = await coordinator.get_status()
    assert (status.head_version, status.epoch) == (0, grant.epoch)
    assert (status.ledger.consumed, status.ledger.pending) == (0, QUEUE)


async def test_learner_with_a_smaller_limit_than_the_coordinators_names_the_key_and_leaves_the_lease(
    coordinator, tmp_path
):
    config = learner_config(tmp_path, max_message_bytes=2 << 20)

    with pytest.raises(
        ConfigError, match=r"2097152 is below the coordinator's, 16777216.*set it to 16777216"
    ) as refused:
        await learn(config, coordinator)

    assert refused.value.key == "max_message_bytes"
    # Another one need not wait for the lease to run out.
    await coordinator.acquire_lease(holder="other", contract=make_contract(), request_id="r")


async def test_learner_stops_when_its_contract_differs(coordinator, tmp_path):
    grant = await coordinator.acquire_lease(holder="learner", contract=make_contract(), request_id="r")
    await coordinator.release_lease(epoch=grant.epoch)

    with pytest.raises(ContractMismatch, match="vocab_size"):
        await learn(learner_config(tmp_path), coordinator, contract=make_contract(vocab_size=49))


async def test_learner_releases_the_lease_when_stopped(coordinator, tmp_path):
    stop = asyncio.Event()
    running = asyncio.create_task(learn(learner_config(tmp_path), coordinator, stop=stop))
    await fill(coordinator, 1)

    stop.set()

    result = await running
    assert not result.is_finished
    assert (await coordinator.get_status()).learner == ""


async def test_second_learner_is_refused_when_it_shares_the_state_directory(coordinator, tmp_path):
    stop = asyncio.Event()
    running = asyncio.create_task(learn(learner_config(tmp_path), coordinator, stop=stop))
    await fill(coordinator, 1)

    with pytest.raises(ConfigError, match="state_dir"):
        await learn(learner_config(tmp_path, holder="other"), coordinator)

    stop.set()
    await running


# ---- the link


async def test_learner_goes_on_when_the_stream_breaks(coordinator, tmp_path, expected):
    api = FragileApi(
        coordinator,
        fail_after={("stream_groups.item", 1): Unreachable("cut"), ("stream_groups.item", 4): Unreachable("cut")},
    )

    await asyncio.gather(learn(learner_config(tmp_path), api), fill(coordinator, QUEUE))

    assert await head_root(coordinator) == expected
    assert api.calls.count("stream_groups") == 3


async def test_learner_asks_for_the_step_when_the_answer_is_lost(coordinator, tmp_path):
    api = FragileApi(coordinator, fail_after={("publish_version", 2): Unreachable("lost")})

    await asyncio.gather(learn(learner_config(tmp_path), api), fill(coordinator, QUEUE))

    # Four versions and one lost answer: had it published again instead of asking, there would be five calls.
    assert api.calls.count("publish_version") == 4
    assert api.calls[api.calls.index("publish_version", api.calls.index("publish_version") + 1) + 1] == "get_step"
    assert (await coordinator.get_status()).head_version == 3


async def test_learner_publishes_again_when_the_request_was_lost(coordinator, tmp_path):
    api = FragileApi(coordinator, fail={("publish_version", 2): Unreachable("lost")})

    await asyncio.gather(learn(learner_config(tmp_path), api), fill(coordinator, QUEUE))

    assert api.calls.count("publish_version") == 5
    assert (await coordinator.get_status()).head_version == 3


# ---- steps that fail


async def test_step_that_is_not_finite_never_becomes_a_version(coordinator, tmp_path):
    config = learner_config(tmp_path, max_steps=2)
    backend = NumpyBackend()
    backend.not_finite_steps = {2}

    await asyncio.gather(learn(config, coordinator, backend), fill(coordinator, QUEUE))

    status = await coordinator.get_status()
    assert status.head_version == 2
    assert status.ledger.consumed == 2 * GROUPS_PER_STEP
    assert {reason.value: count for reason, count in status.ledger.dropped.items() if count} == {"learner_abandoned": 2}
    assert all(report.is_applied for report in await coordinator.list_steps(after_step=0, limit=10))
    # A step of a version is written with it; one that changed nothing at once, beside a version under way.
    path = config.state_dir / "steps.jsonl"
    assert sorted(row["is_applied"] for row in rows(path)) == [False, True, True]
    assert {row["loss"] for row in rows(path)} == {None, 0.5}
    assert "NaN" not in path.read_text(), "strict readers refuse it"
    assert math.isnan(next(value_of_row(StepReport, row).loss for row in rows(path) if not row["is_applied"]))


async def test_learner_stops_when_no_step_is_finite(coordinator, tmp_path):
    backend = NumpyBackend()
    backend.not_finite_steps = {1, 2, 3}
    config = learner_config(tmp_path, max_rejected_steps=2)

    with pytest.raises(OperatorError, match="2 steps in a row"):
        await asyncio.gather(learn(config, coordinator, backend), fill(coordinator, QUEUE))

    assert (await coordinator.get_status()).head_version == 0


async def test_steps_of_equal_rewards_alone_are_given_up_and_never_end_the_run(coordinator, tmp_path, caplog):
    """A loss that drops such groups has nothing left of them: no step, no version, and nothing that was not finite."""
    backend = NumpyBackend()
    backend.empty_steps = {1, 2}
    config = learner_config(tmp_path, max_steps=1, max_rejected_steps=1)

    result, _ = await asyncio.gather(learn(config, coordinator, backend), fill(coordinator, 6))

    assert (result.is_finished, result.version) == (True, 1)
    status = await coordinator.get_status()
    assert {reason.value: count for reason, count in status.ledger.dropped.items() if count} == {"uniform": 4}
    assert "the rewards of each group are equal" in caplog.text
    assert "not finite" not in caplog.text
    assert sorted(row["is_applied"] for row in rows(config.state_dir / "steps.jsonl")) == [False, False, True]


async def test_group_is_abandoned_when_it_is_too_long(coordinator, tmp_path):
    # Prompts have 3 tokens, completions at most 5: a bound of 3 + 0 admits none, so every group is given up.
    stop = asyncio.Event()
    api = FragileApi(coordinator)
    running = asyncio.create_task(learn(learner_config(tmp_path, max_sequence_tokens=3), api, stop=stop))
    await fill(coordinator, QUEUE)
    await api.wait_for("abandon_groups", QUEUE)

    stop.set()

    await running
    status = await coordinator.get_status()
    assert sum(status.ledger.dropped.values()) == QUEUE
    assert status.ledger.is_balanced


async def test_step_is_undone_when_its_groups_are_refused(coordinator, tmp_path):
    """The refused groups leave no trace in the weights: the result is that of the other groups alone."""
    backend, loop = NumpyBackend(), asyncio.get_running_loop()
    third = GroupId(site=SITE, incarnation=INCARNATION, sequence=3)

    def steal():
        # While the second step computes, one of its groups is given up behind the learner's back.
        if len(backend.trained) == 1:
            stealing = coordinator.abandon_groups(epoch=1, ids=[third], reason="test")
            asyncio.run_coroutine_threadsafe(stealing, loop).result(30)

    backend.on_step = steal
    filling = asyncio.create_task(fill(coordinator, QUEUE))

    result = await learn(learner_config(tmp_path, max_steps=2), coordinator, backend)

    await filling
    assert (result.step, result.version) == (2, 2)
    assert (await coordinator.get_status()).ledger.consumed == 4
    # Step 1 on groups 1 and 2; step 2 first on 3 and 4, undone; then, oldest first, on 4 and 5.
    assert [[group_id.sequence for group_id in ids] for ids in backend.trained] == [[1, 2], [3, 4], [4, 5]]
    reference = NumpyBackend()
    for first, second in ((1, 2), (4, 5)):
        reference.train_step([queued(first), queued(second)], head_version=0, step=1)
    assert (backend.weights == reference.weights).all()


async def test_last_version_has_a_checkpoint_whatever_the_cadence(coordinator, tmp_path):
    config = learner_config(tmp_path, checkpoint_every_versions=100)

    await asyncio.gather(learn(config, coordinator), fill(coordinator, QUEUE))

    names = sorted(path.name for path in (config.state_dir / "checkpoints").iterdir())
    assert names == ["v00000000", "v00000003"]
    # So a longer run goes on from it, and no version is abandoned.
    assert (await learn(config, coordinator)).version == 3


@pytest.mark.parametrize("not_finite", [set(), {1}])
async def test_stream_names_only_what_is_still_open_when_it_is_opened_again(coordinator, tmp_path, not_finite):
    api = FragileApi(coordinator, fail_after={("stream_groups.item", 5): Unreachable("cut")})
    backend = NumpyBackend()
    backend.not_finite_steps = not_finite
    config = learner_config(tmp_path, max_steps=2, overlap_publication=False)

    await asyncio.gather(learn(config, api, backend), fill(coordinator, QUEUE))

    # Group 5 comes when 3 and 4 are taken, and those are taken when 1 and 2 are consumed (or given up).
    assert api.held[0] == []
    assert not {1, 2} & set(api.held[1])
    assert 5 in api.held[1]


async def test_steps_that_are_not_finite_are_counted_in_a_row(coordinator, tmp_path):
    backend = NumpyBackend()
    backend.not_finite_steps = {1, 3}
    config = learner_config(tmp_path, max_steps=2, max_rejected_steps=2)

    result, _ = await asyncio.gather(learn(config, coordinator, backend), fill(coordinator, 8))

    assert result.is_finished


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"most_groups_per_version": 1}, "a version needs 2 groups, and the coordinator hands out at most 1 at once"),
        ({"max_message_bytes": 1 << 40}, "max_message_bytes: .* is below the coordinator's, 1099511627776"),
    ],
)
async def test_a_coordinator_that_starts_again_with_limits_of_no_version_ends_the_learner(tmp_path, limits, problem):
    core = await open_coordinator(tmp_path, learner_lease_s=0.3)

    class Restarted(FragileApi):
        async def renew_lease(self, **asked):
            return dataclasses.replace(await core.renew_lease(**asked), **limits)

    with pytest.raises(ConfigError, match=problem):
        await learn(learner_config(tmp_path), Restarted(core))

    assert (await core.get_status()).learner == "", "its lease is free"
    await core.close()
