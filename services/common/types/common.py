"""Shared domain types: run contract, sampling settings, step reports, digests."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import operator
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NewType, TypeVar

import numpy as np
import numpy.typing as npt

from heterorl.common.errors import InvalidRequest, MalformedPayload

SiteId = NewType("SiteId", str)
Digest = NewType("Digest", str)
"""Lower-case hex blake3-256 of content; 64 characters."""
MAX_END_TOKENS = 64
"""End tokens in a contract: the coordinator compares all tokens with each."""
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class LogprobMode(enum.Enum):
    """Meaning of a sampler log-prob: of raw logits, or of logits / temperature.

    Both without truncation.
    """

    RAW = "raw"
    PROCESSED = "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSemantics:
    """How a run draws tokens and what their log-probs mean."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    logprob_mode: LogprobMode

    @property
    def logprob_temperature(self) -> float:
        """The temperature of stated log-probs.

        Raises ValueError: draws have none at this temperature.
        """
        if self.logprob_mode is LogprobMode.RAW:
            return 1.0
        if not self.temperature > 0.0:
            raise ValueError(f"temperature {self.temperature} has no log-probs: it must be positive")
        return self.temperature

    @property
    def is_truncated(self) -> bool:
        """Whether top_p or top_k excludes tokens, which no log-prob shows."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters of a run; `rank` 0: all weights are trained.

    `base_digest` names the frozen weights.
    """

    rank: int = 0
    alpha: float = 0.0
    target_modules: tuple[str, ...] = ()
    base_digest: str = ""


NO_LORA = LoraSettings()
"""All weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The settings that every node of a run must share.

    The first learner states them. `layout_id` names the tensor table of the model (heterorl.common.weights.arena);
    digests are blake3 hex.
    """

    tokenizer_digest: Digest
    chat_template_digest: Digest
    task_digest: Digest
    # Before the layout, which depends on it: a node is told the first difference.
    lora: LoraSettings = NO_LORA
    layout_id: Digest
    vocab_size: int
    num_prompts: int
    group_size: int
    sampling: SamplingSemantics
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, ascending; empty in contracts of earlier programs."""
    min_members: int = 0
    """Rollouts of a group that must be trainable; 0: all."""
    max_turns: int = 1
    """Turns of a rollout; 1: a single completion."""
    max_trajectory_tokens: int = 0
    """Tokens of a multi-turn rollout, drawn and given, behind the prompt, over all its sequences."""
    trajectory_s: float = 0.0
    """Longest time of a multi-turn rollout, seconds; 0: single completions."""
    routed_token_bytes: int = 0
    """Bytes of each token's recorded experts (heterorl.common.model.router_replay); 0: none recorded."""

    @property
    def max_rollout_tokens(self) -> int:
        return self.max_trajectory_tokens if self.max_turns > 1 else self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Groups of one source of a task mixture in an optimizer step."""

    label: str
    num_groups: int
    reward_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Numbers of one optimizer step, named as in the field's papers."""

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
    times: StepTimes | None = None
    """None of a learner that does not state them."""
    sources: tuple[SourceReport, ...] = ()
    """Sources of a task mixture, in the order of labels; empty with one task."""
    num_replaced: int = 0
    """Groups of equal rewards that were replaced by others."""
    lr: float = 0.0
    """Learning rate with all factors; 0 if the learner does not state it."""
    mask_share_bad: float | None = None
    """Share of the rollouts with A < 0 that train; None of a step without such a rollout."""
    kl_token_fresh: float | None = None
    """KL a token of groups that the step's own version made, nats: the engines' mismatch. None without such a group."""
    published_time: float = 0.0
    """Publication of its version by the coordinator's clock, seconds since the epoch; 0: unknown."""


SOURCE_STEPS = 50
"""Newest steps that a source's share and reward are shown over: few groups of a step make them jump."""


def mean_of_sources(reports: Iterable[StepReport]) -> tuple[SourceReport, ...]:
    """Groups and mean reward of each source, by label."""
    found = [source for report in reports for source in report.sources if source.num_groups]
    groups, rewards = defaultdict[str, int](int), defaultdict[str, float](float)
    for source in found:
        groups[source.label] += source.num_groups
        rewards[source.label] += source.num_groups * source.reward_mean
    return tuple(
        SourceReport(label=label, num_groups=groups[label], reward_mean=rewards[label] / groups[label])
        for label in sorted(groups)
    )


MAX_REPORTED_PARTS = 32
"""Reward parts in a report: those that most completions have."""
MAX_REPORTED_SITES = 32
"""Sites in a report: those with most tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMean:
    """Mean of one reward part over the completions that have it."""

    name: str
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTokens:
    """One site's share of a step's groups."""

    site: str
    num_groups: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionNumbers:
    """Completions of a step's groups; lengths in tokens, with the end token."""

    length_mean: float
    length_p95: float
    length_max: int
    length_high_reward: float | None = None
    """Mean over completions with a reward above the step's mean; None without any."""
    length_low_reward: float | None = None
    """Mean over the others; None without any."""
    truncated_fraction: float
    """Share of completions cut at the longest length."""
    uniform_fraction: float
    """Share of groups in which all rewards are equal."""
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
    """Seconds of each phase since the end of the step before.

    The rest of `period_s` is bookkeeping. `examining_s`: too few groups while some are being checked, so the checks are
    the bottleneck. `waiting_s`: too few groups otherwise, so the samplers or the link are. `publishing_s`: rounds and
    copies a version's weights, and waits for a publication that takes longer than its step.
    """

    period_s: float
    waiting_s: float
    examining_s: float
    computing_s: float
    evaluating_s: float
    publishing_s: float


class LearnerPhase(enum.Enum):
    """The current phase of a learner's trainer."""

    WAITING = "waiting"
    EXAMINING = "examining"
    COMPUTING = "computing"
    EVALUATING = "evaluating"
    PUBLISHING = "publishing"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerProgress:
    """A learner's current step and phase, with finished micro-batches while it computes."""

    step: int
    phase: LearnerPhase
    phase_s: float
    """Seconds since the phase began."""
    micro_batches_done: int = 0
    micro_batches: int = 0
    """0: not counted yet."""


ValueT = TypeVar("ValueT")


def amount(count: int, noun: str) -> str:
    """A counted noun.

    Example: "1 version", "2 versions"
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Write plain values; a number that is not finite is null."""
    # Many import this module without pydantic.
    from pydantic_core import to_jsonable_python

    return json.dumps(to_jsonable_python(value, inf_nan_mode="null"), indent=indent, allow_nan=False)


def value_of_row(kind: type[ValueT], row: Mapping[str, Any]) -> ValueT:
    """Value of a dataclass from the JSON of `dataclasses.asdict`.

    Rows of earlier programs have fewer fields; where a number must be stated, null is NaN. Raises TypeError or
    ValueError if the row is not of this kind, also for null where a value must be stated.
    """
    readers = _readers(kind)  # type: ignore[arg-type] # a type is hashable
    stated = _stated(kind)  # type: ignore[arg-type] # a type is hashable
    if empty := [name for name, value in dict(row).items() if value is None and name in stated]:
        raise ValueError(f"{kind.__name__}: null as {', '.join(empty)}")
    return kind(**{name: _of_json(value, readers.get(name)) for name, value in dict(row).items()})


def _of_json(value: Any, reader: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_of_json(each, reader) for each in value)
    if value is None and reader is not _number:
        return None
    return value if reader is None else reader(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@functools.cache
def _stated(kind: type[Any]) -> frozenset[str]:
    hints = typing.get_type_hints(kind)
    return frozenset(
        name for name, hint in hints.items() if hint is not float and type(None) not in typing.get_args(hint)
    )


@functools.cache
def _readers(kind: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """Readers of the fields that are, or hold, dataclasses or enumerations."""
    found: dict[str, Callable[[Any], Any]] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if hint is float:
            found[name] = _number
        elif hint is int:
            found[name] = operator.index
        while parts := typing.get_args(hint):
            hint = parts[0]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found[name] = functools.partial(value_of_row, hint)
        elif isinstance(hint, enum.EnumMeta):
            found[name] = hint
    return found


DIGEST_CHARACTERS = 64
_HEX = frozenset("0123456789abcdef")


def is_digest(text: str) -> bool:
    """Whether a text is exactly a blake3-256 in lower-case hex."""
    return len(text) == DIGEST_CHARACTERS and _HEX.issuperset(text)


def digest_field(key: str, text: str) -> Digest:
    """Check a peer's digest before it names a file; raises InvalidRequest."""
    if not is_digest(text):
        raise InvalidRequest(f"{key}: not a blake3 digest in lower-case hex")
    return Digest(text)


def file_name(digest: str) -> str:
    """The file name of a digest; raises MalformedPayload if it is none."""
    if not is_digest(digest):
        raise MalformedPayload("a payload's name is not a digest")
    return digest


MOST = 300
MAX_ASKED_S = 600.0
"""Longest wait that a peer may ask for at once."""


def peer_words(text: str, *, most: int = MOST) -> str:
    """A peer's text, shortened to `most`, without line ends or control characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * most])
    return line if len(line) <= most else f"{line[:most]} ..."


def peer_seconds(seconds: float) -> float:
    """A peer's wait, limited to MAX_ASKED_S; 0 if negative or not finite."""
    return min(max(0.0, seconds), MAX_ASKED_S) if math.isfinite(seconds) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Numbers of one metric name and their labels, such as 'outcome="pushed"'."""

    name: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
