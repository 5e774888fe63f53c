"""The command `heterorl track`."""

from __future__ import annotations

import asyncio
import enum
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from heterorl.cli.connection import Link, linked, silence_grpc
from heterorl.common.errors import ConfigError
from heterorl.common.process import logs
from heterorl.common.process.clock import SystemClock


class Name(enum.Enum):
    """A tracker for steps; typer takes no list of literals."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"


@linked()
def track(
    link: Link,
    to: Annotated[list[Name] | None, typer.Option("--to", help="Tracker to write to; repeatable.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Write what there is and exit.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two polls.", min=0.1)] = 5.0,
    samples: Annotated[
        int,
        typer.Option(
            help="Also write a table of this many newest prompts with their best and worst completions. "
            "0: no texts leave the coordinator.",
            min=0,
            max=100,
        ),
    ] = 0,
    samples_every: Annotated[int, typer.Option(help="Versions between two tables of samples.", min=1)] = 50,
    project: Annotated[str, typer.Option(help="Project of the tracker (MLflow: experiment).")] = "heterorl",
    run: Annotated[
        str, typer.Option(help="Name of the run in the tracker; default: its run_id.", show_default=False)
    ] = "",
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory for TensorBoard events, W&B files, and MLflow without a server.")
    ] = Path("runs/track"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only problems.")] = False,
) -> None:
    """Write a run into experiment trackers until it ends.

    It writes steps, evaluations and, if asked for, samples. Run it on any machine that reaches the coordinator; it only
    reads the run. Each start adds what the tracker lacks, so no row is missing or doubled.

    Example: `heterorl track --to wandb --project math`

    Exit code 0: the run has ended, or --once. 2: an option is wrong, or the first call failed. 130, 143: Ctrl-C,
    SIGTERM; rows that were read are written first.
    """
    silence_grpc()
    from heterorl.common.rpc.calls import RetryPolicy
    from heterorl.common.rpc.client import CoordinatorClient
    from heterorl.track.follow import Open, Pace, follow
    from heterorl.track.tracker import open_tracker

    if not to:
        raise ConfigError("--to", "is not set", action="give wandb, mlflow, tensorboard or trackio")
    address, tls = link.find()
    # Reports a wrong certificate or address as every other command does.
    link.ask(lambda api: api.get_status())
    logs.configure(level="WARNING" if quiet else "INFO", style="console", fields={})
    pace = Pace(every_s=every, is_once=once, samples=samples, samples_every=samples_every)
    opens: dict[str, Open] = {
        name.value: partial(open_tracker, name.value, project=project, run=run, directory=directory)
        for name in dict.fromkeys(to)
    }

    async def write() -> None:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=10.0)) as client:
            await follow(client, opens, pace=pace, clock=SystemClock())

    try:
        asyncio.run(write())
    except asyncio.CancelledError:
        raise typer.Exit(143) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
