"""The command `heterorl report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterorl.cli.connection import ADDRESS_VARIABLE, Link, linked
from heterorl.common.errors import ConfigError

if TYPE_CHECKING:
    from heterorl.report.past_run import PastRun

REPORT_FILE = "report.html"


@linked(has_address=False)
def report(
    link: Link,
    run: Annotated[
        str,
        typer.Argument(
            metavar="[DIRECTORY|HOST:PORT]",
            help="For a past run: a coordinator's data_dir, a learner's state_dir, or a directory that holds them. "
            f"For a running one: host:port of its coordinator; default: {ADDRESS_VARIABLE}, else the note of `join` "
            "in --credentials.",
            show_default=False,
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Self-contained file to write; default: report.html in DIRECTORY, else here.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(help="Directory for the pictures as PNG files.")] = None,
) -> None:
    """Write one HTML page about a run, past or running.

    It never changes the run's files. If a coordinator runs on the directory, the report asks it at the address noted
    there, with an operator's certificate.

    Example: `heterorl report runs/demo`
    """
    from heterorl.report.report_page import render

    page, pngs = render(_read(run, link))
    if out is None:
        out = Path(run) / REPORT_FILE if Path(run).is_dir() else Path(REPORT_FILE)
    try:
        out.write_text(page, encoding="utf-8")
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            for name, png in pngs.items():
                (pictures / f"{name}.png").write_bytes(png)
    except OSError as error:
        raise ConfigError("--out", f"cannot write: {error}", action="name a file that this user can write") from error
    typer.echo(f"written: {out}")


def _read(run: str, link: Link) -> PastRun:
    from heterorl.report.past_run import InUse, ask_run, read_run

    journal = None
    link = link.at(run)
    if run and (Path(run).exists() or ":" not in run):
        try:
            return read_run(Path(run))
        except InUse as error:
            link, journal = link.at(error.address), error.journal
            try:
                link.find()
            except ConfigError:
                raise error from None
    address, _ = link.find()
    return link.ask(lambda api: ask_run(api, address=address, journal=journal))
