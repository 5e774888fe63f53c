"""The commands `heterorl certs` and `heterorl join`.

They import cryptography when they run.
"""

from __future__ import annotations

import asyncio
import datetime
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from heterorl.cli.connection import ADDRESS_VARIABLE, console_of
from heterorl.common.errors import ConfigError
from heterorl.common.identity.tls import ADDRESS_FILE, TlsConfig, files_in
from heterorl.common.process import logs
from heterorl.common.process.address import addresses, check_address
from heterorl.common.process.config_file import quoted

app = typer.Typer(
    help="Certificates of a run, signed by a private authority in a directory.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

RoleName = Literal["coordinator", "learner", "sampler", "operator", "relay"]
DirOption = Annotated[Path, typer.Option("--dir", help="Directory of the authority; keep it off the nodes.")]
DaysOption = Annotated[int, typer.Option(help="Days until the certificate expires.", min=1, max=398)]
DIRECTORY = Path("certs")
DESK_PORT = 50052
DAYS = 90
WARN_DAYS = 14
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command("init")
def init(
    run: Annotated[str, typer.Argument(help="Name of the run: `run_id` of the coordinator.")],
    directory: DirOption = DIRECTORY,
    days: Annotated[int, typer.Option(help="Days until the authority expires.", min=1, max=3650)] = 1825,
) -> None:
    """Create a certificate authority for a run.

    Its key, ca.key, can sign any identity: back it up and keep it secret.

    Example: `heterorl certs init math-run`
    """
    from heterorl.certs.authority_directory import Authority

    Authority(directory).init(run=run, now=_now(), lifetime=datetime.timedelta(days=days))
    _print(f"authority of run {run} in {directory}; next: heterorl certs issue coordinator main --host NAME")
    _print(f"revoked certificates: {directory / 'revoked'} (empty); a coordinator reads a copy of it as `tls.revoked`")


@app.command("issue")
def issue(
    role: Annotated[RoleName, typer.Argument(help="Role of the node.")],
    site: Annotated[str, typer.Argument(help="Site of the node: a sampler's `site`. A relay of eu serves eu and eu.*")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address at which nodes dial this coordinator or relay; repeatable."),
    ] = None,
    coordinator: Annotated[
        str,
        typer.Option(
            help="host:port that the node dials; noted with its files for `heterorl status` and other commands."
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Directory for the node's files; default: ROLE-SITE in --dir.")
    ] = None,
    directory: DirOption = DIRECTORY,
    days: DaysOption = DAYS,
) -> None:
    """Issue a key and a certificate for one node.

    Copy ca.crt, node.crt and node.key to the node.

    Example: `heterorl certs issue sampler eu-1`
    """
    from heterorl.certs.authority_directory import PUBLIC, REVOKED, Authority, write_file
    from heterorl.common.identity.spiffe import Role

    if coordinator:
        check_address("--coordinator", coordinator, is_list=True)
    lifetime = datetime.timedelta(days=days)
    authority = Authority(directory)
    target = authority.issue(role=Role(role), site=site, hosts=host or (), out=out, now=_now(), lifetime=lifetime)
    if coordinator:
        write_file(target / ADDRESS_FILE, f"{coordinator}\n".encode("ascii"), mode=PUBLIC)
    _print(f"{role} {site}: {target}")
    for key, name in (("ca", "ca.crt"), ("cert", "node.crt"), ("key", "node.key")):
        _print(f"  tls.{key} = {quoted(str(target / name))}")
    _print_end(target)
    if role in ("coordinator", "relay"):
        _print(f"  tls.revoked = {quoted(str(target / REVOKED))}")
        if not host:
            _print("  # only this machine can dial it; heterorl certs renew DIRECTORY --host NAME adds others")


@app.command("renew")
def renew(
    node: Annotated[Path, typer.Argument(help="Directory of the node's files, made by `issue`.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the new certificate; repeatable. Default: the old ones."),
    ] = None,
    directory: DirOption = DIRECTORY,
    days: DaysOption = DAYS,
) -> None:
    """Replace a node's certificate and key in place.

    A running node reads the new files without dropping a call.
    """
    from heterorl.certs.authority_directory import Authority

    old = Authority(directory).renew(node, hosts=host or (), now=_now(), lifetime=datetime.timedelta(days=days))
    _print(f"renewed: {node}; copy node.key and node.crt to the node if they live elsewhere")
    _print_end(node)
    _print(f"the old one stays valid until it expires; heterorl certs revoke {old.serial:x} refuses it")


@app.command("revoke")
def revoke(
    what: Annotated[
        str, typer.Argument(help="Serial number, certificate file, or a node's directory for all its certificates.")
    ] = "",
    site: Annotated[str, typer.Option(help="Instead of WHAT: all certificates of this site.")] = "",
    role: Annotated[RoleName, typer.Option(help="Role of the node at --site.")] = "sampler",
    directory: DirOption = DIRECTORY,
) -> None:
    """Revoke a certificate; of a whole node also its unused tokens.

    Coordinator and relays refuse it from the next call, once their `tls.revoked` names a copy of this list.

    A node that joined by token has no directory here: name it by --site and --role, or by the serial number that
    `heterorl certs list` shows.
    """
    from heterorl.certs.authority_directory import Authority
    from heterorl.common.identity.spiffe import Role

    if bool(what) == bool(site):
        raise ConfigError("WHAT", "give either WHAT or --site", action="`heterorl certs list` shows all of them")
    authority = Authority(directory)
    for identity in authority.revoke(what) if what else authority.revoke_node(role=Role(role), site=site):
        _print(f"revoked: {identity.uri} ({identity.serial:x})")
    if site or Path(what).is_dir():
        _print("the node's unused tokens are deleted")
    _print(f"list: {authority.revoked_path}")
    for copy in authority.copies():
        _print(f"copy: {copy}")
    _print("now copy the list over the file that the coordinator's `tls.revoked` names; it applies from the next call,")
    _print("without a restart. Without `tls.revoked` it accepts revoked nodes: `heterorl doctor` there warns of that.")


@app.command("list")
def list_(directory: DirOption = DIRECTORY) -> None:
    """List an authority's certificates, the first to expire on top."""
    from heterorl.certs.authority_directory import Authority

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
    table = Table(title="certificates", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("role", "site", "expires (UTC)", "days left", "state"):
        table.add_column(heading, no_wrap=heading != "site", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row[:5]))
    console = console_of()
    console.print(table)
    console.print(f"the authority ends {_end(directory / 'ca.crt'):%Y-%m-%d %H:%M}")
    # They are copied, so each has a line of its own, however narrow the screen.
    console.print("serial numbers, in the same order:")
    for role, site, *_, serial, hosts in rows:
        console.print(f"  {serial}  {role} {site} {hosts}".rstrip(), soft_wrap=True)


def _print_end(target: Path) -> None:
    own, authority = (_end(target / name) for name in ("node.crt", "ca.crt"))
    _print(f"  # valid until {own:%Y-%m-%d %H:%M} UTC")
    if own == authority:
        _print("  # the authority ends then too: docs/operate.md (Certificates that expire) exchanges it")


def _end(certificate: Path) -> datetime.datetime:
    from cryptography import x509

    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _print(text: str) -> None:
    console_of().print(text, soft_wrap=True)


token_app = typer.Typer(help="One-time tokens with which nodes get their first certificate.", no_args_is_help=True)
app.add_typer(token_app, name="token")


@token_app.command("create")
def create_token(
    site: Annotated[str, typer.Option(help="Site of the node: a sampler's `site`.")],
    role: Annotated[Literal["sampler", "learner", "operator"], typer.Option(help="Role of the node.")] = "sampler",
    expires: Annotated[str, typer.Option(help="How long the token is valid: 30m, 1h, 2d.")] = "1h",
    authority: Annotated[
        str, typer.Option(help="host:port at which nodes reach `certs serve`; stored in the token.")
    ] = "",
    directory: DirOption = DIRECTORY,
    days: DaysOption = DAYS,
) -> None:
    """Print a one-time token for a node's first certificate.

    Keep it secret until it is used.

    Example: `heterorl certs token create --site eu-1 --expires 2h`
    """
    from heterorl.certs.enrolment import Enrolment
    from heterorl.common.identity.spiffe import Role

    if authority:
        check_address("--authority", authority)
    until = time.time() + parse_duration(expires)
    made = Enrolment(directory).create(role=Role(role), site=site, address=authority, days=days, expires=until)
    # The only line on standard output, for scripts.
    typer.echo(made.text())


@token_app.command("list")
def list_tokens(directory: DirOption = DIRECTORY) -> None:
    """List all tokens: node, expiry, and whether each was used."""
    from heterorl.certs.enrolment import Enrolment
    from heterorl.common.identity.spiffe import split_uri

    now = time.time()
    table = Table("token", "role", "site", "minutes left", "state", title="tokens")
    for number, row in Enrolment(directory).list():
        state = "used" if row.key else "open" if now < row.expires else "expired"
        left = "" if row.key else f"{max(0.0, row.expires - now) / 60:.0f}"
        names = split_uri(row.uri) or ("", "", "")
        table.add_row(number, names[2], names[1], left, state)
    console_of().print(table)


@token_app.command("delete")
def delete_token(
    token: Annotated[str, typer.Argument(help="Number of the token, from `list`.")], directory: DirOption = DIRECTORY
) -> None:
    """Delete a token. Its certificate stays valid: `heterorl certs revoke` refuses that."""
    from heterorl.certs.enrolment import Enrolment

    Enrolment(directory).delete(token)
    console_of().print(f"deleted: {token}")


@app.command("serve")
def serve(
    listen: Annotated[str, typer.Option(help="host:port to listen on for joining nodes.")] = f"0.0.0.0:{DESK_PORT}",
    directory: DirOption = DIRECTORY,
) -> None:
    """Answer nodes that join with a token.

    Run it on the authority's machine and stop it when all have joined. A caller needs a token and no certificate. The
    authority's key stays on this machine; the coordinator needs neither this command nor the key.
    """
    from heterorl.certs.enrolment_server import EnrolmentServer

    check_address("--listen", listen, is_listening=True)
    logs.configure(style="console")
    server = EnrolmentServer(directory)

    async def answer() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with server.listening(listen) as port:
            console_of().print(f"answering joining nodes on port {port}; Ctrl-C stops it", soft_wrap=True)
            await stop.wait()

    asyncio.run(answer())


def join(
    token: Annotated[str, typer.Option(help="Token from `heterorl certs token create`; - reads standard input.")],
    coordinator: Annotated[str, typer.Option(help="host:port of the coordinator.", envvar=ADDRESS_VARIABLE)],
    authority: Annotated[
        str,
        typer.Option(
            help=f"host:port of the authority; default: the token's, else port {DESK_PORT} on the coordinator's host."
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Directory for ca.crt, node.crt and node.key; default: ROLE-SITE here.")
    ] = None,
) -> None:
    """Get this node's certificate with a token.

    The private key is made here and never leaves this machine. The token proves the authority before anything is sent.
    If the answer got lost, run the same command again. The command prints the first lines of the node's configuration.

    Example: `heterorl join --token - --coordinator run.example:50051`
    """
    from heterorl.certs.authority_directory import PUBLIC, write_file
    from heterorl.certs.enrolment import parse_token
    from heterorl.certs.enrolment_client import join as get
    from heterorl.common.rpc.channel import Answer, check_health

    check_address("--coordinator", coordinator, is_list=True)
    parsed = parse_token(sys.stdin.read() if token == "-" else token)
    run, site, role = parsed.node
    target = out or Path(f"{role}-{site}")
    # A run with a standby has several; they have one authority.
    coordinators = addresses(coordinator)
    address = authority or parsed.address or f"{coordinators[0].rpartition(':')[0]}:{DESK_PORT}"
    check_address("--authority", address)
    asyncio.run(get(parsed, address=address, out=target))
    # Operator commands read the address from here.
    write_file(target / ADDRESS_FILE, f"{coordinator}\n".encode("ascii"), mode=PUBLIC)
    console = console_of()
    paths = files_in(target.resolve())
    for line in first_lines(run=run, site=site, role=role, coordinator=coordinator, paths=paths):
        console.print(line, soft_wrap=True)

    async def ask_all() -> list[Answer]:
        tls = TlsConfig(**paths)
        return await asyncio.gather(*(check_health(each, tls=tls, timeout_s=5.0) for each in coordinators))

    try:
        answers = asyncio.run(ask_all())
        problem = "" if any(each.is_serving for each in answers) else "; ".join(each.reason for each in answers)
    except ConfigError as error:
        problem = str(error)
    if problem:
        console_of(stderr=True).print(f"joined, but the coordinator does not answer yet: {problem}", soft_wrap=True)


def first_lines(*, run: str, site: str, role: str, coordinator: str, paths: dict[str, str]) -> list[str]:
    """First lines of a node's TOML, or an operator's next commands."""
    lines = [f"# {role} {site} of run {run}"]
    if role == "operator":
        directory = str(Path(paths["cert"]).parent)
        return [
            *lines,
            f"heterorl top {coordinator} --credentials {shlex.quote(directory)}",
            f"export HETERORL_CREDENTIALS={shlex.quote(directory)}  # then just: heterorl top",
        ]
    if role == "sampler":
        lines.append(f'site = "{site}"')
    else:
        lines += [f'run_id = "{run}"', f'holder = "{site}"']
    return [*lines, f'coordinator = "{coordinator}"', *(f"tls.{key} = {quoted(path)}" for key, path in paths.items())]


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 2d; raises ConfigError for other text."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError("--expires", f"{text!r} is not like 30m, 1h or 2d", action="give a number and m, h or d")
    return float(int(match[1]) * _UNITS[match[2]])
