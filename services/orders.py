"""What an operator orders of a run: going back to the weights of an earlier version."""

from __future__ import annotations

import asyncio
import secrets
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
