"""A published state from the coordinator: plan, download, verify the digest, apply, verify the state."""

from __future__ import annotations

import logging
from pathlib import Path

from services.common.api import CoordinatorApi, PlanKind
from services.common.errors import MalformedPayload, RemoteError, StateMismatch
from services.common.metrics import BYTES
from services.common.trust import Trust
from services.common.types import PayloadKind, PayloadRef
from services.common.weights.arena import Arena, Layout
from services.common.weights.manifest import verify_state
from services.common.weights.payload import apply_payload, file_digest
from services.common.wire import manifest_from_bytes
from services.learner.patience import Patience, is_transient
from services.learner.threads import in_thread

_LOG = logging.getLogger(__name__)


async def pull_state(
    api: CoordinatorApi,
    *,
    layout: Layout,
    version: int,
    directory: Path,
    patience: Patience,
    trust: Trust | None = None,
) -> Arena:
    """Rebuild the weights of a version from nothing.

    Raises:
        UntrustedVersion: no trusted key signed it; nothing was fetched.
        CorruptData: what arrived does not lead to the state that the manifest names.
    """
    plan = await patience.insist(lambda: api.plan_pull(have_version=-1, have_root="", want_version=version))
    if plan.kind is PlanKind.SAME or plan.target_version != version:
        raise StateMismatch(f"a pull of version {version} from nothing was planned as {plan.kind.value}")
    if not plan.manifests or manifest_from_bytes(plan.manifests[-1]).version != version:
        raise StateMismatch(f"the plan of version {version} does not show its manifest")
    (trust or Trust()).check(plan.manifests[-1], plan.signature, version=version)
    _LOG.info("rebuilding version %d: %s", version, plan.reason)
    arena = Arena(layout)
    root: str | None = None
    for payload, manifest_bytes in zip(plan.payloads, plan.manifests, strict=True):
        path = directory / f"{payload.digest}.pull"
        try:
            await download(api, payload, path, patience=patience)
            start = None if payload.kind is PayloadKind.SNAPSHOT else root
            if payload.kind is PayloadKind.DELTA and root is None:
                raise StateMismatch("the plan begins with a delta")
            await in_thread(apply_payload, path, arena, expected_from_root=start)
        finally:
            path.unlink(missing_ok=True)
        manifest = manifest_from_bytes(manifest_bytes)
        await in_thread(verify_state, manifest, arena)
        root = manifest.state_root
    return arena


async def download(api: CoordinatorApi, payload: PayloadRef, path: Path, *, patience: Patience) -> None:
    """Fetch a payload into a file, going on from the bytes received when the link breaks.

    Raises:
        MalformedPayload: more bytes than stated, or bytes of another digest.
    """
    received = 0
    with path.open("wb") as file:
        while received < payload.num_bytes:
            try:
                async for frame in api.read_payload(digest=payload.digest, offset=received):
                    received += len(frame)
                    if received > payload.num_bytes:
                        raise MalformedPayload(f"payload {payload.digest[:12]} is longer than stated")
                    file.write(frame)
                    BYTES.labels(payload.kind.value, "received").inc(len(frame))
                    patience.reset()
            except (RemoteError, TimeoutError) as error:
                if not is_transient(error):
                    raise
                await patience.wait(error)
            else:
                if received < payload.num_bytes:
                    await patience.wait()
    if await in_thread(file_digest, path) != payload.digest:
        raise MalformedPayload(f"payload {payload.digest[:12]} has another digest")
