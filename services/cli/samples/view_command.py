"""The command `heterorl view`."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterorl.cli.connection import ADDRESS_VARIABLE, Link, linked
from heterorl.common.process.clock import SystemClock

if TYPE_CHECKING:
    from heterorl.view.sample_index import SampleIndex, Source


@linked(has_address=False)
def view(
    link: Link,
    run: Annotated[
        str,
        typer.Argument(
            metavar="[HOST:PORT|FILE]",
            help="host:port of a coordinator, or an export of samples (.jsonl). Default: "
            f"{ADDRESS_VARIABLE}, else the note of `join` in --credentials.",
            show_default=False,
        ),
    ] = "",
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the URL.")] = False,
) -> None:
    """Read samples in a browser: prompts, completions, rewards, log-ratios token by token.

    Only this machine can open the page, and only with the key in its URL. Ctrl-C ends it and deletes all it read.
    """
    path = Path(run)
    make_source: Callable[[SampleIndex], Source]
    if path.suffix == ".jsonl" or (run and path.is_file()):
        from heterorl.view.export_source import ExportedSamples

        make_source = partial(ExportedSamples, path)
    else:
        make_source = _coordinator(link.at(run))
    from heterorl.view.pages import redirect_file, served

    try:
        with served(make_source, port=port) as server, redirect_file(server.url) as page:
            typer.echo(f"{server.url}  (Ctrl-C ends it)")
            if not no_browser:
                threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
            threading.Event().wait()
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _coordinator(link: Link) -> Callable[[SampleIndex], Source]:
    address, tls = link.find()
    # Reports a wrong certificate or address as every other command does.
    link.ask(lambda api: api.get_status())
    from heterorl.common.rpc.calls import RetryPolicy
    from heterorl.common.rpc.client import CoordinatorClient
    from heterorl.common.rpc.transport_options import MAX_MESSAGE_BYTES
    from heterorl.view.live_source import LiveSamples

    def connect() -> CoordinatorClient:
        policy = RetryPolicy(budget_s=0.0)
        return CoordinatorClient(address, tls=tls, policy=policy, max_message_bytes=MAX_MESSAGE_BYTES)

    return lambda index: LiveSamples(address, index, connect, SystemClock())
