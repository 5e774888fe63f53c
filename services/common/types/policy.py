"""Values about versions: manifests, payloads, publication, pull plans, the learner's lease."""

import enum
from dataclasses import dataclass

from heterorl.common.types.common import Digest, StepReport
from heterorl.common.types.rollout import GroupId

SIGNATURE_BYTES = 64
"""Length of an Ed25519 signature."""
NO_VERSION = -1
"""No version, in manifests and on the wire; None inside programs. Versions count from 0."""


def version_or_none(version: int) -> int | None:
    """None for NO_VERSION, as manifests and the wire state it."""
    return None if version == NO_VERSION else version


def stated_version(version: int | None) -> int:
    """NO_VERSION for None, as manifests and the wire state it."""
    return NO_VERSION if version is None else version


def version_words(version: int) -> str:
    """A stated version for people; NO_VERSION is "no version yet"."""
    return "no version yet" if version == NO_VERSION else f"version {version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """The learner's lease; only the newest `epoch` has effects."""

    epoch: int
    holder: str
    ttl_s: float
    head_version: int
    """Newest version, or -1 when none is published yet."""
    rollback_to: int = -1
    """Version whose content the next one must have, by an operator's order; -1: no order."""
    rollback_id: str = ""
    """Id of that order."""
    max_message_bytes: int = 0
    """The coordinator's largest message; 0: not stated."""
    max_staleness_versions: int = -1
    """Bound on staleness: from a group's oldest trained token to the parent of its version; -1: not stated."""
    masks_stale: bool = False
    """Whether tokens beyond that bound become context, while the group's other tokens are trained."""
    most_groups_per_version: int = 0
    """Most groups between two versions, so the most in one; 0: not stated."""


class PayloadKind(enum.Enum):
    """Kind of a payload: a state, one version's step, or several merged."""

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
    """A version: digests of its weights and parent, and its payloads.

    `chunk_digests` are blake3 (16 bytes each) of every arena chunk after the step, in arena order; `state_root` =
    blake3(layout_id || chunk digests). `parent_digest` is the digest of the parent's manifest bytes, empty for the
    first version; its `parent_version` is -1. `chunk_elements` is the length of every chunk but the last of a width
    (half of it for elements of 4 bytes), 0 if not stated. `num_byte_elements` of the elements have one byte each.
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
        """Versions abandoned by this one: all between its parent and itself."""
        return range(self.parent_version + 1, self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """Exact bytes of a manifest and its signature, empty if unsigned."""

    data: bytes
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantVersion:
    """A version in another format, with its own manifest, signature and canary."""

    variant: str
    manifest: bytes
    signature: bytes = b""
    canary: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest:
    """One compare-and-set publication: a manifest, consumed groups, reports of its steps.

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
    """Ed25519 signature of `manifest`; empty in unsigned runs."""
    canary: tuple[float, ...] = ()
    """The learner's log-probs of the canary's tokens; may be empty."""
    encode_s: float = 0.0
    """For people; not part of the publication's content."""
    variants: tuple[VariantVersion, ...] = ()
    """The same version in other forms; committed with it or not at all."""


class PlanKind(enum.Enum):
    """How a sampler gets from its version to the wanted one."""

    SAME = "same"
    DELTA = "delta"
    MERGED = "merged"
    CHAIN = "chain"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """Payloads to apply in order, and the manifests they lead to.

    A snapshot, if any, comes first. The last of `manifests` is the exact manifest of the target, and `signature`
    belongs to it (empty if not signed). A plan may carry the manifests before it too, one for each payload; else
    pullers list them. For SAME both are empty.
    """

    kind: PlanKind
    target_version: int
    payloads: tuple[PayloadRef, ...]
    manifests: tuple[bytes, ...]
    reason: str
    signature: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadUpdate:
    """A version became readable `age_s` seconds ago; -1: none is published."""

    version: int
    age_s: float
