"""Commands that steer a run: rollback, release, backup, restore, audit, accept-rewind.

A person gives the consent (`accept-rewind`) at the sampler's site: no coordinator can order it.
"""

from __future__ import annotations

import datetime
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from heterorl.cli.check_config import SetOption, load_service
from heterorl.cli.connection import Link, bytes_bar, console_of, linked
from heterorl.common.errors import ConfigError, OperatorError, RunFinished, UnknownVersion
from heterorl.common.process.files import refuse_root
from heterorl.common.types.common import SiteId, amount
from heterorl.common.types.policy import version_words
from heterorl.common.types.run import RunStatus


@linked()
def rollback(
    link: Link,
    to: Annotated[
        int | None,
        typer.Option(help="Version whose weights to publish again; -1 cancels the order.", min=-1, max=2**63 - 1),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Show the versions to roll back to, with their held-out results.")
    ] = False,
) -> None:
    """Order the learner to publish an earlier version's weights again.

    The weights become the next version; the optimizer starts fresh.

    Example: `heterorl rollback --list`, then `heterorl rollback --to 120`
    """
    if (to is None) == (not list_):
        raise ConfigError("--to", "give one of --to and --list", action="--list shows the versions that --to accepts")
    if to is None:
        from heterorl.cli.live.run_tables import read_versions, versions_table

        found = link.ask(read_versions)
        console_of().print(versions_table(found) if found else "only the newest version can be rebuilt")
        return

    async def order(run: Any) -> tuple[RunStatus, int]:
        return await run.get_status(), await run.rollback(to_version=to, request_id=secrets.token_hex(8))

    try:
        before, head = link.ask(order)
    except UnknownVersion as error:
        # The error's own action is for a service, which would pull another version.
        action = "`heterorl rollback --list` shows the versions to choose from"
        raise UnknownVersion(error.args[0], action=action) from error
    except RunFinished as error:
        raise RunFinished(error.args[0], action="raise it and start the coordinator again, then order") from error
    if to < 0:
        said = "the order is cancelled" if before.rollback_to >= 0 else "no order is open"
    elif before.learner:
        said = f"the learner goes back to version {to} at its next step"
    else:
        run = "the run is complete and" if before.is_draining else "the run"
        said = f"{run} has no learner: one that starts goes back to version {to}"
    typer.echo(f"{said}; the run is at {version_words(head)}")


sites = typer.Typer(help="Release sites of a run from quarantine.", no_args_is_help=True)


@sites.command("release")
@linked()
def sites_release(
    site: Annotated[str, typer.Argument(help="Name of the site.")],
    reason: Annotated[str, typer.Option(help="Why it may come back; written to the audit log.")],
    link: Link,
) -> None:
    """End a site's quarantine and reset its failure count.

    The site gets work again at its next call.
    """

    request_id = secrets.token_hex(8)
    before = link.ask(lambda run: run.release_site(site=SiteId(site), reason=reason, request_id=request_id))
    free = f"{site} was not in quarantine; its failure count is reset"
    typer.echo(f"{site} is released; it was in quarantine because {before}" if before else free)


def accept_rewind(
    rewind: Annotated[
        str, typer.Argument(metavar="RUN:VERSION", help="The run, and the version its operator restored.")
    ],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file of the sampler; it must not run.")
    ] = None,
    set_: SetOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Agree, at a site, to a run's rewind to an earlier version.

    The site's sampler forgets the later versions it saw. Use it only if the run's operator says that the run was
    restored from a backup of that version. It holds for this one rewind: the sampler refuses a second one. It checks
    signatures as before.
    """
    run, _, number = rewind.rpartition(":")
    if not run or not number.isdecimal():
        raise ConfigError("RUN:VERSION", f"{rewind!r} is not RUN:VERSION", action="write it as math-run:120")
    loaded = load_service("sampler", config, set_ or ())
    from heterorl.sampler.trust_record import agree, differences

    found = differences(loaded.state_dir, run=run, to_version=int(number))
    for words in found:
        typer.echo(words)
    if not found:
        raise OperatorError(f"the sampler saw no version above {number}", action="start the sampler")
    if not yes:
        question = f"Did the operator of run {run} say that it was restored at version {number}?"
        try:
            typer.confirm(question, abort=True)
        except typer.Abort:
            raise OperatorError("not agreed, nothing is changed", action="answer y, or repeat it with --yes") from None
    agree(loaded.state_dir, run=run, to_version=int(number))
    typer.echo(f"run {run} may go on from version {number}; start the sampler")


audit = typer.Typer(help="The audit log of a coordinator, read offline.", no_args_is_help=True)
DirectoryArgument = Annotated[Path, typer.Argument(help="A stopped coordinator's data_dir (PostgreSQL: a backup).")]


@audit.command("verify")
def audit_verify(
    directory: DirectoryArgument,
    expect: Annotated[str, typer.Option(help="A digest noted earlier; the log must contain it.")] = "",
) -> None:
    """Check every link of the audit log and print the newest digest.

    Note the digest elsewhere. Exit code 2 on a fault.
    """
    from heterorl.cli.verify_data_dir import verify_log

    raise typer.Exit(verify_log(directory, expected=expect))


@audit.command("show")
def audit_show(
    directory: DirectoryArgument,
    subject: Annotated[str, typer.Option(help="Only rows about this site, serial number or holder.")] = "",
) -> None:
    """Print the audit log, one row a line."""
    from heterorl.cli.verify_data_dir import show_log

    show_log(directory, subject=subject)


@linked()
def backup(
    link: Link,
    name: Annotated[
        str,
        typer.Option(
            help="Name of the directory under the coordinator's backup_dir; default: the time. A backup of that name"
            " stays as it is: give each its own."
        ),
    ] = "",
) -> None:
    """Have a running coordinator back up its current state.

    A coordinator can start from the directory that it writes.
    """
    from heterorl.common.rpc.maintenance import BackupClient

    name = name or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    made = link.ask(lambda client: client.backup(name=name), client=BackupClient)
    if made.existed_since:
        since = datetime.datetime.fromtimestamp(made.existed_since, tz=datetime.UTC).isoformat(timespec="seconds")
        typer.echo(f"backup {name} exists since {since}; nothing new was written")
    typer.echo(
        f"{made.path} on the coordinator's machine: {version_words(made.head_version)},"
        f" {amount(made.num_payloads, 'payload')}, {made.num_bytes} bytes,"
        f" newest audit row {made.audit_digest or 'none'}"
    )
    typer.echo("copy it to another disk, then delete it there: on the run's disk its payloads are hard links")


def restore(
    source: Annotated[Path, typer.Argument(help="A backup, or the data_dir of a stopped coordinator.")],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file of the coordinator that will serve it.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Restore a backup into a new data_dir.

    If store.url is set, it also fills that database, which must be empty. Any store takes any backup: one of SQLite
    goes into PostgreSQL, and the reverse.
    """
    loaded = load_service("coordinator", config, set_ or ())
    refuse_root(loaded.data_dir)
    from heterorl.coordinator.offline.restore_backup import restore as put

    with bytes_bar("payloads") as bar:
        found = put(
            source, run_id=loaded.run_id, data_dir=loaded.data_dir, url=loaded.store.url, now=time.time(), advance=bar
        )
    place = "the database of store.url" if loaded.store.url else "SQLite"
    typer.echo(
        f"run {found.run_id} is in {loaded.data_dir} and {place}: {version_words(found.head_version)},"
        f" {amount(found.num_groups, 'group')} that wait, {amount(found.num_payloads, 'payload')},"
        f" newest audit row {found.audit_digest}"
    )
    for digest in found.missing:
        typer.echo(f"payload {digest[:12]} is incomplete in the backup and was left out; the run works without it")
    typer.echo("groups acknowledged after the backup are lost: never start the old coordinator again")
    if found.head_version < 0:
        typer.echo("a sampler that saw a version ends; give it a new state_dir")
        return
    typer.echo(
        f"a sampler that saw a version above {found.head_version} ends; its operator agrees there, once, with"
        f" `heterorl accept-rewind {found.run_id}:{found.head_version} --config sampler.toml`"
        " with the service's `--set state_dir=DIR`"
    )
