"""The command `heterorl track`."""

from __future__ import annotations

import asyncio
import enum
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from heterorl.cli.link import (
    AddressArgument,
    CaOption,
    CertOption,
    CredentialsOption,
    InsecureOption,
    KeyOption,
    find_link,
    silence_grpc,
)


class Name(enum.Enum):
    """A tracker that steps can go to; typer takes no list of literals."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"


CALL_BUDGET_S = 10.0


def track(
    address: AddressArgument = "",
    to: Annotated[list[Name] | None, typer.Option("--to", help="Where steps go; repeatable.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Write what there is and end.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 5.0,
    project: Annotated[str, typer.Option(help="Project (MLflow: experiment) of the tracker.")] = "heterorl",
    run: Annotated[str, typer.Option(help="Name of the run there; default: the run's own.", show_default=False)] = "",
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory of event files, of W&B's files and of MLflow's without a server.")
    ] = Path("runs/track"),
    credentials: CredentialsOption = None,
    ca: CaOption = "",
    cert: CertOption = "",
    key: KeyOption = "",
    insecure: InsecureOption = False,
) -> None:
    """Write a run's steps into experiment trackers until the run ends; from any machine that reaches the coordinator.

    What a tracker lacks is written at every start: nothing is there twice, nothing is missing. The run is only read.

    Exit code 0: the run has ended, or --once. 2: an option is wrong, or with --once something does not answer.
    130, 143: Ctrl-C, SIGTERM; what was read is written out first.
    """
    silence_grpc()
    from heterorl.common.errors import ConfigError
    from heterorl.common.process import logs
    from heterorl.common.process.clock import SystemClock
    from heterorl.common.rpc.client import CoordinatorClient
    from heterorl.common.rpc.retry import RetryPolicy
    from heterorl.track.follow import Open, follow
    from heterorl.track.open import Kind, open_tracker

    if not to:
        raise ConfigError("--to", "is not given", action="name a tracker: wandb, mlflow, tensorboard or trackio")
    address, tls = find_link(address, credentials=credentials, ca=ca, cert=cert, key=key, insecure=insecure)
    logs.configure(style="console", fields={})
    opens: dict[str, Open] = {
        name.value: partial(open_tracker, Kind(name.value), project=project, run=run, directory=directory)
        for name in dict.fromkeys(to)
    }

    async def write() -> None:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=CALL_BUDGET_S)) as client:
            await follow(client, opens, every_s=every, is_once=once, clock=SystemClock())

    try:
        asyncio.run(write())
    except asyncio.CancelledError:
        raise typer.Exit(143) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
