"""What vLLM is told: the engine's arguments, what is asked for a completion, and how its answers are read.

Guarantees: a completion's random stream depends on its assignment's seed and its place in the group alone; log-probs
mean what the contract says, or the configuration is refused. Must never import vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import blake3
import numpy as np

from heterorl.common.errors import ConfigError
from heterorl.common.generation.engine import Completion
from heterorl.common.types.common import Float32Array, Int32Array, LogprobMode, SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span

ComputeDtype = Literal["fp32", "bf16", "fp16"]
_COMPUTE: dict[ComputeDtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCE: dict[ComputeDtype, float] = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.1}
"""Mean difference from the reference that rounding explains, nats."""
NUM_URGENT = 8
"""Requests of a canary that run beside a whole batch."""
OWN_ARGUMENTS = frozenset(
    {
        "model", "dtype", "tensor_parallel_size", "data_parallel_size", "device_ids", "enforce_eager",
        "enable_prefix_caching", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization",
        "logprobs_mode", "generation_config", "skip_tokenizer_init", "disable_log_stats", "worker_extension_cls",
        "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_target_modules",
    }
)  # fmt: skip
"""Of vLLM's arguments those that have keys of their own here, or that an engine depends on."""
MIN_TEMPERATURE = 0.01
"""Below it vLLM draws at another temperature than it is told."""
NO_VERSION = "default"
"""vLLM's label of tokens drawn before any label was set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Nothing here changes what is drawn, up to rounding.

    Example: VllmOptions(compute_dtype="bf16", batch_rows=256)
    """

    compute_dtype: ComputeDtype
    """Type of the matrix products."""
    batch_rows: int
    """Completions generated at once."""
    tensor_parallel_size: int = 1
    """Workers that share the model."""
    devices: tuple[int, ...] = ()
    """Numbers of the GPUs to compute on, among those that this process sees; empty takes the first."""
    enforce_eager: bool | None = None
    """Compile nothing, record no graphs; None: on a CPU only."""
    has_prefix_cache: bool = True
    """Let completions of one version share the keys and values of equal prompt prefixes."""
    max_model_len: int = 0
    """Longest prompt and completion, tokens; 0 is the model's."""
    kv_cache_bytes: int = 0
    """Memory of keys and values; 0 leaves it to vLLM."""
    memory_share: float = 0.9
    """Of the device's memory, for weights, keys and values."""
    canary_tolerance: float = 0.0
    """Of the mean difference from the reference, nats; 0 is TOLERANCE."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's engine, none of OWN_ARGUMENTS."""

    @property
    def tolerance(self) -> float:
        """Largest mean difference of a sequence from the reference, nats."""
        return self.canary_tolerance or TOLERANCE[self.compute_dtype]

    def arguments(self, *, max_model_len: int, logprobs_mode: str) -> dict[str, Any]:
        """Arguments of vLLM's engine but for the model and its weights.

        Args:
            max_model_len: longest prompt and completion, tokens; that of the model where the options name none.
            logprobs_mode: of `requests.logprobs_mode`.
        """
        return {
            **self.extra,
            **({"device_ids": list(self.devices)} if self.devices else {}),
            **({} if self.enforce_eager is None else {"enforce_eager": self.enforce_eager}),
            "dtype": _COMPUTE[self.compute_dtype],
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": self.has_prefix_cache,
            "max_model_len": max_model_len,
            "max_num_seqs": self.batch_rows + NUM_URGENT,
            "kv_cache_memory_bytes": self.kv_cache_bytes or None,
            "gpu_memory_utilization": self.memory_share,
            "logprobs_mode": logprobs_mode,
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "worker_extension_cls": "heterorl.sampler.vllm.worker.ArenaWorker",
        }


def logprobs_mode(sampling: SamplingSemantics) -> str:
    """vLLM's mode in which the log-probs of drawn tokens have the contract's meaning.

    Raises:
        ConfigError: there is none.
    """
    if sampling.temperature < MIN_TEMPERATURE:
        raise ConfigError("sampling.temperature", f"vLLM draws at no temperature below {MIN_TEMPERATURE}")
    is_of_logits = sampling.logprob_temperature == 1.0
    if sampling.logprob_mode is LogprobMode.RAW or (sampling.is_truncated and is_of_logits):
        return "raw_logprobs"
    if sampling.is_truncated:
        # vLLM renormalises processed log-probs over what truncation leaves; the contract does not.
        raise ConfigError(
            "sampling",
            "vLLM gives no log-probs before truncation at a temperature",
            action="use top_p = 1 and top_k = 0, temperature = 1, or logprob_mode = raw",
        )
    return "processed_logprobs"


def settings(sampling: SamplingSemantics, *, seed: int, max_tokens: int, **changes: Any) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for one completion."""
    return {
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs": 0,
        "detokenize": False,
        # The contract's end tokens end a completion, not those that the model's own settings name.
        "ignore_eos": True,
        **changes,
    }


def seed_of(seed: int, member: int) -> int:
    """Seed of one completion, 63 bits: neighbours of a group share no stream, nor do two groups with close seeds."""
    return int.from_bytes(blake3.blake3(f"{seed}/{member}".encode()).digest(8), "little") >> 1


def chosen(tokens: Int32Array, entries: Sequence[Any]) -> Float32Array:
    """Log-prob of each token out of vLLM's dictionaries of the tokens beside it."""
    return np.array([entry[int(token)].logprob for token, entry in zip(tokens, entries, strict=True)], np.float32)


def completion(output: Any, *, end_token_ids: Sequence[int]) -> Completion:
    """The domain value of one of vLLM's CompletionOutputs."""
    tokens = np.array(output.token_ids, np.int32)
    return Completion(
        token_ids=tokens,
        # Rounding may leave a certain token at +1e-8; a log-prob is never positive.
        logprobs=np.minimum(chosen(tokens, output.logprobs), np.float32(0.0)),
        finish_reason=FinishReason.EOS if tokens[-1] in end_token_ids else FinishReason.LENGTH,
        spans=tuple(
            Span(version=_number(span.version), start=span.start, end=span.end) for span in output.weight_versions
        ),
    )


def _number(label: str) -> int:
    return -1 if label == NO_VERSION else int(label)
