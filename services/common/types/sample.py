"""Kept samples: groups and evaluations with text, and their JSON.

A sample is one prompt with all its completions. The coordinator keeps a bounded ring: one of k trained groups, every
group that failed a check, one of k dropped for another reason, all evaluations. The learner adds texts, which
may be missing; token ids are missing only in some evaluations.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heterorl.common.types.common import Float32Array, Int32Array, SiteId
from heterorl.common.types.evaluation import PromptResult
from heterorl.common.types.rollout import (
    BoolArray,
    DropReason,
    FinishReason,
    GroupId,
    Part,
    RewardPart,
    Span,
    is_drawn,
    parts_of,
)

CONSUMED, EVALUATED = "consumed", "evaluation"
"""Values of `kept_because` in addition to the DropReasons."""
REASONS = (CONSUMED, EVALUATED, *(reason.value for reason in DropReason))
"""Values of `kept_because`."""
MAX_PAGE = 200
"""Samples in one page of a list."""
MAX_PREVIEW = 160
"""Bytes of a preview in UTF-8."""
MAX_ANSWER = 2000
"""Characters of an expected answer that are kept; answers of code tasks are long lists of tests."""
_NO_IDS = np.zeros(0, np.int32)
_NO_NUMBERS = np.zeros(0, np.float32)


class SampleKind(enum.Enum):
    """A part of the ring of samples, with its share of bytes."""

    CONSUMED = "consumed"
    """Trained on."""
    REJECTED = "rejected"
    """Failed a check, of the coordinator or of the learner."""
    DROPPED = "dropped"
    """Not trained on for another reason: too old, surplus, its site in quarantine."""
    EVALUATION = "evaluation"
    """Held-out prompts; no group."""


_REJECTED = frozenset(
    {
        DropReason.CONFLICT,
        DropReason.INVALID,
        DropReason.UNKNOWN_VERSION,
        DropReason.WRONG_DIGEST,
        DropReason.LEARNER_ABANDONED,
        DropReason.REWARD_MISMATCH,
        DropReason.LOGPROB_MISMATCH,
        DropReason.SAMPLING_MISMATCH,
        DropReason.CODE_MISMATCH,
        DropReason.LOST_MEMBERS,
    }
)


def kind_of(reason: DropReason) -> SampleKind:
    """The part of the ring for a drop reason."""
    return SampleKind.REJECTED if reason in _REJECTED else SampleKind.DROPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSummary:
    """One line of a list.

    `version` is the one that consumed the group, that was evaluated, or the newest at a drop. `oldest_version` is the
    oldest policy of its tokens. `site` is empty if the learner evaluated.
    """

    id: int
    """Ascending in the order of keeping, never used again."""
    kind: SampleKind
    kept_because: str
    """CONSUMED, EVALUATED, or the value of a DropReason."""
    detail: str = ""
    """Result of the check, or the name of an evaluation's set; else empty."""
    site: SiteId
    group: GroupId | None
    """None of an evaluation."""
    version: int
    oldest_version: int
    kept_time: float
    """Seconds since the epoch."""
    prompt_index: int
    num_rollouts: int
    num_truncated: int
    """Completions that reached the length limit."""
    num_lost: int = 0
    """Lost members of the group, which no reward number includes."""
    num_tokens: int
    """Drawn tokens of all completions."""
    reward_min: float | None
    """None if a reward is not finite; so are the other two."""
    reward_mean: float | None
    reward_max: float | None
    has_texts: bool
    """Whether prompt and completions have texts."""
    prompt_preview: str = ""
    completion_preview: str = ""
    """First MAX_PREVIEW bytes of the first completion; empty without texts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRollout:
    """One completion, or the turns of a rollout.

    Arrays are empty if not stated. `token_ids` and `token_ends` have one entry a token, drawn or given;
    `sampler_logprobs` and `log_ratios` one a drawn token. `log_ratios` are the learner's log-probs minus the sampler's,
    nats, at the step that trained on it; NaN at stale tokens. `token_ends[i]` is the character of `completion` behind
    token i.
    """

    completion: str = ""
    """Text of all tokens behind the prompt; empty without texts."""
    token_ids: Int32Array = field(default_factory=lambda: _NO_IDS)
    sampler_logprobs: Float32Array = field(default_factory=lambda: _NO_NUMBERS)
    log_ratios: Float32Array = field(default_factory=lambda: _NO_NUMBERS)
    token_ends: Int32Array = field(default_factory=lambda: _NO_IDS)
    spans: tuple[Span, ...] = ()
    """Writers of the tokens; empty if not stated: then a policy drew all."""
    reward: float
    """The total; no meaning for a lost member."""
    reward_parts: tuple[RewardPart, ...]
    finish_reason: FinishReason

    @property
    def log_ratio_mean(self) -> float | None:
        """Mean over the trained tokens, nats; None if the learner stated none."""
        trained = self.log_ratios[~np.isnan(self.log_ratios)]
        return float(np.mean(trained, dtype=np.float64)) if len(trained) else None

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted({span.version for span in self.spans if span.is_drawn}))

    @property
    def is_drawn(self) -> BoolArray:
        """Which of its tokens a policy drew, bool [T]."""
        count = len(self.token_ids)
        return is_drawn(self.spans, count) if self.spans else np.ones(count, np.bool_)

    @property
    def num_drawn(self) -> int:
        return int(np.count_nonzero(self.is_drawn))

    @property
    def is_lost(self) -> bool:
        return not self.finish_reason.is_trainable

    @property
    def turns(self) -> tuple[Part, ...]:
        """The turns in order; none for a single completion or misfit spans."""
        parts = parts_of(self.spans)
        is_whole = len(parts) > 1 and (parts[0].start, parts[-1].end) == (0, len(self.token_ids))
        return parts if is_whole else ()

    @property
    def turn_texts(self) -> tuple[tuple[Part, str], ...]:
        """The turns with their text; none if token ends are not stated."""
        if len(self.token_ends) != len(self.token_ids):
            return ()
        places = [0, *self.token_ends.tolist()]
        return tuple((part, self.completion[places[part.start] : places[part.end]]) for part in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One prompt with all its completions."""

    summary: SampleSummary
    prompt: str = ""
    """Empty without texts."""
    answer: str = ""
    """Expected answer of the task; may be empty."""
    prompt_token_ids: Int32Array = field(default_factory=lambda: _NO_IDS)
    rollouts: tuple[SampleRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Conditions on samples; all stated ones must hold.

    A reward range keeps samples with a completion in it: the sample's `reward_max` is at least `min_reward`, and its
    `reward_min` is at most `max_reward`.
    """

    site: str = ""
    kind: SampleKind | None = None
    kept_because: str = ""
    """One value, such as "reward_mismatch"."""
    first_version: int | None = None
    last_version: int | None = None
    """Bounds of `SampleSummary.version`, both included."""
    min_reward: float | None = None
    max_reward: float | None = None
    is_truncated: bool | None = None
    """True: at least one completion reached the length limit; False: none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePage:
    """A page: ids strictly between `after` and `before`, 0: no bound."""

    limit: int = 50
    """1 to MAX_PAGE."""
    before: int = 0
    after: int = 0
    is_oldest_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleList:
    """One page; a full one may be followed by another."""

    samples: tuple[SampleSummary, ...]
    next_page: SamplePage | None
    """None at the end."""
    num_kept: int
    """Samples in the ring, without the filter."""
    kept_bytes: int
    limit_bytes: int
    """`samples_bytes` of the coordinator; 0: it keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutNote:
    """The learner's note about one completion of a kept group; see SampleRollout."""

    completion: str
    reward_parts: tuple[RewardPart, ...]
    """Parts that the learner computed; empty: the group's parts hold."""
    log_ratios: Float32Array = field(default_factory=lambda: _NO_NUMBERS)
    token_ends: Int32Array = field(default_factory=lambda: _NO_IDS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleNote:
    """The learner's note about a kept group, one entry a completion."""

    group: GroupId
    prompt: str
    answer: str = ""
    rollouts: tuple[RolloutNote, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationSample:
    """One held-out prompt of set `task_set` with its completions."""

    version: int
    task_set: str = ""
    site: SiteId
    """Site that generated; empty: the learner."""
    prompt_index: int
    prompt: str
    answer: str = ""
    rollouts: tuple[SampleRollout, ...]


def beginning(text: str, most: int) -> str:
    """As many first characters as have at most `most` bytes in UTF-8."""
    return text[:most].encode(errors="replace")[:most].decode(errors="ignore")


def shown_answer(answer: str) -> str:
    """An expected answer, shortened to MAX_ANSWER."""
    return answer if len(answer) <= MAX_ANSWER else f"{answer[:MAX_ANSWER]} ..."


def as_sample(result: PromptResult, *, version: int, task_set: str, site: SiteId) -> EvaluationSample:
    """A site's held-out result as a sample; failed verifiers give NaN."""
    rollouts = tuple(
        SampleRollout(
            completion=scored.text,
            reward=math.nan if scored.reward is None else scored.reward,
            reward_parts=(),
            finish_reason=FinishReason.LENGTH if scored.is_truncated else FinishReason.EOS,
        )
        for scored in result.samples
    )
    return EvaluationSample(
        version=version,
        task_set=task_set,
        site=site,
        prompt_index=result.prompt_index,
        prompt=result.prompt,
        answer=result.answer,
        rollouts=rollouts,
    )


def rollout_json(sample: Sample, index: int, *, with_tokens: bool = False) -> dict[str, Any]:
    """The JSON object of one completion; missing numbers and texts are null."""
    summary, rollout = sample.summary, sample.rollouts[index]
    group = summary.group
    found: dict[str, Any] = {
        "id": summary.id,
        "index": index,
        "group": None if group is None else f"{group.site}/{group.incarnation}/{group.sequence}",
        "version": summary.version,
        "oldest_version": summary.oldest_version,
        "versions": list(rollout.versions),
        "site": str(summary.site),
        "prompt_index": summary.prompt_index,
        "prompt": sample.prompt if summary.has_texts else None,
        "answer": sample.answer or None,
        "completion": rollout.completion if summary.has_texts else None,
        "reward": None if rollout.is_lost else _number(rollout.reward),
        "reward_parts": {part.name: _number(part.value) for part in rollout.reward_parts},
        "finish_reason": rollout.finish_reason.value,
        "num_tokens": rollout.num_drawn if rollout.token_ids.size or rollout.is_lost else None,
        "spans": [_span_json(span) for span in rollout.spans],
        "log_ratio_mean": _number(rollout.log_ratio_mean),
        "kept_because": summary.kept_because,
        "detail": summary.detail,
        "kept_time": summary.kept_time,
    }
    if with_tokens:
        found["prompt_token_ids"] = sample.prompt_token_ids.tolist()
        found["token_ids"] = rollout.token_ids.tolist()
        found["sampler_logprobs"] = [_number(value) for value in rollout.sampler_logprobs.tolist()]
        found["log_ratios"] = [_number(value) for value in rollout.log_ratios.tolist()]
        found["token_ends"] = rollout.token_ends.tolist()
    return found


def _span_json(span: Span) -> dict[str, int | None]:
    version = span.version if span.is_drawn else None
    return {"start": span.start, "end": span.end, "version": version, "keeps": span.keeps}


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
