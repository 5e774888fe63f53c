"""The coordinator's interface: one Protocol a role, in domain types.

A certificate states the role (heterorl.coordinator.rpc.access). A process that holds a
`heterorl.coordinator.core.Coordinator` calls it directly; `heterorl.common.rpc.client` implements the same over gRPC.
Each method may raise a `RemoteError` of heterorl.common.errors. Times are seconds.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
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
from heterorl.common.types.sample import EvaluationSample, Sample, SampleFilter, SampleList, SampleNote, SamplePage


class WeightsApi(Protocol):
    """Calls of every puller of weights: learners and samplers."""

    def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield the newest head after `after_version`; versions in between may be skipped."""

    async def get_signed_manifest(self, *, version: int, variant: str = "") -> SignedManifest:
        """Return the exact bytes of a manifest and the publisher's signature."""

    async def list_manifests(self, *, first_version: int, last_version: int, variant: str = "") -> tuple[bytes, ...]:
        """Return a version range's exact manifest bytes, newest first, at least one."""

    async def plan_pull(
        self,
        *,
        have_version: int,
        have_root: str,
        want_version: int,
        accept_merged: bool = False,
        base_root: str = "",
        variant: str = "",
    ) -> PullPlan:
        """Plan from (have_version, have_root) to `want_version`.

        `have_version` -1: the caller holds none; `want_version` -1: the head. `base_root` is the state root of the
        caller's base model (empty: none); a plan may start from the version that has it.
        """

    def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield payload bytes [offset, stop or end), each at most 1 MiB."""


class LearnerApi(WeightsApi, Protocol):
    """Calls of the run's learner."""

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
        """Become the run's learner, which also publishes each version in these variants.

        `incarnation` names the learner's state directory: during a lease only the same one gets it again.
        `groups_per_version` is 0 where the learner does not state it. `statement` is the configuration behind the
        contract (heterorl.common.wire.statement); the first one stays.
        """

    async def renew_lease(
        self, *, epoch: int, progress: LearnerProgress | None = None, refused_rollback: str = ""
    ) -> LeaseGrant:
        """Extend the lease by a term, also past its end if free.

        `progress` is shown to operators. `refused_rollback` is the id of an order that the learner cannot carry out.
        """

    async def release_lease(self, *, epoch: int) -> None:
        """End the lease for the next learner; groups return to the queue."""

    async def query_upload(self, *, digest: Digest) -> int:
        """Return the durable bytes of a payload; its full size once complete."""

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        """Append frames (at most 1 MiB) from `offset`; returns the durable bytes."""

    async def publish_version(self, request: PublishRequest) -> int:
        """Commit a version and its groups atomically, once for a step id."""

    async def get_step(self, *, step_id: str) -> int | None:
        """Return the version that a step id became, or None."""

    def stream_groups(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncIterator[QueuedGroup]:
        """Lease complete groups, oldest first, one per credit.

        Leased groups not in `held` return to the queue. A stream ends when the same epoch opens another one.
        """

    async def abandon_groups(
        self, *, epoch: int, ids: Sequence[GroupId], reason: str, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        """Drop leased groups for good: unusable, too old, or of equal rewards.

        Only prompts of groups that are too old are handed out again.
        """

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        """Drop leased groups that failed a check, counted against their sites."""

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        """Hand out no more work; only a learner names its epoch."""

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        """State what the run trains, for operators."""

    async def note_samples(
        self, *, epoch: int, notes: Sequence[SampleNote], evaluations: Sequence[EvaluationSample] = ()
    ) -> None:
        """Add texts to kept groups (others are ignored), and keep evaluations."""


class SamplerApi(WeightsApi, Protocol):
    """Calls of a sampler, for its own site only."""

    async def register(self, registration: Registration) -> RegisterAnswer:
        """Join the run by an equal contract; learn the site's next sequence."""

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]:
        """Report the site's state; returns the coordinator's commands."""

    async def report_canary(self, report: CanaryReport) -> CanaryVerdict:
        """Compare canaries; a differing site gets no work until a version agrees."""

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
        """Ask for assignments; repeating the newest `request_id` returns those still leased.

        With `sets`, the evaluation sets that the site has data of, they are held-out prompts for `policy_version`.
        """

    async def abandon_work(
        self, *, site: SiteId, incarnation: str, assignments: Sequence[int], reason: ReturnReason | None = None
    ) -> None:
        """Give back assignments, with a reason where their rows give no group.

        Other sites get them next; a row that came back too often is closed.
        """

    async def push_groups(self, groups: Sequence[Group | SealedGroup]) -> list[PushOutcome]:
        """Push groups; returns outcomes in order, fewer if the link broke."""

    async def push_evaluation(
        self, *, site: SiteId, incarnation: str, state_root: Digest, results: Sequence[PromptResult]
    ) -> int:
        """Deliver held-out results; returns how many are new. Repeats are harmless."""


class SamplesApi(Protocol):
    """Calls of a person who reads completions."""

    async def list_samples(self, *, wanted: SampleFilter, page: SamplePage) -> SampleList:
        """Return one page of kept samples."""

    async def get_sample(self, *, sample_id: int) -> Sample:
        """Return a sample with its texts; raises UnknownSample if not kept."""


class OperatorApi(SamplesApi, Protocol):
    """Calls of an operator."""

    async def get_status(self) -> RunStatus:
        """Return the state of the run."""

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]:
        """Return at most `limit` (1 to 1000) reports after `after_step`, oldest first.

        Fewer where they would not fit a message; none is the end.
        """

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        """Hand out no more work; only a learner names its epoch."""

    async def list_evaluations(
        self, *, task_set: str = "", after_version: int = -1, limit: int = 1000
    ) -> tuple[Evaluation, ...]:
        """Return at most `limit` (1 to 1000) evaluations after a version.

        They are in order of version and set; an empty `task_set`: all sets. The last version is complete or left out.
        """

    async def rollback(self, *, to_version: int, request_id: str) -> int:
        """Order to publish a version's content again (-1: cancel); returns the head."""

    async def list_restorable(self) -> tuple[int, ...]:
        """Return the versions that `rollback` can order now, ascending, without the head."""

    async def release_site(self, *, site: SiteId, reason: str, request_id: str = "") -> str:
        """End a site's quarantine and forget failures; returns its reason or empty."""


class CoordinatorApi(LearnerApi, SamplerApi, OperatorApi, Protocol):
    """All roles together: the gRPC client, or an in-process coordinator."""


PAGE = 1000
"""Most rows of one answer."""


async def every_step(api: OperatorApi, *, after: int = -1) -> list[StepReport]:
    """All reports after a step, page by page."""
    reports: list[StepReport] = []
    while (page := await api.list_steps(after_step=after, limit=PAGE)) and page[-1].step > after:
        # A page may end between two versions of a step: its last step is read again.
        whole = [report for report in page if report.step < page[-1].step] or page
        reports += whole
        after = whole[-1].step
    return reports


async def every_evaluation(api: OperatorApi, *, after: int = -1) -> list[Evaluation]:
    """All evaluations after a version."""
    found: list[Evaluation] = []
    while page := await api.list_evaluations(after_version=after, limit=PAGE):
        found += page
        after = page[-1].version
    return found
