"""A coordinator over gRPC whose groups the test pushes itself, to feed a learner step by step."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from heterorl.common.types.common import Contract
from heterorl.common.types.rollout import FinishReason, PushStatus, Rollout
from heterorl.common.types.run import Registration
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.policy_servicer import PolicyServicer
from heterorl.coordinator.servicers.rollout_servicer import RolloutServicer
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.v1 import policy_pb2_grpc, rollout_pb2_grpc, run_pb2_grpc
from tests.support.learner_world import INCARNATION, SITE, make_group, open_coordinator
from tests.support.links import PLAINTEXT


@contextlib.asynccontextmanager
async def served_coordinator(directory: Path) -> AsyncIterator[tuple[Coordinator, int]]:
    """The coordinator and its port."""
    core = await open_coordinator(directory)
    server = Server(CoordinatorConfig(max_message_bytes=16 << 20, max_concurrent_rpcs=64, run_id="run", tls=PLAINTEXT))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(core.policy, core.lease), server.grpc)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(core.rollout), server.grpc)
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    port = await server.start("127.0.0.1:0")
    try:
        yield core, port
    finally:
        await core.end_streams()
        await server.stop(1.0)
        await core.close()


def fed_config(directory: Path, coordinator: str, backend: dict[str, Any]) -> dict[str, Any]:
    """A learner's, of a tiny model of sums; two groups are a step, four steps the run."""
    return {
        "coordinator": coordinator,
        "tls": {"insecure": True},
        "model_dir": str(directory / "model"),
        "state_dir": str(directory / "learner"),
        "task": {"name": "arithmetic", "digits": 1},
        "sampling": {"max_new_tokens": 8},
        "group_size": 2,
        "groups_per_step": 2,
        "max_steps": 4,
        "metrics_port": 0,
        "backend": {"lr": 1e-3, "threads": 1, **backend},
        # The test pushes groups of no task.
        "verification": {"recompute_rewards": False},
    }


async def head_of(core: Coordinator, version: int) -> int:
    async for update in core.watch_head(after_version=version - 1):
        return update.version
    raise AssertionError("the stream ended")


def _ended(rollout: Rollout, eos_token_id: int) -> Rollout:
    """The rollout with tokens of the tiny vocabulary, the end token at its end alone."""
    ids = rollout.token_ids % 16
    ids[ids == eos_token_id] = (eos_token_id + 1) % 16
    ids[-1] = eos_token_id
    return dataclasses.replace(rollout, token_ids=ids, finish_reason=FinishReason.EOS)


async def push(core: Coordinator, contract: Contract, numbers: Sequence[int]) -> None:
    head = (await core.get_status()).head_version
    manifest = manifest_from_bytes((await core.get_signed_manifest(version=head)).data)
    await core.register(
        Registration(
            site=SITE, incarnation=INCARNATION, contract=contract, engine="test", dtype="fp32", max_delay_versions=0
        )
    )
    grant = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=len(numbers), policy_version=head)
    groups = []
    for number, work in zip(numbers, grant.assignments, strict=True):
        group = make_group(
            number, assignment=work.id, prompt_index=work.prompt_index, version=head, state_root=manifest.state_root
        )
        rollouts = tuple(_ended(entry, contract.end_token_ids[0]) for entry in group.rollouts)
        groups.append(dataclasses.replace(group, rollouts=rollouts))
    outcomes = await core.push_groups(groups)
    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * len(groups)


async def until_leased(core: Coordinator, count: int) -> None:
    while (await core.get_status()).ledger.leased < count:  # noqa: ASYNC110 - a lease rings no bell
        await asyncio.sleep(0.05)
