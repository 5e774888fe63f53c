"""Learning rates by arm: the trials that choose them, and the file that keeps the choice beside the results.

An arm is one algorithm at one delay on one task in one variant. Trials run on the tuning seeds and are evaluated on
held-out prompts that no report looks at; `race` says which of them are run, and which rate wins.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.wire.common_messages import bytes_digest
from heterorl_research.lab.cell import Cell, list_cells
from heterorl_research.lab.config import ExperimentConfig, VariantConfig
from heterorl_research.lab.protocol.race import Score, Standing, standing
from heterorl_research.lab.results import cell_digest

FILE = "learning_rates.json"
_KEY = "lr="


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRate:
    """The rate of an arm, what the rates that were tried have reached, and the digest of all its trials."""

    arm: str
    lr: float
    scores: Mapping[float, Score]
    digest: str

    @property
    def is_at_edge(self) -> bool:
        """Whether the grid ends at the choice: a rate outside it may be better."""
        return self.lr in (min(self.scores), max(self.scores))


def trials(experiment: ExperimentConfig) -> ExperimentConfig:
    """The experiment that tries every rate on the tuning seeds and on held-out prompts of its own.

    Variants that set `lr` themselves are not tried, nor are algorithms that take the rate of another one.

    Raises:
        ConfigError: nothing is to be tuned, or trials would not be evaluated at their end.
    """
    protocol, regime = experiment.protocol, experiment.regime
    open_variants = [variant for variant in experiment.variants if "lr" not in variant.set]
    if protocol is None or not protocol.tune or not open_variants:
        raise ConfigError("protocol.tune", "no learning rate of this experiment is tuned")
    steps = protocol.tuning_steps or regime.max_steps
    if steps % regime.evaluate_every:
        raise ConfigError("protocol.tuning_steps", "is no multiple of regime.evaluate_every")
    changed = {"max_steps": steps, "evaluation_offset": regime.evaluation_offset + regime.num_evaluation}
    return experiment.model_copy(
        update={
            "name": f"{experiment.name[:57]}-tuning",
            "title": f"Learning rates of {experiment.name}",
            "algorithms": tuple(one for one in experiment.algorithms if one.name not in protocol.tune_as),
            "seeds": protocol.tuning_seeds,
            "regime": regime.model_copy(update=changed),
            "protocol": None,
            "variants": tuple(
                VariantConfig(name=f"{variant.name},{_KEY}{rate:g}".removeprefix(","), set={**variant.set, "lr": rate})
                for variant in open_variants
                for rate in protocol.learning_rates
            ),
        }
    )


def standings(
    cells: Sequence[Cell], rows: Iterable[Mapping[str, Any]], *, tried: Collection[str] | None = None
) -> dict[str, Standing]:
    """How far each arm is.

    Args:
        cells: all trials.
        rows: of those that ended, by whatever end.
        tried: as in `race.standing`.
    """
    by_id = {row["run_id"]: row for row in rows}
    return {arm: standing(members, by_id, tried=tried) for arm, members in _by_arm(cells).items()}


def choose(cells: Sequence[Cell], rows: Iterable[Mapping[str, Any]]) -> list[ChosenRate]:
    """The rate of each arm whose trials are done."""
    digests = {arm: _digest(members) for arm, members in _by_arm(cells).items()}
    return [
        ChosenRate(arm=arm, lr=found.lr, scores=found.scores, digest=digests[arm])
        for arm, found in standings(cells, rows).items()
        if found.lr is not None
    ]


def write(found: Sequence[ChosenRate], directory: Path, *, engine: str, device: str) -> Path:
    """Write the table with what computed the trials; returns its path."""
    arms = [
        {
            "arm": rate.arm,
            "lr": rate.lr,
            "is_at_edge": rate.is_at_edge,
            "scores": [
                {"lr": tried, "last": round(score.last, 5), "seeds": score.seeds}
                for tried, score in rate.scores.items()
            ],
            "digest": rate.digest,
        }
        for rate in found
    ]
    path = directory / FILE
    text = json.dumps({"engine": engine, "device": device, "arms": arms}, indent=1)
    path.write_text(text + "\n", encoding="ascii")
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
    table = {row["arm"]: row for row in _read(path)["arms"]}
    chosen = {}
    for arm, members in _by_arm(list_cells(trials(experiment))).items():
        if arm not in table:
            continue
        if table[arm]["digest"] != _digest(members):
            raise ConfigError(str(path), f"{arm} was tuned for another configuration", action="tune again")
        chosen[arm] = float(table[arm]["lr"])
    for cell in list_cells(experiment):
        lender = lender_of(cell, protocol.tune_as)
        if lender in chosen:
            chosen[cell.arm_id] = chosen[lender]
    return experiment.model_copy(update={"protocol": protocol.model_copy(update={"chosen": chosen})})


def lender_of(cell: Cell, tune_as: Mapping[str, str]) -> str:
    """The arm whose rate a cell's arm takes; its own where it is tuned itself."""
    name = tune_as.get(cell.algorithm.name, cell.algorithm.name)
    return replace(cell, algorithm=cell.algorithm.model_copy(update={"name": name})).arm_id


def statement(experiment: ExperimentConfig, directory: Path) -> dict[str, Any] | None:
    """What results say about the rates: what computed the trials, and the arms whose rate is at an end of the grid.

    None where no rates were chosen.
    """
    path, protocol = directory / FILE, experiment.protocol
    if protocol is None or not protocol.tune or not path.is_file():
        return None
    found = _read(path)
    edges = {row["arm"] for row in found["arms"] if row["is_at_edge"]}
    arms = {cell.arm_id: lender_of(cell, protocol.tune_as) for cell in list_cells(experiment)}
    return {
        "engine": found["engine"],
        "device": found["device"],
        "at_edge": sorted(arm for arm, lender in arms.items() if lender in edges),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        for row in found["arms"]:
            float(row["lr"]), row["arm"], row["digest"], row["is_at_edge"]
        found["engine"], found["device"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            str(path), f"is not a table of learning rates: {error!r}", action="heterorl lab tune"
        ) from None
    return found


def _by_arm(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    arms: dict[str, list[Cell]] = {}
    for cell in cells:
        variant = cell.variant.rpartition(_KEY)[0].removesuffix(",")
        arms.setdefault(replace(cell, variant=variant).arm_id, []).append(cell)
    return arms


def _digest(cells: Iterable[Cell]) -> str:
    return bytes_digest("\n".join(sorted(cell_digest(cell) for cell in cells)).encode())
