"""Leases of plans: all payloads of one stay while any of them is fetched, and not for ever."""

import dataclasses

from heterorl.common.pull.fetcher import STALL_S
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.weights.payload import SLOW_BYTES
from heterorl.coordinator.payloads import retention as pull_leases
from heterorl.coordinator.payloads.retention import PullLeases


def payloads(*digests):
    return tuple(
        PayloadRef(kind=PayloadKind.DELTA, from_version=n, to_version=n + 1, digest=digest, num_bytes=1)
        for n, digest in enumerate(digests)
    )


def test_one_frame_renews_the_whole_plan_and_no_other():
    leases = PullLeases(term_s=10.0, started=0.0)
    leases.grant(have_version=3, payloads=payloads("a", "b"), now=0.0)
    leases.grant(have_version=4, payloads=payloads("c"), now=0.0)
    leases.touch("b", 9.0)

    assert leases.payloads(9.9) == {"a", "b", "c"}
    assert leases.versions(9.9) == {3, 4}
    assert leases.payloads(18.9) == {"a", "b"}
    assert leases.versions(19.0) == leases.payloads(19.0) == frozenset()


def test_file_being_read_stays_without_a_plan():
    leases = PullLeases(term_s=10.0, started=0.0)
    with leases.reading("a"), leases.reading("a"):
        assert leases.payloads(100.0) == {"a"}
    assert leases.payloads(100.0) == frozenset()


def test_plans_of_an_earlier_process_are_over_after_one_term():
    leases = PullLeases(term_s=10.0, started=5.0)

    assert [leases.are_known(now) for now in (5.0, 14.9, 15.0)] == [False, False, True]


def test_plans_are_bounded_and_the_most_silent_one_is_forgotten(monkeypatch):
    monkeypatch.setattr(pull_leases, "MAX_LEASES", 2)
    leases = PullLeases(term_s=10.0, started=0.0)
    leases.grant(have_version=0, payloads=payloads("a"), now=0.0)
    leases.grant(have_version=0, payloads=payloads("b"), now=0.0)
    leases.touch("a", 1.0)
    leases.grant(have_version=0, payloads=payloads("c"), now=2.0)

    assert leases.payloads(3.0) == {"a", "c"}


def test_frames_renew_their_plans_alone_and_what_ended_is_forgotten():
    leases = PullLeases(term_s=10.0, started=0.0)
    first, second, third = (
        PayloadRef(kind=PayloadKind.DELTA, from_version=0, to_version=1, digest=Digest(name * 64), num_bytes=1)
        for name in "abc"
    )
    leases.grant(have_version=0, payloads=(first, second), now=0.0)
    leases.grant(have_version=1, payloads=(second, third), now=0.0)
    leases.touch(first.digest, 8.0)

    assert leases.payloads(12.0) == {first.digest, second.digest}
    assert leases.versions(12.0) == {0}
    leases.touch(third.digest, 12.0)
    assert leases.payloads(19.0) == frozenset()
    assert not leases._plans_of


def test_frames_of_a_pull_without_progress_renew_its_plan_for_so_long_as_the_slowest_pull_takes():
    leases = PullLeases(term_s=600.0, started=0.0)
    (payload,) = payloads("a")
    # At most 100 frames, each within 60 s; the first term comes on top.
    leases.grant(have_version=0, payloads=(dataclasses.replace(payload, num_bytes=99 * SLOW_BYTES + 1),), now=0.0)
    for now in range(0, 10_000, 500):
        leases.touch("a", now)
        assert leases.payloads(now) == ({"a"} if now < 100 * STALL_S + 600 else frozenset())

    # A new plan counts from its own beginning.
    leases.grant(have_version=0, payloads=(payload,), now=10_000)
    assert leases.payloads(10_599) == {"a"}
