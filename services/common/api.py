"""The coordinator as its callers see it, in domain types: one Protocol, two implementations.

`heterorl.coordinator.core.Coordinator` implements it directly (tests, simulation); `heterorl.common.rpc.client`
implements it over gRPC. Every method raises a `RemoteError` of heterorl.common.errors. Times are seconds.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from heterorl.common.types.values import (
    Contract,
    Digest,
    DropReason,
    Group,
    GroupId,
    LeaseGrant,
    PayloadRef,
    PublishRequest,
    PushOutcome,
    QueuedGroup,
    RunStatus,
    SignedManifest,
    SiteId,
    StepReport,
    WorkAssignment,
)


class PlanKind(enum.Enum):
    """How a sampler gets from what it has to what it wants."""

    SAME = "same"
    DELTA = "delta"
    MERGED = "merged"
    CHAIN = "chain"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """Payloads to apply in order (a snapshot, if any, comes first) and the manifests they lead to.

    The last of `manifests` is the exact manifest bytes of the target; a plan may carry those of the way before it too,
    one for each payload, and whoever needs them otherwise lists them. For SAME both are empty. `signature` belongs to
    the last manifest; empty where its publisher did not sign.
    """

    kind: PlanKind
    target_version: int
    payloads: tuple[PayloadRef, ...]
    manifests: tuple[bytes, ...]
    reason: str
    signature: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadUpdate:
    """A version became readable `age_s` seconds ago; -1 means that none is published yet."""

    version: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkGrant:
    """Assignments, or none with the reason and when to ask again."""

    assignments: tuple[WorkAssignment, ...]
    reason: str
    retry_after_s: float


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAnswer:
    """What the run tells a new sampler. `next_sequence` is 1 + the highest sequence known of this incarnation."""

    run_id: str
    head_version: int
    next_sequence: int
    max_staleness_versions: int
    max_message_bytes: int = 0
    """Largest message that the coordinator takes and sends; 0 where it does not say."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A leased group that failed a check of the learner; `detail` says the numbers."""

    id: GroupId
    reason: DropReason
    detail: str


class CoordinatorApi(Protocol):
    """All that a learner, a sampler or an operator can ask of a coordinator."""

    # policy: the learner's side
    async def acquire_lease(
        self,
        *,
        holder: str,
        contract: Contract,
        request_id: str,
        flavours: Sequence[str] = (),
        incarnation: str = "",
        groups_per_version: int = 0,
    ) -> LeaseGrant:
        """Become the run's learner, who publishes each version in these flavours too.

        `incarnation` names the learner's state directory: while a lease lasts, only the same one gets it again.
        `groups_per_version` groups make one version; 0 where the learner does not say.
        """
        ...

    async def renew_lease(self, *, epoch: int) -> LeaseGrant: ...

    async def release_lease(self, *, epoch: int) -> None: ...

    async def query_upload(self, *, digest: Digest) -> int:
        """Bytes of this payload that are already durable (its full size once complete)."""
        ...

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        """Append frames (at most 1 MiB each) from `offset`; returns the bytes now durable."""
        ...

    async def publish_version(self, request: PublishRequest) -> int: ...

    async def get_step(self, *, step_id: str) -> int | None:
        """The version that this step id became, or None."""
        ...

    # policy: everybody's side
    def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield the newest head whenever it is greater than the last one yielded (intermediate ones may be skipped)."""
        ...

    async def get_manifest(self, *, version: int) -> bytes: ...

    async def get_signed_manifest(self, *, version: int, flavour: str = "") -> SignedManifest:
        """The exact bytes of a manifest with the signature that its publisher sent."""
        ...

    async def list_manifests(self, *, first_version: int, last_version: int, flavour: str = "") -> tuple[bytes, ...]:
        """The exact bytes of manifests of [first_version, last_version], newest first: at least one, as many as fit."""
        ...

    async def plan_pull(
        self,
        *,
        have_version: int,
        have_root: str,
        want_version: int,
        accept_merged: bool = False,
        base_root: str = "",
        object_bytes: int = 0,
        flavour: str = "",
    ) -> PullPlan:
        """Plan from (have_version, have_root), or from nothing when have_version is -1; want_version -1 is the head.

        `base_root` is the state of the model that the caller has without the run (empty: none); a plan may start from
        the version that has it. `object_bytes` is what each payload costs the caller beside its bytes: bandwidth times
        round trip.
        """
        ...

    def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]: ...

    # rollouts
    async def lease_work(
        self, *, site: SiteId, incarnation: str, max_groups: int, policy_version: int, request_id: str = ""
    ) -> WorkGrant:
        """Ask for assignments; the newest `request_id` said again is given what it was given, while that is leased."""
        ...

    async def abandon_work(self, *, site: SiteId, incarnation: str, assignments: Sequence[int]) -> None: ...

    async def push_groups(self, groups: Sequence[Group]) -> list[PushOutcome]:
        """Push groups; outcomes of the first ones in order, of all unless the link broke in between."""
        ...

    def stream_groups(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncIterator[QueuedGroup]:
        """Lease complete groups oldest first, one per credit; leased groups that are not `held` return to the queue.

        A stream ends when the same epoch opens another one.
        """
        ...

    async def abandon_groups(self, *, epoch: int, ids: Sequence[GroupId], reason: str) -> None:
        """Drop leased groups that can never be trained on (counted as learner_abandoned)."""
        ...

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        """Drop leased groups that failed a check, each once, and count that against their sites."""
        ...

    # run
    async def register(self, registration: Registration) -> RegisterAnswer: ...

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]: ...

    async def report_canary(self, report: CanaryReport) -> CanaryVerdict:
        """Compare with the learner's; a site that is off gets no work until a later version of its is right."""
        ...

    async def get_status(self) -> RunStatus: ...

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]: ...

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        """Hand out no more work; a learner names its epoch, an operator none."""
        ...

    async def rollback(self, *, to_version: int, request_id: str) -> int:
        """Order the learner to publish the content of a version anew (-1: no order); returns the head."""
        ...

    async def release_site(self, *, site: SiteId, reason: str, request_id: str = "") -> str:
        """End a site's quarantine and forget its failures; returns why it was there, empty when it was not."""
        ...

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        """Say what the run trains, for people who look at it."""
        ...
