"""Values about a run: sites, heartbeats, canary, ledger, status, facts."""

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import Contract, LearnerProgress, SiteId, StepReport
from heterorl.common.types.rollout import DropReason, ReturnReason

STEPS_FILE, VERSIONS_FILE, EVALUATIONS_FILE, RUN_FILE = "steps.jsonl", "versions.jsonl", "evaluations.jsonl", "run.json"
"""Files of a learner's state_dir."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """The conservation law: acked = pending + leased + consumed + sum(dropped)."""

    acked: int
    pending: int
    leased: int
    consumed: int
    dropped: dict[DropReason, int] = field(default_factory=dict)
    closed: dict[ReturnReason, int] = field(default_factory=dict)
    """Assignments closed because their rows gave no group."""

    @property
    def is_balanced(self) -> bool:
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
    """Median |difference| from the learner in the newest canary, nats; None before the first."""
    quarantine: str = ""
    """Reason of the quarantine; empty without one."""
    apply_s: float = 0.0
    variant: str = ""
    """Variant of the weights that it pulls; empty for the trained ones."""
    groups_failed: int = 0
    """Groups that failed a check of the learner and still count."""
    groups_refused: int = 0
    """Pushes refused for a quota since the coordinator started."""
    quota_used: float = 0.0
    """Used share of the tightest quota, 0 to 1."""
    problem: str = ""
    """Why it does not generate, or why its calls or groups are refused; empty while all is well."""
    work_away: int = 0
    """Part of `work_leased` at a silent site: counted for no site, kept for its return."""
    work_ahead_s: float = 0.0
    """Seconds of work that it holds ahead, as declared and bounded by the coordinator."""
    is_stopped: bool = False
    """Its sampler stopped in order."""
    is_revoked: bool = False
    """Its newest certificate is revoked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantStatus:
    """A variant's newest version; 0 bytes: no such payload."""

    variant: str
    version: int
    full_bytes: int
    delta_bytes: int
    snapshot_bytes: int
    changed_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """Training prompts in and outside the window of difficulty, by mean reward."""

    in_window: int
    too_easy: int
    too_hard: int
    unseen: int
    passed_over: int
    """Assignments not leased, because their prompts are outside the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one moment; `is_head_signed`: a signature came, not verified."""

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
    variants: tuple[VariantStatus, ...] = ()
    rollback_to: int = -1
    """Version of a rollback order that is not done; -1: no order."""
    is_rollback_refused: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    """The learner's facts about the run: names such as "model" to values."""
    store_problem: str = ""
    """Problem of the coordinator's disk and its remedy; empty while all is well."""
    progress: LearnerProgress | None = None
    """The learner's last stated progress; None without one."""
    progress_age_s: float = 0.0
    """Seconds since it was stated."""
    prompts: PromptCounts | None = None
    """None without a window of difficulty."""

    @property
    def has_ended(self) -> bool:
        """Whether its learner ended it and released its lease."""
        return self.is_draining and not self.learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A sampler's introduction.

    `max_delay_versions` is the largest version lag that its delay model causes. `lowest_sequence` is the lowest that
    the incarnation may still push: all below are settled or were never used.
    """

    site: SiteId
    incarnation: str
    contract: Contract
    engine: str
    dtype: str
    max_delay_versions: int
    variant: str = ""
    """Variant of the weights that it pulls; empty for the trained ones."""
    max_delay_s: float = 0.0
    """Longest delay of its delay model, for a version and its groups together, seconds."""
    lowest_sequence: int = 0
    """0 is not stated."""
    work_ahead_s: float = 0.0
    """Seconds of work that it holds ahead for an outage; 0: only what its engine has room for."""
    held: tuple[int, ...] | None = None
    """Assignments that the incarnation can still answer at a process start; its others are leased again at once.
    None: not stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAnswer:
    """The run's answer to a sampler.

    `next_sequence` is 1 + the highest one known of this incarnation.
    """

    run_id: str
    head_version: int
    next_sequence: int
    max_staleness_versions: int
    max_message_bytes: int = 0
    """The coordinator's largest message; 0: not stated."""
    push_groups: int = 1
    """Most groups in one message of a push."""
    work_ahead_s: float = 0.0
    """Seconds that the coordinator grants."""


class Command(enum.Enum):
    """An order in a heartbeat's answer."""

    DRAIN = "drain"
    STOP = "stop"
    REGISTER = "register"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sampler's report of every few seconds."""

    site: SiteId
    incarnation: str
    policy_version: int
    state_root: str
    tokens_per_s: float
    apply_s: float = 0.0
    """Seconds that applying and verifying the newest weights took; 0 before the first."""
    problem: str = ""
    """Why the sampler does not generate; empty while all is well."""
    is_stopped: bool = False
    """True in the last report of a sampler that stops in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """A sampler's log-probs of the canary's tokens under a version."""

    site: SiteId
    incarnation: str
    version: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryVerdict:
    """Median |difference| from the learner, nats, None if unstated; reason of quarantine."""

    difference: float | None
    quarantine: str


NEVER_S = -1.0
"""Value of `last_seen_s` before the first sign of life since the coordinator started."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A site's newest incarnation with the counts of all `starts` incarnations."""

    newest: SiteStatus
    starts: int


def fold_incarnations(sites: Sequence[SiteStatus]) -> list[Folded]:
    """One entry for each site, in the order of first appearance.

    A quarantine is the site's, not an incarnation's.
    """
    by_site: dict[str, list[SiteStatus]] = {}
    for status in sites:
        by_site.setdefault(status.site, []).append(status)
    folded = []
    for own in by_site.values():
        seen = [status for status in own if status.last_seen_s > NEVER_S]
        newest = min(seen, key=lambda status: status.last_seen_s) if seen else own[-1]
        whole = dataclasses.replace(
            newest,
            groups_accepted=sum(status.groups_accepted for status in own),
            groups_dropped=sum(status.groups_dropped for status in own),
            work_leased=sum(status.work_leased for status in own),
            work_away=sum(status.work_away for status in own),
        )
        folded.append(Folded(newest=whole, starts=len(own)))
    return folded


ACTIVE_S = 120.0
"""A site that was silent for so long is not active."""
_SHOWN = 5
RELEASE = "heterorl sites release SITE HOST:PORT --reason TEXT"


def quarantined_sites(status: RunStatus) -> tuple[str, ...]:
    """The active sites, sorted, if all are in quarantine; otherwise none.

    Such a run stands still: no work means no groups and no versions, and only a new version could end a quarantine by
    the canary. An operator must release a site.
    """
    # -1 is not seen yet; clock reads may differ by a little less than 0.
    active = {site.site: site.quarantine for site in status.sites if -1.0 < site.last_seen_s < ACTIVE_S}
    return () if status.is_draining or not all(active.values()) else tuple(sorted(active))


def describe_standstill(sites: Sequence[str]) -> str:
    """Text about a run that stands still; empty without `sites`."""
    if not sites:
        return ""
    more = f" and {len(sites) - _SHOWN} more" if len(sites) > _SHOWN else ""
    return (
        f"the run stands still: every site that answers is in quarantine ({', '.join(sites[:_SHOWN])}{more}) and no"
        f" work is handed out, so no new version comes. If a site is right: {RELEASE}. After a canary it works until"
        " its next version is scored; if that is off again, compare learner and site, or raise the coordinator's"
        " canary_threshold"
    )


STEPS_WANTED = "steps wanted"
CHANGED = "changed after step"
"""Begins names of facts that the coordinator adds: changes of a start, after which step."""
MAX_CHANGES = 20
"""Newest changes kept; earlier ones stay in the audit log."""
_DIGEST = "configuration"
MAX_FACTS, MAX_CHARACTERS = 64, 300
_FACTS = (
    ("model", "config.model_dir"),
    ("task", "config.task.name"),
    ("reward", "config.task.reward"),
    ("environment", "config.task.environment"),
    ("loss", "config.loss.kind"),
    ("own loss", "config.loss.function"),
    ("learning rate", "config.backend.lr"),
    ("learning rate schedule", "config.backend.lr_schedule"),
    ("group size, answers", "config.group_size"),
    ("groups a step", "config.groups_per_step"),
    ("steps a version", "config.steps_per_version"),
    (STEPS_WANTED, "config.max_steps"),
    ("new tokens, at most", "config.sampling.max_new_tokens"),
    ("temperature", "config.sampling.temperature"),
    ("chat template", "config.use_chat_template"),
    ("adapters, rank", "config.lora.rank"),
    ("backend", "config.backend.kind"),
    ("device", "config.backend.device"),
    ("computed in", "config.backend.compute_dtype"),
    ("published in", "config.backend.published_dtype"),
    ("learner's heterorl", "heterorl_version"),
)


_USER, _QUERY = re.compile(r"(://)\S*@"), re.compile(r"(://[^?\s]*\?)\S+")
"""Parts of an address that may be secret."""


def facts_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Facts in a learner's run.json; empty values are left out."""
    facts = {}
    for name, path in _FACTS:
        value: Any = run
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in (None, "", 0, False):
            shown = _QUERY.sub(r"\1***", _USER.sub(r"\1***@", str(value)))
            facts[name] = "".join(c for c in shown if c.isprintable())[:MAX_CHARACTERS]
    if facts:
        digest = hashlib.sha256(json.dumps(run.get("config"), sort_keys=True).encode()).hexdigest()
        facts[_DIGEST] = f"{digest[:12]} (SHA-256 of its keys and values)"
    return facts


def parse_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Check number and form of foreign facts; raises InvalidRequest."""
    if len(facts) > MAX_FACTS:
        raise InvalidRequest(f"{len(facts)} facts, at most {MAX_FACTS} are kept")
    for name, value in facts.items():
        if not re.fullmatch(r"[a-z][a-z0-9 ,.'_-]{0,63}", name):
            raise InvalidRequest(f"{name[:64]!r} is no name of a fact")
        if len(value) > MAX_CHARACTERS or not value.isprintable():
            raise InvalidRequest(f"fact {name}: at most {MAX_CHARACTERS} printable characters")
    return dict(facts)


def changed_facts(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Differences between two starts' facts, in words; empty without any."""
    names = [name for name in {**before, **after} if not name.startswith(CHANGED) and name != _DIGEST]
    said = [
        f"{name} {before.get(name, 'unset')} -> {after.get(name, 'unset')}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    if not said and before.get(_DIGEST) != after.get(_DIGEST):
        said = ["keys that are not among these facts (the learner's log names them)"]
    return ", ".join(said)


def with_changes(before: Mapping[str, str], after: Mapping[str, str], *, words: str, step: int) -> dict[str, str]:
    """New facts with earlier changes, and `words` as the change after `step`."""
    known = {name: value for name, value in before.items() if name.startswith(CHANGED)}
    if words:
        name = f"{CHANGED} {step}"
        known[name] = f"{known[name]}, then {words}" if name in known else words
        known[name] = known[name][:MAX_CHARACTERS]
    return {**after, **dict(list(known.items())[-MAX_CHANGES:])}


def changed_steps(facts: Mapping[str, str]) -> tuple[int, ...]:
    """The steps after which a start changed something."""
    numbers = (name.removeprefix(CHANGED).strip() for name in facts if name.startswith(CHANGED))
    return tuple(int(number) for number in numbers if number.isdecimal())


def steps_wanted(facts: Mapping[str, str]) -> int:
    """Steps that the run will take; 0 if not stated."""
    text = facts.get(STEPS_WANTED, "")
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else 0


def step_words(step: int, wanted: int) -> str:
    """A step and the run's last one, 0 if not stated.
    A run that is past it has had its max_steps lowered."""
    if not wanted:
        return str(step)
    return f"{step} of {wanted}" if step <= wanted else f"{step} (max_steps is {wanted})"
