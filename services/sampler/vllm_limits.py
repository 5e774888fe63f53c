"""Settings of a run that vLLM cannot follow.

The configuration and the start call the same functions: a run's contract may come later than the file. This module
must never import vllm.
"""

from __future__ import annotations

from heterorl.common.errors import ConfigError
from heterorl.common.model.contract import LoraConfig, SamplingConfig
from heterorl.common.types.common import LogprobMode, SamplingSemantics

MIN_TEMPERATURE = 0.01
"""Below it vLLM uses another temperature than it is given."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks of vLLM."""


def check_limits(sampling: SamplingConfig, lora: LoraConfig, max_model_len: int) -> None:
    """Raise ConfigError if vLLM cannot draw so, or takes no such adapters."""
    # Evaluations state their own number of new tokens.
    if "max_new_tokens" in sampling.model_fields_set and 0 < max_model_len <= sampling.max_new_tokens:
        raise ConfigError(
            "engine.max_model_len",
            f"{max_model_len} tokens hold no prompt with sampling.max_new_tokens = {sampling.max_new_tokens}",
            action="raise the first or lower the second",
        )
    if sampling.router_replay != "none":
        raise ConfigError(
            "sampling.router_replay", "vLLM's routing is not recorded", action='use engine hf, or set it to "none"'
        )
    logprobs_mode(sampling.semantics())
    if lora.is_on:
        adapter_room(lora.rank)


def logprobs_mode(sampling: SamplingSemantics) -> str:
    """vLLM's log-probs mode of the contract's meaning; raises ConfigError without one."""
    if sampling.temperature < MIN_TEMPERATURE:
        problem = f"vLLM draws at no temperature below {MIN_TEMPERATURE}"
        action = 'set a higher temperature at the learner, or engine.kind = "hf"'
        raise ConfigError("sampling.temperature", problem, action=action)
    is_of_logits = sampling.logprob_temperature == 1.0
    if sampling.logprob_mode is LogprobMode.RAW or (sampling.is_truncated and is_of_logits):
        return "raw_logprobs"
    if sampling.is_truncated:
        # vLLM renormalises processed log-probs after truncation; the contract does not.
        action = "use top_p = 1 and top_k = 0, temperature = 1, or logprob_mode = raw"
        raise ConfigError("sampling", "vLLM gives no log-probs before truncation at a temperature", action=action)
    return "processed_logprobs"


def adapter_room(rank: int) -> int:
    """The smallest rank of vLLM's that has room for an adapter."""
    room = [larger for larger in LORA_RANKS if larger >= rank]
    if not room:
        action = 'set a smaller rank at the learner, or engine.kind = "hf"'
        raise ConfigError("lora.rank", f"vLLM takes adapters up to rank {LORA_RANKS[-1]}", action=action)
    return room[0]
