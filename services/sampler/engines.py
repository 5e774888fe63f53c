"""Builds the engines of [engine] and joins them behind one Engine.

    submit   the engine with the least load takes the whole request
    collect  returns what ended on any engine; one thread for each engine waits in its `collect`
    load     on all engines at once; an engine that fails is out, the others continue

An engine that is out gets no request until a `load` succeeds on it; its requests become `Lost`. EngineError is raised
only if no engine is left. Except during `load`, `version` is the version of every engine that is not out. Another
`load` of the same version loads the engines that are out; the others run on. A new process takes minutes; it starts in
a thread, and the first `load` after it takes the engine back.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from heterorl.common.errors import EngineError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Engine, Finished, Lost, Request, ScoredText
from heterorl.common.model.model_loading import warn_of_idle_gpus
from heterorl.common.model.quantise import Variant, dequantise, quantise, variant_layout
from heterorl.common.types.common import Float32Array, LoraSettings
from heterorl.common.weights.arena import Arena
from heterorl.sampler.sampler_config import HfEngineConfig, SamplerConfig, VllmEngineConfig, check_limits
from heterorl.sampler.vllm.shared_model import SharedModel
from heterorl.sampler.vllm.vllm_engine import VllmEngine

_LOG = logging.getLogger(__name__)
CLOSE_S = 10.0
"""Wait of a stop for an engine that starts."""


@dataclass(slots=True, eq=False)
class _Member:
    """One engine; `in_flight` maps the group's request numbers to missing completions."""

    number: int
    engine: Engine
    is_out: bool = False
    in_flight: dict[int, int] = field(default_factory=dict)
    start: threading.Thread | None = None
    """Restarts the engine."""
    is_started: bool = False
    """Whether an engine that is out only lacks a version."""

    @property
    def load_share(self) -> float:
        return sum(self.in_flight.values()) / self.engine.max_running


class EngineGroup:
    """Implements heterorl.common.generation.inference_engine.Engine around several engines of one kind."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        staged: Callable[[Arena], AbstractContextManager[None]] | None = None,
        restart: Callable[[int], None] | None = None,
    ) -> None:
        """Take at least one engine, all of one layout, name and dtype.

        `close` does not close them. `staged` is a context around a load on all engines: it prepares the weights once.
        `restart` starts the engine of a number again, after which a load is as short as any; None: loads do that.
        """
        self._members = [_Member(number, engine) for number, engine in enumerate(engines)]
        self._staged = staged or (lambda _: nullcontext())
        self._restart = restart
        self.layout, self.name, self.dtype = engines[0].layout, engines[0].name, engines[0].dtype
        self.version = engines[0].version
        """Version of all engines that are not out; -1 before the first `load`, and if all are out."""
        # Guards all fields below, and the members.
        self._news = threading.Condition()
        self._ended: list[Finished | Lost] = []
        self._keys: dict[int, int] = {}
        self._failure: EngineError | None = None
        self._defect: BaseException | None = None
        self._num_cancels = 0
        self._is_closed = False
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._gather, args=(member,), name=f"engine-{member.number}", daemon=True)
            for member in self._members
        ]
        for thread in self._threads:
            thread.start()

    @property
    def max_running(self) -> int:
        """Completions computed at once by the engines that are not out."""
        return sum(member.engine.max_running for member in self._living() or self._members)

    @property
    def is_whole(self) -> bool:
        return len(self._living()) == len(self._members)

    def load(self, arena: Arena, version: int) -> None:
        """Swap all weights; with the current version, of engines that are out."""
        is_out = [member for member in self._members if member.is_out]
        living = self._living()
        if living and self._restart is not None:
            # The others do not wait for a start, which takes minutes.
            for member in is_out:
                self._begin_start(member, self._restart)
            is_out = [member for member in is_out if member.is_started]
        elif living and version != self.version:
            is_out = []
        wanted = is_out if version == self.version else [*living, *is_out]
        if not wanted:
            return
        with self._staged(arena), ThreadPoolExecutor(len(self._members)) as threads:
            failures = list(threads.map(lambda member: self._loaded(member, arena, version), wanted))
        with self._news:
            if self._living():
                self.version = version
                return
        raise next((failure for failure in failures if failure is not None), EngineError("all engines are out"))

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Scores of the engine farthest from the median: a wrong one shows."""
        answers: list[list[Float32Array]] = []
        failure: EngineError | None = None
        for member in self._living():
            try:
                answers.append(member.engine.score(texts))
            except EngineError as error:
                failure = error
                self._put_out(member, error)
        if not answers:
            raise failure or EngineError("all engines are out")
        return _farthest(answers)

    def submit(self, request: Request) -> None:
        with self._news:
            while living := self._living():
                member = min(living, key=lambda one: one.load_share)
                number = next(self._numbers)
                try:
                    member.engine.submit(replace(request, key=number))
                except EngineError as error:
                    self._put_out(member, error)
                    continue
                member.in_flight[number] = request.num_completions
                self._keys[number] = request.key
                self._news.notify_all()
                return
        raise EngineError("all engines are out: nothing is generated before a version is loaded")

    def collect(self) -> list[Finished | Lost]:
        with self._news:
            num_cancels = self._num_cancels
            self._news.wait_for(
                lambda: (
                    self._ended or self._failure or self._defect or not self._keys or self._num_cancels != num_cancels
                )
            )
            if self._defect:
                raise self._defect
            if self._failure and not self._ended:
                failure = self._failure
                self._drop()
                raise failure
            ended, self._ended = self._ended, []
            return ended

    def cancel(self) -> None:
        with self._news:
            self._drop()

    def stop(self) -> None:
        for member in self._members:
            member.engine.stop()
        self.cancel()

    def close(self) -> None:
        """End the threads; the owner closes the engines.
        A start that goes on after CLOSE_S ends with the process."""
        with self._news:
            self._is_closed = True
            self._drop()
        for thread in self._threads:
            thread.join()
        for start in [member.start for member in self._members]:
            if start is not None:
                start.join(CLOSE_S)

    def _living(self) -> list[_Member]:
        return [member for member in self._members if not member.is_out]

    def _begin_start(self, member: _Member, restart: Callable[[int], None]) -> None:
        """Restart an engine in a thread, unless it starts or has started."""

        def start() -> None:
            try:
                restart(member.number)
            except (EngineError, OSError) as error:
                _LOG.error("engine %d of %d does not start: %s", member.number, len(self._members), error)
            else:
                member.is_started = True
            finally:
                member.start = None

        if member.start is None and not member.is_started:
            member.start = threading.Thread(target=start, name=f"restart-{member.number}", daemon=True)
            member.start.start()

    def _loaded(self, member: _Member, arena: Arena, version: int) -> EngineError | None:
        if (start := member.start) is not None:
            start.join()
        try:
            member.engine.load(arena, version)
        except (EngineError, OSError) as error:
            # A file that cannot be written puts one engine out; the engines that loaded go on.
            failure = error if isinstance(error, EngineError) else EngineError(f"its weights: {error}")
            self._put_out(member, failure)
            return failure
        with self._news:
            member.is_out = member.is_started = False
        return None

    def _gather(self, member: _Member) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closed or member.in_flight)
                if self._is_closed:
                    return
            try:
                ended = member.engine.collect()
            except EngineError as error:
                self._put_out(member, error)
                continue
            except Exception as error:  # noqa: BLE001 - `collect` raises it, as a single engine would
                with self._news:
                    self._defect = error
                    self._news.notify_all()
                return
            with self._news:
                for one in ended:
                    self._note(member, one)
                self._news.notify_all()

    def _note(self, member: _Member, one: Finished | Lost) -> None:
        # A cancelled request has no key any more.
        if one.key not in member.in_flight:
            return
        self._ended.append(replace(one, key=self._keys[one.key]))
        member.in_flight[one.key] -= 1
        if isinstance(one, Lost) or not member.in_flight[one.key]:
            del member.in_flight[one.key], self._keys[one.key]

    def _put_out(self, member: _Member, error: EngineError) -> None:
        """Take an engine out and report its requests as lost.

        If no engine is left, the error is reported instead.
        """
        with self._news:
            lost, member.in_flight = list(member.in_flight), {}
            if not member.is_out:
                _LOG.error(
                    "engine %d of %d is out until it has loaded a version: %s",
                    member.number, len(self._members), error,
                )  # fmt: skip
            member.is_out, member.is_started = True, False
            member.engine.cancel()
            self._ended += [Lost(key=self._keys.pop(number)) for number in lost]
            if not self._living():
                self.version = -1
                finished: list[Finished | Lost] = [one for one in self._ended if isinstance(one, Finished)]
                # The error says more than a `Lost` for each request.
                if len(finished) < len(self._ended):
                    self._failure = error
                self._ended = finished
            self._news.notify_all()

    def _drop(self) -> None:
        self._num_cancels += 1
        self._ended, self._keys, self._failure = [], {}, None
        for member in self._members:
            member.in_flight = {}
            with suppress(EngineError):
                member.engine.cancel()
        self._news.notify_all()


def _farthest(answers: Sequence[list[Float32Array]]) -> list[Float32Array]:
    if len(answers) == 1 or not answers[0]:
        return answers[0]
    flat = np.array([np.concatenate(answer) for answer in answers])
    distances = np.abs(flat - np.median(flat, axis=0)).mean(axis=1)
    # Two at the same distance: the one with lower log-probs, which wrong weights have.
    order = np.lexsort((flat.mean(axis=1), -distances))
    return answers[int(order[0])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """One engine or a group of engines, and properties of their model."""

    engine: Engine
    vocab_size: int
    lora: LoraSettings
    routed_token_bytes: int = 0
    """See Contract."""
    base: Callable[[], Arena | None]
    """Weights of model_dir in the published type, until others are loaded."""
    close: Callable[[], None]


def build_engines(
    config: SamplerConfig, *, end_token_ids: Sequence[int], is_stopped: threading.Event | None = None
) -> Engines:
    """Start the engines of [engine]; `is_stopped` gives up the start of vLLM.

    Raises ConfigError: the model cannot be loaded, or an engine cannot draw as [sampling] says; DependencyMissing: the
    engine's package is not installed; EngineDied: an engine's own process does not start.
    """
    if isinstance(config.engine, HfEngineConfig):
        return _hf(config, config.engine, end_token_ids=end_token_ids)
    return _vllm(config, config.engine, end_token_ids=end_token_ids, is_stopped=is_stopped)


def _hf(config: SamplerConfig, settings: HfEngineConfig, *, end_token_ids: Sequence[int]) -> Engines:
    devices = [f"cuda:{number}" for number in settings.devices] or [settings.device] * settings.engines
    warn_of_idle_gpus("engine.device", devices[0])
    engines = [
        HfEngine(
            model_dir=config.model_dir,
            published_dtype=config.published_dtype,
            compute_dtype=settings.compute_dtype,
            device=device,
            sampling=config.sampling.semantics(),
            batch_rows=settings.batch_rows,
            end_token_ids=end_token_ids,
            lora=config.lora,
            is_seeded=config.seeded_sampling,
            records_routing=config.sampling.router_replay == "rollout",
        )
        for device in devices
    ]
    first = engines[0]
    group = EngineGroup(engines) if len(engines) > 1 else None
    return Engines(
        engine=group or first,
        vocab_size=first.vocab_size,
        lora=first.lora,
        routed_token_bytes=first.routed_token_bytes,
        base=first.base,
        close=group.close if group else lambda: None,
    )


def _vllm(
    config: SamplerConfig,
    settings: VllmEngineConfig,
    *,
    end_token_ids: Sequence[int],
    is_stopped: threading.Event | None,
) -> Engines:
    check_limits(config.sampling, config.lora, settings.max_model_len)
    source = SharedModel(
        model_dir=config.model_dir,
        published_dtype=config.published_dtype,
        sampling=config.sampling.semantics(),
        weights_dir=Path(settings.weights_dir) if settings.weights_dir else config.state_dir / "engine",
        lora=config.lora,
        swap_check_device=settings.swap_check_device,
    )
    engine, close = start_vllm(source, vllm_settings(settings), end_token_ids=end_token_ids, is_stopped=is_stopped)
    return Engines(engine=engine, vocab_size=source.room.vocab_size, lora=source.lora, base=source.base, close=close)


def vllm_settings(settings: VllmEngineConfig) -> list[VllmEngineConfig]:
    """The settings of each engine, with its devices."""
    size = settings.tensor_parallel_size
    devices = [settings.devices[first : first + size] for first in range(0, len(settings.devices), size)]
    return [settings.model_copy(update={"devices": own}) for own in devices or [()] * settings.engines]


def start_vllm(
    source: SharedModel,
    settings: Sequence[VllmEngineConfig],
    *,
    end_token_ids: Sequence[int],
    is_stopped: threading.Event | None = None,
) -> tuple[Engine, Callable[[], None]]:
    """Start an engine for each settings, in parallel.

    `is_stopped` gives the starts up. Returns the engine, and a function that ends all of them and the source. Raises
    EngineDied: one of them does not start; the others and the source are ended.
    """
    if len(settings) > 1:
        # A process forked while another thread holds a lock inherits a lock that is never released.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with ExitStack() as started:
        started.callback(source.close)
        with ThreadPoolExecutor(len(settings)) as threads:
            starts = [
                threads.submit(VllmEngine, source, end_token_ids=end_token_ids, settings=one, is_stopped=is_stopped)
                for one in settings
            ]
        for start in starts:
            if start.exception() is None:
                started.callback(start.result().close)
        engines = [start.result() for start in starts]
        restart = lambda number: engines[number].restart()  # noqa: E731
        group = EngineGroup(engines, staged=source.written, restart=restart) if len(engines) > 1 else None
        if group is not None:
            started.callback(group.close)
        return group or engines[0], started.pop_all().close


def take_variant(engines: Engines, variant: Variant | Literal[""]) -> Engines:
    """Wrap engines so that they load a dequantised variant; empty: no change.

    Dequantised weights have the published type and the same bits on every machine.
    """
    if not variant:
        return engines

    def base() -> Arena | None:
        # With the scales that a run begins with.
        if (whole := engines.base()) is None:
            return None
        arena = Arena(taken.layout)
        quantise(whole, arena, variant)
        return arena

    taken = _VariantedEngine(engines.engine, variant)
    return replace(engines, engine=cast("Engine", taken), base=base)


class _VariantedEngine:
    """An Engine that dequantises before `load`; otherwise it is the wrapped one."""

    def __init__(self, engine: Engine, variant: Variant) -> None:
        self._engine = engine
        self._variant: Variant = variant
        self.layout = variant_layout(engine.layout, variant)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self, arena: Arena, version: int) -> None:
        # Allocated for each swap only: it is as large as the model.
        whole = Arena(self._engine.layout)
        dequantise(arena, whole, self._variant)
        self._engine.load(whole, version)
