"""What an operator orders of a run: going back to the weights of an earlier version, letting a site back in."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Annotated

import typer


def rollback(
    address: Annotated[str, typer.Argument(help="host:port of the coordinator.")],
    to: Annotated[int, typer.Option(help="Version whose weights are wanted; -1 takes an order back.", min=-1)],
    ca: Annotated[str, typer.Option(help="PEM file of the run's authority.")] = "",
    cert: Annotated[str, typer.Option(help="PEM file of an operator's certificate.")] = "",
    key: Annotated[str, typer.Option(help="PEM file of its private key.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Plaintext; for a coordinator on loopback.")] = False,
) -> None:
    """Have the learner publish the weights of an earlier version as the next one; its optimizer starts anew."""
    from services.common.rpc.client import CoordinatorClient
    from services.common.rpc.retry import RetryPolicy
    from services.common.tls import TlsConfig

    async def order() -> int:
        tls = TlsConfig(ca=ca, cert=cert, key=key, insecure=insecure)
        async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=5.0)) as client:
            return await client.rollback(to_version=to, request_id=secrets.token_hex(8))

    head = asyncio.run(order())
    said = f"the learner goes back to version {to} at its next step" if to >= 0 else "no order is left"
    typer.echo(f"{said}; the head is version {head}")


sites = typer.Typer(help="The sites of a run.", no_args_is_help=True)


@sites.command("release")
def sites_release(
    site: Annotated[str, typer.Argument(help="Name of the site.")],
    address: Annotated[str, typer.Argument(help="host:port of the coordinator.")],
    reason: Annotated[str, typer.Option(help="Why it may come back; kept in the log of audit.")],
    ca: Annotated[str, typer.Option(help="PEM file of the run's authority.")] = "",
    cert: Annotated[str, typer.Option(help="PEM file of an operator's certificate.")] = "",
    key: Annotated[str, typer.Option(help="PEM file of its private key.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Plaintext; for a coordinator on loopback.")] = False,
) -> None:
    """End a site's quarantine and forget its failures; it gets work again at its next call."""
    from services.common.rpc.client import CoordinatorClient
    from services.common.rpc.retry import RetryPolicy
    from services.common.tls import TlsConfig
    from services.common.types import SiteId

    async def order() -> str:
        tls = TlsConfig(ca=ca, cert=cert, key=key, insecure=insecure)
        async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=5.0)) as client:
            return await client.release_site(site=SiteId(site), reason=reason)

    before = asyncio.run(order())
    typer.echo(f"{site} is released; it was in quarantine because {before}" if before else f"{site} was not there")


audit = typer.Typer(help="A coordinator's log of audit, read offline.", no_args_is_help=True)
DirectoryArgument = Annotated[
    Path, typer.Argument(help="A coordinator's data_dir; the coordinator must not be running on it.")
]


@audit.command("verify")
def audit_verify(
    directory: DirectoryArgument,
    expect: Annotated[str, typer.Option(help="A digest noted earlier, which must be in the log.")] = "",
) -> None:
    """Check every link of the log; prints the newest digest, to be noted elsewhere. Exit code 2 on any fault."""
    from services.coordinator.audit_command import verify_log

    raise typer.Exit(verify_log(directory, expected=expect, say=typer.echo))


@audit.command("show")
def audit_show(
    directory: DirectoryArgument,
    subject: Annotated[str, typer.Option(help="Only rows of this site, serial number or holder.")] = "",
) -> None:
    """Print the log, one row a line."""
    from services.coordinator.audit_command import show_log

    show_log(directory, subject=subject, say=typer.echo)
