"""Values that all three columns use: names, digests, the contract of a run, sampling, the report of a step."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from heterorl.common.errors import InvalidRequest, MalformedPayload

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
    """Low-rank adapters of a run; `rank` 0: none, all weights are trained. `base_digest` names the frozen weights."""

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
    """Of the recorded experts of each token (heterorl.common.model.router_replay); 0 where none are recorded."""

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
    mask_share_bad: float | None = None
    """Share of the rollouts with A < 0 that train; None of a step without such a rollout."""
    kl_token_fresh: float | None = None
    """KL a token of groups that the step's own version made, nats: the engines' mismatch. None without such a group."""
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


MAX_REPORTED_PARTS = 32
"""Names of reward parts in a report: those that most completions have."""
MAX_REPORTED_SITES = 32
"""Sites in a report: those of which most tokens came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMean:
    """Mean of one named part of the reward, over the completions that have it."""

    name: str
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTokens:
    """What one site made of the groups of a step."""

    site: str
    num_groups: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionNumbers:
    """The completions of a step's groups; lengths in tokens, the end token included."""

    length_mean: float
    length_p95: float
    length_max: int
    length_high_reward: float | None = None
    """Mean over completions whose reward is above the step's mean; None without any, as where all rewards are equal."""
    length_low_reward: float | None = None
    """Mean over the others; None without any."""
    truncated_fraction: float
    """Share of completions that were cut at the longest length."""
    uniform_fraction: float
    """Share of groups in which all rewards are equal, so that no completion is better than another."""
    reward_parts: tuple[PartMean, ...] = ()
    sites: tuple[SiteTokens, ...] = ()
    turns_mean: float = 1.0
    turns_max: int = 1
    given_mean: float = 0.0
    """Tokens of a completion that its environment gave."""
    endings: tuple[PartMean, ...] = ()
    """Share of the completions by finish reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time went since the step before ended, seconds; what is left of `period_s` is bookkeeping.

    `examining_s` is time without enough groups while some were being checked, so the checks hold the step up;
    `waiting_s` the rest of the time without enough groups, so the samplers or the link do. `publishing_s` rounds and
    copies the weights of a version and waits for a publication that takes longer than its step.
    """

    period_s: float
    waiting_s: float
    examining_s: float
    computing_s: float
    evaluating_s: float
    publishing_s: float


class LearnerPhase(enum.Enum):
    """What a learner's trainer is doing."""

    WAITING = "waiting"
    EXAMINING = "examining"
    COMPUTING = "computing"
    EVALUATING = "evaluating"
    PUBLISHING = "publishing"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerProgress:
    """Where a learner stands: the step under way, and while it computes, how many of its micro-batches are done."""

    step: int
    phase: LearnerPhase
    phase_s: float
    """Seconds since the phase began."""
    micro_batches_done: int = 0
    micro_batches: int = 0
    """0 where they are not counted yet."""


def completions_from_row(row: Mapping[str, Any]) -> CompletionNumbers:
    """What `dataclasses.asdict` made of one."""
    nested = {
        "reward_parts": tuple(PartMean(**part) for part in row["reward_parts"]),
        "sites": tuple(SiteTokens(**site) for site in row["sites"]),
        "endings": tuple(PartMean(**part) for part in row.get("endings", ())),
    }
    return CompletionNumbers(**{**row, **nested})


DIGEST_CHARACTERS = 64
_HEX = frozenset("0123456789abcdef")


def is_digest(text: str) -> bool:
    """Whether a text is a blake3-256 in lower-case hex and nothing else."""
    return len(text) == DIGEST_CHARACTERS and _HEX.issuperset(text)


def digest_field(key: str, text: str) -> Digest:
    """Check a digest that came from a peer, so that it can never be a path.

    Raises:
        InvalidRequest: not 64 lower-case hexadecimal digits.
    """
    if not is_digest(text):
        raise InvalidRequest(f"{key}: not a blake3 digest in lower-case hex")
    return Digest(text)


def file_name(digest: str) -> str:
    """The name of the file that holds this content.

    Raises:
        MalformedPayload: not a digest, whoever forgot to check it.
    """
    if not is_digest(digest):
        raise MalformedPayload("a payload is named by something that is no digest")
    return digest


MOST = 300
MAX_ASKED_S = 600.0
"""The longest wait that a peer may ask for at once; it can ask again."""


def peer_words(text: str, *, most: int = MOST) -> str:
    """What a peer wrote without what would begin a line of its own, move a cursor or fill a disk."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * most])
    return line if len(line) <= most else f"{line[:most]} ..."


def peer_seconds(seconds: float) -> float:
    """A wait that a peer asks for: what is no number counts as none, and none is without end."""
    return min(max(0.0, seconds), MAX_ASKED_S) if math.isfinite(seconds) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All numbers of one name; `labels` has each one's labels as they stand between the braces of the text format.

    Example:
        Series(name="heterorl_sampler_groups_total", labels=('outcome="pushed"',), values=(3.0,))
    """

    name: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
