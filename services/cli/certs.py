"""The command `heterorl certs`. Imports cryptography when a subcommand runs, so that `--help` is instant."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heterorl.cli.tokens import app as token
from heterorl.cli.tokens import serve

app = typer.Typer(
    help="Certificates of a run, from a private authority in a directory: who may be learner, sampler or operator.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

RoleName = Literal["coordinator", "learner", "sampler", "operator", "relay"]
DirOption = Annotated[Path, typer.Option("--dir", help="Directory of the authority; keep it off the nodes.")]
DaysOption = Annotated[int, typer.Option(help="Days until it expires.", min=1, max=398)]
DIRECTORY = Path("certs")
app.add_typer(token, name="token")
app.command("serve")(serve)
DAYS = 90
WARN_DAYS = 14


@app.command("init")
def init(
    run: Annotated[str, typer.Argument(help="Name of the run, as `run_id` of the coordinator.")],
    directory: DirOption = DIRECTORY,
    days: Annotated[int, typer.Option(help="Days until the authority expires.", min=1, max=3650)] = 1825,
) -> None:
    """Make an authority for a run. Its key, ca.key, can make any identity: back it up and show it to nobody."""
    from heterorl.certs.directory import Authority

    Authority(directory).init(run=run, now=_now(), lifetime=datetime.timedelta(days=days))
    _print(f"authority of run {run} in {directory}; next: heterorl certs issue coordinator main --host NAME")
    _print(f"revoked certificates: {directory / 'revoked'} (empty); a coordinator reads a copy of it as `tls.revoked`")


@app.command("issue")
def issue(
    role: Annotated[RoleName, typer.Argument(help="What the node is.")],
    site: Annotated[str, typer.Argument(help="Name of its site; a sampler's `site`. A relay of eu carries eu, eu.*")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address that a coordinator or relay is dialled by; repeat for more."),
    ] = None,
    coordinator: Annotated[
        str,
        typer.Option(help="host:port that the node dials; noted beside its files for `heterorl status` and others."),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Directory of the node's files; ROLE-SITE in --dir.")] = None,
    directory: DirOption = DIRECTORY,
    days: DaysOption = DAYS,
) -> None:
    """Issue a key and a certificate for one node: ca.crt, node.crt and node.key, to be copied to it."""
    from heterorl.certs.directory import PUBLIC, REVOKED, Authority, write_file
    from heterorl.common.identity.identity import Role
    from heterorl.common.identity.tls import ADDRESS_FILE
    from heterorl.common.process.address import check_address

    if coordinator:
        check_address("--coordinator", coordinator)
    lifetime = datetime.timedelta(days=days)
    authority = Authority(directory)
    target = authority.issue(role=Role(role), site=site, hosts=host or (), out=out, now=_now(), lifetime=lifetime)
    if coordinator:
        write_file(target / ADDRESS_FILE, f"{coordinator}\n".encode("ascii"), mode=PUBLIC)
    _print(f"{role} {site}: {target}")
    for key, name in (("ca", "ca.crt"), ("cert", "node.crt"), ("key", "node.key")):
        _print(f'  tls.{key} = "{target / name}"')
    if role in ("coordinator", "relay"):
        _print(f'  tls.revoked = "{target / REVOKED}"')


@app.command("renew")
def renew(
    node: Annotated[Path, typer.Argument(help="Directory of a node's files, as `issue` made it.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the new certificate, in place of those of the old one; repeat for more."),
    ] = None,
    directory: DirOption = DIRECTORY,
    days: DaysOption = DAYS,
) -> None:
    """Replace a node's certificate and key in place. Running nodes take new files up without dropping a call."""
    from heterorl.certs.directory import Authority

    old = Authority(directory).renew(node, hosts=host or (), now=_now(), lifetime=datetime.timedelta(days=days))
    _print(f"renewed: {node}; copy node.key and node.crt to the node if they live elsewhere")
    _print(f"the old one stays valid until it expires; heterorl certs revoke {old.serial:x} refuses it")


@app.command("revoke")
def revoke(
    what: Annotated[
        str, typer.Argument(help="Serial number or certificate file; a node's directory means all its certificates.")
    ] = "",
    site: Annotated[str, typer.Option(help="In place of WHAT: every certificate of this site, joined or issued.")] = "",
    role: Annotated[RoleName, typer.Option(help="Role of that site.")] = "sampler",
    directory: DirOption = DIRECTORY,
) -> None:
    """Refuse a certificate from the next call on, wherever a coordinator's `tls.revoked` names a copy of this list.

    A node that joined by token has no directory here: name it by --site and --role, or by its serial number, which
    `heterorl certs list` shows.
    """
    from heterorl.certs.directory import Authority
    from heterorl.common.errors import ConfigError
    from heterorl.common.identity.identity import Role

    if bool(what) == bool(site):
        raise ConfigError("WHAT", "name either WHAT or --site", action="`heterorl certs list` shows all of them")
    authority = Authority(directory)
    for identity in authority.revoke(what) if what else authority.revoke_node(role=Role(role), site=site):
        _print(f"revoked: {identity.uri} ({identity.serial:x})")
    _print(f"list: {authority.revoked_path}")
    for copy in authority.copies():
        _print(f"copy: {copy}")
    _print("now copy the list to the coordinator, over the file that its `tls.revoked` names; it counts from the next")
    _print("call on, without a restart. Without `tls.revoked` nothing is refused: `heterorl doctor` there says so.")


@app.command("list")
def list_(directory: DirOption = DIRECTORY) -> None:
    """Show every certificate of an authority, the one that expires first on top."""
    from heterorl.certs.directory import Authority

    now = _now()
    rows = []
    for entry in Authority(directory).list():
        left = (entry.expires - now).days
        state = entry.state(now)
        if state == "valid" and left < WARN_DAYS:
            state = "renew now"
        expires = entry.expires.strftime("%Y-%m-%d %H:%M")
        identity = entry.identity
        serial, hosts = f"{identity.serial:x}", ", ".join(entry.hosts)
        rows.append((identity.role, identity.site, expires, str(max(left, 0)), state, serial, hosts))
    console = Console(markup=False, emoji=False, highlight=False)
    whole = _table(rows, num_columns=7 if any(hosts for *_, hosts in rows) else 6)
    if Console(width=1000, markup=False).measure(whole).maximum <= console.width:
        console.print(whole)
        return
    # A serial number is there to be copied: it stays in one piece, on a line of its own where the screen is narrow.
    console.print(_table(rows, num_columns=5))
    console.print("serial numbers, in the same order:")
    for role, site, *_, serial, hosts in rows:
        console.print(f"  {serial}  {role} {site} {hosts}".rstrip(), soft_wrap=True)


def _table(rows: Sequence[tuple[str, ...]], *, num_columns: int) -> Table:
    table = Table(title="certificates", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("role", "site", "expires (UTC)", "days left", "state", "serial", "hosts")[:num_columns]:
        table.add_column(heading, no_wrap=heading != "site", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row[:num_columns]))
    return table


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _print(text: str) -> None:
    Console(markup=False, emoji=False, highlight=False).print(text, soft_wrap=True)
