"""vLLM's arguments for engine and completion, and its parsed answers.

A completion's random stream depends only on the assignment's seed and the member. This module must never import vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import blake3
import numpy as np

from heterorl.common.generation.inference_engine import Completion
from heterorl.common.types.common import Float32Array, Int32Array, SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span
from heterorl.sampler.sampler_config import VllmEngineConfig

ComputeDtype = Literal["fp32", "bf16", "fp16"]
_COMPUTE: dict[ComputeDtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCE: dict[ComputeDtype, float] = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.1}
"""Mean log-prob difference from the reference that rounding explains, nats."""
NUM_URGENT = 8
"""Canary requests that run in addition to a full batch."""
NO_VERSION = "default"
"""vLLM's label of tokens drawn before a label was set."""


def tolerance(settings: VllmEngineConfig) -> float:
    """Largest mean difference of a sequence from the reference, nats."""
    return settings.canary_tolerance or TOLERANCE[settings.compute_dtype]


def engine_arguments(settings: VllmEngineConfig, *, max_model_len: int, logprobs_mode: str) -> dict[str, Any]:
    """Arguments of vLLM's engine, without model and weights."""
    return {
        **settings.extra,
        **({"device_ids": list(settings.devices)} if settings.devices else {}),
        **({} if settings.enforce_eager is None else {"enforce_eager": settings.enforce_eager}),
        "dtype": _COMPUTE[settings.compute_dtype],
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": settings.prefix_cache,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.batch_rows + NUM_URGENT,
        "kv_cache_memory_bytes": settings.kv_cache_bytes or None,
        "gpu_memory_utilization": settings.memory_share,
        "logprobs_mode": logprobs_mode,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "worker_extension_cls": "heterorl.sampler.vllm.arena_worker.ArenaWorker",
    }


def drawing(sampling: SamplingSemantics, *, seed: int, max_tokens: int, **changes: Any) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for one completion."""
    return {
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs": 0,
        "detokenize": False,
        # The contract's end tokens end a completion, not the model's.
        "ignore_eos": True,
        **changes,
    }


def seed_of(seed: int, member: int) -> int:
    """63-bit seed of a completion: neither members nor groups share a stream."""
    return int.from_bytes(blake3.blake3(f"{seed}/{member}".encode()).digest(8), "little") >> 1


def chosen(tokens: Int32Array, entries: Sequence[Any]) -> Float32Array:
    """Log-prob of each token from vLLM's dictionaries."""
    return np.array([entry[int(token)].logprob for token, entry in zip(tokens, entries, strict=True)], np.float32)


def completion(output: Any, *, end_token_ids: Sequence[int]) -> Completion:
    """The Completion of a CompletionOutput of vLLM."""
    tokens = np.array(output.token_ids, np.int32)
    return Completion(
        token_ids=tokens,
        # Rounding may give a certain token +1e-8; a log-prob is never positive.
        logprobs=np.minimum(chosen(tokens, output.logprobs), np.float32(0.0)),
        finish_reason=FinishReason.EOS if tokens[-1] in end_token_ids else FinishReason.LENGTH,
        spans=tuple(
            Span(version=-1 if span.version == NO_VERSION else int(span.version), start=span.start, end=span.end)
            for span in output.weight_versions
        ),
    )
