"""The command `heterorl launch`: deployment files for Compose, systemd, Slurm or Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from heterorl.cli.check_config import Service, schema_of
from heterorl.cli.connection import console_of
from heterorl.common.errors import ConfigError
from heterorl.common.process.config_file import DIRECTORY, load, problems_of
from heterorl.common.types.common import amount

Launcher = Literal["compose", "systemd", "slurm", "k8s"]


def launch(
    launcher: Annotated[Launcher, typer.Argument(help="Program that starts the nodes.")],
    run: Annotated[Path, typer.Argument(help="File of the run: see docs/launch.md.", metavar="RUN.toml")],
    out: Annotated[Path, typer.Option(help="New or empty directory to write.")],
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this part: coordinator, learner, or a site with its subsites; repeatable. Another launcher "
            "starts the rest."
        ),
    ] = None,
) -> None:
    """Write the files that start each node of a run.

    They are configurations, units or manifests, and a README. The command starts nothing and uses no network. It checks
    each configuration with the schema of its service; packages that only your rewards need may be missing on this
    machine.

    Exit code 0: written. 2: run.toml or --out is wrong; nothing was written.

    Example: `heterorl launch compose run.toml --out launched`
    """
    from heterorl.launch.nodes import check_nodes, nodes_of
    from heterorl.launch.render import render, write_tree
    from heterorl.launch.run_file import RunFile

    loaded = load(RunFile, run)
    try:
        authority = Path(loaded.tls.directory).expanduser()
    except RuntimeError as error:
        raise ConfigError("tls.directory", str(error), action="name a directory") from error
    if part and not (loaded.tls.insecure or authority.is_absolute()):
        problem = f"{loaded.tls.directory} is relative, so each launcher would create its own authority"
        raise ConfigError("tls.directory", problem, action="set an absolute directory, which all certs.sh share")
    # certs.sh is called from any directory, and the run may be rendered again into another one.
    directory = str((run.parent / authority).absolute())
    loaded = loaded.model_copy(update={"tls": loaded.tls.model_copy(update={"directory": directory})})
    check_nodes(nodes_of(loaded), _problems)
    tree = render(launcher, loaded, part or ())
    write_tree(tree, out)
    console = console_of()
    console.print(f"wrote {amount(len(tree), 'file')} to {out}; read {out / 'README.md'} first", soft_wrap=True)


def _problems(kind: Service, table: dict[str, Any]) -> list[tuple[str, str]]:
    schema = schema_of(kind)
    try:
        schema.model_validate(table, context={DIRECTORY: ""})
    except ValidationError as error:
        return [(problem.key, problem.text) for problem in problems_of(schema, error)]
    return []
