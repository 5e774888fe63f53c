"""Protocol of trackers, their rows of numbers and texts, and names."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from heterorl.common.api import SamplesApi
from heterorl.common.errors import ConfigError, DependencyMissing, OperatorError, UnknownSample
from heterorl.common.types.common import StepReport, peer_words
from heterorl.common.types.evaluation import Estimate, Evaluation, EvaluationState
from heterorl.common.types.run import RunStatus
from heterorl.common.types.sample import MAX_PAGE, Sample, SampleFilter, SampleKind, SamplePage, SampleRollout

MAX_TEXT = 4000
"""Characters of a prompt or completion in a table."""
MAX_PAGES = 20
"""Pages searched for samples with texts."""
COLUMNS = ("version", "site", "prompt", "completion", "reward", "reward_parts", "tokens", "finish_reason")
TABLE = "samples/version"
"""Name of a table's version in a row."""
Cell = str | float | int


def row_of(report: StepReport) -> dict[str, float]:
    """A report's stated numbers by name; `is_applied` is 0 or 1.

    `tokens_per_s` is tokens divided by `times.period_s`, from the end of one step to the end of the next.

    Example: {"step": 7, "version": 9, "loss": 0.1, "completions/length_mean": 212.5, "reward_parts/correct": 0.5,
        "sites/eu-1/num_tokens": 4096, "times/waiting_s": 1.5}
    """
    row = _numbers(report, "")
    if not report.published_time:
        del row["published_time"]
    period_s = 0.0 if report.times is None else report.times.period_s
    if report.completions is not None:
        row |= _numbers(report.completions, "completions/")
        row |= {f"reward_parts/{part.name}": part.mean for part in report.completions.reward_parts}
        for site in report.completions.sites:
            row |= _numbers(site, f"sites/{site.site}/")
            if period_s > 0.0:
                row[f"sites/{site.site}/tokens_per_s"] = site.num_tokens / period_s
    if report.times is not None:
        row |= _numbers(report.times, "times/")
        if period_s > 0.0:
            row["tokens_per_s"] = report.num_tokens / period_s
    for source in report.sources:
        row |= _numbers(source, f"sources/{source.label}/")
    return row


def version_name(task_set: str) -> str:
    """Name of an evaluation's version, the x axis of its row."""
    return f"evaluation/{task_set}/version"


def set_of(name: str) -> str | None:
    """The set of a name that `version_name` made; None for other names."""
    inner = name.removeprefix("evaluation/").removesuffix("/version")
    return inner if name == version_name(inner) else None


def evaluation_row(found: Evaluation) -> dict[str, float]:
    """An evaluation's numbers; `low` and `high` end 95 % intervals over prompts.

    Example: {"evaluation/math/version": 64, "evaluation/math/is_done": 1, "evaluation/math/mean": 0.42,
        "evaluation/math/mean_low": 0.38, "evaluation/math/pass_at_4": 0.6}
    """
    summary = found.summary
    row: dict[str, float] = {"version": found.version, "is_done": int(found.state is EvaluationState.DONE)}
    row |= {name: value for name, value in _numbers(summary, "").items() if name != "num_truncated"}
    if num_drawn := summary.num_samples + summary.num_errors:
        row["truncated_fraction"] = summary.num_truncated / num_drawn
    if summary.average is not None:
        row |= _estimate("mean", summary.average)
    for passed in summary.passes:
        row |= _estimate(f"pass_at_{passed.k}", passed.estimate)
    return {f"evaluation/{found.task_set}/{name}": value for name, value in row.items()}


def _estimate(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def _numbers(value: Any, prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in dataclasses.fields(value):
        number = getattr(value, each.name)
        if isinstance(number, bool):
            found[prefix + each.name] = int(number)
        elif isinstance(number, int | float):
            found[prefix + each.name] = number
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Samples when `version` was the newest; COLUMNS names the cells."""

    version: int
    rows: tuple[tuple[Cell, ...], ...]


async def read_table(api: SamplesApi, *, version: int, most: int) -> TextTable | None:
    """The newest consumed samples, `most` prompts at most; None without texts."""
    rows: list[tuple[Cell, ...]] = []
    left, page = most, SamplePage(limit=min(most, MAX_PAGE))
    for _ in range(MAX_PAGES):
        found = await api.list_samples(wanted=SampleFilter(kind=SampleKind.CONSUMED), page=page)
        for summary in found.samples:
            if not summary.has_texts or left == 0:
                continue
            try:
                rows += sample_rows(await api.get_sample(sample_id=summary.id))
            except UnknownSample:
                # A newer sample took its place.
                continue
            left -= 1
        if left == 0 or found.next_page is None:
            break
        page = found.next_page
    return TextTable(version=version, rows=tuple(rows)) if rows else None


def sample_rows(sample: Sample) -> list[tuple[Cell, ...]]:
    """A sample's best and worst completion; one row if rewards are equal.
    Lost members count only if all are lost."""
    ordered = sorted(sample.rollouts, key=lambda rollout: (rollout.is_lost, -rollout.reward))
    ordered = [rollout for rollout in ordered if not rollout.is_lost] or ordered[:1]
    chosen = [ordered[0], ordered[-1]] if ordered[-1].reward < ordered[0].reward else ordered[:1]
    return [
        (
            sample.summary.version,
            str(sample.summary.site),
            cut(sample.prompt),
            cut(written(rollout)),
            rollout.reward,
            ", ".join(f"{part.name} {part.value:g}" for part in rollout.reward_parts),
            rollout.num_drawn,
            rollout.finish_reason.value,
        )
        for rollout in chosen
    ]


def written(rollout: SampleRollout) -> str:
    """A completion's text; of several turns, each under its writer."""
    turns = [f"[{part.writer}]\n{text}" for part, text in rollout.turn_texts]
    return "\n".join(turns) or rollout.completion


def cut(text: str) -> str:
    """The first MAX_TEXT characters and the length."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A report's place in publication order.
    An older checkpoint, resumed, repeats steps under new versions."""

    version: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Had:
    """The newest rows in a tracker: report, each set's evaluation, table."""

    steps: Mark | None = None
    """None without steps."""
    published: float = 0.0
    """When the newest report was published; 0 if unknown."""
    evaluations: Mapping[str, int] = field(default_factory=dict)
    """Sets to versions."""
    table: int = -1
    """A version; -1 without a table."""


def had_in(rows: Iterable[Mapping[str, Any]]) -> Had:
    """The newest of a tracker's rows.
    A summary is a row of the newest values."""
    steps, published, table, sets = None, 0.0, -1, dict[str, int]()
    for row in rows:
        if "version" in row:
            mark = Mark(int(row["version"]), int(row["step"]))
            if steps is None or mark > steps:
                steps, published = mark, float(row.get("published_time", 0.0))
        table = max(table, int(row.get(TABLE, -1)))
        for name, value in row.items():
            task_set = set_of(name)
            if task_set is not None:
                sets[task_set] = max(int(value), sets.get(task_set, -1))
    return Had(steps=steps, published=published, evaluations=sets, table=table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tracker's target: project, run, directory of local files, learner's `facts`."""

    project: str
    run: str
    directory: Path
    facts: Mapping[str, str]


class TrackerFailed(OperatorError):
    """A tracker does not answer, or its files cannot be written."""


class Tracker(Protocol):
    """One run in one tracker; all calls block.
    After TrackerFailed the tracker is opened again."""

    had: Had
    """The newest rows at its opening."""

    def write(self, reports: Sequence[StepReport]) -> None:
        """Append reports in order; a kill may leave only the first."""

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Append evaluations in order."""

    def write_table(self, table: TextTable) -> None:
        """Write the newest samples."""

    def close(self) -> None:
        """Flush and close."""


def mark_of(report: StepReport) -> Mark:
    """The place of a report."""
    return Mark(report.version, report.step)


@contextlib.contextmanager
def reaching(name: str, *failures: type[Exception], action: str) -> Iterator[None]:
    """Turn failures of a tracker's package into TrackerFailed; usable as a decorator."""
    try:
        yield
    except failures as error:
        raise TrackerFailed(f"{name}: {error}", action=f"{action}; heterorl tries again") from error


_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
CLASSES = {"wandb": "WandB", "mlflow": "Mlflow", "tensorboard": "TensorBoard", "trackio": "Trackio"}
"""Names of the trackers, and their classes."""


def open_tracker(kind: str, status: RunStatus, *, project: str, run: str, directory: Path) -> Tracker:
    """Open or create a run in a tracker, and import its package.
    An empty `run` is the run's own id. Raises ConfigError: the directory cannot be made, or that id is no name;
    DependencyMissing; OperatorError: the run has rows that heterorl does not write; TrackerFailed."""
    name = run or status.run_id
    if not run and (not _RUN_ID.fullmatch(name) or set(name) == {"."}):
        # It is a coordinator's word, and becomes a directory.
        raise ConfigError("--run", f"{peer_words(name)!r}, the coordinator's run_id, is no name", action="give one")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--dir", f"{directory} cannot be made: {error.strerror}", action="name another one"
        ) from error
    try:
        module = importlib.import_module(f"heterorl.track.to_{kind}")
    except ModuleNotFoundError as error:
        raise DependencyMissing(error.name or kind, f"track-{kind}") from None
    place = Place(project=project, run=name, directory=directory, facts=status.facts)
    try:
        opened: Tracker = getattr(module, CLASSES[kind])(place)
    except (TypeError, ValueError, KeyError) as error:
        problem = f"{kind}: the newest rows of {name} cannot be read: {error}"
        raise OperatorError(problem, action="choose another name by --run; that run gets all rows") from error
    return opened
