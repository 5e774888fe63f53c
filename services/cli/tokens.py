"""The commands `heterorl certs token`, `heterorl certs serve` and `heterorl join`."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from heterorl.common.errors import ConfigError
from heterorl.common.process.address import check_address

DESK_PORT = 50052
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DirOption = Annotated[Path, typer.Option("--dir", help="Directory of the authority; keep it off the nodes.")]
DIRECTORY = Path("certs")

app = typer.Typer(help="Tokens by which nodes get their first certificate themselves.", no_args_is_help=True)


@app.command("create")
def create(
    site: Annotated[str, typer.Option(help="Name of the node's site; a sampler's `site`.")],
    role: Annotated[Literal["sampler", "learner", "operator"], typer.Option(help="What the node is.")] = "sampler",
    expires: Annotated[str, typer.Option(help="How long the token counts: 30m, 1h, 2d.")] = "1h",
    authority: Annotated[str, typer.Option(help="host:port of `certs serve` as nodes reach it; goes into it.")] = "",
    directory: DirOption = DIRECTORY,
    days: Annotated[int, typer.Option(help="Days until the certificate expires.", min=1, max=398)] = 90,
) -> None:
    """Print a token that becomes one certificate, once, for this site and role. It is a secret until then."""
    from heterorl.certs.enrolment import Enrolment
    from heterorl.common.identity.identity import Role

    if authority:
        check_address("--authority", authority)
    until = time.time() + parse_duration(expires)
    made = Enrolment(directory).create(role=Role(role), site=site, address=authority, days=days, expires=until)
    # Alone on standard output, so that a script can take it.
    typer.echo(made.text())


@app.command("list")
def list_(directory: DirOption = DIRECTORY) -> None:
    """Show every token: for whom, until when, whether it was used."""
    from heterorl.certs.enrolment import Enrolment
    from heterorl.common.identity.identity import split_uri

    now = time.time()
    table = Table("token", "role", "site", "minutes left", "state", title="tokens")
    for number, row in Enrolment(directory).list():
        state = "used" if row.key else "open" if now < row.expires else "expired"
        left = "" if row.key else f"{max(0.0, row.expires - now) / 60:.0f}"
        names = split_uri(row.uri) or ("", "", "")
        table.add_row(number, names[2], names[1], left, state)
    _console().print(table)


@app.command("delete")
def delete(
    token: Annotated[str, typer.Argument(help="Its number, as `list` shows it.")], directory: DirOption = DIRECTORY
) -> None:
    """Forget a token. A certificate that it became stays: `heterorl certs revoke` refuses that."""
    from heterorl.certs.enrolment import Enrolment

    Enrolment(directory).delete(token)
    _console().print(f"forgotten: {token}")


def serve(
    listen: Annotated[str, typer.Option(help="host:port to answer joining nodes on.")] = f"0.0.0.0:{DESK_PORT}",
    directory: DirOption = DIRECTORY,
) -> None:
    """Answer nodes that join with a token, where the authority is; stop it when all have joined.

    It needs no certificate of the caller, only a token. The authority's key stays on this machine: the coordinator
    needs neither this command nor the key.
    """
    from heterorl.certs.desk import Desk
    from heterorl.common.process import logs

    check_address("--listen", listen, is_listening=True)
    logs.configure(style="console")
    desk = Desk(directory)

    async def answer() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with desk.listening(listen) as port:
            _console().print(f"answering joining nodes on port {port}; Ctrl-C ends it", soft_wrap=True)
            await stop.wait()

    asyncio.run(answer())


def join(
    token: Annotated[str, typer.Option(help="What `heterorl certs token create` printed; - reads standard input.")],
    coordinator: Annotated[str, typer.Option(help="host:port of the coordinator.")],
    authority: Annotated[
        str, typer.Option(help=f"host:port of the authority; default: the token's, or port {DESK_PORT} there.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Directory of ca.crt, node.crt and node.key; ROLE-SITE here.")
    ] = None,
) -> None:
    """Get this node's certificate: the private key is made here and never leaves this machine.

    Prints the first lines of the node's configuration. The authority is proven by the token before anything is sent.
    After a lost answer, the same command gets it again.
    """
    from heterorl.certs.directory import PUBLIC, write_file
    from heterorl.certs.join import join as get
    from heterorl.certs.tokens import parse_token
    from heterorl.common.identity.tls import ADDRESS_FILE, TlsConfig, files_in
    from heterorl.common.rpc.link import check_health

    check_address("--coordinator", coordinator)
    parsed = parse_token(sys.stdin.read() if token == "-" else token)
    run, site, role = parsed.node
    target = out or Path(f"{role}-{site}")
    address = authority or parsed.address or f"{coordinator.rpartition(':')[0]}:{DESK_PORT}"
    check_address("--authority", address)
    asyncio.run(get(parsed, address=address, out=target))
    # For the commands of an operator, which then need not be told.
    write_file(target / ADDRESS_FILE, f"{coordinator}\n".encode("ascii"), mode=PUBLIC)
    console = _console()
    paths = files_in(target.resolve())
    for line in first_lines(run=run, site=site, role=role, coordinator=coordinator, paths=paths):
        console.print(line, soft_wrap=True)
    try:
        answer = asyncio.run(check_health(coordinator, tls=TlsConfig(**paths), timeout_s=5.0))
        problem = "" if answer.is_serving else answer.reason
    except ConfigError as error:
        problem = str(error)
    if problem:
        _console(stderr=True).print(f"joined, but the coordinator does not answer yet: {problem}", soft_wrap=True)


def first_lines(*, run: str, site: str, role: str, coordinator: str, paths: dict[str, str]) -> list[str]:
    """The beginning of the node's configuration, as TOML; of an operator's commands, who needs none."""
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
    return [
        *lines,
        f'coordinator = "{coordinator}"',
        *(f"tls.{key} = {json.dumps(path)}" for key, path in paths.items()),
    ]


def parse_duration(text: str) -> float:
    """Seconds of a number with s, m, h or d.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError("--expires", f"{text!r} is not like 30m, 1h or 2d")
    return float(int(match[1]) * _UNITS[match[2]])


def _console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
