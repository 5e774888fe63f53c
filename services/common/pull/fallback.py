"""Fallback of pulls: a table from failures to the next plan.

    basis     the plan starts from                         damaged    gone
    MERGED    a merged delta                               STRIKE     STRIKE
    SINGLES   the held version, with single deltas         STRIKE     AGAIN
    BASE      the caller's base model and single deltas    STRIKE     AGAIN
    SNAPSHOT  a snapshot                                   END        AGAIN

    damaged   a payload, a manifest, the plan or the resulting state failed its check
    gone      the coordinator no longer has a payload of its plan
    STRIKE    the basis is closed until a version is built; the next plan is the cheapest one without it
    AGAIN     the same bases stay open, for at most MAX_REPLANS plans of one call
    END       no basis is left: the caller gets the failure

The coordinator chooses the plan, so its basis is read off the plan; the highest one counts. A plan on a closed basis is
itself damaged, and counts as a failure of the basis that was asked for. So every failure closes a basis, uses up a
replan or ends the call. Closed bases outlive a call, because one version may take
several calls. A built version opens all bases but BASE, which a caller that holds a version does not need.
"""

import enum

from heterorl.common.errors import StateMismatch


class PlanBasis(enum.Enum):
    """The base of a plan's deltas."""

    MERGED = "merged deltas"
    SINGLES = "the held version"
    BASE = "the base model"
    SNAPSHOT = "a snapshot"


MAX_REPLANS = 3
"""Plans of one call that may fail because the coordinator no longer has a payload."""
BELOW = {
    PlanBasis.MERGED: "from single deltas",
    PlanBasis.SINGLES: "from a snapshot",
    PlanBasis.BASE: "from a snapshot",
}
"""How a version is built once a basis is closed, for logs."""


class Fallback:
    """Which bases are open, and the basis of the current plan."""

    def __init__(self) -> None:
        self.basis = PlanBasis.SNAPSHOT
        self._struck: set[PlanBasis] = set()
        self._num_gone = 0

    def is_open(self, basis: PlanBasis) -> bool:
        return basis not in self._struck

    def begin_call(self) -> None:
        """Start a call: replans are counted per call."""
        self._num_gone = 0

    def begin(self, *, is_held: bool) -> None:
        """Start a plan, from the held version or from a snapshot."""
        self.basis = PlanBasis.SINGLES if is_held else PlanBasis.SNAPSHOT

    def rest_on(self, basis: PlanBasis) -> None:
        """Note the higher basis of a plan; raises StateMismatch if closed."""
        if not self.is_open(basis):
            raise StateMismatch(f"the plan rests on {basis.value}, which failed before")
        self.basis = basis

    def damaged(self) -> bool:
        """Note a failed check; returns whether to ask for another plan."""
        if self.basis is PlanBasis.SNAPSHOT:
            return False
        self._struck.add(self.basis)
        return True

    def gone(self) -> bool:
        """Note a missing payload; returns whether to ask for another plan."""
        self._num_gone += 1
        if self.basis is PlanBasis.MERGED:
            self._struck.add(self.basis)
        return self._num_gone <= MAX_REPLANS

    def built(self) -> None:
        self._struck = {PlanBasis.BASE}
