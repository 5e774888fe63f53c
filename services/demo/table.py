"""The live view of a run: what is happening now, and how it got there."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from heterorl.common.types.common import StepReport
from heterorl.common.types.run import RunStatus
from heterorl.report.sparkline import newest_accuracy, sparkline


def line(status: RunStatus, reports: Sequence[StepReport], *, max_steps: int) -> str:
    """The state of the run in one line, for logs."""
    if status.head_version < 0:
        return "processes are loading the model"
    if not reports:
        return f"version {status.head_version} is out, waiting for the first step"
    report = reports[-1]
    accuracy = newest_accuracy(reports)
    return (
        f"step {report.step}/{max_steps}  version {status.head_version}  reward {report.reward_mean:.3f}  "
        f"accuracy {'-' if accuracy is None else f'{accuracy:.3f}'}  staleness {report.staleness_mean:.0f}  "
        f"KL {report.kl:.3f}  queue {status.ledger.pending}"
    )


def render(
    status: RunStatus,
    reports: Sequence[StepReport],
    *,
    max_steps: int,
    warm_start: float | None,
    algorithm: str,
    lag_versions: int,
) -> Group:
    """Tables of the run and of its sites; `warm_start` is None until version 0 is evaluated."""
    title = Text(f"heterorl demo: {algorithm}, samplers {lag_versions} versions behind")
    run = Table(title=title, show_header=False, min_width=70)
    run.add_column(justify="right", style="bold")
    run.add_column()
    ratio = status.bytes_full / status.bytes_last if status.bytes_last else 0.0
    run.add_row("version", "none yet: loading" if status.head_version < 0 else str(status.head_version))
    if reports:
        report = reports[-1]
        accuracy = newest_accuracy(reports)
        run.add_row("step", f"{report.step} of {max_steps}")
        run.add_row("reward", f"{report.reward_mean:.3f}  {sparkline([r.reward_mean for r in reports])}")
        start = "-" if warm_start is None else f"{warm_start:.3f}"
        run.add_row("held-out accuracy", f"{start if accuracy is None else f'{accuracy:.3f}'} (start {start})")
        run.add_row("staleness", f"{report.staleness_mean:.1f} versions mean, {report.staleness_max} max")
        run.add_row("policy age", f"{report.policy_age_p50_s:.1f} s median")
        run.add_row("KL", f"{report.kl:.3f} nats")
        run.add_row("effective sample size", f"{report.ess_fraction:.1%} of the batch")
    run.add_row("bytes per version", f"{status.bytes_last:,} of {status.bytes_full:,} ({ratio:.2f}x smaller)")
    run.add_row("queue", f"{status.ledger.pending} groups pending, {status.ledger.leased} with the learner")
    run.add_row("ledger", "balanced" if status.ledger.is_balanced else "BROKEN")
    sites = Table("site", "version", "behind", "groups", "tokens/s", min_width=70)
    for site in status.sites:
        behind = status.head_version - site.policy_version
        sites.add_row(
            # A site names itself: text, never markup.
            Text(site.site),
            str(site.policy_version),
            str(behind),
            str(site.groups_accepted),
            f"{site.tokens_per_s:.0f}",
        )
    return Group(run, sites, Text("Ctrl-C stops the run cleanly", style="dim"))
