"""Evaluation of sets on subjects with an idle engine.

Prompts are drawn and scored by the code of samplers. Rewards are computed in the task's processes during generation. A
reward that fails is counted and left out, as are completions of a refused prompt.

Results are tables for people and JSON values for programs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heterorl.common.errors import ConfigError
from heterorl.common.evaluation.summary import Standing, estimate_text, standing, summarize
from heterorl.common.generation.inference_engine import Engine
from heterorl.common.process.clock import Bell, SystemClock
from heterorl.common.text.conversation import try_reward
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.evaluation import EvaluationSpec, EvaluationSummary, PromptResult
from heterorl.common.types.rollout import WorkAssignment
from heterorl.evaluation.subject import FROM_TASK, Subject
from heterorl.sampler.prompt_evaluator import PromptEvaluator, SiteSet
from heterorl.sampler.rollout.group_builder import GroupBuilder
from heterorl.sampler.rollout.in_flight_groups import EvaluationRequests

_LENGTH = "max_new_tokens"


def evaluate_set(subject: Subject, of: SiteSet, *, on_prompt: Callable[[PromptResult], None]) -> list[PromptResult]:
    """Draw and score a set's prompts with an idle engine's weights.
    `on_prompt` is called as each prompt ends. Raises PromptRefused: all prompts are refused; ConfigError: the engine
    has no room for such completions; EngineError: not all completions ended."""
    try:
        return asyncio.run(_evaluate(subject, of, on_prompt))
    except BaseException:
        # Threads may have submitted requests after the failure.
        subject.engine.cancel()
        raise


async def _evaluate(subject: Subject, of: SiteSet, on_prompt: Callable[[PromptResult], None]) -> list[PromptResult]:
    engine, draws = subject.engine, of.draws
    news, evaluation_requests = Bell(), EvaluationRequests()
    builder = GroupBuilder(
        task=of.task, prompter=subject.prompter, site=SiteId(""), incarnation="", group_size=1, clock=SystemClock()
    )
    evaluator = PromptEvaluator(
        engine=engine,
        evaluation_requests=evaluation_requests,
        builder=builder,
        share=1.0,
        max_trajectory_tokens=subject.max_trajectory_tokens,
        news=news,
    )
    spec = EvaluationSpec(task_set=of.name, version=engine.version, state_root=Digest(""), draws=draws)
    places = asyncio.Semaphore(evaluator.num_rows)

    async def evaluated(index: int) -> PromptResult:
        assignment = WorkAssignment(id=0, prompt_index=index, seed=draws.seed, lease_s=0.0)
        async with places:
            result = await evaluator.result(spec, of, assignment)
        on_prompt(result)
        return result

    collecting = asyncio.ensure_future(_collect(engine, evaluation_requests, news))
    evaluating = asyncio.gather(*map(evaluated, range(draws.num_prompts)))
    try:
        await asyncio.wait([collecting, evaluating], return_when=asyncio.FIRST_COMPLETED)
        results = await (collecting if collecting.done() else evaluating)
    finally:
        collecting.cancel()
        evaluating.cancel()
        # A thread that waits for the engine would delay the end of the loop.
        engine.cancel()
        evaluator.close()
        # An error that nothing takes is logged when its future is collected.
        await asyncio.gather(collecting, evaluating, return_exceptions=True)
    if results and len(evaluator.refused) == len(results):
        raise next(iter(evaluator.refused.values()))
    return results


async def _collect(engine: Engine, evaluation_requests: EvaluationRequests, news: Bell) -> list[PromptResult]:
    """Hand over ended completions until cancelled. Raises EngineError: the engine failed."""
    while True:
        ticket = news.ticket()
        ended = await asyncio.to_thread(engine.collect) if evaluation_requests.num_running else ()
        for one in ended:
            evaluation_requests.take(one)
        if ended:
            news.ring()
        else:
            await ticket.wait()


@contextmanager
def _naming_length(task_set: str) -> Iterator[None]:
    """Name the table of completions that are too long."""
    try:
        yield
    except ConfigError as error:
        if error.key != _LENGTH:
            raise
        table = "sampling" if task_set == FROM_TASK else f"evaluation.{task_set}"
        problem = str(error.args[0]).removeprefix(f"{_LENGTH}: ")
        raise error.within(f"{table}.{_LENGTH}", problem, action="lower it there or by --max-new-tokens") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One subject on one set."""

    subject: str
    version: int
    set: SiteSet
    summary: EvaluationSummary
    seconds: float
    results: tuple[PromptResult, ...]
    sources: tuple[tuple[str, EvaluationSummary], ...] = ()
    """The same of each source of a mixture, by label; their rewards may have different scales."""


def evaluate_all(
    subjects: Iterable[Subject],
    sets: Sequence[SiteSet],
    *,
    on_begin: Callable[[str, SiteSet], None],
    on_prompt: Callable[[PromptResult], None],
) -> Iterator[Row]:
    """Draw and score every set with every subject; yields rows.
    A subject is used before the next one is taken. Raises ConfigError: a reward or an environment fails here, or no
    prompt of a set can be drawn; EngineError."""
    for number, subject in enumerate(subjects):
        if not number:
            sets = [one.played(subject.prompter) for one in sets]
            for one in sets:
                try_reward(one.task, subject.prompter)
        for one in sets:
            on_begin(subject.name, one)
            started = time.perf_counter()
            with _naming_length(one.name):
                results = evaluate_set(subject, one, on_prompt=on_prompt)
            yield Row(
                subject=subject.name,
                version=subject.version,
                set=one,
                summary=_summary(one, results),
                seconds=time.perf_counter() - started,
                results=tuple(results),
                sources=by_source(one, results),
            )


def _summary(of: SiteSet, results: Iterable[PromptResult]) -> EvaluationSummary:
    return summarize(results, num_samples=of.draws.num_samples, pass_reward=of.draws.pass_reward)


def by_source(of: SiteSet, results: Iterable[PromptResult]) -> tuple[tuple[str, EvaluationSummary], ...]:
    """Results of each source of a mixture, by label."""
    found: dict[str, list[PromptResult]] = {}
    for result in results:
        found.setdefault(of.task.evaluation_source_of(result.prompt_index), []).append(result)
    return tuple((label, _summary(of, found[label])) for label in sorted(found) if label)


def tables(rows: Sequence[Row], *, width: int) -> list[Table]:
    """A table of all rows, or two where `width` has no room.

    With several versions, also one of best and last.
    """
    ks = sorted({entry.k for row in rows for entry in row.summary.passes if entry.k > 1})
    title = "evaluation, 95 % intervals over prompts"
    shown = [_table(rows, title, ks, estimates=True, counts=True)]
    if Console(width=1000, markup=False).measure(shown[0]).maximum > width:
        shown = [
            _table(rows, title, ks, estimates=True, counts=False),
            _table(rows, "completions", (), estimates=False, counts=True),
        ]
    standings = _standings(rows)
    if not standings:
        return shown
    best = Table("set", "best", "of version", "last", "of version", "gap", title="best and last")
    for name, found in standings.items():
        cells = (f"{found.best:.3f}", found.best_version, f"{found.last:.3f}", found.last_version, f"{found.gap:.3f}")
        best.add_row(Text(name), *map(str, cells))
    return [*shown, best]


def _table(rows: Sequence[Row], title: str, ks: Sequence[int], *, estimates: bool, counts: bool) -> Table:
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    # A narrow screen breaks names anywhere, and an interval between its numbers.
    for name in ("of", "set"):
        shown.add_column(name, overflow="fold")
    for name in ("avg@n", *(f"pass@{k}" for k in ks)) if estimates else ():
        shown.add_column(name, min_width=len("[0.000,"))
    for name in ("prompts", "n", "tokens", "cut", "unscored", "s") if counts else ():
        shown.add_column(name, justify="right", no_wrap=True)
    lines = [
        (row, name, found, seconds)
        for row in rows
        for name, found, seconds in (
            (row.set.name, row.summary, f"{row.seconds:.1f}"),
            *((f"- {label}", of_source, "") for label, of_source in row.sources),
        )
    ]
    for row, name, found, seconds in lines:
        cells = [row.subject if seconds else "", name]
        if estimates:
            passes = {entry.k: entry.estimate for entry in found.passes}
            cells += [estimate_text(found.average), *(estimate_text(passes.get(k)) for k in ks)]
        if counts:
            cells += [
                str(found.num_prompts), str(row.set.draws.num_samples), f"{found.mean_tokens:.0f}",
                str(found.num_truncated), str(found.num_errors), seconds,
            ]  # fmt: skip
        shown.add_row(*map(Text, cells))
    return shown


def as_json(rows: Sequence[Row], *, with_texts: bool) -> dict[str, Any]:
    """All results as plain JSON values; `with_texts` adds every completion."""
    return {
        "evaluations": [_row_json(row, with_texts=with_texts) for row in rows],
        "standings": {
            name: {**dataclasses.asdict(found), "gap": found.gap} for name, found in _standings(rows).items()
        },
    }


def _row_json(row: Row, *, with_texts: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "of": row.subject,
        "version": row.version if row.version >= 0 else None,
        "set": row.set.name,
        "task_digest": row.set.task.digest,
        "draws": dataclasses.asdict(row.set.draws),
        "seconds": row.seconds,
        **dataclasses.asdict(row.summary),
    }
    if row.sources:
        found["sources"] = {label: dataclasses.asdict(of_source) for label, of_source in row.sources}
    if with_texts:
        found["prompts"] = [dataclasses.asdict(result) for result in row.results]
    return found


def _standings(rows: Sequence[Row]) -> dict[str, Standing]:
    found = {}
    for name in dict.fromkeys(row.set.name for row in rows):
        of_set = [(row.version, row.summary.average) for row in rows if row.set.name == name and row.version >= 0]
        both = standing(of_set) if len({version for version, _ in of_set}) > 1 else None
        if both is not None:
            found[name] = both
    return found
