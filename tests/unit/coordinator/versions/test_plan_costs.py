"""Plans against a brute force over all ways of small graphs; what a link costs is part of each way."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.common.errors import UnknownVersion
from heterorl.common.pull.fetcher import MAX_OBJECT_BYTES, LinkEstimate
from heterorl.common.types.policy import PayloadKind, PayloadRef, PlanKind
from heterorl.coordinator.versions.pull_plans import plan_pull


def edge(start, stop, size):
    kind = PayloadKind.SNAPSHOT if start < 0 else PayloadKind.DELTA if stop - start == 1 else PayloadKind.MERGED
    return PayloadRef(
        kind=kind, from_version=start, to_version=stop, digest=f"{start + 1:032x}{stop:032x}", num_bytes=size
    )


GRAPHS = st.dictionaries(
    st.tuples(st.integers(-1, 6), st.integers(0, 7)).filter(lambda pair: pair[0] < pair[1]),
    st.integers(0, 50),
    max_size=16,
)


def cheapest(graph, starts, goal, object_bytes):
    """The least cost of any way, by looking at every increasing sequence of versions."""
    best = None
    for start in starts:
        between = range(max(start + 1, 0), goal)
        for count in range(len(between) + 1):
            for middle in itertools.combinations(between, count):
                pairs = list(itertools.pairwise([start, *middle, goal]))
                # Nothing but the first step may begin with nothing.
                if all(pair in graph for pair in pairs):
                    cost = sum(graph[pair] + object_bytes for pair in pairs)
                    best = cost if best is None else min(best, cost)
    return best


@settings(max_examples=300, deadline=None)
@given(GRAPHS, st.integers(-1, 6), st.integers(-1, 1), st.integers(0, 7), st.sampled_from([0, 1, 20, 1000]))
def test_no_way_is_cheaper_than_the_plan(graph, have, base, want, object_bytes):
    def into(version):
        return [edge(start, stop, size) for (start, stop), size in graph.items() if stop == version]

    def plan():
        return plan_pull(into, have_version=have, want_version=want, base_version=base, object_bytes=object_bytes)

    if want in (have, base):
        assert plan()[:2] == (PlanKind.SAME, ())
        return
    best = cheapest(graph, {-1, have, base}, want, object_bytes)
    if best is None:
        with pytest.raises(UnknownVersion):
            plan()
        return
    _, payloads, _ = plan()
    assert sum(payload.num_bytes + object_bytes for payload in payloads) == best
    ways = [payload.from_version for payload in payloads] + [want]
    assert ways[0] in (-1, have, base)
    assert [payload.to_version for payload in payloads] == ways[1:]


@pytest.mark.parametrize(("object_bytes", "expected"), [(0, [(2, 3), (3, 4)]), (11, [(2, 4)])])
def test_long_round_trip_makes_one_larger_object_the_cheaper_way(object_bytes, expected):
    payloads = {3: [edge(2, 3, 10)], 4: [edge(3, 4, 10), edge(2, 4, 30)]}

    _, plan, reason = plan_pull(
        lambda version: payloads.get(version, []), have_version=2, want_version=4, object_bytes=object_bytes
    )

    # 10 + 10 = 20 < 30; with 11 a trip 42 > 41.
    assert [(p.from_version, p.to_version) for p in plan] == expected
    assert ("41 with" in reason) == bool(object_bytes)


def test_base_model_is_a_start_and_a_nearer_version_is_a_better_one():
    payloads = {9: [edge(0, 9, 40), edge(8, 9, 5)], 8: [edge(-1, 8, 60)]}

    def way(have, base):
        plan = plan_pull(lambda v: payloads.get(v, []), have_version=have, want_version=9, base_version=base)[1]
        return [(p.from_version, p.to_version) for p in plan]

    assert way(-1, -1) == [(-1, 8), (8, 9)]
    assert way(-1, 0) == [(0, 9)]
    assert way(8, 0) == [(8, 9)]
    assert way(5, 0) == [(0, 9)], "what is held has no way, the base has"


def test_link_estimate_is_bandwidth_times_round_trip():
    link = LinkEstimate()
    assert link.object_bytes == 0
    link.note(first_bytes=1000, first_s=0.3, total_bytes=1000, total_s=0.3)
    assert link.object_bytes == 0, "one frame says nothing of the bandwidth"

    link = LinkEstimate()
    link.note(first_bytes=1000, first_s=0.3, total_bytes=11_000, total_s=1.3)

    # 10,000 bytes in 1 s; the first 1000 took 0.1 of the 0.3 s, 0.2 s are the trip: 2000 bytes.
    assert link.object_bytes == 2000
    link.note(first_bytes=1, first_s=1e9, total_bytes=2, total_s=1e9 + 1e-9)
    assert link.object_bytes == MAX_OBJECT_BYTES
