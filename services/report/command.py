"""The command `heterorl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[
        Path, typer.Argument(help="A coordinator's data_dir, a learner's state_dir, or a directory that holds them.")
    ],
    out: Annotated[Path, typer.Option(help="File to write; everything is inside it.")] = Path("report.html"),
    pictures: Annotated[Path | None, typer.Option(help="Directory for the pictures as PNG files, too.")] = None,
) -> None:
    """Write one HTML page about a past run, from its files; no service needs to run, and none of the files changes."""
    from services.common.errors import ConfigError
    from services.report.files import read_run

    run = read_run(directory)
    try:
        from services.report.page import render
    except ModuleNotFoundError as error:
        from services.common.errors import DependencyMissing

        raise DependencyMissing(error.name or "jinja2", "report") from None
    page, pngs = render(run)
    try:
        out.write_text(page, encoding="utf-8")
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            for name, png in pngs.items():
                (pictures / f"{name}.png").write_bytes(png)
    except OSError as error:
        raise ConfigError("--out", f"cannot write: {error}") from error
    typer.echo(f"written: {out}")
