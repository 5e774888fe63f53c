"""How an operator's one-shot commands reach a coordinator: the options that name certificates, and one call.

Guarantees: whatever goes wrong ends in an error that says which option to change. Must never fall back to plaintext.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from heterorl.common.identity.tls import TlsConfig
    from heterorl.common.rpc.client import CoordinatorClient

ResultT = TypeVar("ResultT")
BUDGET_S = 5.0
EXPLAIN_S = 3.0

ADDRESS_VARIABLE, CREDENTIALS_VARIABLE = "HETERORL_ADDRESS", "HETERORL_CREDENTIALS"

AddressArgument = Annotated[
    str,
    typer.Argument(
        help=f"host:port of the coordinator; default: {ADDRESS_VARIABLE}, or what `join` noted in --credentials.",
        show_default=False,
    ),
]
CredentialsOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory of ca.crt, node.crt and node.key, as `heterorl join` makes it; "
        f"default: {CREDENTIALS_VARIABLE}."
    ),
]
CaOption = Annotated[str, typer.Option(help="PEM file of the run's authority; without --credentials.")]
CertOption = Annotated[str, typer.Option(help="PEM file of an operator's certificate.")]
KeyOption = Annotated[str, typer.Option(help="PEM file of its private key.")]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Plaintext; for a coordinator on loopback.")]


def find_link(
    address: str, *, credentials: Path | None, ca: str, cert: str, key: str, insecure: bool
) -> tuple[str, TlsConfig]:
    """Address and certificates of the coordinator: what the command says, then the environment, then what `join` noted.

    Raises:
        ConfigError: an address or certificates are missing or wrong, or named twice.
    """
    from heterorl.common.errors import ConfigError
    from heterorl.common.identity.tls import noted_address

    if credentials is None and not (insecure or ca or cert or key) and os.environ.get(CREDENTIALS_VARIABLE):
        credentials = Path(os.environ[CREDENTIALS_VARIABLE])
    address = address or os.environ.get(ADDRESS_VARIABLE, "")
    if not address and credentials is not None:
        address = noted_address(credentials)
    if not address:
        action = (
            f"name host:port of the coordinator, or set {ADDRESS_VARIABLE}; `heterorl join` notes it in its directory"
        )
        raise ConfigError("ADDRESS", "is not given", action=action)
    return address, link_files(address, credentials=credentials, ca=ca, cert=cert, key=key, insecure=insecure)


def link_files(address: str, *, credentials: Path | None, ca: str, cert: str, key: str, insecure: bool) -> TlsConfig:
    """What a command's options say about the link to `address`.

    Raises:
        ConfigError: the address is not host:port, no certificates are named, or they are named twice.
    """
    from heterorl.common.errors import ConfigError
    from heterorl.common.identity.tls import TlsConfig, files_in
    from heterorl.common.process.address import check_address

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
    silence_grpc()
    from heterorl.common.errors import Unreachable
    from heterorl.common.rpc.client import CoordinatorClient
    from heterorl.common.rpc.retry import RetryPolicy

    async def run() -> ResultT:
        async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=BUDGET_S)) as client:
            return await call(client)

    try:
        return asyncio.run(run())
    except Unreachable as error:
        # Nothing is kept and tried again here, other than by a service.
        known = asyncio.run(explain_link(address, tls=tls))
        if known is not None:
            raise Unreachable(known[0], action=known[1]) from error
        hint = "check host and port, and that the coordinator runs"
        if tls.insecure:
            hint += "; one with certificates refuses --insecure: use --credentials"
        raise Unreachable(error.args[0], action=hint) from error


async def explain_link(address: str, *, tls: TlsConfig) -> tuple[str, str] | None:
    """What a handshake says about a link that failed, and what to do; None where it says nothing.

    gRPC tells names, authorities and expiry apart in a log of its own only.
    """
    from heterorl.doctor import link
    from heterorl.doctor.check import Level, Trouble

    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    found = await link.resolve(host, int(port), timeout_s=EXPLAIN_S)
    check = link.judge_dns(host, found)
    if not isinstance(found, Trouble):
        connected = await link.connect(found, int(port), timeout_s=EXPLAIN_S)
        check = link.judge_port(address, connected)
        if not isinstance(connected, Trouble) and not tls.insecure:
            shaken = await link.shake_hands(connected.address, int(port), host=host, tls=tls, timeout_s=EXPLAIN_S)
            check = link.judge_handshake(host, shaken)
    if check.level is not Level.FAIL:
        return None
    finding = check.finding if check.finding.startswith(host) else f"{address}: {check.finding}"
    return finding, check.remedy


def silence_grpc() -> None:
    """Keep gRPC's own lines from the screen of a command, which says in words what they mean; before its import."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
