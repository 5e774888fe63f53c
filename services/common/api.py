"""The coordinator as its callers see it, in domain types: a Protocol for each role, two implementations of all.

Roles are those of certificates (heterorl.coordinator.rpc.access says which may call what). One process that holds a
`heterorl.coordinator.core.Coordinator` calls it directly (tests, the lab); `heterorl.common.rpc.client` implements
the same over gRPC. Every method raises a `RemoteError` of heterorl.common.errors. Times are seconds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from heterorl.common.types.common import Contract, Digest, LearnerProgress, SiteId, StepReport
from heterorl.common.types.evaluation import Evaluation, EvaluationSet, PromptResult
from heterorl.common.types.policy import HeadUpdate, LeaseGrant, PublishRequest, PullPlan, SignedManifest
from heterorl.common.types.rollout import (
    DropReason,
    Group,
    GroupId,
    PushOutcome,
    QueuedGroup,
    Rejection,
    ReturnReason,
    SealedGroup,
    WorkGrant,
)
from heterorl.common.types.run import (
    CanaryReport,
    CanaryVerdict,
    Command,
    Heartbeat,
    RegisterAnswer,
    Registration,
    RunStatus,
)
from heterorl.common.types.sample import (
    EvaluationSample,
    Sample,
    SampleFilter,
    SampleList,
    SampleNote,
    SamplePage,
)

PieceFrames = Callable[[int, int], AsyncGenerator[bytes, None]]
"""Frames of [offset, stop) of a payload, from its beginning each time that it is called."""


class WeightsApi(Protocol):
    """What whoever needs weights can ask, a learner as well as a sampler."""

    def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield the newest head whenever it is greater than the last one yielded (intermediate ones may be skipped)."""
        ...

    async def get_signed_manifest(self, *, version: int, variant: str = "") -> SignedManifest:
        """The exact bytes of a manifest with the signature that its publisher sent."""
        ...

    async def list_manifests(self, *, first_version: int, last_version: int, variant: str = "") -> tuple[bytes, ...]:
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
        variant: str = "",
    ) -> PullPlan:
        """Plan from (have_version, have_root), or from nothing when have_version is -1; want_version -1 is the head.

        `base_root` is the state of the model that the caller has without the run (empty: none); a plan may start from
        the version that has it. `object_bytes` is what each payload costs the caller beside its bytes: bandwidth times
        round trip.
        """
        ...

    def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes [offset, stop) of a payload in frames of at most 1 MiB; without `stop`, to its end."""
        ...


class LearnerApi(WeightsApi, Protocol):
    """What the run's learner can ask."""

    async def acquire_lease(
        self,
        *,
        holder: str,
        contract: Contract,
        request_id: str,
        variants: Sequence[str] = (),
        incarnation: str = "",
        groups_per_version: int = 0,
        statement: bytes = b"",
    ) -> LeaseGrant:
        """Become the run's learner, who publishes each version in these variants too.

        `incarnation` names the learner's state directory: while a lease lasts, only the same one gets it again.
        `groups_per_version` groups make one version; 0 where the learner does not say.
        `statement` is the configuration behind the contract (heterorl.common.wire.statement); the first one
        stays.
        """
        ...

    async def renew_lease(self, *, epoch: int, progress: LearnerProgress | None = None) -> LeaseGrant:
        """Keep the lease for another term, also after its end while nobody else took it.

        `progress` is shown to operators; None where there is none to tell.
        """
        ...

    async def release_lease(self, *, epoch: int) -> None:
        """Give the lease back; the learner's groups return to the queue, and another one need not wait."""
        ...

    async def query_upload(self, *, digest: Digest) -> int:
        """Bytes of this payload that are already durable (its full size once complete)."""
        ...

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        """Append frames (at most 1 MiB each) from `offset`; returns the bytes now durable."""
        ...

    async def put_payload(self, *, epoch: int, digest: Digest, num_bytes: int, frames: PieceFrames) -> bool:
        """Put the pieces of a payload that are missing where the coordinator can take them; False without such a place.

        Raises Unreachable where the place does not take them; those that it took stay there for a while.
        """
        ...

    async def take_payload(self, *, epoch: int, digest: Digest, num_bytes: int) -> int:
        """Have the coordinator take what was put, and verify all of it; returns the bytes now durable."""
        ...

    async def publish_version(self, request: PublishRequest) -> int:
        """Commit one version and consume its groups, wholly or not at all; the same step id gives the same version."""
        ...

    async def get_step(self, *, step_id: str) -> int | None:
        """The version that this step id became, or None."""
        ...

    def stream_groups(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncIterator[QueuedGroup]:
        """Lease complete groups oldest first, one per credit; leased groups that are not `held` return to the queue.

        A stream ends when the same epoch opens another one.
        """
        ...

    async def abandon_groups(
        self, *, epoch: int, ids: Sequence[GroupId], reason: str, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        """Drop leased groups that can never be trained on, or whose rewards are all equal (counted as uniform).

        None of their prompts is handed out again, but those of groups that are too old, which count as such.
        """
        ...

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        """Drop leased groups that failed a check, each once, and count that against their sites."""
        ...

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        """Hand out no more work; a learner names its epoch, an operator none."""
        ...

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        """Say what the run trains, for people who look at it."""
        ...

    async def note_samples(
        self, *, epoch: int, notes: Sequence[SampleNote], evaluations: Sequence[EvaluationSample] = ()
    ) -> None:
        """Give kept groups their texts, and keep evaluations; a note of a group that is not kept has no effect."""
        ...


class SamplerApi(WeightsApi, Protocol):
    """What a sampler can ask, for its own site alone."""

    async def register(self, registration: Registration) -> RegisterAnswer:
        """Join the run; the contract must be the run's. The answer says from which sequence the site goes on."""
        ...

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]:
        """Say that the site lives and how it is; returns what it is to do."""
        ...

    async def report_canary(self, report: CanaryReport) -> CanaryVerdict:
        """Compare with the learner's; a site that is off gets no work until a later version of its is right."""
        ...

    async def lease_work(
        self,
        *,
        site: SiteId,
        incarnation: str,
        max_groups: int,
        policy_version: int,
        request_id: str = "",
        sets: Sequence[EvaluationSet] = (),
    ) -> WorkGrant:
        """Ask for assignments; the newest `request_id` said again is given what it was given, while that is leased.

        With `sets`, those that the site has the data of, they are held-out prompts to evaluate `policy_version` on.
        """
        ...

    async def abandon_work(
        self, *, site: SiteId, incarnation: str, assignments: Sequence[int], reason: ReturnReason | None = None
    ) -> None:
        """Give back assignments that the site will not answer, with a reason where their rows give no group; others
        are handed them, until they came back too often."""
        ...

    async def push_groups(self, groups: Sequence[Group | SealedGroup]) -> list[PushOutcome]:
        """Push groups, sealed or not; outcomes of the first ones in order, of all unless the link broke in between."""
        ...

    async def push_evaluation(
        self, *, site: SiteId, incarnation: str, state_root: Digest, results: Sequence[PromptResult]
    ) -> int:
        """Deliver what came of held-out prompts; returns how many had not been counted before. Harmless said again."""
        ...


class SamplesApi(Protocol):
    """What a person who reads completions can ask."""

    async def list_samples(self, *, wanted: SampleFilter, page: SamplePage) -> SampleList:
        """One page of the samples that are kept."""
        ...

    async def get_sample(self, *, sample_id: int) -> Sample:
        """One sample with its texts; UnknownSample where it is kept no more."""
        ...


class OperatorApi(SamplesApi, Protocol):
    """What a person who watches over the run can ask."""

    async def get_status(self) -> RunStatus:
        """The run as it is now."""
        ...

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]:
        """At most `limit` (1 to 1000) reports of the steps after `after_step`, oldest first."""
        ...

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        """Hand out no more work; a learner names its epoch, an operator none."""
        ...

    async def list_evaluations(
        self, *, task_set: str = "", after_version: int = -1, limit: int = 1000
    ) -> tuple[Evaluation, ...]:
        """Evaluations of the versions after this one by version and set, at most `limit` (1 to 1000): all of the last
        version or none of it. An empty set is all sets.
        """
        ...

    async def rollback(self, *, to_version: int, request_id: str) -> int:
        """Order the learner to publish the content of a version anew (-1: no order); returns the head."""
        ...

    async def list_restorable(self) -> tuple[int, ...]:
        """Versions that `rollback` could order now, ascending, without the head."""
        ...

    async def release_site(self, *, site: SiteId, reason: str, request_id: str = "") -> str:
        """End a site's quarantine and forget its failures; returns why it was there, empty when it was not."""
        ...


class CoordinatorApi(LearnerApi, SamplerApi, OperatorApi, Protocol):
    """All of them: what one client over gRPC offers, and a coordinator in the same process."""
