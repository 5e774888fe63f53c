"""SIGKILL in the middle of traffic: what was acknowledged to another process is there, once, bit by bit."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from heterorl.common.process.clock import SystemClock
from heterorl.common.wire.common import bytes_digest
from heterorl.common.wire.policy import manifest_digest, manifest_from_bytes
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from tests.support.crash_child import config

pytestmark = pytest.mark.sqlite

ROOT = Path(__file__).parents[3]


async def live_and_die(directory, seed, after):
    """Run the child until it has acknowledged `after` things, kill it, and return its acknowledgements."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.crash_child", str(directory), str(seed),
        cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}"}, stdout=subprocess.PIPE,
    )  # fmt: skip
    lines = []
    assert child.stdout is not None
    while len(lines) < after and (line := await child.stdout.readline()):
        lines.append(line)
    child.kill()
    # What it had said before it died counts as well; a torn last line was not said.
    rest = (await child.stdout.read()).splitlines(keepends=True)
    assert await child.wait() == -9
    return [line.decode().split() for line in [*lines, *rest] if line.endswith(b"\n")]


@pytest.mark.timeout(300)
async def test_nothing_acknowledged_is_lost_or_doubled_by_sigkill(tmp_path):
    chooser = random.Random(5)
    groups, versions = {}, {}
    for seed in range(8):
        for kind, *words in await live_and_die(tmp_path, seed, after=chooser.randint(1, 250)):
            if kind == "group":
                assert groups.setdefault(int(words[0]), words[1]) == words[1], "acknowledged twice with other content"
            elif kind == "version":
                assert int(words[0]) not in versions, "a version number was given out twice"
                versions[int(words[0])] = words[1]
    assert len(groups) > 200
    assert len(versions) > 20

    core = await Coordinator.open(config(tmp_path), SystemClock())
    rows = await core.database.run(
        lambda c: c.execute("SELECT sequence, digest, payload, state, assignment, version FROM groups").fetchall()
    )
    stored = {sequence: digest for sequence, digest, *_ in rows}
    assert len(stored) == len(rows)
    assert {sequence: stored.get(sequence) for sequence in groups} == groups
    for _, digest, payload, state, _, version in rows:
        # A payload is kept until its group is consumed, and is what was acknowledged.
        assert (payload is None) == (state == "consumed") == (version is not None)
        assert payload is None or bytes_digest(payload) == digest
    answered = [assignment for *_, assignment, _ in rows]
    assert len(set(answered)) == len(answered), "a prompt was answered twice"

    head = (await core.get_status()).head_version
    parent = ""
    for version in range(head + 1):
        data = (await core.get_signed_manifest(version=version)).data
        manifest = manifest_from_bytes(data)
        assert manifest_digest(data) == versions.get(version, manifest_digest(data))
        assert manifest.parent_digest == parent
        assert len([1 for row in rows if row[5] == version]) in (0, 4), "a version consumed a part of its groups"
        for payload in manifest.payloads:
            content = b"".join([frame async for frame in core.read_payload(digest=payload.digest, offset=0)])
            assert (bytes_digest(content), len(content)) == (payload.digest, payload.num_bytes)
        parent = manifest_digest(data)
    assert max(versions) <= head

    counts = await core.database.run(ledger.counts)
    assert counts == await core.database.run(ledger.recount)
    assert counts.is_balanced
    await core.close()
