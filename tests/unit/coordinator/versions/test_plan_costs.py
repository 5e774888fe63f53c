"""Plans against a brute force over all ways of small graphs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.common.errors import UnknownVersion
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


def cheapest(graph, starts, goal):
    """The least cost of any way, by looking at every increasing sequence of versions."""
    best = None
    for start in starts:
        between = range(max(start + 1, 0), goal)
        for count in range(len(between) + 1):
            for middle in itertools.combinations(between, count):
                pairs = list(itertools.pairwise([start, *middle, goal]))
                # Nothing but the first step may begin with nothing.
                if all(pair in graph for pair in pairs):
                    cost = sum(graph[pair] for pair in pairs)
                    best = cost if best is None else min(best, cost)
    return best


@settings(max_examples=300, deadline=None)
@given(GRAPHS, st.integers(-1, 6), st.integers(-1, 1), st.integers(0, 7))
def test_no_way_is_cheaper_than_the_plan(graph, have, base, want):
    def into(version):
        return [edge(start, stop, size) for (start, stop), size in graph.items() if stop == version]

    def plan():
        return plan_pull(into, have_version=have, want_version=want, base_version=base)

    if want in (have, base):
        assert plan()[:2] == (PlanKind.SAME, ())
        return
    best = cheapest(graph, {-1, have, base}, want)
    if best is None:
        with pytest.raises(UnknownVersion):
            plan()
        return
    _, payloads, _ = plan()
    assert sum(payload.num_bytes for payload in payloads) == best
    ways = [payload.from_version for payload in payloads] + [want]
    assert ways[0] in (-1, have, base)
    assert [payload.to_version for payload in payloads] == ways[1:]


def test_base_model_is_a_start_and_a_nearer_version_is_a_better_one():
    payloads = {9: [edge(0, 9, 40), edge(8, 9, 5)], 8: [edge(-1, 8, 60)]}

    def way(have, base):
        plan = plan_pull(lambda v: payloads.get(v, []), have_version=have, want_version=9, base_version=base)[1]
        return [(p.from_version, p.to_version) for p in plan]

    assert way(-1, -1) == [(-1, 8), (8, 9)]
    assert way(-1, 0) == [(0, 9)]
    assert way(8, 0) == [(8, 9)]
    assert way(5, 0) == [(0, 9)], "what is held has no way, the base has"
