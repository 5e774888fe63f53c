"""`heterorl backup`: has a running coordinator write a copy of its state; `heterorl restore`: a new place for one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from heterorl.cli.link import (
    AddressArgument,
    CaOption,
    CertOption,
    CredentialsOption,
    InsecureOption,
    KeyOption,
    find_link,
)
from heterorl.cli.service_config import load_service

if TYPE_CHECKING:
    from heterorl.common.identity.tls import TlsConfig
    from heterorl.common.rpc.roles import Backup


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
    from heterorl.common.rpc.retry import RetryPolicy
    from heterorl.common.rpc.roles import BackupClient

    async with BackupClient(address, tls=tls, policy=RetryPolicy(budget_s=30.0)) as client:
        return await client.backup(name=name)


def restore(
    source: Annotated[Path, typer.Argument(help="A backup, or the data_dir of a coordinator that was stopped.")],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file of the coordinator that will serve it.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key: `--set section.key=value`.")
    ] = None,
) -> None:
    """Put a backup where a coordinator will start from it: a new data_dir, and an empty database at store.url.

    A backup is of no particular store: one of a run in SQLite goes into PostgreSQL, and the other way round.
    """
    loaded = load_service("coordinator", config, set_ or ())
    from heterorl.coordinator.offline.restore import restore as put

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, markup=False, highlight=False), transient=True) as progress:
        bar = progress.add_task("payloads", total=None)
        found = put(
            source,
            run_id=loaded.run_id,
            data_dir=loaded.data_dir,
            url=loaded.store.url,
            now=time.time(),
            advance=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    place = "the database of store.url" if loaded.store.url else "SQLite"
    typer.echo(
        f"run {found.run_id} is in {loaded.data_dir} and {place}: version {found.head_version}, {found.num_groups}"
        f" groups that wait, {found.num_payloads} payloads, newest row of audit {found.audit_digest}"
    )
    for digest in found.missing:
        typer.echo(f"payload {digest[:12]} is not whole in the backup and was left out; the run goes on without it")
    typer.echo(
        "what was acknowledged after the backup is gone: let the coordinator that had it never start again. A sampler"
        f" that saw a version above {found.head_version} ends and asks for its operator, who agrees there, once, by"
        f" `heterorl accept-rewind {found.run_id}:{found.head_version} --config sampler.toml`"
    )
