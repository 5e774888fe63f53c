"""The commands `heterorl status`, `heterorl health` and `heterorl top`.

Invariants of `top`: if the coordinator is gone, it shows since when, with the last known state, and reconnects by
itself. It calls only read-only rpcs of an operator.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterorl.cli.connection import Link, NodeCredentialsOption, console_of, explain_link, linked, silence_grpc
from heterorl.common.api import OperatorApi, every_step
from heterorl.common.errors import ConfigError, HeterorlError, PermissionDenied
from heterorl.common.process.address import addresses
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.common import StepReport, strict_json
from heterorl.common.types.evaluation import Evaluation
from heterorl.common.types.run import RunStatus

if TYPE_CHECKING:
    from rich.console import Group

STEPS = 200
"""Newest steps that are read."""


@linked()
def status(
    link: Link, json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False
) -> None:
    """Show a run once: versions, queue, ledger, sites. Needs an operator's certificate.

    Example: `heterorl status run.example:50051 --credentials certs/operator-me`. The command
    `heterorl certs issue operator me` makes that directory.
    """
    from heterorl.cli.live.run_tables import evaluation_tables, status_json, status_tables

    view = View(address="")
    answer = link.ask(lambda run: _read(view, run))
    evaluations = tuple(view.evaluations[key] for key in sorted(view.evaluations))
    if json_:
        typer.echo(strict_json({**status_json(answer), "evaluations": evaluations}, indent=2))
    else:
        console = console_of()
        console.print(*status_tables(answer, reports=view.reports))
        console.print(*evaluation_tables(evaluations))


@linked(credentials=NodeCredentialsOption)
def health(
    link: Link, timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=0.1)] = 5.0
) -> None:
    """Ask a coordinator whether it serves.

    It is for health checks of containers and load balancers. Any certificate of the run will do.

    Exit code 0: it serves. 1: it does not, is stopping, or cannot be reached. 2: an option is wrong.
    """
    silence_grpc()
    from heterorl.common.rpc.channel import Answer, check_health

    address, tls = link.find()

    async def ask_all() -> list[Answer]:
        return await asyncio.gather(*(check_health(e, tls=tls, timeout_s=timeout) for e in addresses(address)))

    answers = asyncio.run(ask_all())
    # One of two coordinators stands by.
    good = [answer.reason for answer in answers if answer.is_serving]
    known = None if good else asyncio.run(explain_link(address, tls=tls))
    words = good[0] if good else " -> ".join(known or ["; ".join(answer.reason for answer in answers)])
    console_of(stderr=not good).print(words, soft_wrap=True)
    raise typer.Exit(0 if good else 1)


CALL_S = 5.0
WINDOW = 60
"""Polls that rates are computed over."""
RATE_S = 10.0
"""Shortest time that rates are computed over."""
LINE = 40
"""Steps that a curve shows."""


@dataclass(slots=True, kw_only=True)
class View:
    """The known state of a run.

    `unreachable_since` is in seconds since the epoch, None while it answers. `marks` are (monotonic seconds, head
    version, trained groups) of the newest polls.
    """

    address: str
    status: RunStatus | None = None
    reports: tuple[StepReport, ...] = ()
    unreachable_since: float | None = None
    problem: str = ""
    marks: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    evaluations: dict[tuple[int, str], Evaluation] = field(default_factory=dict)


async def _read(view: View, api: OperatorApi) -> RunStatus:
    """Read the status, and into the view the newest steps and evaluations."""
    from heterorl.cli.live.run_tables import read_evaluations

    status = await api.get_status()
    before = view.status
    if before is not None and (
        (before.run_id, before.epoch) != (status.run_id, status.epoch) or before.head_version > status.head_version
    ):
        # A restored run, or one that lost versions with its learner, has not all that is known here.
        view.marks.clear()
        view.evaluations.clear()
    if before is None or before.last_report != status.last_report:
        last = status.last_report
        found = () if last is None else await every_step(api, after=max(0, last.step - STEPS))
        view.reports = tuple({report.step: report for report in found}.values())
    await read_evaluations(api, view.evaluations)
    return status


async def poll(view: View, api: OperatorApi, *, wall: float, monotonic: float) -> None:
    """Ask once; note the answer, or since when there is none.

    Raises PermissionDenied without an operator's certificate, ConfigError for certificates that cannot be used.
    """
    try:
        async with asyncio.timeout(CALL_S):
            status = await _read(view, api)
    except (PermissionDenied, ConfigError):
        raise
    except (HeterorlError, TimeoutError) as error:
        # The transport's words without the retry budget, which is 0 here.
        words = Exception.__str__(error).rpartition("no answer in 0 s, last ")[2]
        view.problem = words or f"no answer in {CALL_S:g} s"
        if view.unreachable_since is None:
            view.unreachable_since = wall
        view.marks.clear()
        return
    view.status, view.unreachable_since, view.problem = status, None, ""
    view.marks.append((monotonic, status.head_version, status.ledger.consumed))


def frame(view: View, *, wall: float, is_unicode: bool = False) -> Group:
    """One picture of the run.
    `wall` is in seconds since the epoch."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from heterorl.cli.live.run_tables import evaluation_tables, status_tables
    from heterorl.cli.live.step_curves import series
    from heterorl.report.figures import sparkline

    head = Text(f"{view.address}  {_time(wall)}  ")
    if view.unreachable_since is None:
        head.append("reachable", style="green")
    else:
        since = f"unreachable since {_time(view.unreachable_since)} ({wall - view.unreachable_since:.0f} s): "
        head.append(since + view.problem, style="bold red")
    if view.status is None:
        return Group(head, Text("no answer from the coordinator yet"))
    # What does not fit on the screen is cut off at its end: details, which change least.
    run, work, *rest = status_tables(view.status, reports=view.reports)
    rates = _rates(view)
    if rates:
        run.add_row("rate", rates)
    parts: list[Any] = [head, run, work]
    if view.reports:
        curves = Table("of the steps", "newest", f"last {LINE}", title="training")
        for name, newest, values in series(view.reports):
            # Users name the parts of a reward, so markup is off.
            curves.add_row(Text(name), newest, sparkline(values[-LINE:], is_unicode=is_unicode))
        parts.append(curves)
    return Group(*parts, *evaluation_tables(view.evaluations.values()), *rest)


def _rates(view: View) -> str:
    if len(view.marks) < 2:
        return ""
    (start, version, groups), (end, version_now, groups_now) = view.marks[0], view.marks[-1]
    if end - start < RATE_S:
        return ""
    minutes = (end - start) / 60
    return f"{(version_now - version) / minutes:.1f} versions and {(groups_now - groups) / minutes:.0f} groups a minute"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).astimezone().strftime("%H:%M:%S")


@linked()
def top(
    link: Link,
    interval: Annotated[float, typer.Option(help="Seconds between two refreshes.", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit; code 1 if unreachable.")] = False,
) -> None:
    """Watch a run live; reconnects when the coordinator restarts.

    It shows versions, learner, queue, ledger, bytes, sites and curves.
    """
    from rich.live import Live

    silence_grpc()
    from heterorl.common.rpc.calls import RetryPolicy
    from heterorl.common.rpc.client import CoordinatorClient

    address, tls = link.find()
    console = console_of()
    is_unicode = console.encoding.lower().startswith("utf")
    view = View(address=address)
    clock = SystemClock()

    async def watch(show: Callable[[Group], None]) -> None:
        reason = ""
        async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=0.0)) as client:
            while True:
                was_reachable = view.unreachable_since is None
                await poll(view, client, wall=clock.wall(), monotonic=clock.monotonic())
                if was_reachable and view.unreachable_since is not None:
                    reason = " -> ".join(await explain_link(address, tls=tls) or ())
                if view.unreachable_since is not None:
                    view.problem = reason or view.problem
                show(frame(view, wall=clock.wall(), is_unicode=is_unicode))
                if once:
                    return
                await clock.sleep(interval)

    if once:
        asyncio.run(watch(console.print))
        raise typer.Exit(int(view.unreachable_since is not None))
    # Each picture begins at the top of the screen; lines that do not fit are left out, not scrolled.
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            asyncio.run(watch(lambda picture: live.update(picture, refresh=True)))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
