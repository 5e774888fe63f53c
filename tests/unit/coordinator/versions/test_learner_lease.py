"""A lease lasts to its end, and from then on it is another learner's to take."""

import math

from heterorl.coordinator.versions.lineage import Lease, decide_acquire

LEASE = Lease(epoch=3, holder="a", request_id="1", expires=100.0, is_released=False)


def test_nobody_else_gets_a_lease_in_the_instant_before_its_end():
    before = math.nextafter(100.0, 0.0)

    assert decide_acquire(before, LEASE, holder="b", request_id="2")[:2] == (None, 100.0 - before)
    assert decide_acquire(100.0, LEASE, holder="b", request_id="2")[:2] == (4, 0.0)
