"""Whose calls and bytes are whose: one holder for each certificate, whatever connections it opens.

Guarantees: nobody can be counted as another, and what the learner and the operator need is not for samplers to take.
Without certificates every caller is on this machine and only its connection tells it apart, as far as that goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.common.identity.identity import Identity, Peer, Role
from heterorl.coordinator.rpc.access import RULES

_PRIVILEGED = frozenset({Role.LEARNER, Role.OPERATOR, Role.COORDINATOR})


@dataclass(frozen=True, slots=True)
class Holder:
    """Who is counted; `is_privileged` may also use what is kept from samplers.

    Example:
        Holder(name="sampler eu-1", is_privileged=False, is_proven=True)
    """

    name: str
    is_privileged: bool
    is_proven: bool


def holder_of(peer: Peer, method: str, address: str) -> Holder:
    """The holder of a call that was admitted.

    Args:
        peer: what the gate knows of the caller.
        method: full name of the rpc.
        address: of the other end, as gRPC states it.
    """
    if isinstance(peer, Identity):
        return Holder(f"{peer.role.value} {peer.site}", peer.role in _PRIVILEGED, is_proven=True)
    # Anybody may call anything here: what only a learner or an operator calls is taken for theirs.
    is_privileged = Role.SAMPLER not in RULES[method].roles
    kind = "learner or operator" if is_privileged else "node"
    return Holder(f"{kind} at {address}", is_privileged, is_proven=False)
