"""The command `heterorl certs`. Imports cryptography when a subcommand runs, so that `--help` is instant."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from services.certs.token_cli import app as token
from services.certs.token_cli import serve

app = typer.Typer(
    help="Certificates of a run, from a private authority in a directory: who may be learner, sampler or operator.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

RoleName = Literal["coordinator", "learner", "sampler", "operator"]
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
    from services.certs.directory import Authority

    Authority(directory).init(run=run, now=_now(), lifetime=datetime.timedelta(days=days))
    _print(f"authority of run {run} in {directory}; next: heterorl certs issue coordinator main --host NAME")


@app.command("issue")
def issue(
    role: Annotated[RoleName, typer.Argument(help="What the node is.")],
    site: Annotated[str, typer.Argument(help="Name of its site; a sampler's `site`.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address that the coordinator is dialled by; repeat for more."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the node's files; ROLE-SITE in --dir.")] = None,
    directory: DirOption = DIRECTORY,
    days: DaysOption = DAYS,
) -> None:
    """Issue a key and a certificate for one node: ca.crt, node.crt and node.key, to be copied to it."""
    from services.certs.directory import Authority
    from services.common.identity import Role

    lifetime = datetime.timedelta(days=days)
    authority = Authority(directory)
    target = authority.issue(role=Role(role), site=site, hosts=host or (), out=out, now=_now(), lifetime=lifetime)
    _print(f"{role} {site}: {target}")
    for key, name in (("ca", "ca.crt"), ("cert", "node.crt"), ("key", "node.key")):
        _print(f'  tls.{key} = "{target / name}"')
    if role == "coordinator":
        _print(f'  tls.revoked = "{authority.revoked_path}"')


@app.command("renew")
def renew(
    node: Annotated[Path, typer.Argument(help="Directory of a node's files, as `issue` made it.")],
    directory: DirOption = DIRECTORY,
    days: DaysOption = DAYS,
) -> None:
    """Replace a node's certificate and key in place. Running nodes take new files up without dropping a call."""
    from services.certs.directory import Authority

    Authority(directory).renew(node, now=_now(), lifetime=datetime.timedelta(days=days))
    _print(f"renewed: {node}; copy node.key and node.crt to the node if they live elsewhere")


@app.command("revoke")
def revoke(
    what: Annotated[
        str, typer.Argument(help="Serial number or certificate file; a node's directory means all its certificates.")
    ],
    directory: DirOption = DIRECTORY,
) -> None:
    """Refuse a certificate from the next call on, wherever the coordinator's `tls.revoked` names this list."""
    from services.certs.directory import Authority

    authority = Authority(directory)
    for identity in authority.revoke(what):
        _print(f"revoked: {identity.uri} ({identity.serial:x})")
    _print(f"list: {authority.revoked_path}")


@app.command("list")
def list_(directory: DirOption = DIRECTORY) -> None:
    """Show every certificate of an authority, the one that expires first on top."""
    from services.certs.directory import Authority

    now = _now()
    table = Table(title="certificates")
    for column in ("role", "site", "expires (UTC)", "days left", "state", "serial"):
        table.add_column(column, no_wrap=column not in {"site", "serial"}, overflow="fold")
    for entry in Authority(directory).list():
        left = (entry.expires - now).days
        state = entry.state(now)
        if state == "valid" and left < WARN_DAYS:
            state = "renew now"
        expires = entry.expires.strftime("%Y-%m-%d %H:%M")
        identity = entry.identity
        table.add_row(identity.role, identity.site, expires, str(max(left, 0)), state, f"{identity.serial:x}")
    Console(markup=False, emoji=False, highlight=False).print(table)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _print(text: str) -> None:
    Console(markup=False, emoji=False, highlight=False).print(text, soft_wrap=True)
