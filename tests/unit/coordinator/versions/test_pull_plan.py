"""Pull plans are the cheapest paths, found without looking at more versions than needed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import UnknownVersion
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef, PlanKind
from heterorl.coordinator.versions.pull_plans import plan_pull


def delta(start, end, num_bytes):
    return PayloadRef(
        kind=PayloadKind.DELTA, from_version=start, to_version=end, digest=Digest(f"{start}-{end}"), num_bytes=num_bytes
    )


def snapshot(version, num_bytes):
    return PayloadRef(
        kind=PayloadKind.SNAPSHOT,
        from_version=-1,
        to_version=version,
        digest=Digest(f"s{version}"),
        num_bytes=num_bytes,
    )


def into(*payloads):
    return lambda version: [payload for payload in payloads if payload.to_version == version]


def merged(start, end, num_bytes):
    return PayloadRef(
        kind=PayloadKind.MERGED,
        from_version=start,
        to_version=end,
        digest=Digest(f"m{start}-{end}"),
        num_bytes=num_bytes,
    )


CHAIN = (snapshot(0, 1000), delta(0, 1, 10), delta(1, 2, 20), delta(2, 3, 30))


def test_plan_is_empty_when_the_version_is_there():
    kind, payloads, reason = plan_pull(into(), have_version=3, want_version=3)

    assert (kind, payloads) == (PlanKind.SAME, ())
    assert reason == "version 3 is already there"


def test_plan_is_one_delta_when_one_behind():
    kind, payloads, reason = plan_pull(into(*CHAIN), have_version=2, want_version=3)

    assert (kind, payloads) == (PlanKind.DELTA, CHAIN[3:])
    assert reason == "1 deltas from version 2, 30 bytes"


def test_plan_is_a_chain_in_order_when_further_behind():
    kind, payloads, reason = plan_pull(into(*CHAIN), have_version=0, want_version=3)

    assert (kind, payloads) == (PlanKind.CHAIN, CHAIN[1:])
    assert reason == "3 deltas from version 0, 60 bytes"


@pytest.mark.parametrize(
    ("have", "offered", "kind", "digests"),
    [
        (0, [merged(0, 3, 59)], PlanKind.MERGED, "m0-3"),
        (0, [merged(0, 3, 61)], PlanKind.CHAIN, "0-1 1-2 2-3"),
        (0, [merged(0, 2, 29)], PlanKind.CHAIN, "m0-2 2-3"),
        (0, [merged(0, 2, 29), merged(1, 3, 40)], PlanKind.CHAIN, "0-1 m1-3"),
        (1, [merged(0, 3, 1)], PlanKind.CHAIN, "1-2 2-3"),
        (2, [merged(0, 3, 1), merged(1, 3, 1)], PlanKind.DELTA, "2-3"),
        (-1, [merged(0, 3, 59)], PlanKind.SNAPSHOT, "s0 m0-3"),
        (-1, [merged(0, 3, 59), snapshot(3, 1058)], PlanKind.SNAPSHOT, "s3"),
        (-1, [merged(0, 1, 5), merged(1, 3, 49)], PlanKind.SNAPSHOT, "s0 m0-1 m1-3"),
        (0, [merged(0, 3, 59), snapshot(3, 58)], PlanKind.SNAPSHOT, "s3"),
    ],
)
def test_plan_is_the_cheapest_of_single_merged_chain_and_snapshot(have, offered, kind, digests):
    chosen, payloads, reason = plan_pull(into(*CHAIN, *offered), have_version=have, want_version=3)

    assert (chosen, " ".join(payload.digest for payload in payloads)) == (kind, digests)
    num_merged = digests.count("m")
    assert ("merged" in reason) == (num_merged > 0)
    assert not num_merged or reason.endswith(f"{num_merged} of them merged")


def test_plan_starts_with_a_snapshot_when_nothing_is_there():
    kind, payloads, reason = plan_pull(into(*CHAIN), have_version=-1, want_version=3)

    assert (kind, payloads) == (PlanKind.SNAPSHOT, CHAIN)
    assert reason == "snapshot of version 0 and 3 deltas, 1060 bytes"


def test_plan_is_a_snapshot_when_the_chain_costs_more():
    kind, payloads, _ = plan_pull(into(*CHAIN, snapshot(3, 59)), have_version=0, want_version=3)

    assert (kind, payloads) == (PlanKind.SNAPSHOT, (snapshot(3, 59),))


def test_plan_takes_a_merged_delta_when_one_is_there():
    kind, payloads, _ = plan_pull(into(*CHAIN, delta(0, 3, 45), delta(0, 2, 15)), have_version=0, want_version=3)

    # 15 + 30 = 45 also: either is cheapest; 60 is not.
    assert sum(payload.num_bytes for payload in payloads) == 45
    assert kind in (PlanKind.DELTA, PlanKind.CHAIN)


def test_plan_goes_back_by_snapshot_when_the_wanted_version_is_older():
    kind, payloads, _ = plan_pull(into(*CHAIN), have_version=3, want_version=1)

    assert (kind, payloads) == (PlanKind.SNAPSHOT, CHAIN[:2])


def test_plan_skips_a_chain_with_a_hole():
    kind, payloads, _ = plan_pull(into(CHAIN[1], CHAIN[3], snapshot(2, 500)), have_version=0, want_version=3)

    assert (kind, payloads) == (PlanKind.SNAPSHOT, (snapshot(2, 500), CHAIN[3]))


@pytest.mark.parametrize("payloads", [(), CHAIN[2:], (delta(4, 5, 1),)])
def test_plan_without_a_path_is_refused(payloads):
    with pytest.raises(UnknownVersion, match="version 3"):
        plan_pull(into(*payloads), have_version=0, want_version=3)


@st.composite
def graphs(draw):
    versions = draw(st.integers(1, 6))
    pairs = [(a, b) for a, b in itertools.product(range(versions), repeat=2) if a != b]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=14)) if pairs else []
    sizes = st.integers(0, 20)
    payloads = [delta(a, b, draw(sizes)) for a, b in chosen]
    payloads += [snapshot(version, draw(sizes)) for version in draw(st.lists(st.integers(0, versions - 1), max_size=4))]
    return payloads, draw(st.integers(-1, versions - 1)), draw(st.integers(0, versions - 1))


def cheapest(payloads, have, want):
    """Cheapest path from `have` or nothing by trying every simple path; None when there is none."""
    best = None

    def walk(version, spent, seen):
        nonlocal best
        if version == want:
            best = spent if best is None else min(best, spent)
            return
        for payload in payloads:
            if payload.from_version == version and payload.to_version not in seen:
                walk(payload.to_version, spent + payload.num_bytes, seen | {payload.to_version})

    walk(-1, 0, {-1})
    walk(have, 0, {have})
    return best


@given(graphs())
def test_plan_costs_what_the_cheapest_of_all_paths_costs(graph):
    payloads, have, want = graph
    expected = cheapest(payloads, have, want)

    if expected is None:
        with pytest.raises(UnknownVersion):
            plan_pull(into(*payloads), have_version=have, want_version=want)
        return
    kind, path, _ = plan_pull(into(*payloads), have_version=have, want_version=want)

    assert sum(payload.num_bytes for payload in path) == expected
    position = have if not path or path[0].from_version == have else -1
    for payload in path:
        assert payload.from_version == position
        position = payload.to_version
    assert position == want
    assert (kind is PlanKind.SNAPSHOT) == any(payload.kind is PayloadKind.SNAPSHOT for payload in path)
    assert (kind is PlanKind.SAME) == (have == want)
    assert kind is not PlanKind.DELTA or len(path) == 1


def test_plan_asks_only_for_versions_on_the_way():
    # 5000 versions of 10 bytes each, a snapshot of 1000 bytes every 500.
    asked = []

    def payloads_into(version):
        asked.append(version)
        return [delta(version - 1, version, 10)] + ([snapshot(version, 1000)] if version % 500 == 0 else [])

    _, near, _ = plan_pull(payloads_into, have_version=4890, want_version=4899)
    assert (len(near), asked) == (9, list(range(4899, 4890, -1)))
    asked.clear()

    # From nothing: 399 deltas from the snapshot of 4500 cost 3990 + 1000; deltas alone would cost more beyond 499.
    _, far, _ = plan_pull(payloads_into, have_version=-1, want_version=4899)
    assert far[0] == snapshot(4500, 1000)
    assert len(far) == 400
    assert len(asked) == len(set(asked)) <= 500
