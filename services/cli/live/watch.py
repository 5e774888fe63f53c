"""One look at a run: its state, and whether its coordinator serves."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from heterorl.cli.link import (
    AddressArgument,
    CaOption,
    CertOption,
    CredentialsOption,
    InsecureOption,
    KeyOption,
    ask,
    explain_link,
    find_link,
    silence_grpc,
)

if TYPE_CHECKING:
    from heterorl.common.rpc.client import CoordinatorClient
    from heterorl.common.types.common import StepReport
    from heterorl.common.types.evaluation import Evaluation
    from heterorl.common.types.run import RunStatus

STEPS = 200
"""Newest steps among which an accuracy is looked for."""


def status(
    address: AddressArgument = "",
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    credentials: CredentialsOption = None,
    ca: CaOption = "",
    cert: CertOption = "",
    key: KeyOption = "",
    insecure: InsecureOption = False,
) -> None:
    """Show a run: versions, queue, ledger, sites. Needs an operator's certificate: `heterorl certs issue operator`."""
    from heterorl.cli.live.evaluations import evaluation_tables
    from heterorl.cli.live.status import plain, status_json, status_tables

    address, tls = find_link(address, credentials=credentials, ca=ca, cert=cert, key=key, insecure=insecure)
    answer, reports, evaluations = ask(address, tls=tls, call=_look)
    if json_:
        typer.echo(json.dumps({**status_json(answer), "evaluations": plain(evaluations)}, indent=2))
    else:
        console = console_of()
        scored = [report.evaluation_accuracy for report in reports if report.evaluation_accuracy is not None]
        console.print(*status_tables(answer, width=console.width, accuracy=scored[-1] if scored else None))
        console.print(*evaluation_tables(evaluations))


async def _look(run: CoordinatorClient) -> tuple[RunStatus, tuple[StepReport, ...], tuple[Evaluation, ...]]:
    """The state of the run, its newest steps, one of which knows the accuracy, and its evaluations."""
    from heterorl.cli.live.evaluations import read_evaluations

    status = await run.get_status()
    known: dict[tuple[int, str], Evaluation] = {}
    await read_evaluations(run, known)
    evaluations = tuple(known[key] for key in sorted(known))
    if status.last_report is None:
        return status, (), evaluations
    steps = await run.list_steps(after_step=max(0, status.last_report.step - STEPS), limit=STEPS)
    return status, steps, evaluations


def health(
    address: AddressArgument = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=0.1)] = 5.0,
    credentials: CredentialsOption = None,
    ca: CaOption = "",
    cert: Annotated[str, typer.Option(help="PEM file of a certificate of the run, the coordinator's own too.")] = "",
    key: KeyOption = "",
    insecure: InsecureOption = False,
) -> None:
    """Ask a coordinator whether it serves; for health checks of containers and load balancers.

    Exit code 0: it serves. 1: it does not, is stopping, or cannot be reached. 2: an option is wrong.
    """
    silence_grpc()
    from heterorl.common.rpc.link import check_health

    address, tls = find_link(address, credentials=credentials, ca=ca, cert=cert, key=key, insecure=insecure)
    answer = asyncio.run(check_health(address, tls=tls, timeout_s=timeout))
    known = None if answer.is_serving else asyncio.run(explain_link(address, tls=tls))
    console_of(stderr=not answer.is_serving).print(" -> ".join(known) if known else answer.reason, soft_wrap=True)
    raise typer.Exit(0 if answer.is_serving else 1)


def console_of(*, stderr: bool = False) -> Console:
    """A screen on which names and reasons of other machines are text, never markup."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
