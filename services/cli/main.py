"""The one command `heterorl`. Imports what a subcommand needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.table import Table
from rich.text import Text

import heterorl
from heterorl.cli.certs import app as certs
from heterorl.cli.certs import join
from heterorl.cli.check_config import Service, check_config, check_link, load_service
from heterorl.cli.connection import console_of
from heterorl.cli.doctor import doctor
from heterorl.cli.env import env
from heterorl.cli.launch import launch
from heterorl.cli.live.track import track
from heterorl.cli.live.watch_commands import health, status, top
from heterorl.cli.models import evaluate, export
from heterorl.cli.operations import accept_rewind, audit, backup, restore, rollback, sites
from heterorl.cli.plan import plan
from heterorl.cli.report import report
from heterorl.cli.samples.samples_commands import samples
from heterorl.cli.samples.view_command import view
from heterorl.common.errors import ConfigError, HeterorlError, OperatorError
from heterorl.common.model.model_directory import check_model_dir
from heterorl.common.process.config import explain, read_tables

app = typer.Typer(
    name="heterorl",
    help="Train language models by reinforcement learning across sites that are joined only by the Internet.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
TRY, RUN, WATCH, STEER, CHECK, NAMES = (
    "Try it", "Run the services", "Watch a run", "Steer a run", "Check and keep", "Who is who",
)  # fmt: skip
"""Panels of `heterorl --help`."""


RESEARCH = "heterorl_research"
"""The package of `heterorl lab`, in a distribution of its own."""


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"heterorl {heterorl.__version__}")
        raise typer.Exit


@app.callback()
def _start(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback ends the command
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the service.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one key: `--set section.key=value`.")]
LogStyle = Literal["console", "json"]
LogOption = Annotated[LogStyle, typer.Option("--log", help="`console` for people, `json` for machines.")]


def _who(service: Service, config: Any = None) -> dict[str, str]:
    """What a service says of itself with every line of its log."""
    from heterorl.common.identity.spiffe import Identity, read_identity

    who: dict[str, str] = {"role": service, "version": heterorl.__version__}
    if config is None:
        return who
    try:
        identity = read_identity(Path(config.tls.cert).read_bytes()) if config.tls.cert else None
    except OSError:
        # The link itself will say so.
        identity = None
    if isinstance(identity, Identity):
        return who | {"run": identity.run, "site": identity.site}
    return who | {"run": getattr(config, "run_id", ""), "site": getattr(config, "site", "")}


def _serve(
    service: Service, config: Path | None, overrides: list[str] | None, log: LogStyle, **options: Any
) -> NoReturn:
    # Lines of gRPC's core below errors are of links that heterorl names itself; read once, before its import.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from heterorl.common.process import logs
    from heterorl.common.rpc.transport_options import keep_freed_frames

    logs.configure(style=log, fields=_who(service))
    loaded = load_service(service, config, overrides or ())
    check_link(service, loaded)
    logs.bind(**_who(service, loaded))
    if service not in ("coordinator", "relay"):
        # Before torch is loaded, which takes longer than to see that a directory is not there.
        check_model_dir(loaded.model_dir)
    module = importlib.import_module(f"heterorl.{service}.app")
    keep_freed_frames()
    raise typer.Exit(asyncio.run(module.main(loaded, **options)))


@app.command(rich_help_panel=RUN)
def coordinator(
    config: ConfigOption = None,
    set_: SetOption = None,
    log: LogOption = "console",
    standby: Annotated[
        bool, typer.Option("--standby", help="Serve once no other coordinator has the store; needs store.url.")
    ] = False,
) -> None:
    """Run the coordinator: versions policies, brokers weights, queues groups. One per run, needs no GPU."""
    _serve("coordinator", config, set_, log, is_standby=standby)


@app.command(rich_help_panel=RUN)
def learner(
    config: ConfigOption = None,
    set_: SetOption = None,
    log: LogOption = "console",
    nproc: Annotated[
        int, typer.Option(help="Processes of this machine; more than 1 needs backend fsdp2 or deepspeed.", min=1)
    ] = 1,
) -> None:
    """Run the learner: streams whole groups, takes optimizer steps, publishes versions.

    On several machines: `torchrun --nnodes 2 --nproc-per-node 8 ... -m heterorl learner --config learner.toml`. Rank 0
    alone reads the configuration and knows the coordinator.
    """
    from heterorl.learner.backends.ranks.rank_env import end_with_agent, rank_env_of

    rank_env = rank_env_of(os.environ)
    if rank_env is None:
        _serve("learner", config, set_, log, num_ranks=nproc)
    if nproc > 1:
        raise ConfigError("--nproc", "a launcher has started the processes already", action="remove it")
    end_with_agent(os.environ)
    if rank_env.rank == 0:
        _serve("learner", config, set_, log, rank_env=rank_env)
    from heterorl.common.process import logs
    from heterorl.learner.rank_process import follow

    logs.configure(style=log, fields=_who("learner"))
    raise typer.Exit(follow(rank_env))


@app.command(rich_help_panel=RUN)
def sampler(config: ConfigOption = None, set_: SetOption = None, log: LogOption = "console") -> None:
    """Run a sampler: pulls weights, generates, scores and pushes groups. As many as you like, at any site."""
    _serve("sampler", config, set_, log)


@app.command(rich_help_panel=RUN)
def relay(config: ConfigOption = None, set_: SetOption = None, log: LogOption = "console") -> None:
    """Run a relay at a site with several samplers: what all of them pull crosses the line once. Needs no GPU."""
    _serve("relay", config, set_, log)


@app.command(rich_help_panel=TRY)
def demo(
    out: Annotated[
        Path,
        typer.Option(help="Directory of configurations, logs, report and model: new, empty, or an earlier demo's."),
    ] = Path("runs/demo"),
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Under a minute instead of two: 24 steps, 8 versions behind; a smoke run.")
    ] = False,
    algorithm: Annotated[
        str, typer.Option(help="Loss of the learner: `gepo`, `gspo`, `grpo`; a wrong name lists all.")
    ] = "gepo",
    seed: Annotated[int, typer.Option(help="Seed of model, task and sampling.")] = 0,
    cache: Annotated[Path, typer.Option(help="Directory of the warm-started model, kept for the next run.")] = Path(
        ".cache/heterorl"
    ),
    device: Annotated[
        str, typer.Option(help="Where learner and samplers compute: `cpu`, or `cuda`, one card.")
    ] = "cpu",
) -> None:
    """Watch a small model improve by GEPO on this machine while its samplers are 64 versions behind.

    Warm-starts a small model on addition, starts one coordinator, one learner and two samplers as processes that talk
    only gRPC over loopback, each with a certificate of its own, and shows the run live. Ends with report.html,
    summary.json and a Hugging Face model in --out.

    Exit code 0: every promise was kept. 1: one was not, or the run failed. 2: an option is wrong, nothing was started.
    130: Ctrl-C; the processes were stopped in order, and summary.json says what is known.
    """
    from heterorl.demo.config import DemoOptions, check_options

    options = DemoOptions(out=out, tiny=tiny, algorithm=algorithm, seed=seed, cache=cache, device=device)
    check_options(options)
    from heterorl.demo.demo_run import run_demo

    raise typer.Exit(run_demo(options))


app.command(rich_help_panel=CHECK)(export)
app.command(rich_help_panel=CHECK)(evaluate)
app.command(rich_help_panel=STEER)(rollback)
app.command(rich_help_panel=STEER)(backup)
app.command(rich_help_panel=STEER)(restore)
app.command("accept-rewind", rich_help_panel=STEER)(accept_rewind)


app.command(rich_help_panel=WATCH)(status)
app.command(rich_help_panel=WATCH)(health)
app.command("join", rich_help_panel=NAMES)(join)
app.command("doctor", rich_help_panel=CHECK)(doctor)
app.command("top", rich_help_panel=WATCH)(top)
app.command("report", rich_help_panel=WATCH)(report)
app.command("view", rich_help_panel=WATCH)(view)
app.command("track", rich_help_panel=WATCH)(track)


app.command("check-config", rich_help_panel=CHECK)(check_config)
app.command("plan", rich_help_panel=TRY)(plan)
app.command("launch", rich_help_panel=RUN)(launch)


@app.command("print-config", rich_help_panel=CHECK)
def print_config(service: Service, config: ConfigOption = None, set_: SetOption = None) -> None:
    """Show every key of a configuration, its value, and where the value comes from."""
    loaded = load_service(service, config, set_ or ())
    _, sources = read_tables(config, set_ or ())
    table = Table("key", "value", "source", title=f"{service} configuration")
    for row in explain(loaded, sources):
        table.add_row(row.key, json.dumps(row.value), row.source)
    console_of().print(table)


@app.command("verify-lineage", rich_help_panel=CHECK)
def verify_lineage(
    directory: Annotated[Path, typer.Argument(help="A coordinator's data_dir; the coordinator must not be running.")],
    key: Annotated[list[str] | None, typer.Option("--key", help="Public key that may have signed; repeatable.")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Also rebuild every state from its payloads.")] = False,
) -> None:
    """Check the whole history of a run, offline: numbers, digests, signatures, payloads. Exit code 2 on any fault."""
    from heterorl.cli.verify_data_dir import verify_directory

    raise typer.Exit(verify_directory(directory, keys=key or (), is_replaying=replay, console=console_of()))


keys = typer.Typer(help="The key that a learner signs its versions with.", no_args_is_help=True)
app.add_typer(keys, name="keys", rich_help_panel=NAMES)


@keys.command("new")
def keys_new(path: Annotated[Path, typer.Argument(help="File to write the private key to; must not exist.")]) -> None:
    """Make a private key, readable by you alone, and print its public key for the samplers' `trusted_keys`."""
    from heterorl.common.identity.signing import new_key

    typer.echo(new_key(path).public_key)


@keys.command("show")
def keys_show(path: Annotated[Path, typer.Argument(help="File of a private key.")]) -> None:
    """Print the public key of a private key."""
    from heterorl.common.identity.signing import load_signer

    typer.echo(load_signer(path).public_key)


app.add_typer(samples, name="samples", rich_help_panel=WATCH)
app.add_typer(sites, name="sites", rich_help_panel=STEER)
app.add_typer(audit, name="audit", rich_help_panel=CHECK)
app.add_typer(env, name="env", rich_help_panel=TRY)
app.add_typer(certs, name="certs", rich_help_panel=NAMES)


def add_lab(app: typer.Typer) -> None:
    """Add `lab` where its package is installed; elsewhere a hidden `lab` says what to install."""
    if importlib.util.find_spec(RESEARCH) is None:
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("lab", hidden=True, add_help_option=False, context_settings=anything)(_refuse_lab)
        return
    app.add_typer(importlib.import_module(f"{RESEARCH}.command").app, name="lab", rich_help_panel=TRY)


def _refuse_lab() -> NoReturn:
    raise OperatorError("heterorl-research is not installed", action="in a clone of heterorl: pip install ./research")


add_lab(app)


def main() -> None:
    """Run the command line; a typed error becomes one line, and exit code 2 or what it states."""
    try:
        app(prog_name="heterorl")
    except HeterorlError as error:
        from heterorl.common.process import logs

        if logs.is_for_machines():
            logging.getLogger("heterorl").error("error: %s", error)
            sys.exit(error.exit_code)
        console_of(stderr=True).print(Text("error:", style="bold red"), str(error), soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
