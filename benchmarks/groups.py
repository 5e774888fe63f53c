"""Cost of a group at the coordinator: CPU from a push's bytes to the learner's, and for the bytes only.

Every line of the server's own takes part: the door with its scan of bounds, the servicer, the store with its commits, a
lease, the stream to the learner. Only gRPC is left out: messages come from a list and go to one. Beside it stand a copy
of the same bytes in memory, and SQLite alone taking the same bytes with the same commits and giving them back. CPU is
that of the whole process, all threads together; the median of some repeats. Then one group goes from a sampler's outbox
over loopback to a learner, and the calls are counted that turn all its tokens into another form.

    python -m benchmarks.groups --out benchmarks/results/groups.json

`--before` keeps the rows of another file next to these, such as those that an earlier checkout wrote in the same hour.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import logging
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.pull import contract_of
from heterorl.common.api import CoordinatorApi
from heterorl.common.identity.tls import ServerTlsConfig, TlsConfig
from heterorl.common.process.clock import SystemClock
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import Contract, Digest, SiteId
from heterorl.common.types.policy import PayloadKind, PayloadRef, PublishRequest
from heterorl.common.types.rollout import GIVEN, FinishReason, Group, GroupId, RewardPart, Rollout, Span, WorkAssignment
from heterorl.common.types.run import Registration
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import write_snapshot
from heterorl.common.wire.policy_messages import manifest_to_bytes
from heterorl.common.wire.rollout_messages import pushes_to_pb
from heterorl.common.wire.sealed_groups import seal
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.rpc.bounds import PUSH_GROUPS
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.rollout_servicer import RolloutServicer
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.v1 import rollout_pb2, rollout_pb2_grpc

SITE, INCARNATION = SiteId("bench-1"), "b1946ac9"
GROUP_SIZE, PROMPT_TOKENS, VOCABULARY = 8, 200, 150_000
COUNTS = {(64, 1): 1024, (512, 1): 192, (4096, 1): 32, (24_576, 12): 8}
"""Groups of one repeat, by tokens and turns of a rollout. Half of the tokens of several turns are given."""
CONVERSIONS = frozenset({"group_to_pb", "group_from_pb", "seal", "_group_of"})
"""Functions that turn every token of a group into another form."""
_SERVICE = "/heterorl.v1.RolloutService/"


class Channel:
    """Stands for gRPC: one call's context, whose messages are in a list."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages = iter(messages)

    async def read(self) -> Any:
        """The next message."""
        return next(self._messages, grpc.aio.EOF)

    def auth_context(self) -> dict[str, list[bytes]]:
        """Nothing is known of a plaintext link."""
        return {}

    def invocation_metadata(self) -> tuple[()]:
        """No relay carries the call."""
        return ()

    def peer(self) -> str:
        """Where the call comes from."""
        return "ipv4:127.0.0.1:1"


class Handlers:
    """Stands for gRPC's server: keeps the handlers that a service registers."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Take no note of the handlers' other form."""

    def add_registered_method_handlers(self, _: str, handlers: dict[str, Any]) -> None:
        """Keep handlers by the names of their methods."""
        self.by_name.update(handlers)


@dataclasses.dataclass(frozen=True)
class Details:
    """Stands for gRPC's account of a call."""

    method: str


@dataclasses.dataclass(kw_only=True)
class Bench:
    """A coordinator with one version, its learner's lease and one site."""

    core: Coordinator
    server: Server
    handlers: Handlers
    contract: Contract
    epoch: int
    root: Digest
    num_tokens: int
    turns: int
    sequence: int = 0

    @classmethod
    async def open(cls, directory: Path, *, num_tokens: int, turns: int = 1) -> Bench:
        """Open a store and publish version 0."""
        config = CoordinatorConfig(
            run_id="bench", data_dir=directory / "data", max_staleness_versions=1000, max_superseded_s=1e6,
            groups_per_version=1 << 14, max_outstanding_groups=1 << 14, site_pending_bytes=1 << 40,
        )  # fmt: skip
        core = await Coordinator.open(config, SystemClock())
        layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(64,))])
        contract = bench_contract(layout.layout_id, num_tokens, turns)
        grant = await core.acquire_lease(holder="bench", contract=contract, request_id="bench")
        root = await publish(core, Arena(layout), grant.epoch, directory)
        await core.register(
            Registration(
                site=SITE,
                incarnation=INCARNATION,
                contract=contract,
                engine="bench",
                dtype="fp32",
                max_delay_versions=0,
            )
        )
        tls = ServerTlsConfig(insecure=True)
        server = Server(config.model_copy(update={"max_concurrent_rpcs": 64, "run_id": "bench", "tls": tls}))
        servicer, handlers = RolloutServicer(core.rollout), Handlers()
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, handlers)
        return cls(
            core=core, server=server, handlers=handlers, contract=contract, epoch=grant.epoch, root=root,
            num_tokens=num_tokens, turns=turns,
        )  # fmt: skip

    async def call(self, name: str, messages: Sequence[bytes], *, answers: int) -> list[bytes]:
        """The first answers of one rpc of streams, as the bytes that would leave."""

        async def inner(_: object) -> Any:
            return self.handlers.by_name[name]

        handler = await self.server.admission.intercept_service(inner, Details(_SERVICE + name))
        stream = handler.stream_stream(None, Channel(messages))
        left = []
        async for answer in stream:
            left.append(handler.response_serializer(answer))
            if len(left) == answers:
                break
        await stream.aclose()
        return left

    async def groups(self, count: int) -> list[Group]:
        """New groups for new assignments."""
        grant = await self.core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=count, policy_version=0)
        made = []
        for work in grant.assignments:
            self.sequence += 1
            made.append(
                group_of(work, self.sequence, root=self.root, num_tokens=self.num_tokens, turns=self.turns)
            )  # fmt: skip
        return made

    async def close(self) -> None:
        """Close the store."""
        await self.core.close()


def bench_contract(layout_id: Digest, num_tokens: int, turns: int = 1) -> Contract:
    """What a learner of groups of this length would state."""
    base = contract_of(layout_id)
    return dataclasses.replace(
        base, vocab_size=VOCABULARY, num_prompts=1000, group_size=GROUP_SIZE, max_turns=turns,
        max_trajectory_tokens=num_tokens, sampling=dataclasses.replace(base.sampling, max_new_tokens=num_tokens),
    )  # fmt: skip


async def publish(api: CoordinatorApi, arena: Arena, epoch: int, directory: Path) -> Digest:
    """Publish version 0; returns its state root."""
    path = directory / "payload"
    info = write_snapshot(path, arena)
    payload = PayloadRef(
        kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=0, digest=info.digest, num_bytes=info.num_bytes
    )

    async def frames() -> AsyncIterator[bytes]:
        yield path.read_bytes()

    await api.upload_payload(
        epoch=epoch, digest=payload.digest, num_bytes=payload.num_bytes, offset=0, frames=frames()
    )  # fmt: skip
    manifest = build_manifest(
        run_id="bench", epoch=epoch, version=0, parent_version=-1, parent_digest="", layout=arena.layout, step=0,
        info=info, payloads=(payload,),
    )  # fmt: skip
    await api.publish_version(
        PublishRequest(
            epoch=epoch,
            step_id="step-0",
            parent_version=-1,
            lineage_version=-1,
            manifest=manifest_to_bytes(manifest),
            consumed=(),
            reports=(),
        )
    )
    return manifest.state_root


def group_of(work: WorkAssignment, sequence: int, *, root: Digest, num_tokens: int, turns: int = 1) -> Group:
    """The group of an assignment, of random tokens."""
    rng = np.random.default_rng(sequence)
    # Drawn and given in turn; the last ones are drawn.
    ends = np.linspace(0, num_tokens, 2 * turns).astype(int).tolist()
    spans = tuple(
        Span(version=GIVEN if number % 2 else 0, start=start, end=end)
        for number, (start, end) in enumerate(itertools.pairwise(ends))
    )

    def rollout() -> Rollout:
        num_drawn = sum(span.end - span.start for span in spans if span.is_drawn)
        return Rollout(
            token_ids=rng.integers(0, VOCABULARY, num_tokens).astype(np.int32),
            sampler_logprobs=-rng.random(num_drawn).astype(np.float32),
            spans=spans,
            reward=1.0,
            reward_parts=(RewardPart(name="correct", value=1.0),),
            finish_reason=FinishReason.LENGTH,
        )

    return Group(
        id=GroupId(site=SITE, incarnation=INCARNATION, sequence=sequence),
        assignment=work.id,
        prompt_index=work.prompt_index,
        prompt_token_ids=rng.integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32),
        rollouts=tuple(rollout() for _ in range(GROUP_SIZE)),
        oldest_version=0,
        state_root=root,
        generation_s=1.0,
    )


def _requests(groups: Sequence[Group]) -> list[bytes]:
    """What a sampler sends."""
    pushes = pushes_to_pb([seal(group) for group in groups], limit_bytes=1 << 30, limit_groups=PUSH_GROUPS)
    return [message.SerializeToString(deterministic=True) for message in pushes]


async def measure(directory: Path, *, num_tokens: int, turns: int, count: int, repeats: int) -> dict[str, Any]:
    """CPU of `count` groups on their way through, median of the repeats."""
    bench = await Bench.open(directory, num_tokens=num_tokens, turns=turns)
    taken: dict[str, list[float]] = {"in": [], "out": [], "copy": [], "insert": [], "select": []}
    size = 0
    try:
        # The first one warms up and is not counted.
        for number in range(repeats + 1):
            groups = await bench.groups(count)
            requests, sealed = _requests(groups), [seal(group).data for group in groups]
            size = len(sealed[0])
            times = {}
            started = time.process_time()
            answers = await bench.call("PushGroups", requests, answers=len(requests))
            times["in"] = time.process_time() - started
            outcomes = [o for one in answers for o in rollout_pb2.PushGroupsResponse.FromString(one).outcomes]
            assert [one.status for one in outcomes] == [rollout_pb2.PUSH_STATUS_ACCEPTED] * count, (
                "every group is taken"
            )
            wanted = rollout_pb2.StreamGroupsRequest(epoch=bench.epoch, credits=count).SerializeToString()
            started = time.process_time()
            leased = await bench.call("StreamGroups", [wanted], answers=count)
            times["out"] = time.process_time() - started
            came = {rollout_pb2.StreamGroupsResponse.FromString(one).group for one in leased}
            assert came == set(sealed), "the learner gets what was pushed"
            await bench.core.abandon_groups(epoch=bench.epoch, ids=[group.id for group in groups], reason="measured")
            times |= _limits(directory / f"limit-{number}.sqlite", sealed)
            if number:
                for name, seconds in times.items():
                    taken[name].append(seconds / count)
    finally:
        await bench.close()
    micros = {name: statistics.median(values) * 1e6 for name, values in taken.items()}
    spent = micros["in"] + micros["out"]
    limit = micros["copy"] + micros["insert"] + micros["select"]
    return {
        "tokens": num_tokens,
        "turns": turns,
        "bytes": size,
        "bytes_per_token": round(size / (GROUP_SIZE * num_tokens + PROMPT_TOKENS), 2),
        "in_us": round(micros["in"], 1),
        "out_us": round(micros["out"], 1),
        "cpu_us_per_group": round(spent, 1),
        "ingest_mb_s": round(size / micros["in"], 1),
        "memcpy_us": round(micros["copy"], 1),
        "sqlite_insert_us": round(micros["insert"], 1),
        "sqlite_select_us": round(micros["select"], 1),
        "over_limit": round(spent / limit, 1),
    }


def _limits(path: Path, requests: Sequence[bytes]) -> dict[str, float]:
    """CPU of the same bytes copied, and of SQLite alone with 16 of them in a commit as the coordinator has them."""
    started = time.process_time()
    for request in requests:
        bytearray(request)
    copied = time.process_time() - started
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE groups (number INTEGER PRIMARY KEY, payload BLOB)")
    started = time.process_time()
    for first in range(0, len(requests), 16):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(
            "INSERT INTO groups (payload) VALUES (?)", [(one,) for one in requests[first : first + 16]]
        )  # fmt: skip
        connection.execute("COMMIT")
    inserted = time.process_time() - started
    started = time.process_time()
    for first in range(0, len(requests), 16):
        connection.execute("SELECT payload FROM groups WHERE number > ? LIMIT 16", (first,)).fetchall()
    selected = time.process_time() - started
    connection.close()
    return {"copy": copied, "insert": inserted, "select": selected}


async def count_conversions(directory: Path) -> dict[str, int]:
    """Calls that turn all tokens of one group into another form, from the outbox to the learner, over loopback."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name in CONVERSIONS:
            calls[frame.f_code.co_name] += 1

    # Before the store and the pool begin theirs: threads that run already are not looked at.
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        bench = await Bench.open(directory, num_tokens=64)
        outbox = Outbox(directory / "outbox", site=SITE)
        try:
            address = f"127.0.0.1:{await bench.server.start('127.0.0.1:0')}"
            (group,) = await bench.groups(1)
            async with CoordinatorClient(address, tls=TlsConfig(insecure=True), max_message_bytes=16 << 20) as client:
                await asyncio.to_thread(outbox.put, [group], release=[0.0])
                due, _ = await asyncio.to_thread(outbox.due, 1.0, limit=1, max_bytes=1 << 20)
                await client.push_groups(due)

                async def credits() -> AsyncIterator[int]:
                    yield 1

                async for queued in client.stream_groups(epoch=bench.epoch, held=(), credits=credits()):
                    assert np.array_equal(queued.group.rollouts[0].token_ids, group.rollouts[0].token_ids)
                    break
        finally:
            outbox.close()
            await bench.server.stop(0.0)
            await bench.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return dict(sorted(calls.items()))


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/groups.json"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--before", type=Path, default=None, help="results of an earlier checkout")
    parser.add_argument("--directory", type=Path, default=None, help="where the stores lie; temporary if not given")
    arguments = parser.parse_args()
    # What is measured is given up after each repeat, and the coordinator says so each time.
    logging.disable(logging.WARNING)
    load = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory(prefix="heterorl-groups-", dir=arguments.directory) as directory:
        for (num_tokens, turns), count in COUNTS.items():
            place = Path(directory) / str(num_tokens)
            place.mkdir()
            measured = measure(place, num_tokens=num_tokens, turns=turns, count=count, repeats=arguments.repeats)
            rows.append(asyncio.run(measured))
        conversions = asyncio.run(count_conversions(Path(directory) / "way"))
    results: dict[str, Any] = {
        "group_size": GROUP_SIZE,
        "rows": rows,
        "before": json.loads(arguments.before.read_text())["rows"] if arguments.before else [],
        "form_changes": sum(conversions.values()),
        "conversions": conversions,
        "repeats": arguments.repeats,
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
    }
    table = Table(title=f"CPU of one group of {GROUP_SIZE} rollouts at the coordinator, microseconds")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console(width=160)
    console.print(table)
    console.print(f"form changes from the outbox to the learner: {results['form_changes']} {conversions}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
