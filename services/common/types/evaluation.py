"""Values about evaluation: draws, results of prompts, results of versions."""

import enum
from dataclasses import dataclass, replace

from heterorl.common.types.common import Digest, LogprobMode, SamplingSemantics, SiteId

MAX_SAMPLES = 1024
"""Completions of one prompt."""
MAX_RESULTS = 64
"""Prompts of one delivery."""
MAX_RESULT_SAMPLES = 64
"""Completions of one delivery, unless a single prompt has more."""
HELD_OUT = 1 << 62
"""First number of assignments of held-out prompts; smaller ones are of groups to train on."""
MAX_HELD_OUT = 1 << 20
"""Held-out prompts of one set."""
MAX_TEXT = 1 << 14
"""Characters of a prompt or a completion that travel; the rest is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDraws:
    """How the prompts of a set are drawn.

    Equal values draw the same completions of the same weights and engine.

    Example: EvaluationDraws(num_prompts=500, num_samples=4, temperature=0.6, top_p=0.95, max_new_tokens=4096)
    """

    num_prompts: int
    """Held-out prompts of the task, always the first ones."""
    num_samples: int
    """Completions of each prompt, n."""
    temperature: float
    """0 takes the most likely token."""
    top_p: float = 1.0
    max_new_tokens: int
    seed: int = 0
    pass_reward: float = 1.0
    """Reward from which a completion counts as right."""

    @property
    def sampling(self) -> SamplingSemantics:
        # One candidate makes every draw the most likely token; the temperature then does not matter.
        is_greedy = self.temperature == 0.0
        return SamplingSemantics(
            temperature=1.0 if is_greedy else self.temperature,
            top_p=1.0 if is_greedy else self.top_p,
            top_k=1 if is_greedy else 0,
            max_new_tokens=self.max_new_tokens,
            logprob_mode=LogprobMode.PROCESSED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """One completion of a held-out prompt.

    `reward` is None if its verifier failed, which is not a wrong answer.
    """

    reward: float | None
    num_tokens: int
    is_truncated: bool
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """All completions of one held-out prompt, in the order of their seeds."""

    prompt_index: int
    samples: tuple[ScoredSample, ...]
    prompt: str = ""
    """Its text, if texts are kept."""
    answer: str = ""
    """Its right answer, if texts are kept."""
    assignment: int = 0
    """Assignment that asked for it, in a run."""


def cut_texts(result: PromptResult, most: int) -> PromptResult:
    """A result whose texts have at most `most` characters."""
    samples = tuple(replace(sample, text=sample.text[:most]) for sample in result.samples)
    return replace(result, prompt=result.prompt[:most], answer=result.answer[:most], samples=samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts with its 95 % interval.

    A single prompt has no interval: both ends are the mean.

    Example: Estimate(mean=0.42, low=0.38, high=0.46, num_prompts=500)
    """

    mean: float
    low: float
    high: float
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEstimate:
    """The chance that at least one of `k` completions is right."""

    k: int
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    """A version's scores on a set; `average` is avg@n over scored completions."""

    num_prompts: int
    num_samples: int
    """Scored completions of all prompts."""
    num_errors: int
    """Completions whose verifier failed; they are left out."""
    num_truncated: int
    mean_tokens: float
    average: Estimate | None
    passes: tuple[PassEstimate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A set of held-out prompts whose data a site has."""

    name: str
    task_digest: Digest
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """Draws of a set's held-out prompts with exactly one version."""

    task_set: str
    version: int
    state_root: Digest
    draws: EvaluationDraws


class EvaluationState(enum.Enum):
    """Progress of an evaluation."""

    OPEN = "open"
    """No site has begun it."""
    RUNNING = "running"
    DONE = "done"
    INCOMPLETE = "incomplete"
    """Every site moved on to a newer version; the numbers are of the finished prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One version on one set."""

    version: int
    task_set: str
    state: EvaluationState
    num_wanted: int
    """Prompts; 0 before the first site began."""
    draws: EvaluationDraws
    task_digest: str
    """Empty before the first site began."""
    summary: EvaluationSummary
    """Scores of the finished prompts."""
    sites: tuple[tuple[SiteId, int], ...]
    """Sites with the number of prompts that each delivered first."""
    planned_time: float
    ended_time: float
    """Seconds since the epoch; 0 while it goes on."""
