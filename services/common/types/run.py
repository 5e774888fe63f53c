"""Values about a run: sites and their reports, the canary, the ledger, status."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from heterorl.common.types.common import Contract, SiteId, StepReport
from heterorl.common.types.rollout import DropReason, ReturnReason
from heterorl.common.types.step import LearnerProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """The conservation law: acked = pending + leased + consumed + sum(dropped)."""

    acked: int
    pending: int
    leased: int
    consumed: int
    dropped: dict[DropReason, int] = field(default_factory=dict)
    closed: dict[ReturnReason, int] = field(default_factory=dict)
    """Assignments whose rows gave no group; they have none to be accounted for."""

    @property
    def is_balanced(self) -> bool:
        """Whether every acknowledged group is accounted for."""
        return self.acked == self.pending + self.leased + self.consumed + sum(self.dropped.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStatus:
    """One site as the coordinator sees it."""

    site: SiteId
    incarnation: str
    policy_version: int
    state_root: str
    last_seen_s: float
    groups_accepted: int
    groups_dropped: int
    tokens_per_s: float
    work_leased: int
    canary_difference: float | None = None
    """Median of |difference| from the learner in the newest canary, nats; None before the first."""
    quarantine: str = ""
    """Why the site is in quarantine; empty when it is not."""
    apply_s: float = 0.0
    flavour: str = ""
    """Form of the weights that it pulls; empty for those that are trained."""
    groups_failed: int = 0
    """Groups that failed a check of the learner and still count."""
    groups_refused: int = 0
    """Pushes refused for a quota since the coordinator started."""
    quota_used: float = 0.0
    """Used share of the tightest quota, 0 to 1."""
    problem: str = ""
    """Why it generates nothing, as it says, or why its calls or groups are refused; empty while all is well."""
    work_away: int = 0
    """Those of `work_leased` that left with a silent site: they count against nobody, and wait for its return."""
    work_ahead_s: float = 0.0
    """How far ahead it holds assignments, seconds, as it declared and the coordinator bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlavourStatus:
    """A flavour's newest version: size of its state and of its payloads, bytes (0: none), and the share changed."""

    flavour: str
    version: int
    full_bytes: int
    delta_bytes: int
    snapshot_bytes: int
    changed_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """Training prompts by the mean reward of their groups, as the window of difficulty divides them."""

    in_window: int
    too_easy: int
    too_hard: int
    unseen: int
    passed_over: int
    """Assignments that were not handed out, because their prompts were outside the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A whole run at one moment; `is_head_signed` says that a signature came with the head, not whose it is."""

    run_id: str
    head_version: int
    epoch: int
    learner: str
    is_draining: bool
    uptime_s: float
    ledger: LedgerCounts
    bytes_full: int
    bytes_last: int
    changed_fraction: float
    sites: tuple[SiteStatus, ...]
    last_report: StepReport | None
    is_head_signed: bool = False
    store_bytes: int = 0
    store_limit_bytes: int = 0
    snapshot_version: int = -1
    snapshot_age_s: float = 0.0
    reclaimed_bytes: int = 0
    delta_bytes: int = 0
    snapshot_bytes: int = 0
    encode_s: float = 0.0
    flavours: tuple[FlavourStatus, ...] = ()
    rollback_to: int = -1
    """Version that the learner is ordered to go back to and has not published yet; -1 without an order."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What the learner said of the run: names such as "model" to values."""
    store_problem: str = ""
    """What is wrong with the coordinator's disk and what to do about it; empty while nothing is."""
    progress: LearnerProgress | None = None
    """Where the learner stood when it last said so; None while no learner says so."""
    progress_age_s: float = 0.0
    """Seconds since it said so."""
    prompts: PromptCounts | None = None
    """None where the coordinator keeps no window of difficulty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A sampler introduces itself. `max_delay_versions` is the largest version lag its delay model can cause.

    `lowest_sequence` is the lowest that the incarnation may still push: all below it are settled or were never used.
    """

    site: SiteId
    incarnation: str
    contract: Contract
    engine: str
    dtype: str
    max_delay_versions: int
    flavour: str = ""
    """Form of the weights that it pulls; empty for those that are trained."""
    max_delay_s: float = 0.0
    """Longest that its delay model keeps a version and its groups from the coordinator, there and back, seconds."""
    lowest_sequence: int = 0
    """0 is not stated."""
    work_ahead_s: float = 0.0
    """How far ahead it holds assignments, to ride out an outage, seconds; 0: only what its engine has room for."""
    held: tuple[int, ...] | None = None
    """Assignments that the incarnation can still answer, stated when its process begins: all others that it held go to
    others at once. None is not stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAnswer:
    """What the run tells a new sampler. `next_sequence` is 1 + the highest sequence known of this incarnation."""

    run_id: str
    head_version: int
    next_sequence: int
    max_staleness_versions: int
    max_message_bytes: int = 0
    """Largest message that the coordinator takes and sends; 0 where it does not say."""
    push_groups: int = 1
    """Most groups in one message of a push."""
    work_ahead_s: float = 0.0
    """What the coordinator grants of the stated one, seconds."""


class Command(enum.Enum):
    """What a heartbeat's answer asks of a node."""

    DRAIN = "drain"
    STOP = "stop"
    REGISTER = "register"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a sampler reports every few seconds."""

    site: SiteId
    incarnation: str
    policy_version: int
    state_root: str
    tokens_per_s: float
    outbox_groups: int
    apply_s: float = 0.0
    """Seconds that applying and verifying the newest weights took; 0 before the first."""
    problem: str = ""
    """Why nothing is generated; empty while all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """A sampler's log-probs of the canary's tokens under a version."""

    site: SiteId
    incarnation: str
    version: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryVerdict:
    """Median of |difference| from the learner, nats (None: it stated none), and why the site is in quarantine."""

    difference: float | None
    quarantine: str
