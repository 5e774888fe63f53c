"""A learner's surroundings for tests: a real coordinator with a fixed queue, a backend of numpy, and ways to die."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.common import Contract, LogprobMode, SamplingSemantics, SiteId, StepReport
from heterorl.common.types.policy import LeaseGrant
from heterorl.common.types.rollout import (
    FinishReason,
    Group,
    GroupId,
    PushStatus,
    QueuedGroup,
    RewardPart,
    Rollout,
    Span,
)
from heterorl.common.types.run import Registration
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.learner import learner_app
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import Parts
from heterorl.learner.train.step_report import LogRatios

SITE, INCARNATION = SiteId("eu-1"), "b1946ac9"
GRANT = LeaseGrant(epoch=1, holder="learner", ttl_s=10.0, head_version=0)
VOCAB, GROUP_SIZE = 50, 2
NUM_ELEMENTS = 96
LAYOUT = Layout.build(
    [
        TensorSpec(name="a", dtype="bf16", shape=(8, 8)),
        TensorSpec(name="b", dtype="bf16", shape=(32,)),
        TensorSpec(name="tied", dtype="bf16", shape=(32,), alias_of="b"),
    ],
    chunk_elements=40,
)


class Killed(Exception):
    """The process is gone; nothing answers it any more."""


def make_contract(layout: Layout = LAYOUT, **changes: Any) -> Contract:
    values: dict[str, Any] = {
        "tokenizer_digest": "0" * 64,
        "chat_template_digest": "0" * 64,
        "task_digest": "0" * 64,
        "layout_id": layout.layout_id,
        "vocab_size": VOCAB,
        "num_prompts": 1000,
        "group_size": GROUP_SIZE,
        "sampling": SamplingSemantics(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=16, logprob_mode=LogprobMode.PROCESSED
        ),
    }
    return Contract(**{**values, **changes})


def make_group(
    sequence: int,
    *,
    assignment: int = 0,
    prompt_index: int = 0,
    version: int = 0,
    state_root: str = "0" * 64,
    incarnation: str = INCARNATION,
) -> Group:
    """A group whose content follows from its sequence."""
    rng = np.random.default_rng(sequence)
    rollouts = []
    for member in range(GROUP_SIZE):
        length = int(rng.integers(1, 6))
        reward = float((sequence + member) % 2)
        rollouts.append(
            Rollout(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                sampler_logprobs=-rng.random(length).astype(np.float32),
                spans=(Span(version=version, start=0, end=length),),
                reward=reward,
                reward_parts=(RewardPart(name="correct", value=reward),),
                finish_reason=FinishReason.LENGTH,
            )
        )
    return Group(
        id=GroupId(site=SITE, incarnation=incarnation, sequence=sequence),
        assignment=assignment,
        prompt_index=prompt_index,
        prompt_token_ids=np.array([1, 2, 3], np.int32),
        rollouts=tuple(rollouts),
        oldest_version=version,
        state_root=state_root,
        generation_s=0.0,
    )


def queued(sequence: int) -> QueuedGroup:
    return QueuedGroup(group=make_group(sequence), policy_age_s=0.0, queue_age_s=0.0)


class NumpyBackend:
    """Implements TrainBackend: momentum descent on a gradient that is a hash of the groups, so that order matters."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.weights = rng.standard_normal(NUM_ELEMENTS).astype(np.float32)
        self.momentum = np.zeros(NUM_ELEMENTS, np.float32)
        self.not_finite_steps: set[int] = set()
        self.empty_steps: set[int] = set()
        self.trained: list[tuple[GroupId, ...]] = []
        self.reports: list[StepReport] = []
        self.on_step: Callable[[], None] = lambda: None
        self.on_save: Callable[[Path], None] = lambda _: None

    @property
    def layout(self) -> Layout:
        return LAYOUT

    @property
    def torch_model(self) -> Any:
        raise AssertionError("there is no torch here")

    @property
    def last_metrics(self):
        return {}

    @property
    def last_log_ratios(self) -> LogRatios:
        return {}

    def train_step(self, groups: Any, *, head_version: int, step: int) -> StepReport:
        self.on_step()
        ids = tuple(entry.group.id for entry in groups)
        is_empty = len(self.reports) + 1 in self.empty_steps
        is_applied = not is_empty and len(self.reports) + 1 not in self.not_finite_steps
        if is_applied:
            seed = int.from_bytes(blake3.blake3(repr(ids).encode()).digest(4), "little")
            gradient = np.random.default_rng(seed).standard_normal(NUM_ELEMENTS).astype(np.float32)
            self.momentum = np.float32(0.9) * self.momentum + gradient
            self.weights = self.weights - np.float32(0.05) * self.momentum
            self.trained.append(ids)
        staleness = [head_version - entry.group.oldest_version for entry in groups]
        report = StepReport(
            step=step,
            version=head_version + 1,
            loss=0.5 if is_applied else math.nan,
            reward_mean=0.5,
            kl=0.0,
            ess_fraction=1.0,
            iw_variance=0.0,
            clip_fraction=0.0,
            entropy=0.0,
            grad_norm=1.0,
            staleness_mean=float(np.mean(staleness)),
            staleness_max=max(staleness),
            policy_age_p50_s=0.0,
            num_groups=len(groups),
            num_tokens=0 if is_empty else 1,
            step_s=0.0,
            is_applied=is_applied,
            kl_token_fresh=0.001 if 0 in staleness else None,
        )
        self.reports.append(report)
        return report

    def store(self, arena: Arena) -> None:
        bits = (self.weights.view(np.int32) >> 16).astype(np.int16)
        arena.view("a")[...] = bits[:64].reshape(8, 8)
        arena.view("b")[...] = bits[64:]

    def load_published(self, arena: Arena, *, keep_optimizer: bool = False) -> None:
        bits = np.concatenate([arena.view("a").reshape(-1), arena.view("b")]).astype(np.int32)
        self.weights = (bits << 16).view(np.float32).copy()
        if not keep_optimizer:
            self.momentum = np.zeros(NUM_ELEMENTS, np.float32)

    def freeze(self, directory: Path) -> Callable[[], None]:
        weights, momentum = self.weights.copy(), self.momentum.copy()

        def write() -> None:
            self.on_save(directory)
            np.save(directory / "weights.npy", weights, allow_pickle=False)
            np.save(directory / "momentum.npy", momentum, allow_pickle=False)

        return write

    def restore(self, directory: Path) -> None:
        self.weights = np.load(directory / "weights.npy", allow_pickle=False)
        self.momentum = np.load(directory / "momentum.npy", allow_pickle=False)


@dataclass
class FragileApi:
    """A coordinator's api that counts calls, and dies or loses answers where a test says.

    `die_before` / `die_after` name a call by (method, number from 1): the caller then never hears anything again.
    `fail` raises instead of calling, `fail_after` instead of answering; the peer lives on.
    """

    inner: Any
    die_before: tuple[str, int] | None = None
    die_after: tuple[str, int] | None = None
    fail: dict[tuple[str, int], Exception] = field(default_factory=dict)
    fail_after: dict[tuple[str, int], Exception] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)
    is_dead: bool = False
    answered: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def wait_for(self, name: str, number: int) -> None:
        """Wait until a call has been answered that many times, refusals included."""
        async with self.answered:
            await self.answered.wait_for(lambda: self.answers.count(name) >= number)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name in ("stream_groups", "watch_head", "read_payload"):
            return self._streaming(name, method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            number = self._enter(name)
            if name == "upload_payload" and self.die_after == (name, number):
                kwargs["frames"] = _half(kwargs["frames"])
            try:
                result = await method(*args, **kwargs)
            finally:
                self.answers.append(name)
                async with self.answered:
                    self.answered.notify_all()
            self._leave(name, number)
            return result

        return call

    def _streaming(self, name: str, method: Any) -> Any:
        async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            self._enter(name)
            if name == "stream_groups":
                self.held.append([group_id.sequence for group_id in kwargs["held"]])
            async for item in method(*args, **kwargs):
                number = self._enter(f"{name}.item")
                yield item
                self._leave(f"{name}.item", number)

        return stream

    def _enter(self, name: str) -> int:
        if self.is_dead:
            raise Killed
        self.calls.append(name)
        number = self.calls.count(name)
        if self.die_before == (name, number):
            self.is_dead = True
            raise Killed
        if (name, number) in self.fail:
            raise self.fail[(name, number)]
        return number

    def _leave(self, name: str, number: int) -> None:
        if self.die_after == (name, number):
            self.is_dead = True
            raise Killed
        if (name, number) in self.fail_after:
            raise self.fail_after[(name, number)]


async def _half(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for frame in frames:
        yield frame[: len(frame) // 2]
        return


class ManualClock:
    """Time that a test moves; sleepers wake when their instant is reached."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, future))
        await future

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [entry for entry in self._sleepers if entry[0] <= self.now]
        self._sleepers = [entry for entry in self._sleepers if entry[0] > self.now]
        for _, future in due:
            if not future.done():
                future.set_result(None)


async def open_coordinator(directory: Path, clock: Any = None, **changes: Any) -> Coordinator:
    values: dict[str, Any] = {
        "data_dir": directory / "coordinator",
        "groups_per_version": 2,
        "max_outstanding_groups": 1000,
        "max_staleness_versions": 500,
    }
    return await Coordinator.open(CoordinatorConfig(**{**values, **changes}), clock or SystemClock())


async def fill(
    coordinator: Any, count: int, *, incarnation: str = INCARNATION, contract: Contract | None = None
) -> int:
    """Wait for a version, then push `count` groups generated by the head in one call; returns the head."""
    async for update in coordinator.watch_head(after_version=-1):
        head = update.version
        break
    manifest = manifest_from_bytes((await coordinator.get_signed_manifest(version=head)).data)
    await coordinator.register(
        Registration(
            site=SITE,
            incarnation=incarnation,
            contract=contract or make_contract(),
            engine="test",
            dtype="fp32",
            max_delay_versions=0,
        )
    )
    # As a sampler does: a run that had ended leases again only when the next learner holds its lease.
    backoff = Backoff(clock=SystemClock(), rng=random.Random(0), base_s=1e-3, cap_s=1e-2)
    grant = await backoff.retry(
        lambda: coordinator.lease_work(site=SITE, incarnation=incarnation, max_groups=count, policy_version=head)
    )
    groups = [
        make_group(
            number,
            assignment=work.id,
            prompt_index=work.prompt_index,
            version=head,
            state_root=manifest.state_root,
            incarnation=incarnation,
        )
        for number, work in enumerate(grant.assignments, start=1)
    ]
    outcomes = await coordinator.push_groups(groups)
    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * count
    return head


def learner_config(directory: Path, **changes: Any) -> LearnerConfig:
    values: dict[str, Any] = {
        "state_dir": directory / "learner",
        "group_size": GROUP_SIZE,
        "groups_per_step": 2,
        "max_steps": 3,
        "snapshot_every_versions": 2,
        "retry_base_s": 1e-4,
        "retry_cap_s": 1e-3,
    }
    return LearnerConfig(**{**values, **changes})


async def learn(config: LearnerConfig, api: Any, backend: Any = None, **changes: Any) -> learner_app.RunResult:
    """Train with these parts; `changes` are other parts, clock, rng, stop and on_ready."""
    values: dict[str, Any] = {"clock": SystemClock(), "rng": random.Random(0)}
    joining = {name: changes.pop(name, value) for name, value in values.items()}
    stop, on_ready = changes.pop("stop", asyncio.Event()), changes.pop("on_ready", lambda: None)
    parts = Parts(**{"backend": backend or NumpyBackend(), "contract": make_contract(), **changes})
    return await learner_app.join(config, parts, api=api, **joining).run(stop, on_ready=on_ready)


async def head_root(coordinator: Any) -> str:
    head = (await coordinator.get_status()).head_version
    return str(manifest_from_bytes((await coordinator.get_signed_manifest(version=head)).data).state_root)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
