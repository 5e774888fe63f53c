"""What samplers of a site ask about weights, answered here: head, manifests, plans, payloads.

Guarantees: of a question that several ask, the coordinator hears once. A plan is kept for seconds and never beyond a
new head; a manifest for as long as its run does not go back. Presigned addresses and whatever else a newer coordinator
adds to a plan do not pass: payloads are read here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from heterorl.common.api import WeightsApi
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import HeadUpdate, PullPlan, SignedManifest
from heterorl.relay.answers import Answers
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.head import Head
from heterorl.relay.payloads import Payloads

PLAN_S = 10.0
"""A coordinator merges deltas for those who ask: a better plan is there some seconds later."""
MANIFEST_S = 600.0
MANIFEST_BYTES, PLAN_BYTES = 64 << 20, 64 << 20
"""Kept in memory at most."""


class Weights:
    """The relay's side of heterorl.common.api.WeightsApi."""

    def __init__(self, *, api: WeightsApi, cache: CacheDirectory, clock: Clock) -> None:
        self._api = api
        self.head = Head(api=api, clock=clock, on_change=self._head_changed)
        self._plans: Answers[PullPlan] = Answers(
            clock=clock, keep_s=PLAN_S, max_bytes=PLAN_BYTES, size=lambda plan: 256 + sum(map(len, plan.manifests))
        )
        self._signed: Answers[SignedManifest] = Answers(
            clock=clock, keep_s=MANIFEST_S, max_bytes=MANIFEST_BYTES, size=lambda signed: 256 + len(signed.data)
        )
        self._lists: Answers[tuple[bytes, ...]] = Answers(
            clock=clock, keep_s=MANIFEST_S, max_bytes=MANIFEST_BYTES, size=lambda found: 256 + sum(map(len, found))
        )
        self.payloads = Payloads(api=api, cache=cache, clock=clock, on_gone=self._plans.clear)

    def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield every head that passes the cursor."""
        return self.head.watch(after_version=after_version)

    async def get_signed_manifest(self, *, version: int, flavour: str) -> SignedManifest:
        """The exact bytes of a manifest and its signature."""
        return await self._signed.get(
            (version, flavour), lambda: self._api.get_signed_manifest(version=version, flavour=flavour)
        )

    async def list_manifests(self, *, first_version: int, last_version: int, flavour: str) -> tuple[bytes, ...]:
        """The exact bytes of the newest manifests of a range."""
        return await self._lists.get(
            (first_version, last_version, flavour),
            lambda: self._api.list_manifests(first_version=first_version, last_version=last_version, flavour=flavour),
        )

    async def plan_pull(
        self, *, have_version: int, have_root: str, want_version: int, accept_merged: bool, base_root: str, flavour: str
    ) -> PullPlan:
        """The way to a version; the same for all who hold the same, whatever their own line to this relay is like."""

        async def ask() -> PullPlan:
            return await self._api.plan_pull(
                have_version=have_version,
                have_root=have_root,
                want_version=want_version,
                accept_merged=accept_merged,
                base_root=base_root,
                object_bytes=self.payloads.object_bytes,
                flavour=flavour,
            )

        key = (have_version, have_root, want_version, accept_merged, base_root, flavour)
        plan = await self._plans.get(key, ask)
        self.payloads.note(plan)
        return plan

    def read_payload(self, *, digest: Digest, offset: int, stop: int | None) -> AsyncIterator[bytes]:
        """Yield frames of a payload."""
        return self.payloads.read(digest=digest, offset=offset, stop=stop)

    def _head_changed(self, went_back: bool) -> None:
        if went_back:
            for kept in (self._plans, self._signed, self._lists):
                kept.clear()
        else:
            self._plans.expire()

    async def close(self) -> None:
        """End streams and fetches."""
        self.head.close()
        await self.payloads.close()
