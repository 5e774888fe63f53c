"""Curves of a run as text: completions, reward parts, time, progress. Pure.

A value that the learner did not state is left out or shown as a dash, never as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heterorl.common.types.common import LearnerPhase, LearnerProgress, StepReport, StepTimes, amount

MAX_SHOWN = 6
"""Reward parts and sites in a line."""
_WORDS = {
    LearnerPhase.WAITING: "waiting for groups",
    LearnerPhase.EXAMINING: "checking groups",
    LearnerPhase.COMPUTING: "computing",
    LearnerPhase.EVALUATING: "evaluating",
    LearnerPhase.PUBLISHING: "publishing",
}
_Number = Callable[[StepReport], float | None]


def _of_completions(name: str) -> _Number:
    return lambda report: None if report.completions is None else getattr(report.completions, name)


_SERIES: tuple[tuple[str, _Number, str], ...] = (
    ("reward", lambda report: report.reward_mean, "{:.3f}"),
    ("KL", lambda report: report.kl, "{:.4f} nats"),
    ("entropy", lambda report: report.entropy, "{:.3f} nats"),
    ("length", _of_completions("length_mean"), "{:.0f} tokens"),
    ("length p95", _of_completions("length_p95"), "{:.0f} tokens"),
    ("of high reward", _of_completions("length_high_reward"), "{:.0f} tokens"),
    ("of low reward", _of_completions("length_low_reward"), "{:.0f} tokens"),
    ("truncated", _of_completions("truncated_fraction"), "{:.1%}"),
    ("equal rewards", _of_completions("uniform_fraction"), "{:.1%} of the groups"),
    ("replaced", lambda report: report.num_replaced or None, "{:.0f} groups of equal rewards"),
    ("staleness", lambda report: report.staleness_mean, "{:.1f} versions"),
    ("sample size", lambda report: report.ess_fraction, "{:.1%}"),
    ("learning rate", lambda report: report.lr or None, "{:.3g}"),
    ("step", lambda report: report.step_s, "{:.2f} s"),
)


def series(reports: Sequence[StepReport]) -> list[tuple[str, str, list[float]]]:
    """Name, newest value and known values of each curve that has some."""
    parts = reports[-1].completions.reward_parts if reports and reports[-1].completions else ()
    curves = [*_SERIES, *((f"part {part.name}", _part(part.name), "{:.3f}") for part in parts[:MAX_SHOWN])]
    found = []
    for name, number, form in curves:
        known = [value for report in reports if (value := number(report)) is not None]
        if known:
            newest = number(reports[-1])
            found.append((name, "-" if newest is None else form.format(newest), known))
    return found


def report_rows(report: StepReport) -> list[tuple[str, str]]:
    """Table rows about the completions and the time of a step."""
    rows = []
    numbers, times = report.completions, report.times
    if numbers is not None:
        cut, uniform = numbers.truncated_fraction, numbers.uniform_fraction
        rows.append(
            (
                "completions",
                f"{numbers.length_mean:.0f} tokens mean, {numbers.length_p95:.0f} p95, {numbers.length_max} max;"
                f" {cut:.1%} truncated; equal rewards in {uniform:.0%} of the groups",
            )
        )
        if report.num_replaced:
            came = report.num_groups + report.num_replaced
            useful = report.num_groups * (1 - uniform) / came
            rows.append(
                (
                    "replaced",
                    f"{amount(report.num_replaced, 'group')} of equal rewards; {useful:.0%} of the {came} received were"
                    f" useful, {1 - uniform:.0%} of the {report.num_groups} in the step",
                )
            )
        if numbers.turns_max > 1:
            ended = _listed([f"{ending.name} {ending.mean:.0%}" for ending in numbers.endings])
            rows.append(
                (
                    "trajectories",
                    f"{numbers.turns_mean:.1f} turns mean, {numbers.turns_max} max; {numbers.given_mean:.0f} given"
                    f" tokens mean; ended by {ended}",
                )
            )
        if numbers.reward_parts:
            rows.append(("reward parts", _listed([f"{part.name} {part.mean:.3f}" for part in numbers.reward_parts])))
    if report.mask_share_bad is not None:
        rows.append(("bad rollouts", f"{report.mask_share_bad:.0%} of those with A < 0 train"))
    if report.kl_token_fresh is not None:
        rows.append(("engine gap", f"{report.kl_token_fresh:.2g} nats a token, at a staleness of 0"))
    if report.lr:
        rows.append(("learning rate", f"{report.lr:.3g}"))
    if times is not None:
        rows.append(("time", time_words(times)))
        if numbers is not None and times.period_s > 0:
            sites = sorted(numbers.sites, key=lambda site: -site.num_tokens)
            rates = [f"{site.site} {site.num_tokens / times.period_s:.0f} tokens/s" for site in sites]
            rows.append(("trained from", _listed(rates)))
    return rows


def time_words(times: StepTimes) -> str:
    """Shares of a step's time by phase, largest first, down to 1 %."""
    shares = {phase: getattr(times, f"{phase.value}_s") / (times.period_s or 1.0) for phase in LearnerPhase}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    said = [f"{phase.value} {share:.0%}" for phase, share in ordered if share >= 0.01]
    return f"{times.period_s:.2f} s a step: {', '.join(said) or 'bookkeeping'}"


def progress_words(progress: LearnerProgress, age_s: float) -> str:
    """Phase of a learner, and how long ago it was stated."""
    what = _WORDS[progress.phase]
    if progress.phase is LearnerPhase.COMPUTING and progress.micro_batches:
        what += f" micro-batch {min(progress.micro_batches_done + 1, progress.micro_batches)}"
        what += f" of {progress.micro_batches}"
    return f"step {progress.step}: {what}, for {progress.phase_s:.0f} s (stated {age_s:.0f} s ago)"


def _part(name: str) -> _Number:
    def number(report: StepReport) -> float | None:
        parts = report.completions.reward_parts if report.completions else ()
        return next((part.mean for part in parts if part.name == name), None)

    return number


def _listed(texts: Sequence[str]) -> str:
    rest = len(texts) - MAX_SHOWN
    return ", ".join(texts[:MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
