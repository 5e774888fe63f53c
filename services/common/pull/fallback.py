"""The ways to a version, from the cheapest to the one that depends on least, as a table of what follows a failure.

    rung      what the plan rests on                          damaged    gone
    MERGED    a merged delta, wherever it begins              STRIKE     STRIKE
    SINGLES   the version that is held, and single deltas     STRIKE     AGAIN
    BASE      the caller's base model, and single deltas      STRIKE     AGAIN
    SNAPSHOT  nothing but what the coordinator sends          END        AGAIN

    damaged   something failed its check: a payload, a manifest, the plan itself, the state that came of it
    gone      the coordinator has a payload of its plan no longer
    STRIKE    nothing rests on that rung before a version is built; the next plan is the cheapest one without it
    AGAIN     the same rungs are open, but MAX_REPLANS plans in one call are the last
    END       there is nothing below: the failure is the caller's

Four rules. The coordinator chooses the plan, so a rung is read off the plan, and the highest that it rests on counts. A
plan that rests on a rung that is struck out is itself damaged, and the failure is that of the rung that was asked for;
so every failure but a few strikes another rung or ends the call, whatever the coordinator offers. What is struck out
outlives a call: a version may take several, and what failed would only fail again in between. A version that was built
opens all rungs but BASE, which whoever holds a version needs no more.
"""

from __future__ import annotations

import enum

from heterorl.common.errors import StateMismatch


class PlanBasis(enum.Enum):
    """What a plan rests on."""

    MERGED = "merged deltas"
    SINGLES = "the held version"
    BASE = "the base model"
    SNAPSHOT = "a snapshot"


class Failure(enum.Enum):
    """What became of a plan."""

    DAMAGED = "damaged"
    GONE = "gone"


class Move(enum.Enum):
    """What follows."""

    STRIKE = "strike"
    AGAIN = "again"
    END = "end"


MAX_REPLANS = 3
"""Times in one call that a plan is made anew because the coordinator no longer has one of its payloads."""
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
"""How a version is built when a rung is struck out, in words."""


class Fallback:
    """Which rungs are open, and the one that the plan under way rests on."""

    def __init__(self) -> None:
        self.rung = PlanBasis.SNAPSHOT
        self._struck: set[PlanBasis] = set()
        self._num_gone = 0

    def is_open(self, rung: PlanBasis) -> bool:
        """Whether a plan may rest on a rung."""
        return rung not in self._struck

    def begin_call(self) -> None:
        """Somebody asks for a version."""
        self._num_gone = 0

    def begin(self, *, is_held: bool) -> None:
        """A plan is asked for, from what is held or from nothing."""
        self.rung = PlanBasis.SINGLES if is_held else PlanBasis.SNAPSHOT

    def rest_on(self, rung: PlanBasis) -> None:
        """The plan turns out to rest on a higher rung.

        Raises:
            StateMismatch: that rung is struck out; the plan counts as one that rests on the rung below.
        """
        if not self.is_open(rung):
            raise StateMismatch(f"the plan rests on {rung.value}, which it was not to")
        self.rung = rung

    def fail(self, failure: Failure) -> bool:
        """Note that the plan failed; returns whether another one is to be asked for."""
        move = TABLE[self.rung][failure]
        if failure is Failure.GONE:
            self._num_gone += 1
            if self._num_gone > MAX_REPLANS:
                return False
        if move is Move.STRIKE:
            self._struck.add(self.rung)
        return move is not Move.END

    def built(self) -> None:
        """A version is there."""
        self._struck = {PlanBasis.BASE}
