"""A lease lasts to its end, and from then on it is another learner's to take."""

import math

from heterorl.coordinator.versions.lineage import Lease, decide_acquire

LEASE = Lease(epoch=3, holder="a", request_id="1", expires=100.0, is_released=False)


def test_nobody_else_gets_a_lease_in_the_instant_before_its_end():
    before = math.nextafter(100.0, 0.0)

    refused, _ = decide_acquire(before, LEASE, holder="b", request_id="2")
    granted, _ = decide_acquire(100.0, LEASE, holder="b", request_id="2")

    assert (refused.epoch, refused.wait_s) == (None, 100.0 - before)
    assert (granted.epoch, granted.is_new) == (4, True)
