"""Learning rates by arm: the trials that choose them, the choice, and the file that keeps it beside the results.

An arm is one algorithm at one delay on one task in one variant. Each is tried with every rate of the grid on the tuning
seeds; the rate with the best mean last accuracy wins, the smaller of two equals, and a run that failed counts 0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.wire.common import bytes_digest
from heterorl.lab.cell import Cell, list_cells
from heterorl.lab.config import ExperimentConfig, VariantConfig
from heterorl.lab.results import cell_digest

FILE = "learning_rates.json"
_KEY = "lr="


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRate:
    """The rate of an arm, the mean last accuracy of every rate that was tried, and what the trials were."""

    arm: str
    lr: float
    scores: Mapping[float, float]
    digest: str

    @property
    def is_at_edge(self) -> bool:
        """Whether the grid ends at the choice: a rate outside it may be better."""
        return self.lr in (min(self.scores), max(self.scores))


def trials(experiment: ExperimentConfig) -> ExperimentConfig:
    """The experiment that tries every rate on the tuning seeds; variants that set `lr` themselves are not tried.

    Raises:
        ConfigError: nothing is to be tuned.
    """
    protocol = experiment.protocol
    open_variants = [variant for variant in experiment.variants if "lr" not in variant.set]
    if protocol is None or not protocol.tune or not open_variants:
        raise ConfigError("protocol.tune", "no learning rate of this experiment is tuned")
    return experiment.model_copy(
        update={
            "name": f"{experiment.name[:57]}-tuning",
            "title": f"Learning rates of {experiment.name}",
            "seeds": protocol.tuning_seeds,
            "protocol": None,
            "variants": tuple(
                VariantConfig(name=f"{variant.name},{_KEY}{rate:g}".removeprefix(","), set={**variant.set, "lr": rate})
                for variant in open_variants
                for rate in protocol.learning_rates
            ),
        }
    )


def choose(cells: Sequence[Cell], rows: Iterable[Mapping[str, Any]]) -> list[ChosenRate]:
    """The best rate of each arm.

    Args:
        cells: all runs of the trials.
        rows: of those that ended, by whatever end.
    """
    last = {row["run_id"]: 0.0 if row["failed"] or row["last"] is None else float(row["last"]) for row in rows}
    found = []
    for arm, members in _by_arm(cells).items():
        scores: defaultdict[float, list[float]] = defaultdict(list)
        for cell in members:
            scores[cell.regime.lr].append(last.get(cell.run_id, 0.0))
        means = {rate: sum(values) / len(values) for rate, values in sorted(scores.items())}
        best = max(means, key=lambda rate: (means[rate], -rate))
        found.append(ChosenRate(arm=arm, lr=best, scores=means, digest=_digest(members)))
    return found


def write(found: Sequence[ChosenRate], directory: Path) -> Path:
    """Write the table; returns its path."""
    arms = [
        {
            "arm": rate.arm,
            "lr": rate.lr,
            "is_at_edge": rate.is_at_edge,
            "scores": [{"lr": tried, "last": round(score, 5)} for tried, score in rate.scores.items()],
            "digest": rate.digest,
        }
        for rate in found
    ]
    path = directory / FILE
    path.write_text(json.dumps({"arms": arms}, indent=1) + "\n", encoding="ascii")
    return path


def with_chosen(experiment: ExperimentConfig, directory: Path) -> ExperimentConfig:
    """The experiment with the rates that the file beside its results holds for it.

    Raises:
        ConfigError: the file is damaged, or was made by trials of something else.
    """
    path = directory / FILE
    protocol = experiment.protocol
    if protocol is None or not protocol.tune or protocol.chosen or not path.is_file():
        return experiment
    try:
        table = {row["arm"]: (float(row["lr"]), row["digest"]) for row in json.loads(path.read_bytes())["arms"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(path), f"is not a table of learning rates: {error!r}") from None
    chosen = {}
    for arm, members in _by_arm(list_cells(trials(experiment))).items():
        if arm not in table:
            continue
        rate, digest = table[arm]
        if digest != _digest(members):
            raise ConfigError(str(path), f"{arm} was tuned for another configuration", action="tune again")
        chosen[arm] = rate
    return experiment.model_copy(update={"protocol": protocol.model_copy(update={"chosen": chosen})})


def _by_arm(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    arms: dict[str, list[Cell]] = {}
    for cell in cells:
        variant = cell.variant.rpartition(_KEY)[0].removesuffix(",")
        arms.setdefault(replace(cell, variant=variant).arm_id, []).append(cell)
    return arms


def _digest(cells: Iterable[Cell]) -> str:
    return bytes_digest("\n".join(sorted(cell_digest(cell) for cell in cells)).encode())
