"""Domain values that cross service borders. Frozen, transport-free: no protobuf, no grpc, no torch.

One file, over 300 lines because a reader wants the whole vocabulary in one place.

One word per concept: a policy *version* is a dense integer that the coordinator assigns; an optimizer *step* is the
learner's; a *rollout* is one completion; a *group* is the G rollouts of one prompt and the unit that travels.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
import numpy.typing as npt

SiteId = NewType("SiteId", str)
Digest = NewType("Digest", str)
"""Lower-case hex blake3-256 of content; 64 characters."""

SIGNATURE_BYTES = 64
"""Length of an Ed25519 signature."""

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class FinishReason(enum.Enum):
    """Why a rollout ended."""

    EOS = "eos"
    LENGTH = "length"


class LogprobMode(enum.Enum):
    """What a sampler log-prob means: of the raw logits, or of logits / temperature (no truncation either way)."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GroupId:
    """Identity of a group: its site, that site's incarnation and a dense sequence from 1; the key of deduplication.

    Example: GroupId(site=SiteId("eu-1"), incarnation="b1946ac9", sequence=17)
    """

    site: SiteId
    incarnation: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a completion were produced by policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One named component of a reward."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One completion with the log-probs of the policy that produced it.

    `token_ids` int32 [T] includes the end-of-sequence token when `finish_reason` is EOS; `sampler_logprobs`
    float32 [T], each finite and <= 0; `spans` cover [0, T) in order without gaps.
    """

    token_ids: Int32Array
    sampler_logprobs: Float32Array
    spans: tuple[VersionSpan, ...]
    reward: float
    reward_parts: tuple[RewardPart, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The G rollouts of one prompt: the unit that is pushed, queued, leased and trained.

    `oldest_version` is the smallest version in any span; `state_root` is the state root of that version's manifest;
    `assignment` is the work assignment that asked for it; `prompt_index` is the position of the prompt in the task.
    """

    id: GroupId
    assignment: int
    prompt_index: int
    prompt_token_ids: Int32Array
    rollouts: tuple[Rollout, ...]
    oldest_version: int
    state_root: Digest
    generation_s: float
    is_seeded: bool = False
    """Whether the tokens were drawn with the noise of heterorl.common.generation.seeded."""
    trace: str = ""
    """W3C trace context of the generation; empty when nobody follows the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSemantics:
    """How tokens are drawn and what their log-probs mean; both sides must agree before a rollout is accepted."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    logprob_mode: LogprobMode


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters of a run; `rank` 0: none, all weights are trained. `base_digest` names the frozen weights.

    Example: LoraSettings(rank=8, alpha=16.0, target_modules=("q_proj", "v_proj"), base_digest=digest)
    """

    rank: int = 0
    alpha: float = 0.0
    target_modules: tuple[str, ...] = ()
    base_digest: str = ""


NO_LORA = LoraSettings()
"""All weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What every node of a run must agree on; the first learner states it, later nodes must equal it.

    `layout_id` names the tensor table of the model (heterorl.common.weights.arena); digests are blake3 hex.
    """

    tokenizer_digest: Digest
    chat_template_digest: Digest
    task_digest: Digest
    # Before the layout, which depends on it: the first difference is the one that a node is told.
    lora: LoraSettings = NO_LORA
    layout_id: Digest
    vocab_size: int
    num_prompts: int
    group_size: int
    sampling: SamplingSemantics
    eos_token_id: int = -1
    """Token that ends a completion; -1 in contracts of programs that did not state it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAssignment:
    """One prompt group to generate: which prompt, with which seed, until when the lease holds (seconds from now)."""

    id: int
    prompt_index: int
    seed: int
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """The learner's lease: every effect names its `epoch`; only the newest epoch has effects."""

    epoch: int
    holder: str
    ttl_s: float
    head_version: int
    """Newest version, or -1 when none is published yet."""
    rollback_to: int = -1
    """Version whose content the next one is to have, by an operator's order; -1 for none."""
    max_message_bytes: int = 0
    """Largest message that the coordinator takes and sends; 0 where it does not say."""
    max_staleness_versions: int = -1
    """Versions between a group's oldest token and the parent of the version that consumes it, at most; -1: not said."""


class PayloadKind(enum.Enum):
    """What a payload rebuilds: a whole state, the step from a version's parent to it, or several such steps as one."""

    SNAPSHOT = "snapshot"
    DELTA = "delta"
    MERGED = "merged"


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """A content-addressed payload object. `from_version` is -1 for a snapshot."""

    kind: PayloadKind
    from_version: int
    to_version: int
    digest: Digest
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a version is: its weights by digest, its parent by digest, and the payloads that rebuild it.

    `chunk_digests` are xxh3-128 (16 bytes each) of every arena chunk after the step, in arena order;
    `state_root` = blake3(layout_id || chunk digests). `parent_digest` is the digest of the parent's manifest bytes,
    empty for the first version. `parent_version` is -1 for the first version. `chunk_elements` is the length of every
    chunk but the last of a width (half of it for elements of 4 bytes), 0 when not stated. `num_byte_elements` of the
    elements have one byte each.
    """

    run_id: str
    epoch: int
    version: int
    parent_version: int
    parent_digest: str
    layout_id: Digest
    chunk_digests: tuple[bytes, ...]
    state_root: Digest
    step: int
    num_changed: int
    num_elements: int
    full_bytes: int
    payloads: tuple[PayloadRef, ...]
    chunk_elements: int = 0
    num_byte_elements: int = 0

    @property
    def abandoned(self) -> range:
        """Versions that this one abandons: numbers are dense and never reused, so all between its parent and itself."""
        return range(self.parent_version + 1, self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """Exact bytes of a manifest and the signature beside them; empty where the publisher did not sign."""

    data: bytes
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did; numbers only, names as in the field's papers."""

    step: int
    version: int
    loss: float
    reward_mean: float
    kl: float
    ess_fraction: float
    iw_variance: float
    clip_fraction: float
    entropy: float
    grad_norm: float
    staleness_mean: float
    staleness_max: int
    policy_age_p50_s: float
    num_groups: int
    num_tokens: int
    step_s: float
    is_applied: bool
    """False when a non-finite loss or gradient made the step a no-op."""
    evaluation_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlavourVersion:
    """A version's weights in another form, published with it: its own manifest, signature and canary log-probs.

    Example: FlavourVersion(flavour="int8", manifest=data, signature=signature, canary=logprobs)
    """

    flavour: str
    manifest: bytes
    signature: bytes = b""
    canary: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest:
    """One compare-and-set publication: the manifest's bytes, the groups it consumed, the steps it contains.

    `step_id` is the idempotency key. `lineage_version` < `parent_version` abandons the versions in between.
    """

    epoch: int
    step_id: str
    parent_version: int
    lineage_version: int
    manifest: bytes
    consumed: tuple[GroupId, ...]
    reports: tuple[StepReport, ...]
    signature: bytes = b""
    """Ed25519 signature of `manifest`; empty when the run is not signed."""
    canary: tuple[float, ...] = ()
    """The learner's log-probs of the canary's tokens; empty when it states none."""
    encode_s: float = 0.0
    """For people to see; no part of the publication's content."""
    flavours: tuple[FlavourVersion, ...] = ()
    """The same version for samplers that asked for less; committed with it or not at all."""


class PushStatus(enum.Enum):
    """The outcome of pushing one group; every one but RETRY is terminal and acknowledged durably."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    DROPPED = "dropped"
    RETRY = "retry"


class DropReason(enum.Enum):
    """The closed set of reasons for which an acknowledged group is not trained on."""

    STALE_AT_INGEST = "stale_at_ingest"
    STALE_AT_LEASE = "stale_at_lease"
    STALE_AT_COMMIT = "stale_at_commit"
    CONFLICT = "conflict"
    INVALID = "invalid"
    UNKNOWN_VERSION = "unknown_version"
    WRONG_DIGEST = "wrong_digest"
    SURPLUS = "surplus"
    """Its assignment was already answered by another group (late answer after a re-lease)."""
    LINEAGE_ABANDONED = "lineage_abandoned"
    LEARNER_ABANDONED = "learner_abandoned"
    REWARD_MISMATCH = "reward_mismatch"
    LOGPROB_MISMATCH = "logprob_mismatch"
    SAMPLING_MISMATCH = "sampling_mismatch"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """What the coordinator did with one group, and why."""

    id: GroupId
    status: PushStatus
    reason: DropReason | None = None
    message: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedGroup:
    """A group as streamed to the learner: with what the coordinator knows of its age."""

    group: Group
    policy_age_s: float
    """Seconds between the publication of the group's oldest version and this moment, by the coordinator's clock."""
    queue_age_s: float
    seed: int | None = None
    """Sampling seed of the group's assignment; None from a coordinator that does not state it."""
    flavour: str = ""
    """Form of the weights that it was generated with; empty for those that are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """The conservation law: acked = pending + leased + consumed + sum(dropped)."""

    acked: int
    pending: int
    leased: int
    consumed: int
    dropped: dict[DropReason, int] = field(default_factory=dict)

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
    """Why it generates nothing, as it says; empty while all is well."""


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
