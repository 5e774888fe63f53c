"""The contract of a node, made from tokenizer, task, sampling and adapters.

With adapters only they are published, unmerged: W + B A summed on another machine has other bits.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from heterorl.common.errors import ConfigError, InvalidRequest
from heterorl.common.process.config_file import Config
from heterorl.common.rpc.node_config import NodeConfig
from heterorl.common.tasks.task import Task
from heterorl.common.tasks.task_config import TaskConfig
from heterorl.common.types.common import (
    MAX_END_TOKENS,
    NO_LORA,
    Contract,
    Digest,
    LogprobMode,
    LoraSettings,
    SamplingSemantics,
)
from heterorl.common.wire.statement import Statement, contract_digest, statement_to_bytes


class LoraConfig(Config):
    """LoRA adapters of a run (arXiv:2106.09685); equal on every node."""

    rank: int = Field(default=0, ge=0, le=1024)
    """Rank of adapters, trained and sent instead of all weights; 0: all weights. Equal on every node."""
    alpha: float = Field(default=32.0, gt=0.0, le=1e6)
    """Scale of the adapters: alpha / rank."""
    target_modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers with an adapter, by last part of their names; not the output embedding."""

    @property
    def is_on(self) -> bool:
        return self.rank > 0

    def settings(self, base_digest: Digest) -> LoraSettings:
        """The settings that nodes compare, with the digest of the frozen weights."""
        if not self.is_on:
            return NO_LORA
        return LoraSettings(
            rank=self.rank,
            alpha=self.alpha,
            target_modules=tuple(sorted(set(self.target_modules))),
            base_digest=base_digest,
        )


ALL_WEIGHTS = LoraConfig()
"""No adapters."""
_LOG = logging.getLogger(__name__)
LOCAL = frozenset(
    {"reward_path", "reward_timeout_s", "reward_workers", "cache_dir", "directory", "api_key_env", "api_key_file",
     "ca_file", "cache_file", "rubric_file", "python", "shown", "environment_path", "step_timeout_s",
     "environment_memory_bytes", "environment_workers"}
)  # fmt: skip
"""Task keys about one machine's files and resources: not stated, not adopted."""


class SamplingConfig(Config):
    """How tokens are drawn and log-probs computed; equal on every node."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1: off. Below 1, log-probs do not describe the draws."""
    top_k: int = Field(default=0, ge=0)
    """Candidate tokens; 0: off."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Longest completion; in environments, longest turn."""
    max_trajectory_tokens: int = Field(default=8192, ge=1)
    """Longest multi-turn rollout after the prompt, drawn and given tokens."""
    min_members: int = Field(default=0, ge=0)
    """Rollouts with a reward that a group needs for training; 0: half of group_size."""
    end_token_ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = Field(default=(), max_length=MAX_END_TOKENS)
    """Tokens that end a completion; empty: from generation_config.json, else config.json, and the tokenizer."""
    logprob_mode: LogprobMode = LogprobMode.PROCESSED
    """Log-probs of logits / temperature (`processed`) or of the logits (`raw`)."""
    router_replay: Literal["none", "rollout"] = "none"
    """Mixtures of experts: the learner replays experts that samplers recorded (`rollout`; engine hf, backends torch and
    fsdp2), or both route by themselves (`none`)."""

    def members(self, group_size: int) -> int:
        """Trainable rollouts that a group needs; raises ConfigError if over group_size."""
        if self.min_members > group_size:
            raise ConfigError(
                "sampling.min_members",
                f"{self.min_members}, and group_size is {group_size}",
                action="set it to at most group_size",
            )
        return self.min_members or -(-group_size // 2)

    def semantics(self) -> SamplingSemantics:
        return SamplingSemantics(**self.model_dump(include={field.name for field in fields(SamplingSemantics)}))


class ContractConfig(NodeConfig):
    """Keys of learner and sampler that make the contract."""

    model_dir: str = Field(default="", max_length=4096)
    """Hugging Face directory or hub id of the start model, with its tokenizer."""
    task: TaskConfig = TaskConfig()
    """Prompts and reward; equal on every node, except paths, workers, memory, step_timeout_s and
    reward_timeout_s (which counts with `code`, below 5 with `math_verify`, below 4 with reasoning_gym)."""
    sampling: SamplingConfig = SamplingConfig()
    """How samplers draw tokens; equal on every node."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters, trained and sent instead of all weights; equal on every node."""
    use_chat_template: bool = False
    """Whether prompts go through the tokenizer's chat template; equal on every node."""
    chat_template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the template, such as `enable_thinking = false`; equal on every node. `strftime_now` is the date
    that templates write (default `2025-01-01`)."""


def build_contract(
    config: Any,
    *,
    text: tuple[Digest, Digest],
    task: Task,
    layout_id: Digest,
    vocab_size: int,
    end_token_ids: Sequence[int],
    lora: LoraSettings = NO_LORA,
    routed_token_bytes: int = 0,
) -> Contract:
    """Build the contract of a learner's or sampler's configuration.

    `text` are the digests of its tokenizer and template.

    Raises ConfigError if an end token is not a token of the model.
    """
    max_turns = config.task.max_turns_of_all
    ends = tuple(sorted(set(end_token_ids)))
    if ends and ends[-1] >= vocab_size:
        raise ConfigError(
            "sampling.end_token_ids",
            f"{ends[-1]} is not a token of the model, which has {vocab_size}",
            action="remove it, or use the tokenizer of this model",
        )
    return Contract(
        tokenizer_digest=text[0],
        chat_template_digest=text[1],
        task_digest=task.digest,
        lora=lora,
        layout_id=layout_id,
        vocab_size=vocab_size,
        num_prompts=task.num_prompts,
        group_size=config.group_size,
        sampling=config.sampling.semantics(),
        end_token_ids=ends,
        min_members=config.sampling.members(config.group_size),
        max_turns=max_turns,
        max_trajectory_tokens=config.sampling.max_trajectory_tokens if max_turns > 1 else 0,
        trajectory_s=config.task.trajectory_s_of_all if max_turns > 1 else 0.0,
        routed_token_bytes=routed_token_bytes,
    )


def statement_of(config: Any, contract: Contract) -> bytes:
    """A learner's configuration for joining sites, empty where it cannot be stated."""
    task = config.task.model_dump(mode="json", exclude_unset=True)
    settings = {
        "task": without_local({"name": config.task.name, **task}),
        "sampling": config.sampling.model_dump(mode="json"),
        "lora": config.lora.model_dump(mode="json"),
        "group_size": config.group_size,
        "use_chat_template": config.use_chat_template,
        "chat_template_arguments": dict(config.chat_template_arguments),
    }
    try:
        return statement_to_bytes(Statement(contract=contract_digest(contract), settings=settings))
    except InvalidRequest as error:
        _LOG.warning("the learner states no configuration, so sites with [join] must set every key: %s", error)
        return b""


def without_local(value: Any) -> Any:
    """A task's table, with sources and rewards, without keys of one machine."""
    if isinstance(value, dict):
        return {key: without_local(entry) for key, entry in value.items() if key not in LOCAL}
    return [without_local(entry) for entry in value] if isinstance(value, list | tuple) else value
