"""Builds the engines of [engine] and returns them as one Engine. Loads models."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from heterorl.common.errors import ConfigError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Engine
from heterorl.common.model.quantise import Variant, dequantise, quantise, variant_layout
from heterorl.common.types.common import LoraSettings, SamplingSemantics
from heterorl.common.weights.arena import Arena
from heterorl.sampler.engine_group import EngineGroup
from heterorl.sampler.sampler_config import HfEngineConfig, SamplerConfig, VllmEngineConfig
from heterorl.sampler.vllm.shared_model import SharedModel
from heterorl.sampler.vllm.vllm_engine import VllmEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """One engine or a group of engines, and properties of their model."""

    engine: Engine
    vocab_size: int
    lora: LoraSettings
    routed_token_bytes: int
    """See Contract."""
    base: Callable[[], Arena | None]
    """Weights of model_dir in the published type, until others are loaded."""
    close: Callable[[], None]


def build_engines(config: SamplerConfig, sampling: SamplingSemantics, *, end_token_ids: Sequence[int]) -> Engines:
    """Start the engines of [engine].

    Raises:
        ConfigError: the model cannot be loaded, or an engine cannot draw as `sampling` says.
        DependencyMissing: the engine's package is not installed.
        EngineDied: an engine's own process does not start.
    """
    if isinstance(config.engine, HfEngineConfig):
        return _hf(config, config.engine, sampling, end_token_ids=end_token_ids)
    return _vllm(config, config.engine, sampling, end_token_ids=end_token_ids)


def _hf(
    config: SamplerConfig, settings: HfEngineConfig, sampling: SamplingSemantics, *, end_token_ids: Sequence[int]
) -> Engines:
    devices = [f"cuda:{number}" for number in settings.devices] or [settings.device] * settings.engines
    engines = [
        HfEngine(
            model_dir=config.model_dir,
            published_dtype=config.published_dtype,
            compute_dtype=settings.compute_dtype,
            device=device,
            sampling=sampling,
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
    config: SamplerConfig, settings: VllmEngineConfig, sampling: SamplingSemantics, *, end_token_ids: Sequence[int]
) -> Engines:
    if config.sampling.router_replay != "none":
        raise ConfigError(
            "sampling.router_replay", "vLLM's routing is not recorded", action='use engine hf, or set it to "none"'
        )
    source = SharedModel(
        model_dir=config.model_dir,
        published_dtype=config.published_dtype,
        sampling=sampling,
        weights_dir=Path(settings.weights_dir) if settings.weights_dir else config.state_dir / "engine",
        lora=config.lora,
        canary_device=settings.canary_device,
    )
    try:
        engine, close = start_vllm(source, vllm_settings(settings), end_token_ids=end_token_ids)
    except BaseException:
        source.close()
        raise

    return Engines(
        engine=engine,
        vocab_size=source.room.vocab_size,
        lora=source.lora,
        routed_token_bytes=0,
        base=source.base,
        close=close,
    )


def vllm_settings(settings: VllmEngineConfig) -> list[VllmEngineConfig]:
    """The settings of each engine, with its devices."""
    size = settings.tensor_parallel_size
    devices = [settings.devices[first : first + size] for first in range(0, len(settings.devices), size)]
    return [settings.model_copy(update={"devices": own}) for own in devices or [()] * settings.engines]


def start_vllm(
    source: SharedModel, settings: Sequence[VllmEngineConfig], *, end_token_ids: Sequence[int]
) -> tuple[Engine, Callable[[], None]]:
    """Start one engine per settings in parallel; returns the engine and a function that ends all of them and the
    source.

    Raises EngineDied: one of them does not start; the others are ended.
    """
    if len(settings) > 1:
        # A process forked while another thread holds a lock inherits a lock that is never released.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with ThreadPoolExecutor(len(settings)) as threads, ExitStack() as started:
        futures = [threads.submit(VllmEngine, source, end_token_ids=end_token_ids, settings=one) for one in settings]
        failures = []
        engines = []
        for future in futures:
            if (error := future.exception()) is not None:
                failures.append(error)
                continue
            engines.append(future.result())
            started.callback(future.result().close)
        if failures:
            raise failures[0]
        ends = started.pop_all()
    ends_last = ExitStack()
    ends_last.callback(source.close)
    ends_last.callback(ends.close)
    if len(engines) == 1:
        return engines[0], ends_last.close
    group = EngineGroup(engines, staged=source.written)
    ends_last.callback(group.close)
    return group, ends_last.close


def take_variant(engines: Engines, variant: Variant | Literal[""]) -> Engines:
    """Wrap engines so that they load a variant of the weights, dequantised; empty `variant`: no change.

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
    """An Engine that dequantises the arena before `load`; everything else is the wrapped engine's."""

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
