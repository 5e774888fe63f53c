"""Values that all three columns use: names, the contract of a run, the semantics of sampling, the report of a step."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from heterorl.common.types.step import CompletionNumbers, StepTimes, completions_from_row

SiteId = NewType("SiteId", str)


Digest = NewType("Digest", str)
"""Lower-case hex blake3-256 of content; 64 characters."""


MAX_END_TOKENS = 64
"""In a contract: each costs the coordinator a look at all tokens."""


Int32Array = npt.NDArray[np.int32]


Float32Array = npt.NDArray[np.float32]


class LogprobMode(enum.Enum):
    """What a sampler log-prob means: of the raw logits, or of logits / temperature (no truncation either way)."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSemantics:
    """How tokens are drawn and what their log-probs mean; both sides must agree before a rollout is accepted."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    logprob_mode: LogprobMode

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by before their log-softmax gives the log-probs that are stated.

        Raises:
            ValueError: draws at this temperature have no log-probs.
        """
        if self.logprob_mode is LogprobMode.RAW:
            return 1.0
        if not self.temperature > 0.0:
            raise ValueError(f"temperature {self.temperature} has no log-probs: it must be positive")
        return self.temperature

    @property
    def is_truncated(self) -> bool:
        """Whether top_p or top_k keeps tokens from being drawn, which no log-prob shows."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters of a run; `rank` 0: none, all weights are trained. `base_digest` names the frozen weights.

    Example: LoraSettings(rank=8, alpha=16.0, target_modules=("q_proj", "v_proj"), base_digest=digest)
    """

    rank: int = 0
    alpha: float = 0.0
    target_modules: tuple[str, ...] = ()
    base_digest: str = ""


NO_LORA = LoraSettings()
"""All weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What every node of a run must agree on; the first learner states it, later nodes must equal it.

    `layout_id` names the tensor table of the model (heterorl.common.weights.arena); digests are blake3 hex.
    """

    tokenizer_digest: Digest
    chat_template_digest: Digest
    task_digest: Digest
    # Before the layout, which depends on it: the first difference is the one that a node is told.
    lora: LoraSettings = NO_LORA
    layout_id: Digest
    vocab_size: int
    num_prompts: int
    group_size: int
    sampling: SamplingSemantics
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, ascending; empty in contracts of programs that did not state them."""
    min_members: int = 0
    """Rollouts of a group that must be trainable; 0: all."""
    max_turns: int = 1
    """Of a rollout; 1: each is one completion, and no token is given behind the prompt."""
    max_trajectory_tokens: int = 0
    """Of a rollout of several turns: drawn and given, behind the prompt; of all its sequences, each as the longest."""
    trajectory_s: float = 0.0
    """Longest time that a rollout of several turns may take, seconds; 0: single completions."""
    routed_token_bytes: int = 0
    """Of the recorded experts of each token (heterorl.common.model.routing); 0 where none are recorded."""

    @property
    def max_rollout_tokens(self) -> int:
        """Tokens behind the prompt."""
        return self.max_trajectory_tokens if self.max_turns > 1 else self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What a source of a mixture of tasks had of one optimizer step."""

    label: str
    num_groups: int
    reward_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did; numbers only, names as in the field's papers."""

    step: int
    version: int
    loss: float
    reward_mean: float
    kl: float
    ess_fraction: float
    iw_variance: float
    clip_fraction: float
    entropy: float
    grad_norm: float
    staleness_mean: float
    staleness_max: int
    policy_age_p50_s: float
    num_groups: int
    num_tokens: int
    step_s: float
    is_applied: bool
    """False when a non-finite loss or gradient made the step a no-op."""
    evaluation_accuracy: float | None = None
    completions: CompletionNumbers | None = None
    """None of a learner that does not state them."""
    times: StepTimes | None = None
    """None of a learner that does not state them."""
    sources: tuple[SourceReport, ...] = ()
    """By source of a mixture of tasks, in the order of labels; empty where there is one task."""
    num_replaced: int = 0
    """Groups of equal rewards that others were trained on instead of."""
    lr: float = 0.0
    """Step size, with the schedule's and the loss's factors; 0 of a learner that does not state it."""
    published_time: float = 0.0
    """When its version was published, by the coordinator's clock, seconds since the epoch; 0 where it is not known."""


def report_from_row(row: Mapping[str, Any]) -> StepReport:
    """What `dataclasses.asdict` made of a report and JSON kept; rows of earlier programs have fewer fields.

    Raises:
        TypeError, KeyError: the row is no report.
    """
    values = dict(row)
    if values.get("completions") is not None:
        values["completions"] = completions_from_row(values["completions"])
    if values.get("times") is not None:
        values["times"] = StepTimes(**values["times"])
    values["sources"] = tuple(SourceReport(**source) for source in values.get("sources", ()))
    return StepReport(**values)
