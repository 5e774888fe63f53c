"""What the lab adds to a step: time charged to the virtual clock, and the error of the estimate of E[advantage].

Every so often fresh rollouts of the policy that is about to be trained are drawn for the prompts of the step. With the
group's own mean reward as baseline, their mean advantage is what the importance-weighted mean of the stale rollouts
estimates; the difference is the estimation error of arXiv 2508.17850 figure 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from heterorl.common.generation.inference_engine import Engine, Finished, Request, ScoredText, generate_all
from heterorl.common.tasks.task import Task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Float32Array, StepReport
from heterorl.common.types.rollout import QueuedGroup, total_reward
from heterorl.common.weights.arena import Arena, Layout
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.evaluate import Evaluation, Evaluator
from heterorl.learner.loss.objectives import MAX_LOG_WEIGHT
from heterorl.learner.train.step_report import LogRatios, SequenceSample, capped_products, ess_fraction

if TYPE_CHECKING:
    from torch import nn


@dataclass(slots=True, kw_only=True)
class Probe:
    """Draws fresh rollouts of the weights in training."""

    engine: Engine
    task: Task
    prompter: Prompter
    every: int
    group_size: int
    seed: int

    def mean_advantage(self, backend: TorchBackend, groups: Sequence[QueuedGroup], *, step: int) -> float | None:
        """Monte-Carlo estimate of E_p[A] with A = reward - mean reward of the stale group; None when not due."""
        if not self.every or step % self.every:
            return None
        arena = Arena(backend.layout)
        backend.store(arena)
        self.engine.load(arena, step)
        completions = generate_all(
            self.engine,
            [queued.group.prompt_token_ids for queued in groups],
            seeds=[(self.seed << 40) + (step << 16) + number for number in range(len(groups))],
            num_per_prompt=self.group_size,
        )
        advantages = []
        for queued, members in zip(groups, completions, strict=True):
            prompt = self.task.prompt(queued.group.prompt_index)
            # Lost members are in no batch.
            kept = [rollout.reward for rollout in queued.group.trainable]
            baseline = float(np.mean(kept)) if kept else 0.0
            rewards = [
                total_reward(self.task.score(prompt, self.prompter.completion(member.token_ids, prompt)))
                for member in members
            ]
            advantages.append(float(np.mean(rewards)) - baseline)
        return float(np.mean(advantages))


class Diverged(Exception):
    """The loss or the gradient of a step was not finite: the run ends here, as one that has collapsed."""


@dataclass(slots=True, kw_only=True)
class MeasuredBackend:
    """Implements TrainBackend around another one; keeps a row per applied step."""

    inner: TorchBackend
    probe: Probe
    charge: Callable[[float], None]
    step_s: float
    rows: list[dict[str, float | None]] = field(default_factory=list)
    diverged_at: int | None = None

    @property
    def layout(self) -> Layout:
        """Layout of the published weights."""
        return self.inner.layout

    @property
    def torch_model(self) -> nn.Module:
        """The model being trained."""
        return self.inner.torch_model

    @property
    def last_metrics(self) -> dict[str, float]:
        """What the newest step's loss measured, where it is the user's own."""
        return self.inner.last_metrics

    @property
    def last_log_ratios(self) -> LogRatios:
        """Of the newest step's groups whose note is wanted."""
        return self.inner.last_log_ratios

    def train_step(self, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        """Take a step, note what it measured, charge its time.

        Raises:
            Diverged: loss or gradient is not finite.
        """
        target = self.probe.mean_advantage(self.inner, groups, step=step)
        report = self.inner.train_step(groups, head_version=head_version, step=step)
        self.charge(self.step_s)
        if not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            self.diverged_at = report.step
            raise Diverged(f"step {report.step} was not finite")
        if report.is_applied:
            self.rows.append(step_row(report, step_extras(self.inner.last_sequences), target))
        return report

    def store(self, arena: Arena) -> None:
        """Round the masters to the published type."""
        self.inner.store(arena)

    def load_published(self, arena: Arena, *, keep_optimizer: bool = False) -> None:
        """Take published weights as masters."""
        self.inner.load_published(arena, keep_optimizer=keep_optimizer)

    def freeze(self, directory: Path) -> Callable[[], None]:
        """Take the state for a checkpoint."""
        return self.inner.freeze(directory)

    def restore(self, directory: Path) -> None:
        """Read a checkpoint."""
        self.inner.restore(directory)


def step_row(report: StepReport, extras: dict[str, float], target: float | None) -> dict[str, float | None]:
    """What a run keeps of a step: its report, `step_extras`, and the mean advantage of fresh rollouts."""
    estimate = extras.get("advantage_estimate")
    return {
        "step": report.step,
        "reward": report.reward_mean,
        "kl": report.kl,
        "iw_var": report.iw_variance,
        "iw_var_gepo": extras.get("iw_variance_gepo"),
        "iw_var_gspo": extras.get("iw_variance_gspo"),
        "ess": report.ess_fraction,
        "clip_fraction": report.clip_fraction,
        "grad_norm": report.grad_norm,
        "staleness": report.staleness_mean,
        "advantage_error": None if target is None or estimate is None else abs(estimate - target),
        "bias_gepo": extras.get("bias_gepo"),
        "bias_gspo": extras.get("bias_gspo"),
        "entropy": report.entropy,
        "bad_trained": report.mask_share_bad,
    }


@dataclass(slots=True, kw_only=True)
class ChargedEngine:
    """Implements Engine around another one: generation takes virtual time."""

    inner: Engine
    charge: Callable[[float], None]
    group_s: float
    num_groups: int = 0
    num_open: int = 0

    @property
    def layout(self) -> Layout:
        """Layout of the weights it takes."""
        return self.inner.layout

    @property
    def name(self) -> str:
        """Name and version."""
        return self.inner.name

    @property
    def dtype(self) -> str:
        """Data type of the computation."""
        return self.inner.dtype

    @property
    def version(self) -> int:
        """Version of the loaded weights."""
        return self.inner.version

    def load(self, arena: Arena, version: int) -> None:
        """Swap the weights."""
        self.inner.load(arena, version)

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Score a canary."""
        return self.inner.score(texts)

    @property
    def max_running(self) -> int:
        """Completions computed at once."""
        return self.inner.max_running

    def submit(self, request: Request) -> None:
        """Take a request."""
        self.inner.submit(request)
        self.num_open += request.num_completions
        self.num_groups += 1

    def collect(self) -> list[Finished]:
        """Compute all that was submitted and charge its time."""
        self.charge(self.group_s * self.num_groups)
        self.num_groups = 0
        finished: list[Finished] = []
        while len(finished) < self.num_open:
            finished += self.inner.collect()
        self.num_open = 0
        # As they were asked for: on virtual time all of them end at once.
        return sorted(finished, key=lambda one: (one.key, one.member))

    def cancel(self) -> None:
        """Give up everything under way."""
        self.num_open = self.num_groups = 0
        self.inner.cancel()

    def stop(self) -> None:
        """Give up everything, for good."""
        self.cancel()
        self.inner.stop()


class BenchmarkEvaluator(Evaluator):
    """Held-out accuracy on several benchmarks; `rows` keeps each evaluation, the accuracy is the mean over prompts."""

    def __init__(self, parts_of: Callable[[int], dict[str, Evaluator]]) -> None:
        """Make one.

        Args:
            parts_of: the benchmarks by name, as they are for a version.
        """
        self._parts_of = parts_of
        self.rows: list[dict[str, object]] = []

    def evaluate(self, arena: Arena, version: int) -> Evaluation:
        """Evaluate every benchmark with the same weights."""
        found = {name: part.evaluate(arena, version) for name, part in self._parts_of(version).items()}
        scored = [value for value in found.values() if value.accuracy is not None]
        count = sum(value.num_completions for value in scored)
        total = sum((value.accuracy or 0.0) * value.num_completions for value in scored)
        accuracy = total / count if count else None
        benchmarks = {name: value.accuracy for name, value in found.items()}
        self.rows.append({"step": version, "accuracy": accuracy, "benchmarks": benchmarks})
        return Evaluation(
            version=version,
            accuracy=accuracy,
            num_prompts=sum(value.num_prompts for value in found.values()),
            num_completions=count,
            num_errors=sum(value.num_errors for value in found.values()),
            seconds=sum(value.seconds for value in found.values()),
        )


def step_extras(sample: SequenceSample) -> dict[str, float]:
    """Numbers of a closed step beyond its report.

    bias_x is (mean w A)^2; iw_variance_x (ddof 0) and ess_fraction_x are of the length-normalised weights of x = gepo
    (contraharmonic) and gspo, for every loss. advantage_estimate is the mean of w A over rollouts with the loss's own
    weights. A is here the reward minus the group's mean, for every loss. clip_fraction_positive and _negative are
    shares of the rollouts or tokens with that sign of the loss's own A; dropped_token_fraction is the share that masks
    left out; second_moment is the mean of (log p - log q)^2 over tokens; ess_fraction_sequence is of whole-rollout
    ratios capped at 8.
    """
    numbers: dict[str, float] = {}
    for name, logs_B in (("gepo", sample.log_gepo_B), ("gspo", sample.log_gspo_B)):
        weights_B = logs_B.clamp(max=MAX_LOG_WEIGHT).exp()
        numbers[f"bias_{name}"] = _ratio((weights_B * sample.centred_rewards_B).sum(), weights_B.numel()) ** 2
        numbers[f"iw_variance_{name}"] = float(weights_B.var(correction=0)) if weights_B.numel() else 0.0
        numbers[f"ess_fraction_{name}"] = ess_fraction(weights_B)
    numbers["ess_fraction_sequence"] = ess_fraction(capped_products(sample))
    estimated = (sample.weights_B * sample.centred_rewards_B).sum()
    numbers["advantage_estimate"] = _ratio(estimated, sample.centred_rewards_B.numel())
    for name, is_chosen in (("positive", sample.advantages_B > 0), ("negative", sample.advantages_B < 0)):
        numbers[f"clip_fraction_{name}"] = _ratio(
            sample.clipped_B[is_chosen].sum(), float(sample.clippable_B[is_chosen].sum())
        )
    num_tokens = float(sample.lengths_B.sum())
    numbers["dropped_token_fraction"] = _ratio(sample.dropped_B.sum(), num_tokens)
    numbers["second_moment"] = _ratio(sample.squares_B.sum(), num_tokens)
    return numbers


def _ratio(total: torch.Tensor, count: float) -> float:
    return float(total) / count if count else 0.0
