"""Options, calls and screens that operator commands share to reach a coordinator.

Invariants: every failure names the option to change; no call falls back to plaintext.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from heterorl.common.errors import Busy, ConfigError, Unreachable
from heterorl.common.identity.tls import TlsConfig, files_in, noted_address
from heterorl.common.process.address import addresses, check_address

if TYPE_CHECKING:
    from heterorl.common.rpc.calls import Calls

ResultT = TypeVar("ResultT")
BUDGET_S = 5.0
EXPLAIN_S = 3.0

ADDRESS_VARIABLE, CREDENTIALS_VARIABLE = "HETERORL_ADDRESS", "HETERORL_CREDENTIALS"

AddressArgument = Annotated[
    str,
    typer.Argument(
        help=f"host:port of the coordinator; default: {ADDRESS_VARIABLE}, else the note of `join` in --credentials.",
        show_default=False,
    ),
]
CredentialsOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory of an operator's ca.crt, node.crt and node.key, made by `heterorl join`; "
        f"default: {CREDENTIALS_VARIABLE}."
    ),
]
NodeCredentialsOption = Annotated[
    Path | None,
    typer.Option(help=f"Directory of a node's ca.crt, node.crt and node.key; default: {CREDENTIALS_VARIABLE}."),
]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Plaintext; only for a coordinator on loopback.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Address and certificates that a command line names."""

    address: str = ""
    credentials: Path | None = None
    insecure: bool = False

    def at(self, address: str) -> Link:
        return replace(self, address=address)

    def find(self) -> tuple[str, TlsConfig]:
        """Address and certificates: command line, then environment, then note of `join`.

        Raises ConfigError if one is missing or wrong.
        """

        credentials, address = self.credentials, self.address or os.environ.get(ADDRESS_VARIABLE, "")
        if credentials is None and not self.insecure and os.environ.get(CREDENTIALS_VARIABLE):
            credentials = Path(os.environ[CREDENTIALS_VARIABLE])
        if not address and credentials is not None:
            address = noted_address(credentials)
        if not address:
            action = f"give host:port of the coordinator, or set {ADDRESS_VARIABLE}; `heterorl join` notes it too"
            raise ConfigError("ADDRESS", "is not set", action=action)
        # A Path raises for names that are too long.
        if os.path.isdir(address):  # noqa: PTH112
            problem = f"{address} is a directory, and this command asks a running coordinator"
            action = "start it and give host:port. `heterorl report DIR` reads a stopped run, without samples: export "
            raise ConfigError(
                "ADDRESS", problem, action=f"{action}them by `heterorl samples export` before you stop it"
            )
        check_address("ADDRESS", address, is_list=True)
        if credentials is None and not self.insecure:
            action = "give a directory that `heterorl join` made, or --insecure if the run has no certificates"
            raise ConfigError("--credentials", "is not set, and the link needs certificates", action=action)
        files = {} if credentials is None else files_in(credentials)
        return address, TlsConfig(**files, insecure=self.insecure)

    def ask(self, call: Callable[[Any], Awaitable[ResultT]], *, client: type[Calls] | None = None) -> ResultT:
        """Connect and make one call, of a CoordinatorClient or another one.

        Raises the coordinator's refusal, or Unreachable.
        """
        address, tls = self.find()
        silence_grpc()
        from heterorl.common.rpc.calls import RetryPolicy
        from heterorl.common.rpc.client import CoordinatorClient
        from heterorl.common.rpc.transport_options import MAX_MESSAGE_BYTES

        async def run() -> ResultT:
            how: dict[str, Any] = {"policy": RetryPolicy(budget_s=BUDGET_S), "max_message_bytes": MAX_MESSAGE_BYTES}
            async with (client or CoordinatorClient)(address, tls=tls, **how) as made:
                return await call(made)

        try:
            return asyncio.run(run())
        except Busy:
            # The coordinator answered.
            raise
        except Unreachable as error:
            # A command does not retry as a service does, so the error says what to check.
            known = asyncio.run(explain_link(address, tls=tls))
            if known is not None:
                raise Unreachable(known[0], action=known[1]) from error
            hint = "check host and port, and that the coordinator runs"
            if tls.insecure:
                hint += "; one with certificates refuses --insecure: use --credentials"
            raise Unreachable(error.args[0], action=hint) from error


def linked(
    *, has_address: bool = True, credentials: Any = CredentialsOption
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `link` by the address and link options."""
    options = {"credentials": (credentials, None), "insecure": (InsecureOption, False)}

    def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            if own.name != "link":
                parameters.append(parameter(own.name, own.annotation, own.default))
            elif has_address:
                parameters.append(parameter("address", AddressArgument, ""))
        parameters += [parameter(name, *option) for name, option in options.items()]

        @wraps(command)
        def run(**given: Any) -> None:
            link = Link(**{name: given.pop(name) for name in ("address", *options) if name in given})
            command(link=link, **given)

        # Typer reads these; `wraps` would show the command's own parameters.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        del run.__wrapped__
        return run

    return decorate


def console_of(*, stderr: bool = False) -> Console:
    """A console that prints text from other machines literally, without markup."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


@contextmanager
def bytes_bar(words: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; takes done and total bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=console_of(stderr=True), transient=True,
    ) as progress:  # fmt: skip
        bar = progress.add_task(words, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


async def explain_link(address: str, *, tls: TlsConfig) -> tuple[str, str] | None:
    """Problem and action that failed handshakes reveal, or None if one succeeds.

    gRPC reports names, authorities and expiry only in its own log.
    """

    found = await asyncio.gather(*(_explain_one(each, tls=tls) for each in addresses(address)))
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    problems, actions = zip(*known, strict=True)
    return "; ".join(problems), "; ".join(dict.fromkeys(actions))


async def _explain_one(address: str, *, tls: TlsConfig) -> tuple[str, str] | None:
    from heterorl.common.rpc.transport_options import proxy_variable
    from heterorl.doctor import link_checks
    from heterorl.doctor.check import Failure, Level

    if not tls.insecure and proxy_variable(address):
        # A handshake without the proxy would explain another way.
        return None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    found = await link_checks.resolve(host, int(port), timeout_s=EXPLAIN_S)
    check = link_checks.judge_dns(host, found)
    if not isinstance(found, Failure):
        connected = await link_checks.connect(found, int(port), timeout_s=EXPLAIN_S)
        check = link_checks.judge_port(address, connected)
        if not isinstance(connected, Failure) and not tls.insecure:
            shaken = await link_checks.tls_handshake(
                connected.address, int(port), host=host, tls=tls, timeout_s=EXPLAIN_S
            )
            check = link_checks.judge_handshake(host, shaken)
    if check.level is not Level.FAIL:
        return None
    finding = check.finding if check.finding.startswith(host) else f"{address}: {check.finding}"
    return finding, check.remedy


def silence_grpc() -> None:
    """Keep gRPC's log lines off the screen; call before importing gRPC."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
