"""`heterorl backup`: has a running coordinator write a copy of its state."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from heterorl.cli.link import (
    AddressArgument,
    CaOption,
    CertOption,
    CredentialsOption,
    InsecureOption,
    KeyOption,
    find_link,
)

if TYPE_CHECKING:
    from heterorl.common.identity.tls import TlsConfig
    from heterorl.common.rpc.backup import Backup


def backup(
    address: AddressArgument = "",
    name: Annotated[
        str, typer.Option(help="Name of the directory, under the coordinator's backup_dir; the time if not given.")
    ] = "",
    credentials: CredentialsOption = None,
    ca: CaOption = "",
    cert: CertOption = "",
    key: KeyOption = "",
    insecure: InsecureOption = False,
) -> None:
    """Have a running coordinator write its state at this moment into a directory that a coordinator starts from."""
    address, tls = find_link(address, credentials=credentials, ca=ca, cert=cert, key=key, insecure=insecure)
    made = asyncio.run(_ask(address, tls=tls, name=name or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())))
    typer.echo(
        f"{made.path} on the coordinator's machine: version {made.head_version}, {made.num_payloads} payloads,"
        f" {made.num_bytes} bytes, newest row of audit {made.audit_digest or 'none'}"
    )
    typer.echo("copy it to another disk, then delete it there: its payloads share their bytes with the run's")


async def _ask(address: str, *, tls: TlsConfig, name: str) -> Backup:
    from heterorl.common.rpc.backup import BackupClient
    from heterorl.common.rpc.retry import RetryPolicy

    async with BackupClient(address, tls=tls, policy=RetryPolicy(budget_s=30.0)) as client:
        return await client.backup(name=name)
