"""Builds the engines of [engine] and joins them behind one Engine.

    submit   the engine with the least load takes the whole request
    collect  returns what ended on any engine; one thread for each engine waits in its `collect`
    load     on all engines at once

The engines of one sampler fail together: what one loses is lost on all, until a `load` succeeds.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from heterorl.common.errors import EngineError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Engine, Finished, Request, ScoredText
from heterorl.common.model.model_loading import warn_of_idle_gpus
from heterorl.common.model.quantise import Variant, dequantise, quantise, variant_layout
from heterorl.common.types.common import Float32Array, LoraSettings
from heterorl.common.weights.arena import Arena
from heterorl.sampler.sampler_config import HfEngineConfig, SamplerConfig, VllmEngineConfig, check_limits
from heterorl.sampler.vllm.shared_model import SharedModel
from heterorl.sampler.vllm.vllm_engine import VllmEngine

_LOG = logging.getLogger(__name__)


class EngineGroup:
    """Implements heterorl.common.generation.inference_engine.Engine around several engines of one kind."""

    def __init__(
        self, engines: Sequence[Engine], *, staged: Callable[[Arena], AbstractContextManager[None]] | None = None
    ) -> None:
        """Take at least one engine, all of one layout, name and dtype.

        `close` does not close them. `staged` is a context around a load on all engines: it prepares the weights once.
        """
        self._engines = list(engines)
        self._staged = staged or (lambda _: nullcontext())
        self.layout, self.name, self.dtype = engines[0].layout, engines[0].name, engines[0].dtype
        self.version = engines[0].version
        self.max_running = sum(engine.max_running for engine in engines)
        # Guards all fields below, and the version.
        self._news = threading.Condition()
        self._in_flight: list[dict[int, int]] = [{} for _ in engines]
        """Missing completions of each engine's requests, by the group's number."""
        self._ended: list[Finished] = []
        self._keys: dict[int, int] = {}
        self._failure: EngineError | None = None
        self._defect: BaseException | None = None
        self._num_cancels = 0
        self._is_closed = False
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._gather, args=(place,), name=f"engine-{place}", daemon=True)
            for place in range(len(engines))
        ]
        for thread in self._threads:
            thread.start()

    def load(self, arena: Arena, version: int) -> None:
        try:
            with self._staged(arena), ThreadPoolExecutor(len(self._engines)) as threads:
                list(threads.map(lambda engine: engine.load(arena, version), self._engines))
        except (EngineError, OSError) as error:
            self._fail(EngineError(f"a swap failed: {error}"))
            raise
        with self._news:
            self.version = version

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Scores of the engine farthest from the median: a wrong one shows."""
        return _farthest([engine.score(texts) for engine in self._engines])

    def submit(self, request: Request) -> None:
        with self._news:
            loads = [
                sum(requests.values()) / engine.max_running
                for requests, engine in zip(self._in_flight, self._engines, strict=True)
            ]
            place, number = loads.index(min(loads)), next(self._numbers)
            self._engines[place].submit(replace(request, key=number))
            self._in_flight[place][number] = request.num_completions
            self._keys[number] = request.key
            self._news.notify_all()

    def collect(self) -> list[Finished]:
        with self._news:
            num_cancels = self._num_cancels
            self._news.wait_for(
                lambda: (
                    self._ended or self._failure or self._defect or not self._keys or self._num_cancels != num_cancels
                )
            )
            if self._defect:
                raise self._defect
            failure, self._failure = self._failure, None
            if failure:
                raise failure
            ended, self._ended = self._ended, []
            return ended

    def cancel(self) -> None:
        with self._news:
            self._drop()

    def stop(self) -> None:
        for engine in self._engines:
            engine.stop()
        self.cancel()

    def close(self) -> None:
        """End the threads; the owner closes the engines."""
        with self._news:
            self._is_closed = True
            self._drop()
        for thread in self._threads:
            thread.join()

    def _gather(self, place: int) -> None:
        requests = self._in_flight[place]
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closed or requests)
                if self._is_closed:
                    return
            try:
                ended = self._engines[place].collect()
            except EngineError as error:
                _LOG.error("engine %d of %d failed, and all lose their requests: %s", place, len(self._engines), error)
                self._fail(error)
                continue
            except Exception as error:  # noqa: BLE001 - `collect` raises it, as a single engine would
                with self._news:
                    self._defect = error
                    self._news.notify_all()
                return
            with self._news:
                for one in ended:
                    # A cancelled request has no key any more.
                    if one.key in requests:
                        self._ended.append(replace(one, key=self._keys[one.key]))
                        requests[one.key] -= 1
                        if not requests[one.key]:
                            del requests[one.key], self._keys[one.key]
                self._news.notify_all()

    def _fail(self, error: EngineError) -> None:
        with self._news:
            # A failure is reported several times; requests in flight at the first report must still fail.
            is_heard = bool(self._keys or self._ended or self._failure)
            self.version = -1
            self._drop()
            self._failure = error if is_heard else None

    def _drop(self) -> None:
        self._num_cancels += 1
        self._ended, self._keys, self._failure = [], {}, None
        for requests, engine in zip(self._in_flight, self._engines, strict=True):
            requests.clear()
            with suppress(EngineError):
                engine.cancel()
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
        group = EngineGroup(engines, staged=source.written) if len(engines) > 1 else None
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
