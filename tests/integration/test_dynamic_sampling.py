"""A task of which 70 % of the groups have equal rewards: the learner replaces them, over a real server and real pacing."""

import asyncio
import dataclasses

import pytest

from heterorl.common.errors import Draining, Unreachable
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.rollout import DropReason, PushStatus
from heterorl.common.types.run import Registration
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.policy_servicer import PolicyServicer
from heterorl.coordinator.servicers.rollout_servicer import RolloutServicer
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.v1 import policy_pb2_grpc, rollout_pb2_grpc, run_pb2_grpc
from tests.support.learner_world import (
    INCARNATION,
    SITE,
    FragileApi,
    Killed,
    NumpyBackend,
    head_root,
    learn,
    learner_config,
    make_contract,
    make_group,
    open_coordinator,
)
from tests.support.links import PLAINTEXT

STEPS, GROUPS_PER_STEP, MOST_OUTSTANDING = 5, 4, 8


class Site:
    """One sampler: leases what pacing grants, generates with the head at once, and pushes."""

    def __init__(self, client, learner, *, tenths, contract=None):
        self.client, self.learner, self.tenths = client, learner, tenths
        self.contract = contract or make_contract()
        self.assignments = []
        self.most_outstanding = 0

    def is_uniform(self, sequence):
        """Of ten groups in a row, whichever, so many are."""
        return 7 * sequence % 10 < self.tenths

    def has_equal_rewards(self, work):
        return self.is_uniform(len(self.assignments))

    async def run(self):
        """Until the run drains."""
        async for update in self.client.watch_head(after_version=-1):
            head = update.version
            break
        await self.client.register(
            Registration(
                site=SITE, incarnation=INCARNATION, contract=self.contract, engine="test", dtype="fp32",
                max_delay_versions=0,
            )
        )  # fmt: skip
        while True:
            heard, status = len(self.learner.answers), await self.client.get_status()
            self.most_outstanding = max(self.most_outstanding, status.ledger.pending + status.ledger.leased)
            head = status.head_version
            try:
                grant = await self.client.lease_work(
                    site=SITE, incarnation=INCARNATION, max_groups=64, policy_version=head
                )
            except Draining:
                return
            if grant.assignments:
                await self.push(grant.assignments, head)
                continue
            # Room comes with what the learner says.
            async with self.learner.answered:
                await self.learner.answered.wait_for(lambda heard=heard: len(self.learner.answers) > heard)

    async def push(self, assignments, head):
        manifest = manifest_from_bytes((await self.client.get_signed_manifest(version=head)).data)
        groups = []
        for work in assignments:
            self.assignments.append(work.id)
            group = make_group(
                len(self.assignments), assignment=work.id, prompt_index=work.prompt_index, version=head,
                state_root=manifest.state_root,
            )  # fmt: skip
            if self.has_equal_rewards(work):
                rollouts = tuple(
                    dataclasses.replace(rollout, reward=1.0, reward_parts=()) for rollout in group.rollouts
                )
                group = dataclasses.replace(group, rollouts=rollouts)
            groups.append(group)
        outcomes = await self.client.push_groups(groups)
        assert {outcome.status for outcome in outcomes} == {PushStatus.ACCEPTED}


@pytest.fixture
async def served(tmp_path):
    core = await open_coordinator(
        tmp_path, groups_per_version=GROUPS_PER_STEP, max_outstanding_groups=MOST_OUTSTANDING, max_staleness_versions=2
    )
    server = Server(CoordinatorConfig(max_message_bytes=16 << 20, max_concurrent_rpcs=64, run_id="run", tls=PLAINTEXT))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(core.policy, core.lease), server.grpc)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(core.rollout), server.grpc)
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    port = await server.start("127.0.0.1:0")
    async with CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT) as client:
        yield core, client
        await core.end_streams()
    await server.stop(1.0)
    await core.close()


def config_of(tmp_path, room):
    return learner_config(
        tmp_path, groups_per_step=GROUPS_PER_STEP, max_steps=STEPS,
        dynamic_sampling={"max_replaced_per_step": room},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tenths", "room", "useful", "replaced"),
    [
        pytest.param(7, 0, 0.3, 0, id="before"),
        # Groups 1, 4 and 7 of each ten have signal, so the twentieth of them is group 64.
        pytest.param(7, 64, 1.0, 64 - STEPS * GROUPS_PER_STEP, id="after"),
        pytest.param(10, 3, 0.0, STEPS * 3, id="solved task"),
    ],
)
async def test_share_of_useful_groups(served, tmp_path, tenths, room, useful, replaced):
    _, client = served
    # One answer is lost: the same groups are given up again, and count once.
    learner = FragileApi(client, fail_after={("abandon_groups", 2): Unreachable("cut")})
    site, backend = Site(client, learner, tenths=tenths), NumpyBackend()

    _, result = await asyncio.gather(site.run(), learn(config_of(tmp_path, room), learner, backend))

    assert result.is_finished
    trained = [group_id.sequence for step in backend.trained for group_id in step]
    assert [len(step) for step in backend.trained] == [GROUPS_PER_STEP] * STEPS, "batches keep their size"
    num_useful = sum(not site.is_uniform(sequence) for sequence in trained)
    assert num_useful / len(trained) == useful
    status = await client.get_status()
    dropped = {reason: count for reason, count in status.ledger.dropped.items() if count}
    assert dropped == ({DropReason.UNIFORM: replaced} if replaced else {})
    assert status.ledger.is_balanced
    assert status.ledger.consumed == STEPS * GROUPS_PER_STEP
    reports = await client.list_steps(after_step=0, limit=STEPS)
    assert sum(report.num_replaced for report in reports) == replaced
    assert site.most_outstanding <= MOST_OUTSTANDING, "pacing holds"
    assert len(set(site.assignments)) == len(site.assignments), "no prompt of a replaced group comes back"
    assert status.sites[0].groups_failed == 0


class SiteOfPrompts(Site):
    """Equal rewards are the prompts': of each ten so many are solved."""

    def has_equal_rewards(self, work):
        return self.is_uniform(work.prompt_index)


async def replaced_with(outside_share, directory):
    """How many groups ten steps replace, of 20 prompts of which 14 are solved."""
    contract = make_contract(num_prompts=20)
    core = await open_coordinator(
        directory, groups_per_version=GROUPS_PER_STEP, max_outstanding_groups=MOST_OUTSTANDING,
        max_staleness_versions=2, difficulty={"outside_share": outside_share},
    )  # fmt: skip
    learner = FragileApi(core)
    site = SiteOfPrompts(core, learner, tenths=7, contract=contract)
    config = learner_config(
        directory, groups_per_step=GROUPS_PER_STEP, max_steps=10, dynamic_sampling={"max_replaced_per_step": 64}
    )
    await asyncio.gather(site.run(), learn(config, learner, contract=contract))
    status = await core.get_status()
    await core.close()
    assert (status.ledger.consumed, status.ledger.is_balanced) == (10 * GROUPS_PER_STEP, True)
    assert len(set(site.assignments)) == len(site.assignments)
    return status.ledger.dropped[DropReason.UNIFORM], status.prompts


async def test_window_of_difficulty_spares_samplers_what_would_be_replaced(tmp_path):
    without, nothing = await replaced_with(1.0, tmp_path / "without")
    window, prompts = await replaced_with(0.1, tmp_path / "window")

    # 40 groups of three in ten prompts come with about 93 others; with the window, with those of the first pass.
    assert nothing is None
    assert (prompts.in_window, prompts.too_easy, prompts.unseen) == (6, 14, 0)
    assert without > 80
    assert window < without / 2


async def test_kill_between_replacement_and_step_changes_nothing(served, tmp_path):
    core, client = served
    config = config_of(tmp_path, 64)
    first = FragileApi(client, die_after=("abandon_groups", 5))
    second = FragileApi(client)
    first.answers = second.answers
    first.answered = second.answered
    site = Site(client, second, tenths=7)
    sampling = asyncio.create_task(site.run())

    with pytest.raises(Killed):
        await learn(config, first)
    backend = NumpyBackend()
    assert (await learn(config, second, backend)).is_finished
    await sampling

    status = await client.get_status()
    assert status.ledger.is_balanced
    assert status.ledger.consumed == STEPS * GROUPS_PER_STEP
    assert all(not site.is_uniform(one.sequence) for step in backend.trained for one in step)
    reference = await open_coordinator(
        tmp_path / "reference", groups_per_version=GROUPS_PER_STEP, max_outstanding_groups=MOST_OUTSTANDING,
        max_staleness_versions=2,
    )  # fmt: skip
    learner = FragileApi(reference)
    await asyncio.gather(
        Site(reference, learner, tenths=7).run(), learn(config_of(tmp_path / "reference", 64), learner)
    )
    assert await head_root(core) == await head_root(reference)
    await reference.close()
