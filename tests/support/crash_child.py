"""A coordinator with its traffic in one process, to be killed: prints each acknowledgement after it has it.

python -m tests.support.crash_child DIRECTORY SEED
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from heterorl.common.process.clock import SystemClock
from heterorl.common.types.rollout import PushStatus
from heterorl.common.wire.common import bytes_digest
from heterorl.common.wire.policy import manifest_digest, manifest_from_bytes
from heterorl.common.wire.seal import seal
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.run import Run


def config(directory: Path) -> CoordinatorConfig:
    return CoordinatorConfig(data_dir=directory / "data", groups_per_version=4, max_staleness_versions=10**6)


async def main(directory: Path, seed: int) -> None:
    chooser = random.Random(seed)
    core = await Coordinator.open(config(directory), SystemClock())
    run = Run(core, directory)
    await run.begin(request_id=f"request-{seed}")
    run.head = (await core.get_status()).head_version
    if run.head < 0:
        await run.publish()
    run.roots[run.head] = manifest_from_bytes((await core.get_signed_manifest(version=run.head)).data).state_root
    run.sequence = (await core.register(run.registration())).next_sequence - 1
    say("ready")
    await asyncio.gather(_push(core, run, chooser), _publish(core, run, chooser))


async def _push(core: Coordinator, run: Run, chooser: random.Random) -> None:
    while True:
        groups = [run.group(work) for work in await run.lease(chooser.randint(1, 6))]
        if not groups:
            await asyncio.sleep(0.001)
            continue
        for _ in range(chooser.choice([1, 1, 2])):
            for outcome, group in zip(await core.push_groups(groups), groups, strict=True):
                assert outcome.status in (PushStatus.ACCEPTED, PushStatus.DUPLICATE), outcome
                say(f"group {group.id.sequence} {bytes_digest(seal(group).data)}")


async def _publish(core: Coordinator, run: Run, chooser: random.Random) -> None:
    async def credits():
        while True:
            yield 1
            await asyncio.sleep(0)

    held = []
    async for queued in core.stream_groups(epoch=run.epoch, held=(), credits=credits()):
        held.append(queued.group.id)
        if len(held) == 4:
            request = await run.prepare(consumed=held, snapshot=chooser.random() < 0.3)
            run.head = await core.publish_version(request)
            run.roots[run.head] = manifest_from_bytes(request.manifest).state_root
            say(f"version {run.head} {manifest_digest(request.manifest)}")
            held = []


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
