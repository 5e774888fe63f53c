"""Faults of a learner's machines: their kinds, order and time limits."""

from __future__ import annotations

import random
from dataclasses import dataclass

RANK_TIMEOUT_S = 10.0
RANKS_ENDED_S = 1.25 * RANK_TIMEOUT_S + 2.0
"""Until no rank runs: the documented limit, plus the delay of busy cores."""
ENDED_S = RANKS_ENDED_S + 10.0
"""Until the agents have ended too; torchrun takes seconds of shared cores for that."""
TRAINS_S = 150.0
"""From then until a new version: each machine loads torch twice on shared cores."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one of the learner's machines; machine 0 has rank 0 and the rendezvous."""

    kind: str
    machine: int = 0


ON_TWO = (
    Fault("machine", 1), Fault("rank", 0), Fault("parted"), Fault("stopped", 1), Fault("machine", 0), Fault("agent", 1),
    Fault("cut off", 1), Fault("rank", 1), Fault("stopped", 0), Fault("agent", 0), Fault("cut off", 0),
)  # fmt: skip
"""machine: SIGKILL of agent and rank; rank, agent: of one of them; stopped: SIGSTOP of the rank; cut off: the cable is
pulled; parted: the machines cannot reach each other, but both reach the coordinator."""
ON_ONE = (Fault("machine"), Fault("rank"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault; seconds until no rank ran, until no agent ran, and from there until a new version."""

    fault: str
    machine: int
    machines: int
    head: int
    ranks_ended_s: float
    ended_s: float
    next_version_s: float

    def late(self) -> str:
        """The times that exceeded their limits; empty if none did."""
        bounds = (
            (self.ranks_ended_s, RANKS_ENDED_S, "no rank ran"),
            (self.ended_s, ENDED_S, "no agent ran"),
            (self.next_version_s, TRAINS_S, "a new version"),
        )
        over = [f"{found} s until {what}" for found, bound, what in bounds if found > bound]
        return f"{self.fault} {self.machine} of {self.machines} at {self.head}: {', '.join(over)}" if over else ""


def plan(kills: int, *, seed: int) -> list[Fault]:
    """Each fault once, then at random; after the loss of a machine, a fault of the remaining one."""
    chooser = random.Random(seed)
    on_two = [*ON_TWO, *chooser.choices(ON_TWO, k=kills)]
    faults: list[Fault] = []
    for fault in on_two:
        faults.append(fault)
        if fault.kind == "machine":
            faults.append(chooser.choice(ON_ONE))
    return faults[:kills]
