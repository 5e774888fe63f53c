"""A coordinator that holds a run's genuine signed manifests and has weights of its own to be believed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from heterorl.common.pull.puller import PulledVersion
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION, PayloadKind, PayloadRef, PlanKind, PullPlan, SignedManifest
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import write_delta, write_snapshot
from heterorl.common.wire.policy_messages import manifest_digest, manifest_to_bytes
from tests.support.run import LAYOUT


class Forger:
    """Leads to version `target` in two payloads of its own; every manifest of its own claims what is asked of it."""

    down_bytes_per_s = 0.0

    def __init__(self, inner: Any, directory: Path, *, target: int, held: PulledVersion | None = None) -> None:
        self._inner = inner
        self._target = target
        self._files: dict[Digest, bytes] = {}
        self.plan: Callable[[SignedManifest], PullPlan] = self.way
        """The plan that is answered, of the genuine signed manifest of the target."""
        directory.mkdir(parents=True, exist_ok=True)
        before = Arena(LAYOUT) if held is None else held.arena
        one = before.copy()
        one.chunk(0)[:] += 666
        two = one.copy()
        two.chunk(1)[:] += 13
        self.root = two.state_root()
        parent = NO_VERSION if held is None else held.version
        digest = "" if held is None else held.manifest_digest
        made = [self._version(directory / "one", target - 1, parent, digest, None if held is None else before, one)]
        made.append(self._version(directory / "two", target, target - 1, manifest_digest(made[0][1]), one, two))
        self.payloads = tuple(payload for payload, _ in made)
        self.manifests = tuple(manifest for _, manifest in made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def way(self, signed: SignedManifest) -> PullPlan:
        """Both manifests claim to be the target's: the genuine one is last, where it is judged."""
        return PullPlan(
            kind=PlanKind.CHAIN,
            target_version=self._target,
            payloads=self.payloads,
            manifests=(self.manifests[1], signed.data),
            reason="",
            signature=signed.signature,
        )

    async def plan_pull(self, *, variant: str = "", **_wanted: Any) -> PullPlan:
        return self.plan(await self._inner.get_signed_manifest(version=self._target))

    async def list_manifests(self, *, first_version: int, last_version: int, variant: str = "") -> tuple[bytes, ...]:
        return tuple(reversed(self.manifests))

    async def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        yield self._files[digest][offset:]

    def _version(
        self, path: Path, version: int, parent: int, parent_digest: str, before: Arena | None, after: Arena
    ) -> tuple[PayloadRef, bytes]:
        info = write_snapshot(path, after) if before is None else write_delta(path, before, after)
        self._files[info.digest] = path.read_bytes()
        kind = PayloadKind.SNAPSHOT if before is None else PayloadKind.DELTA
        payload = PayloadRef(
            kind=kind, from_version=parent, to_version=version, digest=info.digest, num_bytes=info.num_bytes
        )
        manifest = build_manifest(
            run_id="run", epoch=1, version=version, parent_version=parent, parent_digest=parent_digest,
            layout=after.layout, step=version, info=info, payloads=(payload,),
        )  # fmt: skip
        return payload, manifest_to_bytes(manifest)
