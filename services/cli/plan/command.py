"""The command `heterorl plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heterorl.cli.plan.amounts import bits_per_s, seconds
from heterorl.common.errors import ConfigError


def plan(
    params: Annotated[float, typer.Option(help="Parameters of the model, such as 8e9.")] = 0.0,
    model_dir: Annotated[
        Path | None, typer.Option(help="A Hugging Face directory: exact shapes from its config.json.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the learner, one rank each.")] = 8,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8,
    backend: Annotated[str, typer.Option(help="torch, fsdp2, zero-1, zero-2 or zero-3.")] = "fsdp2",
    compute_dtype: Annotated[str, typer.Option(help="Of the passes: bf16 or fp32.")] = "bf16",
    link: Annotated[str, typer.Option(help="Of a site to the coordinator, such as 1Gbit or 300Mbit.")] = "1Gbit",
    rtt: Annotated[str, typer.Option(help="Round trip over it, such as 100ms.")] = "100ms",
    tokens_per_step: Annotated[float, typer.Option(help="Prompts and completions of a step.")] = 1048576,
    sites: Annotated[int, typer.Option(help="Sites that share the completions of a step.")] = 1,
    lr: Annotated[
        float | None,
        typer.Option(help="Step size, which gives --changed-fraction: 1e-6 is 1.4 %, 1e-5 is 9 %."),
    ] = None,
    changed_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of the published elements that a version changes; 0.014 if neither this nor --lr is given."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Another assumption: `--set mfu=0.4`; the table lists all.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Say on paper what a run costs: a step, a version, memory, GPUs of samplers, bytes on the WAN, and a verdict.

    Nothing is loaded or asked. Exit code 0: answered, also where memory does not suffice. 2: an option is wrong.
    """
    from heterorl.cli.plan.table import show
    from heterorl.plan import plan as planning
    from heterorl.plan.assumptions import parse
    from heterorl.plan.shape import shape_of_directory

    shape = shape_of_directory(model_dir) if model_dir is not None else None
    if not params and shape is None:
        raise ConfigError("--params", "is missing", action="give --params 8e9 or --model-dir DIR")
    answer = planning.plan(
        planning.Question(
            parameters=params or (shape.parameters if shape else 0.0),
            shape=shape,
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            backend=backend,
            products=compute_dtype,
            link_bits_per_s=bits_per_s(link),
            rtt_s=seconds(rtt),
            tokens_per_step=tokens_per_step,
            sites=sites,
            changed=_changed(lr, changed_fraction),
            given=parse(set_ or ()),
        )
    )
    if json_:
        typer.echo(json.dumps(answer.as_dict(), indent=2))
    else:
        show(answer, Console(markup=False, emoji=False, highlight=False))


def _changed(lr: float | None, fraction: float | None) -> float:
    from heterorl.plan.traffic import changed_by

    if lr is None:
        return 0.014 if fraction is None else fraction
    if fraction is not None:
        raise ConfigError("--lr", "is given together with --changed-fraction", action="give one of them")
    if not 0.0 < lr < 1.0:
        raise ConfigError("--lr", f"must be above 0 and below 1, is {lr:g}")
    return changed_by(lr)
