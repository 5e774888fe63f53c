"""Merged deltas in the coordinator: one composition for all, found again, safe to delete, never in anybody's way."""

import asyncio
import dataclasses
import errno
import os
import shutil
import sys
import threading

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.policy import PayloadKind, PayloadRef, PlanKind
from heterorl.common.weights.payload import read_chunk, read_header, write_file
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.payloads import delta_merger as composer_module
from heterorl.coordinator.payloads.merged_deltas import Span
from heterorl.coordinator.store import background
from tests.support.clock import ManualClock
from tests.support.limits import WAIT_S
from tests.support.merging import Counted, RandomRun, count_composed, merging, published, puller

BUDGET = 3000
"""Room for two merged deltas of four versions, not for three."""


def files(directory):
    folder = directory / "data" / "merged"
    return sorted(path.name.rsplit("-", 1)[0] for path in folder.iterdir()) if folder.exists() else []


async def plan(core, run, have, *, accept_merged=True):
    root = run.roots[have] if have >= 0 else ""
    return await core.plan_pull(have_version=have, have_root=root, want_version=-1, accept_merged=accept_merged)


class Gate:
    """Compositions that wait to be let through, in their thread; counts them by the number of payloads."""

    def __init__(self, monkeypatch):
        self.entered, self.opened = threading.Event(), threading.Event()
        self.calls = []
        self._compose = composer_module.compose
        monkeypatch.setattr(composer_module, "compose", self)

    def __call__(self, paths, target, **rest):
        self.calls.append(len(paths))
        self.entered.set()
        assert self.opened.wait(WAIT_S)
        return self._compose(paths, target, **rest)


async def test_blocks_are_made_as_versions_come_and_shorten_the_way(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 21)
        await core.merger.settle()

        assert files(tmp_path) == ["0-16", "0-4", "12-16", "16-20", "4-8", "8-12"]
        chosen = await plan(core, run, 0)
        assert (chosen.kind, chosen.target_version) == (PlanKind.CHAIN, 21)
        assert [(p.from_version, p.to_version) for p in chosen.payloads] == [(0, 16), (16, 20), (20, 21)]
        single = await plan(core, run, 0, accept_merged=False)
        assert {payload.kind for payload in single.payloads} == {PayloadKind.DELTA}
        assert len(single.payloads) == 21


async def test_two_samplers_at_once_get_the_chain_now_and_cause_one_composition(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 3)
        await core.merger.settle()
        gate.calls.clear()
        await run.publish()  # block 0-4 is due and holds the thread
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        await run.publish()

        # The thread is stuck, and yet both are answered.
        first, second = await asyncio.gather(plan(core, run, 0), plan(core, run, 0))
        again = await plan(core, run, 0)
        gate.opened.set()
        await core.merger.settle()
        merged = await plan(core, run, 0)

    assert first == second == again
    assert (first.kind, len(first.payloads)) == (PlanKind.CHAIN, 5)
    assert gate.calls == [4, 2], "0-4 of four, then 0-5 of two"
    assert (merged.kind, merged.payloads[0].kind, len(merged.manifests)) == (PlanKind.MERGED, PayloadKind.MERGED, 1)
    assert merged.manifests[0] == first.manifests[-1]


async def test_request_for_what_is_under_way_makes_nothing_again(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 4)
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        for _ in range(3):
            await plan(core, run, 0)
        gate.opened.set()
        await core.merger.settle()

    assert gate.calls == [4]


async def test_sampler_reaches_the_same_state_by_one_object(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 6)
        api = Counted(core)
        held = await puller(api, tmp_path / "a").pull(held=None, want_version=1)
        await plan(core, run, 1)
        await core.merger.settle()
        api.num_read = 0

        by_merged = await puller(api, tmp_path / "a").pull(held=held, want_version=-1)

        assert (api.num_read, api.kinds) == (1, {PayloadKind.MERGED: 1})
        by_chain = await puller(Counted(core, is_old=True), tmp_path / "b").pull(held=held, want_version=-1)
        assert by_merged.arena.state_root() == by_chain.arena.state_root() == run.roots[6]
        assert by_merged.manifest_digest == by_chain.manifest_digest


async def test_joiner_gets_the_snapshot_and_one_merged_delta(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 7)
        await plan(core, run, -1)
        await core.merger.settle()
        api = Counted(core)

        pulled = await puller(api, tmp_path / "a").pull(held=None, want_version=-1)

    assert api.kinds == {PayloadKind.SNAPSHOT: 1, PayloadKind.MERGED: 1}
    assert pulled.arena.state_root() == run.roots[7]


async def test_start_empties_the_cache_and_makes_it_again(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 9)
        await core.merger.settle()
        before = files(tmp_path)
    folder = tmp_path / "data" / "merged"
    (folder / "compose").write_bytes(b"half")
    for path in folder.iterdir():
        path.write_bytes(b"of another run")
    # A mount of its own has one.
    (folder / "lost+found").mkdir()

    async with merging(tmp_path) as core:
        assert files(tmp_path) == ["lost+found"]
        await core.merger.settle()
        assert files(tmp_path) == [*before, "lost+found"]
        assert PayloadKind.MERGED in {payload.kind for payload in (await plan(core, run, 0)).payloads}


async def test_deleted_cache_hurts_nobody(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 5)
        await plan(core, run, 0)
        await core.merger.settle()
        held = await puller(core, tmp_path / "a").pull(held=None, want_version=0)
        planned = await plan(core, run, 0)
        assert planned.kind is PlanKind.MERGED
        made = count_composed(core)

        # Between the plan and the download: by the chain, from the held state, without a snapshot.
        class Deleting(Counted):
            async def plan_pull(self, **wanted):
                found = await super().plan_pull(**wanted)
                shutil.rmtree(tmp_path / "data" / "merged", ignore_errors=True)
                return found

        api = Deleting(core)
        pulled = await puller(api, tmp_path / "a").pull(held=held, want_version=-1)
        assert pulled.arena.state_root() == run.roots[5]
        assert api.kinds == {PayloadKind.DELTA: 5}

        # Before the plan: nothing is promised that is not there, and it comes back.
        chosen = await plan(core, run, 0)
        assert {payload.kind for payload in chosen.payloads} == {PayloadKind.DELTA}
        await core.merger.settle()
        assert (await plan(core, run, 0)).payloads == planned.payloads
        assert len(made) == 2


async def test_composer_survives_a_deleted_input(tmp_path):
    async with merging(tmp_path) as core:
        await published(core, tmp_path, 15)
        await core.merger.settle()
        shutil.rmtree(tmp_path / "data" / "merged")
        await published_more(core, tmp_path, 16)
        await core.merger.settle()

        assert Span(0, 16) in core.merges.spans


async def published_more(core, directory, count):
    run = RandomRun(core, directory)
    run.epoch, run.head = 1, count - 1
    held = await puller(core, directory / "more").pull(held=None, want_version=-1)
    run.arena = held.arena
    await run.publish()


async def test_damaged_input_is_left_out_and_not_tried_again(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.opened.set()
    async with merging(tmp_path, merged_bytes=1 << 20) as core:
        run = await published(core, tmp_path, 3)
        victim = (await plan(core, run, 1)).payloads[0]
        data = bytearray(core.blobs.path(victim.digest).read_bytes())
        data[-1] ^= 1
        core.blobs.path(victim.digest).write_bytes(data)
        for _ in range(5):
            await run.publish()
        await core.merger.settle()
        core.merger.request(Span(0, 4))
        core.merger.poke()
        await core.merger.settle()

    assert sorted(core.merges.spans) == [Span(4, 8)]
    assert sorted(gate.calls) == [4, 4], "each of the two blocks once"
    assert files(tmp_path) == ["4-8"], "no scratch is left"


async def test_full_disk_is_waited_out_until_the_next_version(tmp_path, monkeypatch):
    real, failures = composer_module.compose, [1]

    def full(paths, target, **rest):
        if failures:
            failures.pop()
            raise OSError(errno.ENOSPC, "no space")
        return real(paths, target, **rest)

    monkeypatch.setattr(composer_module, "compose", full)
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 4)
        await core.merger.settle()
        assert (core.merges.spans, failures) == (frozenset(), [])
        await run.publish()
        await core.merger.settle()
        assert core.merges.spans == {Span(0, 4)}


async def test_budget_bounds_the_disk_and_what_had_to_go_is_not_made_again(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.opened.set()
    async with merging(tmp_path, merged_bytes=BUDGET) as core:
        composed = count_composed(core)
        run = await published(core, tmp_path, 15)
        await core.merger.settle()
        sizes = sum(path.stat().st_size for path in (tmp_path / "data" / "merged").iterdir())
        spans, made = core.merges.spans, len(composed)
        core.merger.poke()
        await core.merger.settle()

        assert sizes <= BUDGET
        assert spans == {Span(4, 8), Span(8, 12)}, "the newest stay"
        assert (len(composed), len(gate.calls)) == (made, made)
        assert made == 3
        assert (await plan(core, run, 0)).target_version == 15


async def test_no_budget_makes_nothing(tmp_path):
    async with merging(tmp_path, merged_bytes=0) as core:
        run = await published(core, tmp_path, 5)
        await plan(core, run, 0)
        await core.merger.run()

    assert files(tmp_path) == []


async def test_rollback_leaves_abandoned_versions_out(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 6)
        await core.merger.settle()
        await run.publish(lineage_version=2, snapshot=True)  # version 7 from version 2; 3 to 6 are abandoned
        for _ in range(2):
            await run.publish()
        core.merger.request(Span(3, 6))
        await core.merger.settle()
        pulled = await puller(core, tmp_path / "a").pull(held=None, want_version=-1)

        assert core.merges.spans == {Span(0, 4)}, "made before the rollback; 4-8 has no deltas all the way"
        assert pulled.arena.state_root() == run.roots[9]


async def test_learner_cannot_publish_a_merged_delta(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 1)
        payload = PayloadRef(kind=PayloadKind.MERGED, from_version=-1, to_version=2, digest="0" * 64, num_bytes=1)
        request = await run.prepare()
        wrong = (*manifest_from_bytes(request.manifest).payloads, payload)
        core.blobs.path(payload.digest).parent.mkdir(exist_ok=True)
        core.blobs.path(payload.digest).write_bytes(b"x")

        with pytest.raises(InvalidRequest, match="only the coordinator makes"):
            await run.publish(manifest={"payloads": wrong})


async def test_thread_of_the_compositions_ends_between_two_chunks(tmp_path, monkeypatch):
    real = composer_module.compose
    seen = []
    entered, released = threading.Event(), threading.Event()

    def slow(paths, target, *, on_chunk, **rest):
        def step():
            seen.append(1)
            entered.set()
            assert released.wait(WAIT_S)
            on_chunk()

        return real(paths, target, on_chunk=step, **rest)

    monkeypatch.setattr(composer_module, "compose", slow)
    async with merging(tmp_path) as core:
        await published(core, tmp_path, 4)
        await asyncio.to_thread(entered.wait, WAIT_S)
        core.merger._stopping.set()
        released.set()

    assert seen == [1], "six chunks, ended at the first"
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "lie",
    [{"from_version": 0}, {"to_version": 5}, {"kind": PayloadKind.DELTA}],
    ids=["from another version", "to another version", "as a single delta"],
)
async def test_sampler_refuses_a_merged_delta_that_does_not_fit_and_goes_by_the_chain(tmp_path, lie):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 6)
        held = await puller(core, tmp_path / "a").pull(held=None, want_version=1)
        await plan(core, run, 1)
        await core.merger.settle()
        planned = []

        class Lying(Counted):
            async def plan_pull(self, **wanted):
                found = await super().plan_pull(**wanted)
                planned.append(found.kind)
                if found.kind is PlanKind.MERGED:
                    payload = dataclasses.replace(found.payloads[0], **lie)
                    return dataclasses.replace(found, payloads=(payload,))
                return found

        pulled = await puller(Lying(core), tmp_path / "a").pull(held=held, want_version=-1)

    after = PlanKind.SNAPSHOT if "kind" in lie else PlanKind.CHAIN
    assert planned[:2] == [PlanKind.MERGED, after]
    assert pulled.arena.state_root() == run.roots[6]


async def test_merged_delta_with_wrong_content_never_becomes_a_state(tmp_path, monkeypatch):
    real = composer_module.compose

    def dropping(paths, target, *, layout_id, chunks, on_chunk):
        # What the last payload does is lost; the roots say otherwise.
        real(paths, target, layout_id=layout_id, chunks=chunks, on_chunk=on_chunk)
        with target.open("rb") as file:
            to_root = read_header(file, layout_id=layout_id, chunks=chunks).to_root
        short = target.with_name("compose-short")
        real(paths[:-1], short, layout_id=layout_id, chunks=chunks, on_chunk=on_chunk)
        with short.open("rb") as file:
            header = read_header(file, layout_id=layout_id, chunks=chunks)
            coded = [
                (record.method, read_chunk(file, record, number=number)) for number, record in enumerate(header.records)
            ]
        short.unlink()

        def made(records):
            return dataclasses.replace(header, to_root=to_root, records=records)

        return write_file(target, coded, num_chunks=len(coded), header=made)

    monkeypatch.setattr(composer_module, "compose", dropping)
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 4)
        await core.merger.settle()
        api = Counted(core)
        held = await puller(core, tmp_path / "a").pull(held=None, want_version=0)
        assert (await plan(core, run, 0)).kind is PlanKind.MERGED

        pulled = await puller(api, tmp_path / "a").pull(held=held, want_version=-1)

    assert api.kinds == {PayloadKind.DELTA: 4}, "by the chain, not by a snapshot: the held state is good"
    assert pulled.arena.state_root() == run.roots[4]


async def test_sampler_with_a_damaged_state_ends_with_the_snapshot(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 4)
        await core.merger.settle()
        api = Counted(core)
        held = await puller(core, tmp_path / "a").pull(held=None, want_version=0)
        held.arena.chunk(0)[0] ^= 1

        pulled = await puller(api, tmp_path / "a").pull(held=held, want_version=-1)

    assert api.kinds[PayloadKind.SNAPSHOT] == 1
    assert pulled.arena.state_root() == run.roots[4]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_compositions_have_the_lowest_priority_and_the_rest_keeps_its_own(tmp_path, monkeypatch):
    real, seen = composer_module.compose, []

    def noting(*positional, **named):
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(*positional, **named)

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    monkeypatch.setattr(background, "LOWEST_PRIORITY", min(19, before + 1))
    monkeypatch.setattr(composer_module, "compose", noting)
    async with merging(tmp_path) as core:
        await published(core, tmp_path, 4)
        await core.merger.settle()

    assert seen == [min(19, before + 1)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.parametrize(("most", "expected"), [(5, {Span(0, 4), Span(4, 8), Span(1, 9)}), (3, set())])
async def test_long_way_waits_for_the_blocks_that_shorten_it(tmp_path, monkeypatch, most, expected):
    monkeypatch.setattr(composer_module, "MAX_PAYLOADS", most)
    async with merging(tmp_path, merged_bytes=0) as core:
        await published(core, tmp_path, 9)
    async with merging(tmp_path) as core:
        core.merger.request(Span(1, 9))
        await core.merger.settle()

        assert core.merges.spans == expected


async def test_requests_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(composer_module, "MAX_REQUESTS", 4)
    async with merging(tmp_path, merged_bytes=0) as core:
        await published(core, tmp_path, 9)
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    for start in range(7):
        core.merger.request(Span(start, 9))
    task = asyncio.create_task(core.merger.run())
    await core.merger.settle()
    task.cancel()
    await asyncio.wait([task])
    await core.close()

    assert sum(span.stop == 9 for span in core.merges.spans) == 4


async def test_impossible_chunks_are_refused_before_memory_is_taken(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 3)
        await run.publish(manifest={"chunk_elements": composer_module.MAX_CHUNK_ELEMENTS + 1})
        await core.merger.settle()

        assert core.merges.spans == frozenset()
        assert (await plan(core, run, 0)).kind is PlanKind.CHAIN
