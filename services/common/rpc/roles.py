"""Calls of a client by who makes them: pullers, the learner, sites that evaluate, operators; see `client` for all."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heterorl.common.errors import InvalidRequest, MalformedPayload, Unreachable
from heterorl.common.rpc.calls import Calls
from heterorl.common.rpc.direct import Allowed, Connections, DirectReads, Slow
from heterorl.common.types.common import Contract, Digest, LearnerProgress, Series, SiteId, peer_words
from heterorl.common.types.evaluation import Evaluation, PromptResult
from heterorl.common.types.policy import HeadUpdate, LeaseGrant, PullPlan, SignedManifest
from heterorl.common.types.rollout import DropReason, GroupId, Rejection
from heterorl.common.types.sample import EvaluationSample, SampleNote
from heterorl.common.wire.common import (
    contract_from_pb,
    contract_to_pb,
    progress_to_pb,
    series_to_pb,
    to_message,
    to_value,
)
from heterorl.common.wire.evaluation import evaluation_from_pb, results_to_pb
from heterorl.common.wire.policy import frame_checksum, grant_from_pb, plan_from_pb
from heterorl.common.wire.rollout import group_id_to_pb, reason_to_pb, rejections_to_pb
from heterorl.common.wire.sample import evaluation_to_pb, note_to_pb
from heterorl.v1 import (
    backup_pb2,
    diagnosis_pb2,
    evaluation_pb2,
    metrics_pb2,
    policy_pb2,
    rollout_pb2,
    run_pb2,
    sample_pb2,
)

_LOG = logging.getLogger(__name__)


class WeightCalls(Calls):
    """Asks for versions and reads payloads: from an address where the plan has one that serves, else from the peer."""

    def __init__(
        self, address: str, *, payload_urls: Allowed = "https", payload_hosts: Sequence[str] = (), **how: Any
    ) -> None:
        super().__init__(address, **how)
        self._connections = Connections(payload_urls, payload_hosts)
        self._direct = DirectReads(self._connections)

    async def close(self) -> None:
        """Close the channel and the connections; calls under way are cancelled."""
        await self._connections.close()
        await super().close()

    async def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield new heads until the link breaks."""
        request = policy_pb2.WatchHeadRequest(after_version=after_version)
        async for message in self._streamed("WatchHead", request):
            age_s = max(0.0, message.age_s) if math.isfinite(message.age_s) else 0.0
            yield HeadUpdate(version=message.version, age_s=age_s)

    async def get_signed_manifest(self, *, version: int, variant: str = "") -> SignedManifest:
        """Fetch the exact bytes of a manifest and its signature."""
        request = policy_pb2.GetManifestRequest(version=version, variant=variant)
        answer = await self._call("GetManifest", request)
        return SignedManifest(data=answer.manifest, signature=answer.signature)

    async def list_manifests(self, *, first_version: int, last_version: int, variant: str = "") -> tuple[bytes, ...]:
        """Fetch the exact bytes of the newest manifests of a range, as many as fit one answer."""
        request = policy_pb2.ListManifestsRequest(
            first_version=first_version, last_version=last_version, variant=variant
        )
        return tuple((await self._call("ListManifests", request)).manifests)

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
        """Ask for the cheapest way to a version."""
        request = policy_pb2.PlanPullRequest(
            have_version=have_version,
            have_root=have_root,
            want_version=want_version,
            accept_merged=accept_merged,
            base_root=base_root,
            object_bytes=object_bytes,
            variant=variant,
        )
        answer = await self._call("PlanPull", request)
        try:
            plan = plan_from_pb(answer)
        except InvalidRequest as error:
            # The peer's answer breaks the format, not our request: nothing about this node is to be corrected.
            raise MalformedPayload(f"the coordinator's plan, {error.args[0]}", action="distrust it") from error
        self._direct.note(plan.payloads, answer.urls)
        return plan

    async def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield frames of a payload until `stop` or its end; after Unreachable go on from the bytes received."""
        address = self._direct.find(digest)
        if address is not None:
            end = address.num_bytes if stop is None else stop
            try:
                async for frame in self._direct.read(address, offset=offset, stop=end):
                    await self._pace(self._down, "down", len(frame))
                    self._note_frame(frame, is_direct=True)
                    offset += len(frame)
                    yield frame
                return
            except Unreachable as error:
                self._direct.forget(digest)
                if isinstance(error, Slow):
                    self._direct.pause()
                _LOG.info("payload %s comes from the coordinator: %s", digest[:12], error.args[0])
        async for frame in self.read_from_peer(digest=digest, offset=offset, stop=stop):
            yield frame

    def gave_up(self, digest: Digest) -> None:
        """Ask no address for a while, where one of this payload kept its reader waiting until that one ended it."""
        if self._direct.find(digest) is not None:
            _LOG.info("payload %s did not come from its address: it comes from the coordinator", digest[:12])
            self._direct.pause()

    def distrust_address(self, digest: Digest) -> None:
        """Read a payload from the peer alone from now on: it arrived with other bytes than its name says."""
        self._direct.distrust(digest)

    def _note_frame(self, frame: bytes, *, is_direct: bool) -> None:
        """A frame of a payload arrived, from an address or from the peer."""

    async def read_from_peer(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield frames of a payload as the peer sends them, whatever addresses are known."""
        request = policy_pb2.ReadPayloadRequest(digest=digest, offset=offset, stop=stop)
        async for message in self._streamed("ReadPayload", request):
            # Once: each access of a bytes field copies it.
            frame = message.frame
            if frame_checksum(frame) != message.checksum:
                raise Unreachable(f"a frame of payload {digest[:12]} was damaged on its way", retry_after_s=1.0)
            await self._pace(self._down, "down", len(frame))
            self._note_frame(frame, is_direct=False)
            yield frame


class LearnerCalls(Calls):
    """Asks for the lease, keeps it, gives it back; says what became of groups and what the run is."""

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
        """Become the run's learner under a new epoch."""
        request = policy_pb2.AcquireLeaseRequest(
            request_id=request_id,
            holder=holder,
            contract=contract_to_pb(contract),
            variants=variants,
            incarnation=incarnation,
            groups_per_version=groups_per_version,
            statement=statement,
        )
        return grant_from_pb(await self._call("AcquireLease", request))

    async def renew_lease(self, *, epoch: int, progress: LearnerProgress | None = None) -> LeaseGrant:
        """Extend the lease."""
        request = policy_pb2.RenewLeaseRequest(epoch=epoch, progress=progress_to_pb(progress))
        return grant_from_pb(await self._call("RenewLease", request))

    async def release_lease(self, *, epoch: int) -> None:
        """End the lease."""
        await self._call("ReleaseLease", policy_pb2.ReleaseLeaseRequest(epoch=epoch))

    async def push_learner_metrics(self, *, site: str, series: Sequence[Series]) -> bool:
        """Hand out this learner's numbers, once; returns whether the coordinator keeps them."""
        request = metrics_pb2.PushLearnerMetricsRequest(site=site, series=series_to_pb(series))
        return bool((await self._once("PushLearnerMetrics", request)).is_kept)

    async def abandon_groups(
        self, *, epoch: int, ids: Sequence[GroupId], reason: str, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        """Drop leased groups for good."""
        request = rollout_pb2.AbandonGroupsRequest(
            epoch=epoch,
            ids=[group_id_to_pb(group_id) for group_id in ids],
            reason=peer_words(reason),
            counted_as=reason_to_pb(counted_as),
        )
        await self._call("AbandonGroups", request)

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        """Drop leased groups that failed a check."""
        await self._call("RejectGroups", rejections_to_pb(epoch, rejections))

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        """Say what the run trains."""
        await self._call("DescribeRun", run_pb2.DescribeRunRequest(epoch=epoch, facts=dict(facts)))

    async def note_samples(
        self, *, epoch: int, notes: Sequence[SampleNote], evaluations: Sequence[EvaluationSample] = ()
    ) -> None:
        """Say what kept groups were as text; said again, it is the same."""
        request = sample_pb2.NoteSamplesRequest(
            epoch=epoch,
            notes=[note_to_pb(note) for note in notes],
            evaluations=[evaluation_to_pb(evaluation) for evaluation in evaluations],
        )
        await self._call("NoteSamples", request)


PUSH_TIMEOUT_S = 120.0
"""Texts of a part over a narrow link."""


class EvaluationCalls(Calls):
    """Delivers what came of held-out prompts; lists what is known."""

    async def push_evaluation(
        self, *, site: SiteId, incarnation: str, state_root: Digest, results: Sequence[PromptResult]
    ) -> int:
        """Deliver results; repeating the call is harmless."""
        request = evaluation_pb2.PushEvaluationRequest(
            site=site, incarnation=incarnation, state_root=state_root, results=results_to_pb(results)
        )
        await self._pace(self._up, "up", request.ByteSize())
        return int((await self._call("PushEvaluation", request, timeout_s=PUSH_TIMEOUT_S)).num_counted)

    async def list_evaluations(
        self, *, task_set: str = "", after_version: int = -1, limit: int = 1000
    ) -> tuple[Evaluation, ...]:
        """Ask what is known of versions on sets."""
        request = evaluation_pb2.ListEvaluationsRequest(task_set=task_set, after_version=after_version, limit=limit)
        answer = await self._call("ListEvaluations", request)
        return tuple(evaluation_from_pb(message) for message in answer.evaluations)


OVERHEAD_BYTES = 4096
"""Room in a message for everything but its padding."""
MAX_ANSWER_BYTES = 1 << 20
"""Largest padding of an answer: every role may ask, and what nobody reads stays in the coordinator's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Facts of a coordinator; `server_time` in seconds since the epoch; no `contract` before a learner stated one."""

    server_time: float
    run_id: str
    heterorl_version: str
    python_version: str
    grpc_version: str
    max_message_bytes: int
    head_version: int
    bytes_full: int
    contract: Contract | None
    statement: bytes = b""
    """Of the configuration behind the contract (heterorl.common.wire.statement); empty where none was stated."""


class DiagnosisClient(Calls):
    """A coordinator at an address, asked about itself by a node of any role."""

    async def diagnose(self, *, send_bytes: int = 0, answer_bytes: int = 0, timeout_s: float = 5.0) -> Diagnosis:
        """Ask, with padding of the given sizes in request and answer.

        Raises:
            HeterorlError: the coordinator's refusal, or Unreachable.
        """
        request = diagnosis_pb2.DiagnoseRequest(padding=bytes(send_bytes), answer_bytes=answer_bytes)
        return diagnosis_from_pb(await self._call("Diagnose", request, timeout_s=timeout_s))


def diagnosis_to_pb(value: Diagnosis, *, padding: bytes = b"") -> diagnosis_pb2.DiagnoseResponse:
    """Convert a diagnosis."""
    return to_message(
        diagnosis_pb2.DiagnoseResponse,
        value,
        without={"server_time"},
        server_time_s=value.server_time,
        contract=None if value.contract is None else contract_to_pb(value.contract),
        padding=padding,
    )


def diagnosis_from_pb(message: diagnosis_pb2.DiagnoseResponse) -> Diagnosis:
    """Convert a diagnosis."""
    contract = contract_from_pb(message.contract) if message.HasField("contract") else None
    return to_value(Diagnosis, message, server_time=message.server_time_s, contract=contract)


BACKUP_TIMEOUT_S = 3600.0
"""Copying between disks takes its time; the same name may be asked for again meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A copy of a run; `path` is on the coordinator's machine, `made_s` seconds since the epoch."""

    path: str
    head_version: int
    num_payloads: int
    num_bytes: int
    made_s: float
    audit_digest: str


def backup_to_pb(value: Backup) -> backup_pb2.BackupResponse:
    """Convert a backup."""
    return to_message(backup_pb2.BackupResponse, value)


def backup_from_pb(message: backup_pb2.BackupResponse) -> Backup:
    """Convert a backup."""
    return to_value(Backup, message)


class BackupClient(Calls):
    """heterorl.v1.BackupService at an address."""

    async def backup(self, *, name: str) -> Backup:
        """Have the run as it is written into a directory of this name; repeating the call is harmless."""
        request = backup_pb2.BackupRequest(name=name)
        return backup_from_pb(await self._call("Backup", request, timeout_s=BACKUP_TIMEOUT_S))
