"""Pull plans are the cheapest paths."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import UnknownVersion
from heterorl.common.types.policy import PayloadKind, PayloadRef, PlanKind
from heterorl.coordinator.versions.pull_plans import plan_pull
from heterorl.coordinator.versions.rollback_order import _rebuilt, _undone


def edge(start, end, size):
    kind = PayloadKind.SNAPSHOT if start == -1 else PayloadKind.DELTA
    return PayloadRef(kind=kind, from_version=start, to_version=end, digest="0" * 64, num_bytes=size)


def plan(edges, have, want):
    return plan_pull(lambda v: [e for e in edges if e.to_version == v], have_version=have, want_version=want)


CHAIN = [edge(-1, 0, 1000), *(edge(v, v + 1, 100) for v in range(20))]


@pytest.mark.parametrize(
    ("have", "want", "kind", "length"),
    [
        (5, 5, PlanKind.SAME, 0),
        (5, 6, PlanKind.DELTA, 1),
        (5, 9, PlanKind.CHAIN, 4),
        (0, 20, PlanKind.CHAIN, 20),
        (-1, 3, PlanKind.SNAPSHOT, 4),
        (99, 3, PlanKind.SNAPSHOT, 4),  # what the run does not know counts as nothing
    ],
)
def test_plan_follows_the_lag(have, want, kind, length):
    chosen, path, reason = plan(CHAIN, have, want)

    assert (chosen, len(path)) == (kind, length)
    assert reason


def test_plan_prefers_a_snapshot_where_it_is_cheaper_than_the_chain():
    kind, path, _ = plan([*CHAIN, edge(-1, 18, 500)], 2, 20)

    assert kind is PlanKind.SNAPSHOT
    assert [p.to_version for p in path] == [18, 19, 20]


def test_plan_takes_a_merged_edge_without_knowing_of_merging():
    kind, path, _ = plan([*CHAIN, edge(4, 20, 700)], 4, 20)

    assert (kind, len(path)) == (PlanKind.DELTA, 1)


def test_plan_refuses_what_nothing_leads_to():
    with pytest.raises(UnknownVersion, match=r"version 2 is no longer stored: .* `heterorl rollback --list`"):
        plan([edge(1, 2, 5)], 0, 2)


@given(st.data())
def test_plan_costs_as_little_as_brute_force(data):
    nodes = range(-1, 5)
    sizes = {
        (a, b): data.draw(st.integers(1, 50)) for a, b in itertools.combinations(nodes, 2) if data.draw(st.booleans())
    }
    edges = [edge(a, b, size) for (a, b), size in sizes.items()]
    have, want = data.draw(st.integers(-1, 3)), 4

    def cheapest(node):
        if node in (-1, have):
            return 0
        costs = [cheapest(a) + size for (a, b), size in sizes.items() if b == node]
        return min(costs, default=float("inf"))

    best = cheapest(want)
    if best == float("inf"):
        with pytest.raises(UnknownVersion):
            plan(edges, have, want)
    else:
        assert sum(p.num_bytes for p in plan(edges, have, want)[1]) == best


def test_difference_to_nothing_is_no_way_to_a_version():
    delta = PayloadRef(kind=PayloadKind.DELTA, from_version=-1, to_version=3, digest="0" * 64, num_bytes=1)

    for have in (-1, 2):
        with pytest.raises(UnknownVersion):
            plan_pull(lambda version: [delta] if version == 3 else [], have_version=have, want_version=3)


EDGES = st.lists(
    st.tuples(st.integers(-1, 7), st.integers(0, 8), st.integers(1, 3)).filter(lambda each: each[0] < each[1]),
    max_size=14,
    unique_by=lambda each: each[:2],
)


@given(EDGES)
def test_versions_to_go_back_to_are_those_that_a_plan_reaches(sizes):
    edges, head = [edge(*each) for each in sizes], 8
    into = {}
    for each in edges:
        into.setdefault(each.to_version, []).append(each)

    def reaches(have, want):
        try:
            return plan(edges, have, want)[0]
        except UnknownVersion:
            return None

    undone = {v for v in range(head) if reaches(v, head) not in (None, PlanKind.SNAPSHOT)}
    assert _undone(into, head) - {head} == undone
    assert _rebuilt(into) == {v for v in range(head + 1) if reaches(None, v) is not None}


@pytest.mark.parametrize("changes", [{}, {"lineage_version": 2, "snapshot": True}])
async def test_every_version_that_is_listed_can_be_ordered_and_no_other(run, core, changes):
    for version in range(6):
        await run.publish(snapshot=version == 3)
    await run.publish(**changes)
    await run.publish()

    listed = await core.list_restorable()

    taken = []
    for version in range(9):
        try:
            await core.rollback(to_version=version, request_id=f"r-{version}")
        except UnknownVersion:
            continue
        taken.append(version)
    # The head is where the run stands.
    assert list(listed) == [version for version in taken if version != run.head]
    assert listed
