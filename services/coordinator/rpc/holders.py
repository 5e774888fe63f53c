"""Whose calls and bytes are whose: one holder for each certificate, whatever connections it opens.

Guarantees: nobody can be counted as another, and what the learner and the operator need is not for samplers to take.
Without certificates every caller is on this machine and only its connection tells it apart, as far as that goes.
"""

from __future__ import annotations

from heterorl.common.identity.identity import Identity, Peer, Role
from heterorl.common.rpc.lanes import Holder
from heterorl.coordinator.rpc.access import RULES

_PRIVILEGED = frozenset({Role.LEARNER, Role.OPERATOR, Role.COORDINATOR})


def holder_of(peer: Peer, method: str, address: str) -> Holder:
    """The holder of a call that was admitted.

    Args:
        peer: what the gate knows of the caller.
        method: full name of the rpc.
        address: of the other end, as gRPC states it.
    """
    if isinstance(peer, Identity):
        name, owner = f"{peer.role.value} {peer.site}", peer.site.partition(".")[0]
        return Holder(name, peer.role in _PRIVILEGED, is_proven=True, site=owner)
    # Anybody may call anything here: what only a learner or an operator calls is taken for theirs.
    is_privileged = Role.SAMPLER not in RULES[method].roles
    kind = "learner or operator" if is_privileged else "node"
    return Holder(f"{kind} at {address}", is_privileged, is_proven=False)
