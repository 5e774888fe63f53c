"""What may go: nothing that a reachable, used or leased version needs, and all the rest."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.common.errors import UnknownVersion
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.coordinator.payloads.payload_index import decide_snapshot
from heterorl.coordinator.payloads.retention import Graph, Needs, decide_retirement
from heterorl.coordinator.versions.pull_plans import plan_pull


def delta(start, stop, size=10):
    return PayloadRef(kind=PayloadKind.DELTA, from_version=start, to_version=stop, digest=f"d{stop}", num_bytes=size)


def snapshot(version, size=100):
    return PayloadRef(
        kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=version, digest=f"s{version}", num_bytes=size
    )


def graph(head, snapshots, *, verified=None, gaps=(), lineage=None):
    lineage = list(range(head + 1)) if lineage is None else lineage
    deltas = [delta(a, b) for a, b in itertools.pairwise(lineage) if b not in gaps]
    payloads = [*deltas, *(snapshot(version) for version in snapshots)]
    return Graph(payloads=payloads, lineage=lineage, verified=set(snapshots if verified is None else verified))


def needs(*, window=4, staleness=2, in_use=(), leased=()):
    return Needs(window=window, staleness=staleness, in_use=set(in_use), leased=set(leased))


def kept(found, retirement):
    return {payload.digest for payload in found.payloads} - {payload.digest for payload in retirement.payloads}


def way(payloads, start, goal, starts_with=None):
    def into(version):
        return [
            p for p in payloads
            if p.to_version == version
            and (starts_with is None or p.kind is not PayloadKind.SNAPSHOT or p.to_version in starts_with)
        ]  # fmt: skip

    try:
        return plan_pull(into, have_version=start, want_version=goal)[1]
    except UnknownVersion:
        return None


def test_old_deltas_and_snapshots_go_the_window_and_two_snapshots_stay():
    found = graph(20, [0, 8, 14, 18])

    retirement = decide_retirement(found, needs())

    # Two newest snapshots 14 and 18, deltas from 14 on; window 17..20; 18 is the oldest version asked for.
    assert kept(found, retirement) == {"s14", "s18", *(f"d{v}" for v in range(15, 21))}
    assert [p.digest for p in retirement.way] == ["s18", "d19", "d20"]


def test_oldest_version_that_may_be_asked_for_keeps_its_snapshot():
    found = graph(20, [0, 8, 14, 18])

    retirement = decide_retirement(found, needs(window=10, staleness=10))

    # Version 10 is reached by the snapshot of 8 only.
    assert {"s8", "d9", "d10"} <= kept(found, retirement)
    assert "s0" not in kept(found, retirement)


def test_versions_in_use_keep_their_cheapest_way():
    cheap = graph(20, [0, 18, 19])
    # 16 deltas of 10 bytes are dearer than a snapshot of 100 with one or two: nobody goes by them.
    assert kept(cheap, decide_retirement(cheap, needs(in_use={4}))).isdisjoint({"d5", "d9", "d16"})

    dear = graph(20, [0])
    dear.payloads.extend([snapshot(18, 10**6), snapshot(19, 10**6)])
    found = Graph(payloads=dear.payloads, lineage=dear.lineage, verified={0, 18, 19})
    left = kept(found, decide_retirement(found, needs(in_use={4})))
    assert {f"d{version}" for version in range(5, 21)} <= left


def test_what_is_leased_stays_although_nobody_would_plan_it():
    found = graph(20, [0, 18, 19])

    left = kept(found, decide_retirement(found, needs(leased={"d10"})))

    assert "d10" in left
    assert left.isdisjoint({"d9", "d11"})


def test_nothing_goes_while_no_verified_snapshot_leads_to_the_head():
    for found in (graph(20, [0, 18], verified=[]), graph(20, [0, 18], verified=[0], gaps={5}), graph(-1, [])):
        assert decide_retirement(found, needs()).payloads == ()


def test_snapshot_that_is_not_verified_stays_and_is_no_start():
    found = graph(20, [0, 19], verified=[0])

    retirement = decide_retirement(found, needs())

    assert retirement.payloads == ()
    assert retirement.way[0].digest == "s0"


@pytest.mark.parametrize(("gaps", "held"), [({1}, 2), ({1, 3}, 4)])
def test_version_behind_a_snapshot_that_is_not_verified_keeps_a_verified_one(gaps, held):
    verified = {0, 2, 4, 5, 6} - gaps
    found = graph(6, [0, 1, 2, 3, 4, 5, 6], verified=verified, gaps=gaps)

    retirement = decide_retirement(found, needs(window=5, staleness=5, in_use=[0]))

    left = [payload for payload in found.payloads if payload not in retirement.payloads]
    assert way(left, 0, held, verified) is not None


def test_abandoned_versions_go():
    found = graph(9, [0, 7], lineage=[0, 1, 2, 7, 8, 9], gaps={7})
    found.payloads.extend([delta(2, 3), delta(3, 4), snapshot(4)])

    retirement = decide_retirement(found, needs(window=100, staleness=0))

    assert {p.digest for p in retirement.payloads} == {"d3", "d4", "s4"}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_everything_that_can_be_asked_for_stays_possible_and_what_is_held_no_dearer(data):
    head = data.draw(st.integers(0, 14))
    lineage = sorted(data.draw(st.sets(st.integers(0, head))) | {0, head})
    gaps = data.draw(st.sets(st.sampled_from(lineage)))
    snapshots = data.draw(st.sets(st.sampled_from(lineage))) | gaps | {0}
    verified = data.draw(st.sets(st.sampled_from(sorted(snapshots))))
    staleness = data.draw(st.integers(0, 5))
    sizes = st.integers(1, 60)
    payloads = [delta(a, b, data.draw(sizes)) for a, b in itertools.pairwise(lineage) if b not in gaps]
    payloads += [snapshot(version, data.draw(sizes)) for version in sorted(snapshots)]
    found = Graph(payloads=payloads, lineage=lineage, verified=verified)
    in_use = data.draw(st.sets(st.sampled_from(lineage)))
    leased = data.draw(st.sets(st.sampled_from([p.digest for p in payloads])))
    window = staleness + data.draw(st.integers(0, 4))

    retirement = decide_retirement(found, needs(window=window, staleness=staleness, in_use=in_use, leased=leased))
    left = [p for p in payloads if p not in retirement.payloads]

    assert leased <= {p.digest for p in left}
    goals = [v for v in lineage if v >= head - staleness]
    for goal in goals:
        # By verified snapshots if possible, else by any.
        assert way(payloads, -1, goal) is None or way(left, -1, goal) is not None
        if goal == goals[0] and way(payloads, -1, goal, verified) is not None:
            assert way(left, -1, goal, verified) is not None
        for start in in_use:
            if start <= goal and way(payloads, start, goal, verified) is not None:
                assert way(left, start, goal, verified) is not None
    for start in in_use:
        if retirement.payloads and start < head:
            cost = sum(p.num_bytes for p in way(payloads, start, head, verified))
            assert sum(p.num_bytes for p in way(left, start, head, verified)) == cost


@pytest.mark.parametrize(
    ("sizes", "versions", "expected"),
    [
        ([], 0, False),
        ([10, 10], 2, False),  # 20 of a bound of 25
        ([13, 13], 2, True),
        ([1], 5, True),  # beyond the window of 4
        ([1], 4, False),
    ],
)
def test_snapshot_is_due_when_the_deltas_after_it_cost_a_quarter_of_it(sizes, versions, expected):
    steps = [versions - len(sizes) + n + 1 for n in range(len(sizes))]
    way = [snapshot(0), *(delta(0 if n == 0 else steps[n - 1], steps[n], size) for n, size in enumerate(sizes))]

    assert decide_snapshot(way, snapshot_ratio=0.25, window=4)[0] is expected
    assert not decide_snapshot(way[1:], snapshot_ratio=0.25, window=4)[0]
