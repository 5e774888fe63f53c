"""Held-out accuracy and the estimation error of many runs: the same prompts, seeds and numbers as the services' lab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heterorl.common.model.contract import SamplingConfig
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.types.common import SamplingSemantics
from heterorl_research.lab.benchmarks import PartOfTask, evaluation_seed, split_evaluation
from heterorl_research.lab.cell import Cell
from heterorl_research.lab.fast.forward import Folded
from heterorl_research.lab.fast.generate import generate
from heterorl_research.lab.fast.layout import Sizes, mask_of
from heterorl_research.lab.fast.rollouts import Rollouts, of_run, score
from heterorl_research.lab.fast.work import Texts, Work, make_work

PROMPTS_AT_ONCE = 1024
"""Held-out prompts of one pass on a CPU. One run's share more prefixes than prompts of several, and what a pass holds
stays below what the allocator gives back to the system and has to ask for again."""


_MOST_KEPT = 16
"""Noises of evaluations that are kept: those of the seeds of a batch, of one version where versions differ in it."""


def sampling_of(cell: Cell, **keys: Any) -> SamplingSemantics:
    """How a cell's tokens are drawn: temperature and truncation as in a configuration."""
    return SamplingConfig(max_new_tokens=cell.task.max_new_tokens, **keys).semantics()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What every generation of a batch needs beside weights and work; `mask_SS` is `additive_mask` of the sizes."""

    task: Task
    texts: Texts
    sizes: Sizes
    mask_SS: Tensor
    sampling: SamplingSemantics
    device: torch.device
    is_sharing: bool

    def draw(self, folded: Folded, works: Sequence[Work], *, version: int) -> list[Rollouts]:
        """Rollouts of one work for each of the weights, scored."""
        # Runs of a seed share their work: its noise goes to the device once.
        places = {id(work): number for number, work in enumerate({id(work): work for work in works}.values())}
        noise = torch.stack(list({id(work): work.noise_GMTV for work in works}.values())).to(self.device)
        owners = torch.tensor([places[id(work)] for work in works], device=self.device)
        drawn = generate(
            folded,
            self.sizes,
            np.stack([work.tokens_GP for work in works]),
            noise[owners],
            self.mask_SS,
            sampling=self.sampling,
            eos_token_id=self.texts.eos_token_id,
            is_sharing=self.is_sharing,
        )
        return [
            Rollouts(
                work=work,
                drawn=of_run(drawn, number),
                rewards_GM=score(self.task, self.texts, work, of_run(drawn, number)),
                version=version,
            )
            for number, work in enumerate(works)
        ]


def additive_mask(sizes: Sizes, device: torch.device) -> Tensor:
    """`layout.mask_of` as what is added to scores."""
    is_seen = torch.from_numpy(mask_of(sizes))
    return torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf).to(device)


class Evaluations:
    """Scores held-out prompts in their parts, one completion each."""

    def __init__(self, cell: Cell, drawing: Drawing) -> None:
        regime = cell.regime
        parts = split_evaluation(drawing.task, num_prompts=regime.num_evaluation, offset=regime.evaluation_offset)
        self._regime = regime
        self._parts: dict[str, PartOfTask] = parts
        num_prompts = sum(part.num_evaluation_prompts for part in parts.values())
        at_once = PROMPTS_AT_ONCE if drawing.device.type == "cpu" else num_prompts
        sizes = replace(drawing.sizes, num_prompts=min(at_once, num_prompts), group_size=1)
        whole = replace(
            drawing,
            sizes=sizes,
            mask_SS=additive_mask(sizes, drawing.device),
            sampling=sampling_of(cell, temperature=cell.regime.evaluation_temperature),
        )
        self._drawings = [
            replace(whole, sizes=replace(sizes, num_prompts=min(at_once, num_prompts - start)))
            for start in range(0, num_prompts, at_once)
        ]
        self._works: dict[int, list[Work]] = {}

    def parts(self, num_runs: int) -> list[slice]:
        """The runs that are evaluated at once: one on a CPU, all on a GPU."""
        size = 1 if self._drawings[0].device.type == "cpu" else num_runs
        return [slice(start, start + size) for start in range(0, num_runs, size)]

    def rows(self, folded: Folded, seeds: Sequence[int], *, version: int) -> list[dict[str, Any]]:
        """A row for each of the weights, as the services' lab writes them.

        Args:
            folded: published weights.
            seeds: of the runs that they belong to.
            version: their version.
        """
        works = [self._works_of(evaluation_seed(self._regime, seed=seed, version=version)) for seed in seeds]
        drawn = [
            drawing.draw(folded, [some[number] for some in works], version=version)
            for number, drawing in enumerate(self._drawings)
        ]
        rows = [
            self._row(np.concatenate([one.rewards_GM[:, 0] for one in of_run]), version)
            for of_run in zip(*drawn, strict=True)
        ]
        if version < self._regime.max_steps:
            return rows
        return [
            row | {"greedy": greedy} for row, greedy in zip(rows, self._greedy(folded, works[0], rows), strict=True)
        ]

    def _greedy(self, folded: Folded, works: Sequence[Work], rows: Sequence[Any]) -> list[float]:
        """Accuracy of the likeliest tokens, of each of the weights: without noise the largest score is drawn."""
        quiet = [replace(work, noise_GMTV=torch.zeros_like(work.noise_GMTV)) for work in works]
        drawn = [
            drawing.draw(folded, [work] * len(rows), version=self._regime.max_steps)
            for drawing, work in zip(self._drawings, quiet, strict=True)
        ]
        return [
            float(np.concatenate([one.rewards_GM[:, 0] for one in of_run]).mean())
            for of_run in zip(*drawn, strict=True)
        ]

    def _row(self, rewards_G: NDArray[np.float64], version: int) -> dict[str, Any]:
        rewards, benchmarks, start = rewards_G.tolist(), {}, 0
        for name, part in self._parts.items():
            own = rewards[start : start + part.num_evaluation_prompts]
            benchmarks[name] = sum(own) / len(own) if own else None
            start += len(own)
        return {"step": version, "accuracy": sum(rewards) / len(rewards), "benchmarks": benchmarks}

    def _works_of(self, noise: int) -> list[Work]:
        if noise in self._works:
            return self._works[noise]
        prompts: list[Prompt] = []
        seeds: list[int] = []
        for part in self._parts.values():
            prompts += [part.evaluation_prompt(index) for index in range(part.num_evaluation_prompts)]
            seeds += [noise + index for index in range(part.num_evaluation_prompts)]
        works, start = [], 0
        for drawing in self._drawings:
            end = start + drawing.sizes.num_prompts
            # Scores ask for text and answer alone, so the whole task may give them.
            works.append(make_work(prompts[start:end], seeds[start:end], texts=drawing.texts, sizes=drawing.sizes))
            start = end
        if len(self._works) >= _MOST_KEPT:
            del self._works[next(iter(self._works))]
        self._works[noise] = works
        return works


def mean_advantages(
    drawing: Drawing, folded: Folded, stale: Sequence[Rollouts], seeds: Sequence[int], *, step: int
) -> list[float]:
    """Monte-Carlo estimates of E_p[A], A = reward - mean reward of the stale group: `measure.Probe` for many runs.

    Args:
        drawing: of the batch.
        folded: published weights that are about to be trained.
        stale: what they are about to be trained on.
        seeds: of the runs.
        step: from 1.
    """
    works = [
        make_work(
            one.work.prompts,
            [(seed << 40) + (step << 16) + number for number in range(len(one.work.prompts))],
            texts=drawing.texts,
            sizes=drawing.sizes,
        )
        for one, seed in zip(stale, seeds, strict=True)
    ]
    fresh = drawing.draw(folded, works, version=step - 1)
    return [
        float(np.mean(new.rewards_GM.mean(1) - old.rewards_GM.mean(1))) for new, old in zip(fresh, stale, strict=True)
    ]
