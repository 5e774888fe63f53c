"""A coordinator with a learner's lease, one site and one version: the state that most tests start from."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heterorl.common.api import CoordinatorApi
from heterorl.common.identity.signing import Signer
from heterorl.common.types.common import Contract, Digest, LogprobMode, SamplingSemantics, SiteId, StepReport
from heterorl.common.types.policy import PayloadKind, PayloadRef, PublishRequest
from heterorl.common.types.rollout import FinishReason, Group, GroupId, RewardPart, Rollout, Span, WorkAssignment
from heterorl.common.types.run import Registration
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import write_delta, write_snapshot
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes, manifest_to_bytes

LAYOUT = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(40,))], chunk_elements=16)
CONTRACT = Contract(
    tokenizer_digest=Digest("1" * 64),
    chat_template_digest=Digest("2" * 64),
    task_digest=Digest("3" * 64),
    layout_id=LAYOUT.layout_id,
    vocab_size=20,
    num_prompts=50,
    group_size=2,
    sampling=SamplingSemantics(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=4, logprob_mode=LogprobMode.PROCESSED
    ),
)
SITE, INCARNATION = SiteId("eu-1"), "inc-1"
REPORT = StepReport(
    step=1, version=1, loss=0.0, reward_mean=0.5, kl=0.0, ess_fraction=1.0, iw_variance=0.0, clip_fraction=0.0,
    entropy=1.0, grad_norm=1.0, staleness_mean=0.0, staleness_max=0, policy_age_p50_s=0.0, num_groups=1, num_tokens=4,
    step_s=0.1, is_applied=True,
)  # fmt: skip


def rollout(version: int, **changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "token_ids": np.array([5, 6, 1], np.int32),
        "sampler_logprobs": np.array([-0.5, -0.25, -1.0], np.float32),
        "spans": (Span(version=version, start=0, end=3),),
        "reward": 1.0,
        "reward_parts": (RewardPart(name="correct", value=1.0),),
        "finish_reason": FinishReason.EOS,
    }
    return Rollout(**{**values, **changes})


class Run:
    """Drives a CoordinatorApi through publications and pushes; `arena` is the newest state."""

    layout = LAYOUT
    contract = CONTRACT

    def __init__(self, api: CoordinatorApi, directory: Path) -> None:
        self.api = api
        self.directory = directory
        self.arena = Arena(self.layout)
        self.epoch = 0
        self.head = -1
        self.sequence = 0
        self.roots: dict[int, Digest] = {}
        self.signer: Signer | None = None

    async def begin(self, *, holder: str = "learner", request_id: str = "r1") -> None:
        grant = await self.api.acquire_lease(holder=holder, contract=self.contract, request_id=request_id)
        self.epoch = grant.epoch

    async def register(self, site: str = SITE, incarnation: str = INCARNATION) -> None:
        await self.api.register(self.registration(site=SiteId(site), incarnation=incarnation))

    def registration(self, **changes: Any) -> Registration:
        values: dict[str, Any] = {
            "site": SITE, "incarnation": INCARNATION, "contract": self.contract, "engine": "test", "dtype": "fp32",
            "max_delay_versions": 0,
        }  # fmt: skip
        return Registration(**{**values, **changes})

    def step(self) -> None:
        """Change the newest state."""
        self.arena.chunk(0)[:] += 1

    async def prepare(self, *, consumed: Sequence[GroupId] = (), **changes: Any) -> PublishRequest:
        """Upload the next version and return the request that would publish it."""
        old, self.arena = self.arena, self.arena.copy()
        self.step()
        version, parent = self.head + 1, changes.get("lineage_version", self.head)
        path = self.directory / f"payload-{version}"
        if parent < 0 or changes.get("snapshot"):
            info, kind, start = write_snapshot(path, self.arena), PayloadKind.SNAPSHOT, -1
        else:
            info, kind, start = write_delta(path, old, self.arena), PayloadKind.DELTA, parent
        payload = PayloadRef(
            kind=kind, from_version=start, to_version=version, digest=info.digest, num_bytes=info.num_bytes
        )
        await self.upload(path.read_bytes(), payload.digest)
        parent_digest = "" if parent < 0 else manifest_digest((await self.api.get_signed_manifest(version=parent)).data)
        manifest = build_manifest(
            run_id="run", epoch=self.epoch, version=version, parent_version=parent, parent_digest=parent_digest,
            layout=self.arena.layout, step=version, info=info, payloads=(payload,),
        )  # fmt: skip
        manifest = dataclasses.replace(manifest, **changes.get("manifest", {}))
        data = manifest_to_bytes(manifest)
        return PublishRequest(
            epoch=changes.get("epoch", self.epoch),
            step_id=changes.get("step_id", f"step-{self.epoch}-{version}"),
            parent_version=changes.get("parent_version", self.head),
            lineage_version=parent,
            manifest=data,
            consumed=tuple(consumed),
            reports=(dataclasses.replace(REPORT, step=version, version=version),) if version else (),
            signature=changes.get("signature", self.signer.sign(data) if self.signer else b""),
        )

    async def upload(self, data: bytes, digest: Digest, *, offset: int = 0) -> int:
        return await self.api.upload_payload(
            epoch=self.epoch, digest=digest, num_bytes=len(data), offset=offset, frames=frames(data[offset:])
        )

    async def publish(self, *, consumed: Sequence[GroupId] = (), **changes: Any) -> int:
        request = await self.prepare(consumed=consumed, **changes)
        self.head = await self.api.publish_version(request)
        self.roots[self.head] = manifest_from_bytes(request.manifest).state_root
        return self.head

    async def lease(self, count: int = 1, *, version: int | None = None) -> tuple[WorkAssignment, ...]:
        grant = await self.api.lease_work(
            site=SITE,
            incarnation=INCARNATION,
            max_groups=count,
            policy_version=self.head if version is None else version,
        )
        return grant.assignments

    def group(self, work: WorkAssignment, *, version: int | None = None, **changes: Any) -> Group:
        self.sequence += 1
        version = self.head if version is None else version
        values: dict[str, Any] = {
            "id": GroupId(site=SITE, incarnation=INCARNATION, sequence=self.sequence),
            "assignment": work.id,
            "prompt_index": work.prompt_index,
            "prompt_token_ids": np.array([2, 3], np.int32),
            "rollouts": (rollout(version), rollout(version, reward=0.0)),
            "oldest_version": version,
            "state_root": self.roots.get(version, Digest("0" * 64)),
            "generation_s": 0.1,
        }
        return Group(**{**values, **changes})

    async def push(self, count: int = 1) -> list[GroupId]:
        groups = [self.group(work) for work in await self.lease(count)]
        outcomes = await self.api.push_groups(groups)
        return [outcome.id for outcome in outcomes]


async def frames(data: bytes, size: int = 1 << 20) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def credits_of(*amounts: int) -> AsyncIterator[int]:
    for amount in amounts:
        yield amount
