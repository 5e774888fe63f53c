"""How an operator's one-shot commands reach a coordinator: the options that name certificates, and one call.

Guarantees: whatever goes wrong ends in an error that says which option to change. Must never fall back to plaintext.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from services.common.rpc.client import CoordinatorClient
    from services.common.tls import TlsConfig

ResultT = TypeVar("ResultT")
BUDGET_S = 5.0

AddressArgument = Annotated[str, typer.Argument(help="host:port of the coordinator.")]
CredentialsOption = Annotated[
    Path | None,
    typer.Option(help="Directory of ca.crt, node.crt and node.key, as `heterorl join` makes it."),
]
CaOption = Annotated[str, typer.Option(help="PEM file of the run's authority; without --credentials.")]
CertOption = Annotated[str, typer.Option(help="PEM file of an operator's certificate.")]
KeyOption = Annotated[str, typer.Option(help="PEM file of its private key.")]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Plaintext; for a coordinator on loopback.")]


def link_files(address: str, *, credentials: Path | None, ca: str, cert: str, key: str, insecure: bool) -> TlsConfig:
    """What a command's options say about the link to `address`.

    Raises:
        ConfigError: the address is not host:port, no certificates are named, or they are named twice.
    """
    from services.common.errors import ConfigError
    from services.common.tls import TlsConfig, check_address, files_in

    check_address("ADDRESS", address)
    stated = [name for name, value in (("--ca", ca), ("--cert", cert), ("--key", key)) if value]
    if credentials is not None:
        if stated:
            raise ConfigError("--credentials", f"is given together with {stated[0]}", action="remove one of them")
        return TlsConfig(**files_in(credentials), insecure=insecure)
    if not insecure and len(stated) < 3:
        missing = next(name for name, value in (("ca", ca), ("cert", cert), ("key", key)) if not value)
        action = "name an operator's directory by --credentials, or all of --ca, --cert and --key; `heterorl join`"
        raise ConfigError(
            f"tls.{missing}", "is not set, and the link needs certificates", action=f"{action} with its token makes it"
        )
    return TlsConfig(ca=ca, cert=cert, key=key, insecure=insecure)


def ask(address: str, *, tls: TlsConfig, call: Callable[[CoordinatorClient], Awaitable[ResultT]]) -> ResultT:
    """Connect, make one call, and return its answer.

    Raises:
        HeterorlError: the coordinator's refusal, or that it cannot be reached.
    """
    from services.common.errors import Unreachable
    from services.common.rpc.client import CoordinatorClient
    from services.common.rpc.retry import RetryPolicy

    async def run() -> ResultT:
        async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=BUDGET_S)) as client:
            return await call(client)

    try:
        return asyncio.run(run())
    except Unreachable as error:
        # Nothing is kept and tried again here, other than by a service.
        hint = "check host and port, and that the coordinator runs"
        if tls.insecure:
            hint += "; one with certificates refuses --insecure: use --credentials"
        raise Unreachable(error.args[0], action=hint) from error
