"""Calls about weights over gRPC: the head, manifests, plans, and the bytes of payloads, wherever they come from."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from heterorl.common.direct.connections import Allowed, Connections
from heterorl.common.direct.reads import DirectReads, Slow
from heterorl.common.errors import InvalidRequest, MalformedPayload, Unreachable
from heterorl.common.rpc.calls import Calls
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import HeadUpdate, PullPlan, SignedManifest
from heterorl.common.wire.policy import frame_checksum, plan_from_pb
from heterorl.v1 import policy_pb2

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

    async def get_signed_manifest(self, *, version: int, flavour: str = "") -> SignedManifest:
        """Fetch the exact bytes of a manifest and its signature."""
        request = policy_pb2.GetManifestRequest(version=version, flavour=flavour)
        answer = await self._call("GetManifest", request)
        return SignedManifest(data=answer.manifest, signature=answer.signature)

    async def list_manifests(self, *, first_version: int, last_version: int, flavour: str = "") -> tuple[bytes, ...]:
        """Fetch the exact bytes of the newest manifests of a range, as many as fit one answer."""
        request = policy_pb2.ListManifestsRequest(
            first_version=first_version, last_version=last_version, flavour=flavour
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
        flavour: str = "",
    ) -> PullPlan:
        """Ask for the cheapest way to a version."""
        request = policy_pb2.PlanPullRequest(
            have_version=have_version,
            have_root=have_root,
            want_version=want_version,
            accept_merged=accept_merged,
            base_root=base_root,
            object_bytes=object_bytes,
            flavour=flavour,
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
