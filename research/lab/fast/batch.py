"""Many runs of one shape, step by step together.

    for each version   evaluate -> draw the rollouts of the steps that the delay gives it -> train on those of this step

Rollouts wait for their step, weights do not: a step s trains on what version `sources[s]` drew for it when that version
was the newest. Guarantees: a run's numbers depend on its own cell alone, bit for bit, on one CPU thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.task_config import build_task
from heterorl.common.types.common import StepReport
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.step_report import MicroBatchSample, ess_fraction, mean, share_of_bad, step_size_factor
from heterorl_research.lab.cell import Cell
from heterorl_research.lab.fast.adam import Adam
from heterorl_research.lab.fast.evaluation import Drawing, Evaluations, additive_mask, mean_advantages, sampling_of
from heterorl_research.lab.fast.forward import Folded, fold, forward, log_probs
from heterorl_research.lab.fast.lags import served, sources
from heterorl_research.lab.fast.layout import Sizes, lay_out, lay_out_apart
from heterorl_research.lab.fast.losses import gather_step, losses
from heterorl_research.lab.fast.orders import batch_key
from heterorl_research.lab.fast.rollouts import Rollouts, as_reported
from heterorl_research.lab.fast.scope import check_scope
from heterorl_research.lab.fast.stack import Shape, published, read_model, views
from heterorl_research.lab.fast.work import Assignments, Texts
from heterorl_research.lab.measure import step_extras, step_row
from heterorl_research.lab.world import Outcome
from heterorl_research.losses.kinds import learner_loss

MOST_ROWS_ON_GPU = 1 << 18
"""Rows of a training pass; with two layers and 1,001 tokens a batch took 5.8 GB at most."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run of the batch: its cell, the steps that each version draws for, what waits, and what was measured."""

    cell: Cell
    steps_of: dict[int, list[int]]
    waiting: dict[int, Rollouts] = field(default_factory=dict)
    rows: list[dict[str, float | None]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    diverged_at: int | None = None


def run_batch(
    cells: Sequence[Cell],
    *,
    model_dirs: Sequence[Path],
    device: str = "cpu",
    note_step: Callable[[int], None] = lambda _: None,
) -> list[Outcome]:
    """Run cells of one `batch_key` from their warm starts.

    Args:
        cells: what to run.
        model_dirs: of their warm starts.
        device: cpu or cuda; on a GPU equal prefixes are not shared, so that all runs have the same shapes.
        note_step: told after every step how many are done.

    Returns:
        What each run left.

    Raises:
        ConfigError: the engine has no way to run these cells, or the device does not exist.
    """
    if len({batch_key(cell) for cell in cells}) != 1:
        raise ConfigError("regime", "runs of several shapes are several batches")
    for cell in cells:
        check_scope(cell)
    # Runs of one rule one after another: their losses are one call.
    order = sorted(range(len(cells)), key=lambda number: cells[number].algorithm.loss.model_dump_json())
    batch = _Batch([cells[number] for number in order], [model_dirs[number] for number in order], device)
    for version in range(cells[0].regime.max_steps):
        batch.turn(version)
        note_step(version + 1)
    batch.evaluate(cells[0].regime.max_steps)
    outcomes = {
        number: Outcome(
            steps=run.rows, evaluations=run.evaluations, status=None, ledger_balanced=None, diverged_at=run.diverged_at
        )
        for number, run in zip(order, batch.runs, strict=True)
    }
    return [outcomes[number] for number in range(len(cells))]


class _Batch:
    def __init__(self, cells: Sequence[Cell], model_dirs: Sequence[Path], device: str) -> None:
        first = cells[0]
        try:
            self._device = torch.zeros(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError("device", f"cannot use {device}: {error}") from error
        self.runs = [_Run(cell=cell, steps_of=served(sources(cell))) for cell in cells]
        models = {model_dir: read_model(model_dir) for model_dir in dict.fromkeys(model_dirs)}
        shapes = {shape for shape, _ in models.values()}
        if len(shapes) > 1:
            raise ConfigError("tasks", "runs of several model shapes are several batches")
        self._shape: Shape = shapes.pop()
        self._starts = [(cell.seed, model_dir) for cell, model_dir in zip(cells, model_dirs, strict=True)]
        masters_RP = torch.stack([models[model_dir][1] for model_dir in model_dirs]).to(self._device)
        self._settings = TorchBackendConfig()
        self._adam = Adam(masters_RP, self._settings)
        task, texts = build_task(first.task.task), Texts(model_dirs[0])
        sizes = Sizes(
            num_prompts=first.regime.groups_per_step,
            group_size=first.regime.group_size,
            prompt_length=len(texts.encode(task.prompt(0).text)),
            max_new_tokens=first.task.max_new_tokens,
            vocab_size=self._shape.vocab_size,
        )
        self._drawing = Drawing(
            task=task,
            texts=texts,
            sizes=sizes,
            mask_SS=additive_mask(sizes, self._device),
            sampling=sampling_of(
                first, temperature=first.regime.temperature, top_p=first.regime.top_p, top_k=first.regime.top_k
            ),
            device=self._device,
            is_sharing=self._device.type == "cpu",
        )
        self._assignments = Assignments(task=task, texts=texts, sizes=sizes)
        self._evaluations = Evaluations(first, self._drawing)
        self._regime = first.regime

    def turn(self, version: int) -> None:
        """All that happens while a version is the newest."""
        self.evaluate(version)
        self._draw(version)
        stale = [run.waiting.pop(version) for run in self.runs]
        targets: Sequence[float | None] = [None] * len(self.runs)
        if self._regime.probe_every and (version + 1) % self._regime.probe_every == 0:
            seeds = [run.cell.seed for run in self.runs]
            everyone = list(range(len(self.runs)))
            targets = mean_advantages(self._drawing, self._published(everyone), stale, seeds, step=version + 1)
        self._train(version, stale, targets)

    def evaluate(self, version: int) -> None:
        """Evaluate the newest version where that is due."""
        if version % self._regime.evaluate_every:
            return
        for part in self._evaluations.parts(len(self.runs)):
            seeds = [run.cell.seed for run in self.runs[part]]
            rows = self._evaluations.rows(self._published(part), seeds, version=version)
            for run, row in zip(self.runs[part], rows, strict=True):
                run.evaluations.append(row)

    def _published(self, numbers: slice | list[int]) -> Folded:
        with torch.no_grad():
            weights = views(published(self._adam.masters_RP[numbers]), self._shape)
            return fold(self._shape, weights, num_positions=self._drawing.sizes.num_positions)

    def _draw(self, version: int) -> None:
        """Draw rollouts for every step that this version serves."""
        jobs: dict[tuple[Any, int], list[int]] = {}
        for number, run in enumerate(self.runs):
            for step in run.steps_of.get(version, []):
                # Runs of one seed have the same first version, so they draw the same with it.
                owner = self._starts[number] if version == 0 else number
                jobs.setdefault((owner, step), []).append(number)
        waiting = list(jobs.items())
        for start in range(0, len(waiting), len(self.runs)):
            part = waiting[start : start + len(self.runs)]
            folded = self._published([numbers[0] for _, numbers in part])
            works = [self._assignments.of_step(self.runs[numbers[0]].cell.seed, step) for (_, step), numbers in part]
            drawn = self._drawing.draw(folded, works, version=version)
            for ((_, step), numbers), rollouts in zip(part, drawn, strict=True):
                for number in numbers:
                    self.runs[number].waiting[step] = as_reported(rollouts, self.runs[number].cell, step=step)

    def _train(self, version: int, stale: list[Rollouts], targets: Sequence[float | None]) -> None:
        gradients, samples = [], []
        for part in self._parts():
            found, measured = self._gradients(version, self.runs[part], stale[part], self._adam.masters_RP[part])
            gradients.append(found)
            samples += measured
        step_sizes = [
            TorchBackendConfig(lr=run.cell.regime.lr, warmup_steps=run.cell.regime.warmup_steps).rate(
                step=version + 1, applied_steps=version
            )
            * step_size_factor(loss_spec_of(learner_loss(run.cell.algorithm.loss)), sample.sequences)
            for run, sample in zip(self.runs, samples, strict=True)
        ]
        norms = self._adam.step(
            torch.cat(gradients), step_sizes=step_sizes, is_finite=[math.isfinite(sample.loss) for sample in samples]
        )
        for run, rollouts, sample, norm, target in zip(self.runs, stale, samples, norms, targets, strict=True):
            if not (math.isfinite(sample.loss) and math.isfinite(norm)):
                run.diverged_at = run.diverged_at or version + 1
            report = _report(sample, rollouts, head_version=version, grad_norm=norm)
            run.rows.append(step_row(report, step_extras(sample.sequences), target))

    def _parts(self) -> list[slice]:
        """The runs that one pass trains: all on a CPU, as many as a GPU's memory holds."""
        sizes, num = self._drawing.sizes, len(self.runs)
        rows_of_run = sizes.num_prompts * sizes.group_size * sizes.num_positions
        most = num if self._device.type == "cpu" else max(1, MOST_ROWS_ON_GPU // rows_of_run)
        return [slice(start, start + most) for start in range(0, num, most)]

    def _gradients(
        self, version: int, runs: Sequence[_Run], stale: list[Rollouts], masters_RP: torch.Tensor
    ) -> tuple[torch.Tensor, list[MicroBatchSample]]:
        """Gradients [R, P] of some runs, and what their losses measured."""
        drawing, sizes = self._drawing, self._drawing.sizes
        step = gather_step(stale, head_version=version, device=self._device)
        prompts = np.stack([one.work.tokens_GP for one in stale])
        if drawing.is_sharing:
            layout = lay_out(
                sizes,
                prompts,
                np.stack([one.drawn.tokens_RGMT for one in stale]),
                np.stack([one.drawn.lengths_RGM for one in stale]),
                np.stack([one.drawn.first_RGMT for one in stale]),
            )
        else:
            layout = lay_out_apart(sizes, torch.from_numpy(prompts).to(self._device), step.tokens_RGMT)
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in views(masters_RP, self._shape).items()}
        folded = fold(self._shape, leaves, num_positions=sizes.num_positions)
        logits = forward(folded, layout, drawing.mask_SS)
        temperature = drawing.sampling.logprob_temperature
        learner, entropies = log_probs(logits, layout, step.tokens_RGMT, temperature=temperature)
        configs = [learner_loss(run.cell.algorithm.loss) for run in runs]
        total, samples = losses(configs, step, learner.flatten(1, 2), entropies.flatten(1, 2))
        gradients = torch.autograd.grad(total, list(leaves.values()))
        return torch.cat([gradient.flatten(1) for gradient in gradients], 1), samples


def _report(sample: MicroBatchSample, rollouts: Rollouts, *, head_version: int, grad_norm: float) -> StepReport:
    """The report of a run's step, as a learner closes it."""
    weights_M, staleness = sample.weights_M, head_version - rollouts.version
    return StepReport(
        step=head_version + 1,
        version=head_version + 1,
        loss=sample.loss,
        reward_mean=float(rollouts.rewards_GM.mean()),
        kl=mean(sample.kl_B),
        ess_fraction=ess_fraction(weights_M),
        iw_variance=float(weights_M.var(correction=0)) if weights_M.numel() else 0.0,
        clip_fraction=mean(sample.is_clipped_M.double()),
        entropy=mean(sample.entropies_N),
        grad_norm=grad_norm,
        staleness_mean=float(staleness),
        staleness_max=staleness,
        policy_age_p50_s=0.0,
        num_groups=len(rollouts.rewards_GM),
        num_tokens=sample.entropies_N.numel(),
        step_s=0.0,
        is_applied=True,
        mask_share_bad=share_of_bad(sample.sequences),
    )
