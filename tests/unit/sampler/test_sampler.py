"""A whole sampler in one process, against a real coordinator, on a clock that the test moves."""

import asyncio
import dataclasses
import json
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import ContractMismatch, CorruptStore, DiskFull, InvalidRequest, NotRegistered, Unreachable
from heterorl.common.generation.inference_engine import ScoredText
from heterorl.common.process import notify
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.policy import HeadUpdate
from heterorl.common.types.rollout import PushOutcome, PushStatus, WorkAssignment, WorkGrant
from heterorl.common.types.run import Command
from heterorl.sampler import sampler_app
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.sampler.trust_record import RunReplaced
from tests.support.certificates import Certificates
from tests.support.limits import WAIT_S
from tests.support.run import CONTRACT
from tests.support.sampler_world import World


@pytest.fixture
async def world(tmp_path):
    world = await World.open(tmp_path)
    yield world
    await world.close()


async def generating(world, *, batches=1):
    await world.run.publish()
    world.start()
    await world.until(lambda: world.engine.num_batches >= batches)


# ---- the run of its certificate


@pytest.mark.parametrize("run", ["run", "other"])
async def test_first_version_of_another_run_than_the_certificates_is_not_fetched(world, tmp_path, run):
    world.settings = {"tls": Certificates(tmp_path / "ca", run=run).tls("sampler")}
    await world.run.publish()
    world.start()
    if run == "run":
        await world.until(lambda: world.engine.num_batches >= 1)
        return

    with pytest.raises(RunReplaced, match="version 0 is of run run, this site works for other"):
        await world.until(lambda: world.engine.num_batches >= 1)
    assert world.link.calls["read_payload"] == 0
    with pytest.raises(RunReplaced):
        await world.end()


# ---- the canary


async def test_sampler_whose_engine_is_off_gets_no_work_until_a_version_is_right(world):
    world.canary = (ScoredText(prompt=np.array([2], np.int32), completion=np.array([5, 1], np.int32)),)
    stated = (-0.5, -1.0)
    world.start()
    world.engine.scores = np.array([-1.5, -2.0], np.float32)
    await world.core.publish_version(dataclasses.replace(await world.run.prepare(), canary=stated))
    world.run.head = 0
    await world.until(lambda: world.link.calls["lease_work"] >= 3)
    (site,) = (await world.core.get_status()).sites
    assert world.engine.num_batches == 0
    assert "1 nats off" in site.quarantine

    world.engine.scores = np.array(stated, np.float32)
    await world.core.publish_version(dataclasses.replace(await world.run.prepare(), canary=stated))
    await world.until(lambda: world.engine.num_batches >= 1)
    assert world.engine.version == 1
    assert world.link.calls["report_canary"] == 2


# ---- T7: no verified version, no work


async def test_sampler_that_starts_before_any_version_asks_for_no_work(world):
    """T7: nothing is leased nor generated until a version is verified; then it begins by itself."""
    world.start()
    await world.until(lambda: world.link.calls["heartbeat"] >= 20)

    assert world.link.calls["lease_work"] == 0
    assert world.engine.num_batches == 0
    await world.run.publish()
    await world.until(lambda: world.engine.num_batches >= 1)
    assert world.engine.loaded == [(0, world.run.roots[0])]


async def test_sampler_whose_weights_fail_verification_never_generates(world):
    """T7: damaged bytes are tried again ever more rarely, and nothing is generated meanwhile."""
    await world.run.publish()

    async def read_payload(**wanted):
        async for frame in world.core.read_payload(**wanted):
            yield frame[:-1] + bytes([frame[-1] ^ 1])

    world.link.replaced["read_payload"] = read_payload
    world.start()
    await world.until(lambda: world.link.calls["read_payload"] >= 5, step_s=1.0)
    assert (world.link.calls["lease_work"], world.engine.loaded) == (0, [])

    del world.link.replaced["read_payload"]
    await world.until(lambda: world.engine.num_batches >= 1, step_s=1.0)
    assert world.engine.loaded == [(0, world.run.roots[0])]


async def test_restarted_sampler_gets_no_work_until_it_has_verified_again(world):
    """T7: what an earlier process verified does not count for this one."""
    await generating(world)
    world.stop.set()
    await world.end()

    async def read_payload(**wanted):
        raise Unreachable("cut")
        yield b""

    world.link.replaced["read_payload"] = read_payload
    asked = world.link.calls["lease_work"]
    world.start()
    await world.until(lambda: world.link.calls["read_payload"] >= 8)

    assert world.link.calls["lease_work"] == asked
    assert world.engine.loaded == []


async def test_failing_pull_leaves_the_sampler_generating_with_what_it_has(world):
    """T20: a weight update that fails is bounded and visible, and the old version goes on."""
    await generating(world)

    async def plan_pull(**wanted):
        raise OSError("disk")

    world.link.replaced["plan_pull"] = plan_pull
    await world.run.publish()
    await world.until(lambda: world.link.calls["plan_pull"] >= 4, step_s=1.0)
    before = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches >= before + 3)

    assert world.engine.version == 0
    del world.link.replaced["plan_pull"]
    await world.until(lambda: world.engine.version == 1, step_s=1.0)


# ---- heartbeats and orders


@pytest.mark.parametrize("error", [Unreachable("cut"), InvalidRequest("tokens_per_s"), ContractMismatch("no")])
async def test_failing_heartbeats_never_stop_generation(world, error):
    await generating(world)

    async def heartbeat(report):
        raise error

    world.link.replaced["heartbeat"] = heartbeat
    asked, batches = world.link.calls["heartbeat"], world.engine.num_batches
    await world.until(lambda: world.link.calls["heartbeat"] >= asked + 5 and world.engine.num_batches >= batches + 5)

    assert not world.is_ended


async def test_forgotten_sampler_registers_again_when_a_heartbeat_says_so(world):
    await generating(world)
    registered = world.link.calls["register"]
    orders = [(Command.REGISTER,)]

    async def heartbeat(report):
        return orders.pop() if orders else ()

    world.link.replaced["heartbeat"] = heartbeat
    await world.until(lambda: world.link.calls["register"] == registered + 1)

    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)


async def test_drain_empties_the_outbox_before_the_end_whatever_the_delay(world):
    world.settings = {"delay": {"kind": "fixed", "value": 3600.0}}
    await generating(world, batches=2)
    await world.until(lambda: world.spooled() >= 2)
    assert world.link.calls["push_groups"] == 0

    await world.core.drain(reason="enough")
    await world.until(lambda: world.sampler.session.is_draining)
    await world.until(lambda: world.is_ended)
    held = world.spooled()
    await world.end()

    assert held == 0
    assert await world.ledger_acked() == 2 * world.engine.num_batches


async def test_a_full_disk_does_not_end_a_drain(world, caplog):
    world.settings = {"delay": {"kind": "fixed", "value": 60.0}}
    await generating(world, batches=2)
    await world.until(lambda: world.spooled() >= 2)

    def full(instant):
        raise DiskFull("/state")

    world.sampler.generation.outbox.release_by = full
    await world.core.drain(reason="enough")
    await world.until(lambda: world.is_ended)
    await world.end()

    assert world.spooled() == 0
    assert "the drain waits for the delays of groups: no space left under /state" in caplog.text


async def test_sampler_that_starts_in_a_complete_run_ends_and_says_how_to_go_on(world, caplog):
    caplog.set_level("INFO")
    await world.run.publish()
    await world.core.drain(reason="step 60 of 60 is reached")

    world.start()
    await world.until(lambda: world.is_ended)
    await world.end()

    assert "to go on: raise max_steps, start the learner, and samplers when it holds the lease" in caplog.text


async def test_drain_waits_out_an_outage_rather_than_leave_groups_behind(world):
    world.settings = {"delay": {"kind": "fixed", "value": 3600.0}}
    await generating(world, batches=2)

    async def push_groups(groups):
        raise Unreachable("cut")

    # Before the drain: between hearing of it and an empty outbox there may be no instant to break the link in.
    world.link.replaced["push_groups"] = push_groups
    await world.core.drain(reason="enough")
    await world.until(lambda: world.sampler.session.is_draining)
    world.link.is_down = True
    await world.passed(300.0, step_s=1.0)
    assert not world.is_ended
    assert world.spooled() > 0

    world.link.is_down = False
    del world.link.replaced["push_groups"]
    await world.end()
    assert await world.ledger_acked() == 2 * world.engine.num_batches


async def test_stop_ends_at_once_and_keeps_the_outbox(world):
    world.settings = {"delay": {"kind": "fixed", "value": 3600.0}}
    await generating(world, batches=2)
    await world.until(lambda: world.spooled() >= 2)
    # Held, so that the stop always finds one batch under way: what ends beside it may be spooled or handed back.
    world.engine.proceed.clear()
    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)

    async def heartbeat(report):
        return (Command.STOP,)

    world.link.replaced["heartbeat"] = heartbeat
    await world.until(lambda: world.is_ended)
    held = world.spooled()
    await world.end()

    assert held == 2 * batches
    assert world.link.calls["push_groups"] == 0


async def test_stop_keeps_what_has_ended_and_hands_back_what_is_under_way(world):
    world.settings = {"delay": {"kind": "fixed", "value": 3600.0}}
    await generating(world)
    await world.until(lambda: world.spooled() >= 2)
    world.engine.proceed.clear()
    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)
    began, stopped = world.clock.monotonic(), world.link.calls["abandon_work"]
    world.stop.set()
    await world.end()

    assert world.clock.monotonic() - began < 5.0
    assert world.link.calls["abandon_work"] == stopped + 1
    outbox = Outbox(world.directory / "site")
    assert outbox.level().num_groups == outbox.next_sequence - 1 == 2 * batches
    outbox.close()
    leased = "SELECT count(*) FROM work WHERE is_leased = 1 AND assignment >= ?"
    assert await world.core.database.run(lambda c: c.execute(leased, (2 * batches,)).fetchone()) == (0,)


@pytest.mark.parametrize("call", ["abandon_work", "heartbeat"])
async def test_stop_does_not_wait_for_a_coordinator_that_is_away(world, call):
    await generating(world)
    world.engine.proceed.clear()
    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)

    async def hang(*report, **given):
        await asyncio.Event().wait()

    world.link.replaced[call] = hang
    began = world.clock.monotonic()
    world.stop.set()
    await world.end()

    assert 2.0 < world.clock.monotonic() - began < 5.0


async def test_last_report_says_that_the_site_stopped_and_its_next_start_clears_it(world):
    await generating(world)
    world.stop.set()
    await world.end()
    assert (await world.core.get_status()).sites[0].is_stopped

    await generating(world)
    reports = world.link.calls["heartbeat"]
    await world.until(lambda: world.link.calls["heartbeat"] > reports + 1)
    assert not (await world.core.get_status()).sites[0].is_stopped


async def test_first_registration_ends_at_the_stop(world):
    world.link.is_down = True
    world.start()
    await world.until(lambda: world.link.calls["register"] >= 3)

    world.stop.set()
    await world.end()


# ---- back-pressure and outages


async def test_full_outbox_pauses_generation_and_room_resumes_it(world):
    """T12: nothing is dropped, nothing is generated that cannot be kept."""
    world.settings = {"outbox_bytes": 1 << 16}

    async def push_groups(groups):
        return [PushOutcome(id=group.id, status=PushStatus.RETRY, retry_after_s=5.0) for group in groups]

    world.link.replaced["push_groups"] = push_groups
    await generating(world)
    await world.until(lambda: world.outbox.level().num_bytes >= 1 << 16)
    await world.passed(2.0)
    asked, batches, spooled = world.link.calls["lease_work"], world.engine.num_batches, world.spooled()
    await world.passed(30.0)
    assert (world.link.calls["lease_work"], world.engine.num_batches) == (asked, batches)
    assert spooled == world.spooled() == 2 * batches

    del world.link.replaced["push_groups"]
    await world.until(lambda: world.engine.num_batches > batches)


@pytest.mark.slow
async def test_outage_loses_nothing_and_ends_by_itself(world):
    await generating(world, batches=2)
    world.link.is_down = True
    await world.passed(600.0, step_s=1.0)
    made = 2 * world.engine.num_batches
    calls = world.link.calls.copy()
    await world.passed(600.0, step_s=1.0)
    # Every caller waits at least half a cap on average once its delays have grown: 600 s / 7.5 s = 80 calls, and the
    # heartbeat has its own interval. A busy loop would make 600.
    assert world.link.calls["lease_work"] - calls["lease_work"] < 160
    assert world.link.calls["push_groups"] - calls["push_groups"] < 160

    world.link.is_down = False
    # Not until the outbox is empty: generation goes on and fills it again.
    await world.until_acknowledged(made)
    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)


async def test_killed_sampler_pushes_again_under_the_same_ids(world):
    """At-least-once push, exactly-one effect: the coordinator took the groups, its answer was lost, the sampler died."""
    await world.run.publish()
    pushed = []

    async def push_groups(groups):
        pushed.append([group.id for group in groups])
        await world.core.push_groups(groups)
        world.link.is_down = True
        raise Unreachable("the answer is lost")

    world.link.replaced["push_groups"] = push_groups
    world.start()
    # Not merely until it pushes: a link that breaks after the restart would stay broken.
    await world.until(lambda: world.link.is_down)
    acked = await world.ledger_acked()
    await world.kill()

    outcomes = []

    async def push_again(groups):
        answers = await world.core.push_groups(groups)
        outcomes.extend(answers)
        return answers

    world.link.is_down = False
    world.link.replaced["push_groups"] = push_again
    world.start()
    await world.until(lambda: len(outcomes) >= len(pushed[0]))

    first = outcomes[: len(pushed[0])]
    assert [outcome.id for outcome in first] == pushed[0]
    assert {outcome.status for outcome in first} == {PushStatus.DUPLICATE}
    assert acked == len(pushed[0])
    sequences = [outcome.id.sequence for outcome in outcomes]
    assert sequences == sorted(set(sequences)), "a new group has an old id"


async def test_group_without_a_score_is_given_back_and_not_pushed(world):
    """T13: a verifier that fails is no zero reward."""
    await world.run.publish()
    world.task.is_failing = True
    world.start()
    await world.until(lambda: world.link.calls["abandon_work"] >= 2)

    assert world.spooled() == 0
    assert world.link.calls["push_groups"] == 0


# ---- errors that end the process


async def test_contract_mismatch_ends_with_itself(world):
    async def register(registration):
        return await world.core.register(
            dataclasses.replace(registration, contract=dataclasses.replace(CONTRACT, vocab_size=21))
        )

    world.link.replaced["register"] = register
    world.start()
    with pytest.raises(ContractMismatch, match=r"vocab_size.*set model_dir to the run's model"):
        await world.end()


async def test_error_of_a_loop_ends_all_of_them_with_itself(world):
    await generating(world)

    def put(groups, *, release):
        raise CorruptStore("state_dir")

    world.outbox.put = put
    with pytest.raises(CorruptStore, match="backup"):
        await world.end()


async def test_full_disk_pauses_generation_which_goes_on_by_itself(world, caplog):
    caplog.set_level("INFO")
    await generating(world)
    real, is_full = world.outbox.put, True

    def put(groups, *, release):
        if is_full:
            raise DiskFull("/site/state")
        real(groups, release=release)

    world.outbox.put = put
    await world.until(lambda: bool(world.sampler.generation.reported().problem))
    num_batches, acked = world.engine.num_batches, await world.ledger_acked()
    await world.passed(120.0, step_s=1.0)

    # Alive, idle, and it says why, once.
    assert world.engine.num_batches == num_batches
    assert world.sampler.generation.reported().problem.startswith("no space left under /site/state")
    (status,) = (await world.core.get_status()).sites
    assert status.problem == world.sampler.generation.reported().problem
    assert caplog.text.count("GENERATION PAUSES, 2 groups wait in memory: no space left under /site/state") == 1
    waiting = world.sampler.generation.outbox_writer.num_waiting
    is_full = False
    await world.until(lambda: world.engine.num_batches > num_batches)

    assert world.sampler.generation.reported().problem == ""
    assert "the disk has room again: 2 groups are spooled" in caplog.text
    await world.until_acknowledged(acked + waiting)


async def test_full_disk_does_not_hold_a_stop(world, caplog):
    caplog.set_level("INFO")
    await generating(world)

    def put(groups, *, release):
        raise DiskFull("/site/state")

    world.outbox.put = put
    await world.until(lambda: bool(world.sampler.generation.reported().problem))
    world.stop.set()
    await world.end()

    assert "2 groups are lost, there was no room to spool them" in caplog.text


async def test_a_stop_calls_no_group_lost_that_a_slow_disk_still_writes(world, caplog):
    may_score, begun, may_write, written = (threading.Event() for _ in range(4))
    world.held += [may_score, begun, may_write, written]
    score, world.task.num_workers = world.task.score, 1
    world.task.score = lambda *given: may_score.wait() and score(*given)
    await generating(world)
    real = world.outbox.put

    def put(groups, *, release):
        # The clock need not wait for this thread.
        world.threads.num_busy -= 1
        begun.set()
        may_write.wait()
        world.threads.num_busy += 1
        real(groups, release=release)
        written.set()

    world.outbox.put = put
    world.stop.set()
    await world.passed(1.0)
    may_score.set()
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    await world.until(lambda: world.is_ended)
    may_write.set()
    assert await asyncio.to_thread(written.wait, WAIT_S)

    assert world.spooled() > 0
    assert "are lost" not in caplog.text
    await world.end()


async def test_sampler_says_what_it_does(world, caplog):
    caplog.set_level("INFO")
    await generating(world)
    await world.run.publish()
    started = world.clock.monotonic()

    def said():
        return [record.getMessage() for record in caplog.records if "tokens/s" in record.getMessage()]

    await world.until(lambda: len(said()) >= 2 and "version 1, 0 behind" in said()[-1], step_s=1.0)
    minutes = (world.clock.monotonic() - started) / 60
    world.stop.set()
    await world.end()

    lines = [record.getMessage() for record in caplog.records if record.name.startswith("heterorl.sampler")]
    # At most one a minute, whatever the number of batches.
    assert 2 <= len(said()) <= 2 + minutes
    assert re.fullmatch(r"the sampler made \d+ groups, \d+ tokens/s; version 1, 0 behind the head", said()[-1])
    taken = [line for line in lines if "is used" in line]
    assert [line.split()[1] for line in taken] == ["0", "1"]
    assert "bytes in" in taken[0]
    assert lines[-1].startswith("the sampler has stopped: ")
    assert "groups delivered since the start, 0 not taken" in lines[-1]


@pytest.mark.parametrize(
    "grant",
    [
        {"prompt_index": CONTRACT.num_prompts},
        {"prompt_index": -1},
        {"prompt_index": 2**63 - 1},
        {"seed": 2**64 - 1, "prompt_index": 2**62},
    ],
)
async def test_work_that_is_none_is_not_done(world, grant):
    """A prompt that the task does not have would end the process with an IndexError."""

    async def lease_work(**wanted):
        return WorkGrant(
            assignments=(WorkAssignment(**{"id": 1, "prompt_index": 0, "seed": 1, "lease_s": 9.0, **grant}),),
            reason="", retry_after_s=0.0,
        )  # fmt: skip

    world.link.replaced["lease_work"] = lease_work
    await world.run.publish()
    world.start()
    await world.until(lambda: world.link.calls["lease_work"] > 3)

    assert world.engine.num_batches == 0
    assert not world.is_ended


async def test_more_work_than_was_asked_for_is_left(world):
    async def lease_work(**wanted):
        grant = await world.core.lease_work(**{**wanted, "max_groups": 9})
        return dataclasses.replace(grant, assignments=grant.assignments)

    world.link.replaced["lease_work"] = lease_work
    await world.run.publish()
    world.start()
    await world.until(lambda: world.engine.num_batches > 3)

    assert len(world.engine.submitted) <= 2 * world.engine.num_batches + 2


@pytest.mark.parametrize("next_sequence", [2**63, 2**64 - 1])
async def test_sequence_that_no_run_reaches_does_not_spoil_the_outbox(world, next_sequence):
    async def register(registration):
        answer = await world.core.register(registration)
        return dataclasses.replace(answer, next_sequence=next_sequence)

    world.link.replaced["register"] = register
    world.start()
    await world.until(lambda: world.link.calls["register"] > 3)

    assert world.outbox.next_sequence == 1
    assert not world.is_ended


async def test_head_that_went_back_while_the_sampler_ran_ends_it(world):
    """Nobody tells: the coordinator was restored from an old copy that knows the site, so no registration is asked."""
    await generating(world)

    async def old_watch(*, after_version):
        if after_version < 0:
            yield HeadUpdate(version=0, age_s=0.0)

    world.link.replaced["watch_head"] = old_watch
    world.link.is_down = True
    await world.run.publish()
    await world.until(lambda: world.sampler.policy.head_version == 1)
    world.link.is_down = False

    with pytest.raises(RunReplaced, match="the head is version 0, but version 1 was seen before.*accept-rewind"):
        await world.end()


async def test_head_that_went_back_is_refused_by_a_restarted_sampler(world):
    await generating(world)
    await world.run.publish()
    await world.until(lambda: world.engine.version == 1)
    world.stop.set()
    await world.end()

    async def register(registration):
        return dataclasses.replace(await world.core.register(registration), head_version=0)

    world.link.replaced["register"] = register
    world.start()
    with pytest.raises(RunReplaced, match="the head is version 0, but version 1 was seen before"):
        await world.end()


async def test_version_with_another_state_than_before_is_refused_and_never_generated_with(world):
    path = world.directory / "site" / "versions.jsonl"
    path.parent.mkdir()
    row = {"version": 0, "state_root": "a" * 64, "manifest_digest": "b" * 64, "run_id": "run", "signed_by": "unsigned"}
    path.write_text(json.dumps(row) + "\n")
    await world.run.publish()
    world.start()
    with pytest.raises(RunReplaced, match="version 0 is another than the one used before"):
        await world.end()

    assert world.engine.loaded == []


async def test_registration_during_a_batch_does_not_disturb_its_sequences(world):
    """The coordinator knows more of this incarnation than its restored outbox: the batch under way keeps its ids."""
    await generating(world)
    world.engine.proceed.clear()
    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)
    orders = [(Command.REGISTER,)]

    async def heartbeat(report):
        return orders.pop() if orders else ()

    async def register(registration):
        return dataclasses.replace(await world.core.register(registration), next_sequence=1000)

    world.link.replaced |= {"heartbeat": heartbeat, "register": register}
    registered = world.link.calls["register"]
    await world.until(lambda: world.link.calls["register"] > registered)
    await world.passed(1.0)
    world.engine.proceed.set()
    await world.until(lambda: world.outbox.next_sequence > 1000)

    assert await world.ledger_acked() >= 2


async def test_groups_carry_the_version_that_drew_them_though_a_newer_one_is_staged(world):
    """T8: a swap waits for the end of the batch, and the batch is stamped with what generated it."""
    await generating(world)
    pushed = []

    async def push_groups(groups):
        pushed.extend(groups)
        return await world.core.push_groups(groups)

    world.engine.proceed.clear()
    await world.until(lambda: world.engine.is_held)
    # Nothing new is spooled while the engine holds its batch.
    await world.until(lambda: world.spooled() == 0)
    world.link.replaced["push_groups"] = push_groups
    await world.run.publish()
    await world.until(lambda: world.sampler.policy.take(0) is not None)
    assert world.engine.version == 0
    world.engine.proceed.set()
    await world.until(lambda: any(group.oldest_version == 1 for group in pushed))

    assert any(group.oldest_version == 0 for group in pushed)
    assert all(group.state_root == world.run.roots[group.oldest_version] for group in pushed)
    assert all(group.versions == (group.oldest_version,) for group in pushed)


async def test_coordinator_that_forgets_every_registration_is_not_asked_in_a_circle(world):
    await generating(world)

    async def lease_work(**wanted):
        raise NotRegistered("who are you")

    world.link.replaced["lease_work"] = lease_work
    registered, now = world.link.calls["register"], world.clock.monotonic()
    await world.until(lambda: world.link.calls["register"] >= registered + 12)

    # Delays of up to 1, 2, 4, 8, 15, 15 ... s: 12 take about 60 s; without them, no time at all.
    assert world.clock.monotonic() - now > 20


async def test_sampler_repeats_its_question_until_it_is_answered(world):
    """Otherwise each lost answer parks its assignments until their leases run out."""
    await generating(world)
    asked = []

    async def lease_work(**wanted):
        asked.append(wanted["request_id"])
        grant = await world.core.lease_work(**wanted)
        if len(asked) <= 3:
            raise Unreachable("the answer is lost")
        return grant

    world.link.replaced["lease_work"] = lease_work
    batches = world.engine.num_batches
    await world.until(lambda: len(asked) >= 6 and world.engine.num_batches >= batches + 3)
    assert len(set(asked[:4])) == 1
    assert len(set(asked[3:6])) == 3
    leased = "SELECT count(*) FROM work WHERE is_leased = 1"
    (parked,) = await world.core.database.run(lambda c: c.execute(leased).fetchone())
    assert parked <= 2 * 2, "what it is at and what it asked for, nothing beside"


async def test_sampler_that_runs_has_its_engine_watched(tmp_path, monkeypatch):
    watched = []

    async def run(stop, on_ready):
        watched.append(process.watch.silent_s())

    collector = SimpleNamespace(silent_s=lambda: 7.0)
    sampler = SimpleNamespace(
        session=None, generation=SimpleNamespace(collector=collector), run=run, close=lambda: None
    )

    async def built(*_):
        return sampler

    monkeypatch.setattr(sampler_app, "_built", built)
    process = notify.Process(
        stop=asyncio.Event(), notifier=notify.Notifier(), clock=SystemClock(), watch=notify.Watch()
    )
    config = SamplerConfig(site="eu", state_dir=tmp_path, model_dir="m", metrics_port=0, tls={"insecure": True})
    await sampler_app._sample(config, process)

    assert watched == [7.0]
