"""Many simulated samplers in one process: each registers, watches, beats, leases work and pushes small groups.

Each has a connection of its own. What is asked goes over stdin and the answers over stdout, a JSON line each: `idle`
(only watches and heartbeats) and `load` (work as well, at a fixed rate of all sites together, whatever the answers
take). An empty unary call to another process is timed all the while: what this machine and gRPC cost by themselves.

    python -m benchmarks.site_load '{"address": "127.0.0.1:50051", "reference": "127.0.0.1:50052", "sites": 10, ...}'
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import FinishReason, Group, GroupId, RewardPart, Rollout, Span
from heterorl.common.wire.common_messages import contract_from_bytes, contract_to_pb
from heterorl.common.wire.rollout_messages import pushes_to_pb
from heterorl.common.wire.sealed_groups import seal
from heterorl.v1 import common_pb2, policy_pb2, policy_pb2_grpc, rollout_pb2, rollout_pb2_grpc, run_pb2, run_pb2_grpc

EMPTY = "/bench.Reference/Empty"
TOKENS = 64
GROUP_SIZE = 2


@dataclass(kw_only=True)
class Samples:
    """Seconds that calls took, by name, and groups by outcome."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    groups: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def taken(self) -> dict[str, Any]:
        """What was sampled since the last call."""
        found = {"seconds": dict(self.seconds), "groups": dict(self.groups)}
        self.seconds.clear()
        self.groups.clear()
        return found


class Site:
    """One simulated sampler."""

    def __init__(self, number: int, options: dict[str, Any], samples: Samples) -> None:
        self.name, self.incarnation = f"site-{number:04}", f"{number:08x}"
        self.samples = samples
        self.head = int(options["head"])
        self._root = options["root"]
        self._sequence = 0
        # Options that no other channel has: gRPC joins connections of equal channels within a process.
        self._channel = grpc.aio.insecure_channel(
            options["address"], options=[("grpc.use_local_subchannel_pool", 1), ("heterorl.number", number)]
        )
        self._run = run_pb2_grpc.RunServiceStub(self._channel)
        self._rollout = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._policy = policy_pb2_grpc.PolicyServiceStub(self._channel)

    async def register(self, contract: common_pb2.Contract) -> None:
        """Join the run."""
        started = time.perf_counter()
        answer = await self._run.Register(
            run_pb2.RegisterRequest(
                site=self.name,
                incarnation=self.incarnation,
                contract=contract,
                engine="bench",
                dtype="fp32",
                work_ahead_s=600.0,
            )
        )
        self._sequence = answer.next_sequence - 1
        self.samples.seconds["register"].append(time.perf_counter() - started)

    async def watch(self) -> None:
        """Follow the head."""
        async for update in self._policy.WatchHead(policy_pb2.WatchHeadRequest(after_version=-1)):
            self.head = update.version
            self.samples.groups["heads"] += 1

    async def beat(self, interval_s: float, rng: random.Random) -> None:
        """Say that it lives, as a sampler does."""
        await asyncio.sleep(rng.random() * interval_s)
        message = run_pb2.HeartbeatRequest(
            site=self.name, incarnation=self.incarnation, state_root=self._root, tokens_per_s=100.0
        )
        while True:
            message.policy_version = self.head
            started = time.perf_counter()
            await self._run.Heartbeat(message)
            self.samples.seconds["heartbeat"].append(time.perf_counter() - started)
            await asyncio.sleep(interval_s)

    async def work(self, interval_s: float, count: int, rng: random.Random) -> None:
        """Lease some work and push its groups, again and again at even intervals."""
        due = time.perf_counter() + rng.random() * interval_s
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += interval_s
            version = self.head
            started = time.perf_counter()
            grant = await self._rollout.LeaseWork(
                rollout_pb2.LeaseWorkRequest(
                    site=self.name,
                    incarnation=self.incarnation,
                    max_groups=count,
                    policy_version=version,
                    request_id=f"r{self._sequence}",
                )
            )
            self.samples.seconds["lease"].append(time.perf_counter() - started)
            messages = [self._group(assignment, version) for assignment in grant.assignments]
            if messages:
                started = time.perf_counter()
                async for answer in self._rollout.PushGroups(_each(messages)):
                    for outcome in answer.outcomes:
                        self.samples.groups[rollout_pb2.PushStatus.Name(outcome.status)] += 1
                self.samples.seconds["push"].append(time.perf_counter() - started)
            else:
                self.samples.groups["refused leases"] += 1

    def _group(self, work: rollout_pb2.WorkAssignment, version: int) -> rollout_pb2.PushGroupsRequest:
        self._sequence += 1
        rollout = Rollout(
            token_ids=np.arange(TOKENS, dtype=np.int32),
            sampler_logprobs=np.full(TOKENS, -1.0, np.float32),
            spans=(Span(version=version, start=0, end=TOKENS),),
            reward=1.0,
            reward_parts=(RewardPart(name="correct", value=1.0),),
            finish_reason=FinishReason.LENGTH,
        )
        group = Group(
            id=GroupId(site=SiteId(self.name), incarnation=self.incarnation, sequence=self._sequence),
            assignment=work.id,
            prompt_index=work.prompt_index,
            prompt_token_ids=np.arange(8, dtype=np.int32),
            rollouts=(rollout,) * GROUP_SIZE,
            oldest_version=version,
            state_root=Digest(self._root),
            generation_s=1.0,
        )
        (message,) = pushes_to_pb([seal(group)], limit_bytes=1 << 20)
        return message


async def _each(messages: list[rollout_pb2.PushGroupsRequest]) -> AsyncIterator[rollout_pb2.PushGroupsRequest]:
    for message in messages:
        yield message


async def _time_reference(address: str, samples: Samples) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        empty = channel.unary_unary(EMPTY)
        while True:
            started = time.perf_counter()
            await empty(b"")
            samples.seconds["reference"].append(time.perf_counter() - started)
            await asyncio.sleep(0.02)


async def _during(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Let tasks run for a while; the first that fails ends everything."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def serve(options: dict[str, Any]) -> None:
    """Do what stdin says."""
    samples, rng = Samples(), random.Random(0)
    contract = contract_to_pb(contract_from_bytes(bytes.fromhex(options["contract"])))
    sites = [Site(number, options, samples) for number in range(options["sites"])]
    for site in sites:
        await site.register(contract)
    # The pauses of this process are no latency of the coordinator.
    gc.freeze()
    background = [asyncio.create_task(site.watch()) for site in sites]
    background += [asyncio.create_task(site.beat(options["heartbeat_s"], rng)) for site in sites]
    background.append(asyncio.create_task(_time_reference(options["reference"], samples)))
    print(json.dumps(samples.taken()), flush=True)
    loop = asyncio.get_running_loop()
    while (line := await loop.run_in_executor(None, sys.stdin.readline)).strip():
        order = json.loads(line)
        samples.taken()
        working: list[asyncio.Task[None]] = []
        if order["rate"]:
            interval_s = options["sites"] * order["count"] / order["rate"]
            working = [asyncio.create_task(site.work(interval_s, order["count"], rng)) for site in sites]
        await _during([*background, *working], order["seconds"])
        print(json.dumps(samples.taken()), flush=True)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    for task in background:
        task.cancel()


async def answer_empty() -> None:
    """Be the bare server of the reference until stdin ends; says its port."""

    async def empty(_: bytes, _context: object) -> bytes:
        return b""

    server = grpc.aio.server()
    service, _, method = EMPTY[1:].partition("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(empty)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(answer_empty() if sys.argv[1] == "reference" else serve(json.loads(sys.argv[1])))
