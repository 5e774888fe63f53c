"""A sampler's surroundings for tests: a real coordinator in process, a link that can fail, an engine that computes
nothing, and time that moves only when a test waits."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np

from heterorl.common.errors import EngineDied, EngineError, RewardError, Unreachable
from heterorl.common.generation.hf_batch import spans_of
from heterorl.common.generation.inference_engine import Completion, Finished, Request, ScoredText
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Contract, Digest, Float32Array, Int32Array
from heterorl.common.types.rollout import FinishReason, RewardPart
from heterorl.common.weights.arena import Arena, Layout
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.prompt_evaluator import SiteSet
from heterorl.sampler.sampler_app import Components, Sampler, join
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.sampler.trust_record import TrustRecord
from tests.support.clock import ManualClock
from tests.support.plain_task import PlainTask
from tests.support.run import CONTRACT, LAYOUT, SITE, Run

STREAMS = ("watch_head", "read_payload")


class SilentEngine:
    """Implements Engine: every completion is the same; notes what was loaded; can hold what is under way; fails as it
    is told. It ends all that was submitted at once, in one batch, or with `is_paced` a completion whenever time passes."""

    name = "silent"
    dtype = "fp32"

    def __init__(self, *, max_running: int) -> None:
        self.layout: Layout = LAYOUT
        self.max_running = max_running
        self.version = -1
        self.loaded: list[tuple[int, Digest]] = []
        self.num_batches = 0
        self.proceed = threading.Event()
        self.proceed.set()
        self.is_held = False
        self.may_load = threading.Event()
        self.may_load.set()
        self.is_loading = False
        self.is_starting = False
        """Whether a load starts a process: a stop ends it."""
        self.begins_late = False
        self.is_paced = False
        self.pace = threading.Semaphore(0)
        self.submitted: list[Request] = []
        self.scores = np.zeros(0, np.float32)
        self.load_failures: list[EngineError] = []
        self.batch_failures: list[EngineError] = []
        self.score_failures: list[EngineError] = []
        self._waiting: list[tuple[Request, int]] = []
        self._begun: dict[int, int] = {}
        self._is_lost = False
        self._changed = threading.Condition()

    @property
    def num_waiting(self) -> int:
        """Threads that wait for the test; one that may go on is busy, though it has not noticed yet."""
        is_held = self.is_held and (self.is_paced or not self.proceed.is_set())
        return is_held + (self.is_loading and not self.may_load.is_set())

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        if self.score_failures:
            self.version = -1
            raise self.score_failures.pop()
        return [self.scores for _ in texts]

    def load(self, arena: Arena, version: int) -> None:
        self.version = -1
        self.is_loading = True
        self.may_load.wait()
        self.is_loading = False
        if self.load_failures:
            self._is_lost = bool(self._waiting)
            raise self.load_failures.pop()
        self.loaded.append((version, arena.state_root()))
        self.version = version

    def submit(self, request: Request) -> None:
        if self.version < 0:
            raise EngineError("no version is loaded")
        with self._changed:
            self.submitted.append(request)
            self._begun[request.key] = self.version
            self._waiting += [(request, member) for member in range(request.num_completions)]

    def collect(self) -> list[Finished]:
        if not self._waiting:
            return []
        if self.batch_failures:
            self._waiting, self.version = [], -1
            raise self.batch_failures.pop()
        self.num_batches += 1
        self.is_held = True
        self.proceed.wait()
        if self.is_paced:
            self.pace.acquire()
        self.is_held = False
        with self._changed:
            count = 1 if self.is_paced else len(self._waiting)
            ended, self._waiting = self._waiting[:count], self._waiting[count:]
            if self._is_lost:
                self._waiting, self._is_lost = [], False
                raise EngineError("a swap meanwhile failed")
        return [
            Finished(key=request.key, member=member, completion=self._completion(self._begun[request.key]))
            for request, member in ended
        ]

    def cancel(self) -> None:
        with self._changed:
            self._waiting = []
        self.proceed.set()
        self.pace.release()

    def stop(self) -> None:
        self.cancel()
        if self.is_starting:
            self.load_failures = [EngineDied("its start was given up")]
            self.may_load.set()

    def _completion(self, begun: int) -> Completion:
        begun = self.version if self.begins_late else begun
        return Completion(
            token_ids=np.array([5, 6, 1], np.int32),
            logprobs=np.array([-0.5, -0.25, -1.0], np.float32),
            finish_reason=FinishReason.EOS,
            spans=spans_of([begun, self.version, self.version]),
        )


class FixedTask(PlainTask):
    """Every completion is worth 1; the verifier can be made to fail."""

    digest = CONTRACT.task_digest
    num_prompts = CONTRACT.num_prompts
    num_evaluation_prompts = 1

    def __init__(self) -> None:
        self.is_failing = False
        self.num_failing = 0

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="1+1=", answer="2")

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        if self.is_failing or self.num_failing:
            self.num_failing = max(0, self.num_failing - 1)
            raise RewardError("it crashed")
        return (RewardPart(name="correct", value=1.0),)


class FixedPrompter:
    """Prompter without a tokenizer."""

    def encode_prompt(self, prompt: Prompt) -> Int32Array:
        return np.array([2, 3], np.int32)

    def decode(self, token_ids: Int32Array, *, keeps_special: bool = False) -> str:
        return "|" if keeps_special else "x"

    def completion(self, token_ids: Int32Array, prompt: Prompt | None = None) -> str:
        return self.decode(token_ids)


class Link:
    """A coordinator's api behind a link that a test breaks: wholly (`is_down`), or by replacing methods (`replaced`)."""

    def __init__(self, core: Coordinator) -> None:
        self._core = core
        self.is_down = False
        self.replaced: dict[str, Callable[..., Any]] = {}
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            return self.replaced.get(name, getattr(self._core, name))(*args, **kwargs)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if self.is_down:
                raise Unreachable("the link is down")
            answer = await method(*args, **kwargs)
            if self.is_down:
                raise Unreachable("the answer is lost")
            return answer

        async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            self.calls[name] += 1
            if self.is_down:
                raise Unreachable("the link is down")
            async for item in method(*args, **kwargs):
                yield item
                if self.is_down:
                    raise Unreachable("the link broke")

        return stream if name in STREAMS else call


class CountingThreads(ThreadPoolExecutor):
    """The event loop's threads, and how many of them are at work."""

    def __init__(self) -> None:
        super().__init__(max_workers=8)
        self.num_busy = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_busy += 1
        answer: Future[Any] = Future()
        loop = asyncio.get_running_loop()

        def work() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001
                    answer.set_exception(error)
                else:
                    answer.set_result(result)
            # Behind the waiter's own callback, which `answer` has called, and the step that this schedules.
            loop.call_soon_threadsafe(loop.call_soon, self._end)

        super().submit(work)
        return answer

    def _end(self) -> None:
        self.num_busy -= 1


class World:
    """A coordinator with a learner's lease, and one sampler at a time over one state directory."""

    def __init__(self, core: Coordinator, clock: ManualClock, directory: Path) -> None:
        self.core, self.clock, self.directory = core, clock, directory
        self.run = Run(core, directory)
        self.link = Link(core)
        self.task: Task = FixedTask()
        self.prompter = cast("Prompter", FixedPrompter())
        self.settings: dict[str, Any] = {}
        self.canary: tuple[ScoredText, ...] = ()
        self.sets: tuple[SiteSet, ...] = ()
        self.conversations: Any = None
        self.running: asyncio.Task[None] | None = None
        self.held: list[threading.Event] = []
        """What threads of this world's samplers may wait for."""
        self.threads = CountingThreads()
        asyncio.get_running_loop().set_default_executor(self.threads)

    @classmethod
    async def open(cls, directory: Path, *, contract: Contract = CONTRACT, **coordinator: Any) -> World:
        clock = ManualClock()
        values = {"groups_per_version": 2, "max_outstanding_groups": 1000, "max_staleness_versions": 500}
        config = CoordinatorConfig(data_dir=directory / "coordinator", **{**values, **coordinator})
        world = cls(await Coordinator.open(config, clock), clock, directory)
        world.run.contract = contract
        await world.run.begin()
        return world

    def start(self) -> None:
        """Start a sampler process's worth of objects over the state directory."""
        values: dict[str, Any] = {
            "site": SITE,
            "state_dir": self.directory / "site",
            "group_size": CONTRACT.group_size,
            "heartbeat_s": 1.0,
            # Two groups at a time: what most tests are about is one batch after another.
            "work_ahead_s": 0.0,
            "swap": "drain",
        }
        config = SamplerConfig(**{**values, **self.settings})
        self.engine = SilentEngine(max_running=2 * CONTRACT.group_size)
        self.held += [self.engine.proceed, self.engine.may_load]
        if self.conversations is not None:
            self.held.append(self.conversations.go)
        self.outbox = Outbox(config.state_dir)
        parts = Components(
            engine=self.engine, task=self.task, prompter=self.prompter, contract=self.run.contract,
            canary=self.canary, sets=self.sets, conversations=self.conversations,
        )  # fmt: skip
        api: Any = self.link
        record = TrustRecord(config.state_dir / "versions.jsonl")
        self.sampler: Sampler = join(
            config, parts, api=api, outbox=self.outbox, record=record, clock=self.clock, rng=random.Random(0)
        )
        self.stop = asyncio.Event()
        self.running = asyncio.create_task(self.sampler.run(self.stop))

    async def lose_engine_in_outage(self, *, lasts_s: float, takes: Callable[[Request], bool] = lambda _: True) -> None:
        """End the engine and the link at the next request that `takes` names; only the link comes back."""
        submit = self.engine.submit

        def last(request: Request) -> None:
            submit(request)
            if takes(request):
                self.link.is_down = True
                self.engine.batch_failures = [EngineDied("gone")]
                self.engine.submit = submit  # type: ignore[method-assign]

        self.engine.submit = last  # type: ignore[method-assign]
        await self.until(lambda: self.link.is_down)
        await self.passed(lasts_s, step_s=0.5)
        self.link.is_down = False

    async def until(self, condition: Callable[[], bool], *, step_s: float = 0.1) -> None:
        """Let time pass until `condition` holds."""
        while not condition():
            await self._pass_running(step_s)

    async def until_acknowledged(self, count: int) -> None:
        """Let time pass until the coordinator has acknowledged so many groups."""
        while await self.ledger_acked() < count:
            await self._pass_running(0.1)

    async def _pass_running(self, seconds: float) -> None:
        """Let time pass for a sampler that runs; an error that ended it is raised."""
        assert self.running is not None
        if self.running.done():
            await self.running
        await self._pass(seconds)

    async def _pass(self, seconds: float) -> None:
        """Let time pass once the threads have done what they were given: on a slow machine it must not run away."""
        while True:
            await asyncio.sleep(0.001)
            # What an operation on the store answers is on its way when one submitted after it has answered.
            await self.core.database.run(lambda _: None)
            await asyncio.sleep(0)
            if self.threads.num_busy <= (0 if self.running is None else self.engine.num_waiting):
                break
        if self.running is not None and self.engine.is_paced and self.engine.is_held:
            self.engine.pace.release()
        self.clock.advance(seconds)

    async def passed(self, seconds: float, *, step_s: float = 0.1) -> None:
        """Let so much time pass."""
        end = self.clock.monotonic() + seconds
        await self.until(lambda: self.clock.monotonic() >= end, step_s=step_s)

    async def end(self) -> None:
        """Wait for the sampler's own end."""
        running = self.running
        assert running is not None
        while not running.done():
            await self._pass(0.1)
        self.running = None
        self.outbox.close()
        await running

    async def kill(self) -> None:
        """SIGKILL as far as objects can show it: nothing runs any more, only files remain."""
        running, self.running = self.running, None
        assert running is not None
        running.cancel()
        await asyncio.wait([running])
        self.outbox.close()
        assert running.cancelled(), running.exception()

    async def close(self) -> None:
        """End everything."""
        for event in self.held:
            event.set()
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running])
            self.outbox.close()
        await self.core.close()

    @property
    def is_ended(self) -> bool:
        """Whether the sampler ended by itself."""
        return self.running is None or self.running.done()

    def spooled(self) -> int:
        """Groups in the outbox."""
        return self.outbox.level().num_groups

    async def ledger_acked(self) -> int:
        """Groups that the coordinator acknowledged."""
        return (await self.core.get_status()).ledger.acked
