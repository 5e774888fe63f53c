"""What the gate shows of itself before it refuses anybody."""

from heterorl.common.identity.spiffe import RefusalReason
from heterorl.common.process.metrics import IDENTITY_REFUSALS
from heterorl.coordinator.rpc.access import CallAuthorizer
from tests.support.secure_run import refusals


def test_every_reason_of_a_refusal_is_counted_from_zero():
    # Other tests of this process have counted.
    IDENTITY_REFUSALS.clear()

    CallAuthorizer(run_id="run", is_plaintext=True)

    assert refusals() == {reason.value: 0.0 for reason in RefusalReason}
