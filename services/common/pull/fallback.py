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

from __future__ import annotations

import enum

from heterorl.common.errors import StateMismatch


class PlanBasis(enum.Enum):
    """The base of a plan's deltas."""

    MERGED = "merged deltas"
    SINGLES = "the held version"
    BASE = "the base model"
    SNAPSHOT = "a snapshot"


class Failure(enum.Enum):
    """Why a plan failed."""

    DAMAGED = "damaged"
    GONE = "gone"


class Move(enum.Enum):
    """The next step after a failure."""

    STRIKE = "strike"
    AGAIN = "again"
    END = "end"


MAX_REPLANS = 3
"""Plans of one call that may fail because the coordinator no longer has a payload."""
TABLE: dict[PlanBasis, dict[Failure, Move]] = {
    PlanBasis.MERGED: {Failure.DAMAGED: Move.STRIKE, Failure.GONE: Move.STRIKE},
    PlanBasis.SINGLES: {Failure.DAMAGED: Move.STRIKE, Failure.GONE: Move.AGAIN},
    PlanBasis.BASE: {Failure.DAMAGED: Move.STRIKE, Failure.GONE: Move.AGAIN},
    PlanBasis.SNAPSHOT: {Failure.DAMAGED: Move.END, Failure.GONE: Move.AGAIN},
}
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

    def fail(self, failure: Failure) -> bool:
        """Note that the plan failed; returns whether to ask for another one."""
        move = TABLE[self.basis][failure]
        if failure is Failure.GONE:
            self._num_gone += 1
            if self._num_gone > MAX_REPLANS:
                return False
        if move is Move.STRIKE:
            self._struck.add(self.basis)
        return move is not Move.END

    def built(self) -> None:
        self._struck = {PlanBasis.BASE}
