"""What an operator orders of a run: rollback, a site's release, backup, restore, and a sampler's agreement to a rewind.

A sampler's agreement (`accept-rewind`) is given at its site: no coordinator can order it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterorl.cli.check_config import load_service
from heterorl.cli.connection import Link, bytes_bar, console_of, linked
from heterorl.common.errors import ConfigError, OperatorError, UnknownVersion

if TYPE_CHECKING:
    from heterorl.common.identity.tls import TlsConfig
    from heterorl.common.rpc.maintenance import Backup

NEWEST = 20
"""Versions that `rollback --list` shows where no number is given."""


@linked()
def rollback(
    link: Link,
    to: Annotated[
        int | None, typer.Option(help="Version whose weights are wanted; -1 takes an order back.", min=-1)
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Show the versions that one can go back to, with their held-out results.")
    ] = False,
    last: Annotated[
        int, typer.Option(help="Of --list: so many of the newest, and the best of each set.", min=1)
    ] = NEWEST,
    all_: Annotated[bool, typer.Option("--all", help="Of --list: every version.")] = False,
) -> None:
    """Have the learner publish the weights of an earlier version as the next one, with a new optimizer."""
    if (to is None) == (not list_):
        raise ConfigError("--to", "name one of --to and --list", action="--list shows which versions --to can name")
    if to is None:
        from heterorl.cli.live.run_tables import read_versions, shown, versions_table

        found = link.ask(read_versions)
        lines = shown(found, num=None if all_ else last)
        console_of().print(versions_table(lines) if lines else "no version but the newest can be rebuilt")
        if len(lines) < len(found):
            typer.echo(f"{len(found) - len(lines)} more: --last N or --all shows them")
        return
    try:
        head = link.ask(lambda run: run.rollback(to_version=to, request_id=secrets.token_hex(8)))
    except UnknownVersion as error:
        # What a service should do then is pull another one; an operator chooses again.
        action = "`heterorl rollback --list` shows the versions that one can go back to"
        raise UnknownVersion(error.args[0], action=action) from error
    said = f"the learner goes back to version {to} at its next step" if to >= 0 else "no order is left"
    typer.echo(f"{said}; the head is version {head}")


sites = typer.Typer(help="The sites of a run.", no_args_is_help=True)


@sites.command("release")
@linked()
def sites_release(
    site: Annotated[str, typer.Argument(help="Name of the site.")],
    reason: Annotated[str, typer.Option(help="Why it may come back; kept in the log of audit.")],
    link: Link,
) -> None:
    """End a site's quarantine and forget its failures; it gets work again at its next call."""
    from heterorl.common.types.common import SiteId

    request_id = secrets.token_hex(8)
    before = link.ask(lambda run: run.release_site(site=SiteId(site), reason=reason, request_id=request_id))
    free = f"{site} was not in quarantine; its failures are forgotten"
    typer.echo(f"{site} is released; it was in quarantine because {before}" if before else free)


def accept_rewind(
    rewind: Annotated[
        str, typer.Argument(metavar="RUN:VERSION", help="The run, and the version that the run's operator restored.")
    ],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file of the sampler; it must not be running.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key: `--set section.key=value`.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Agree, at a site, that a run went back to an earlier version: its sampler forgets the later ones that it saw.

    Only for a run whose operator says that it was restored from a backup of that version. Agreed once, for this once: a
    run that goes back again is refused again. Signatures are checked as before.
    """
    run, _, number = rewind.rpartition(":")
    if not run or not number.isdecimal():
        raise ConfigError("RUN:VERSION", f"{rewind} is no run and version", action="write it as math-run:120")
    loaded = load_service("sampler", config, set_ or ())
    from heterorl.sampler.trust_record import agree, differences

    found = differences(loaded.state_dir, run=run, to_version=int(number))
    for words in found:
        typer.echo(words)
    if not found:
        raise OperatorError(f"nothing above version {number} was seen here", action="start the sampler")
    if not yes:
        typer.confirm(f"Did the operator of run {run} say that it was restored at version {number}?", abort=True)
    agree(loaded.state_dir, run=run, to_version=int(number))
    typer.echo(f"run {run} may go on from version {number}; start the sampler")


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
    from heterorl.cli.verify_data_dir import verify_log

    raise typer.Exit(verify_log(directory, expected=expect, say=typer.echo))


@audit.command("show")
def audit_show(
    directory: DirectoryArgument,
    subject: Annotated[str, typer.Option(help="Only rows of this site, serial number or holder.")] = "",
) -> None:
    """Print the log, one row a line."""
    from heterorl.cli.verify_data_dir import show_log

    show_log(directory, subject=subject, say=typer.echo)


@linked()
def backup(
    link: Link,
    name: Annotated[
        str, typer.Option(help="Name of the directory, under the coordinator's backup_dir; the time if not given.")
    ] = "",
) -> None:
    """Have a running coordinator write its state at this moment into a directory that a coordinator starts from."""
    address, tls = link.find()
    made = asyncio.run(_ask(address, tls=tls, name=name or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())))
    typer.echo(
        f"{made.path} on the coordinator's machine: version {made.head_version}, {made.num_payloads} payloads,"
        f" {made.num_bytes} bytes, newest row of audit {made.audit_digest or 'none'}"
    )
    typer.echo("copy it to another disk, then delete it there: its payloads share their bytes with the run's")


async def _ask(address: str, *, tls: TlsConfig, name: str) -> Backup:
    from heterorl.common.rpc.maintenance import BackupClient
    from heterorl.common.rpc.retry import RetryPolicy

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
    from heterorl.coordinator.offline.restore_backup import restore as put

    with bytes_bar("payloads") as advance:
        found = put(
            source,
            run_id=loaded.run_id,
            data_dir=loaded.data_dir,
            url=loaded.store.url,
            now=time.time(),
            advance=advance,
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
