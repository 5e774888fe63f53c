"""The command `heterorl`: each subcommand imports its modules when it runs."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import io
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn, get_args

import typer
from rich.text import Text

import heterorl
from heterorl.cli.certs import app as certs
from heterorl.cli.certs import join
from heterorl.cli.check_config import (
    ConfigOption,
    Service,
    SetOption,
    check_config,
    check_files,
    check_link,
    load_service,
)
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
from heterorl.cli.reward import reward
from heterorl.cli.samples.samples_commands import samples
from heterorl.cli.samples.view_command import view
from heterorl.common.errors import ConfigError, DependencyMissing, DiskFull, HeterorlError, OperatorError
from heterorl.common.model.model_directory import check_model_dir
from heterorl.common.process import logs
from heterorl.common.process.config_file import explain, read_tables
from heterorl.common.process.files import NO_ROOM

app = typer.Typer(
    name="heterorl",
    help="Train language models by reinforcement learning across data centres that only the Internet connects.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["--help", "-h"]},
)
TRY, RUN, WATCH, STEER, CHECK, NAMES = (
    "Try it", "Run the services", "Watch a run", "Steer a run", "Check and keep", "Who is who",
)  # fmt: skip
"""Panels of `heterorl --help`."""

RESEARCH = "heterorl_research"
"""Package of `heterorl lab`, which another distribution installs."""


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"heterorl {heterorl.__version__}")
        raise typer.Exit


@app.callback()
def _start(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback ends the command
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


LogStyle = Literal["console", "json"]
LogOption = Annotated[LogStyle, typer.Option("--log", help="Format of log lines: `console` or `json`.")]


def _who(service: Service, config: Any = None) -> dict[str, str]:
    from heterorl.common.identity.spiffe import Identity, read_identity

    who: dict[str, str] = {"role": service, "version": heterorl.__version__}
    if config is None:
        return who
    try:
        identity = read_identity(Path(config.tls.cert).read_bytes()) if config.tls.cert else None
    except OSError:
        # The link reports it.
        identity = None
    if isinstance(identity, Identity):
        return who | {"run": identity.run, "site": identity.site}
    return who | {"run": getattr(config, "run_id", ""), "site": getattr(config, "site", "")}


def _serve(
    service: Service, config: Path | None, overrides: list[str] | None, log: LogStyle, **options: Any
) -> NoReturn:
    # gRPC's core logs links that heterorl reports itself. It reads the variable once, at its import.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from heterorl.common.rpc.transport_options import keep_freed_frames

    logs.configure(style=log, fields=_who(service))
    loaded = load_service(service, config, overrides or ())
    check_link(service, loaded)
    logs.bind(**_who(service, loaded))
    if service not in ("coordinator", "relay"):
        # Before torch is loaded: wrong files and a missing directory are found in less time.
        check_files(service, loaded)
        check_model_dir(loaded.model_dir)
    module = importlib.import_module(f"heterorl.{service}.{service}_app")
    keep_freed_frames()
    raise typer.Exit(asyncio.run(module.main(loaded, **options)))


@app.command(rich_help_panel=RUN)
def coordinator(
    config: ConfigOption = None,
    set_: SetOption = None,
    log: LogOption = "console",
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Wait until no other coordinator has the store, then serve; needs store.url."),
    ] = False,
) -> None:
    """Run the coordinator: it stores versions, distributes weights and queues groups.

    A run has one coordinator; it needs no GPU.
    """
    _serve("coordinator", config, set_, log, is_standby=standby)


@app.command(rich_help_panel=RUN)
def learner(
    config: ConfigOption = None,
    set_: SetOption = None,
    log: LogOption = "console",
    nproc: Annotated[
        int,
        typer.Option(
            help="Processes on this machine, one for each GPU; above 1 needs backend fsdp2 or deepspeed.", min=1
        ),
    ] = 1,
) -> None:
    """Run the learner: it trains on groups and publishes policy versions.

    On several machines: `torchrun --nnodes 2 --nproc-per-node 8 ... -m -- heterorl learner --config learner.toml`. Only
    rank 0 reads the configuration and connects to the coordinator.
    """
    from heterorl.learner.backends.ranks.rank_env import end_with_agent, rank_env_of

    rank_env = rank_env_of(os.environ)
    if rank_env is None:
        _serve("learner", config, set_, log, num_ranks=nproc)
    if nproc > 1:
        raise ConfigError("--nproc", "torchrun has started the processes already", action="remove it")
    end_with_agent(os.environ)
    if rank_env.rank == 0:
        _serve("learner", config, set_, log, rank_env=rank_env)
    from heterorl.learner.rank_process import follow

    logs.configure(style=log, fields=_who("learner"))
    raise typer.Exit(follow(rank_env))


@app.command(rich_help_panel=RUN)
def sampler(config: ConfigOption = None, set_: SetOption = None, log: LogOption = "console") -> None:
    """Run a sampler: it pulls weights, generates, scores and pushes rollouts.

    Run any number at any site.
    """
    _serve("sampler", config, set_, log)


@app.command(rich_help_panel=RUN)
def relay(config: ConfigOption = None, set_: SetOption = None, log: LogOption = "console") -> None:
    """Run a relay, so that a site downloads each payload once.

    A relay is for a site with several samplers and needs no GPU.
    """
    _serve("relay", config, set_, log)


@app.command(rich_help_panel=TRY)
def demo(
    out: Annotated[
        Path,
        typer.Option(help="Directory for configurations, logs, report and model: new, empty, or of an earlier demo."),
    ] = Path("runs/demo"),
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Smoke run of under a minute instead of two: 24 steps, 8 versions behind.")
    ] = False,
    algorithm: Annotated[
        str, typer.Option(help="Loss of the learner, such as `gepo`, `gspo` or `grpo`; a wrong name lists all.")
    ] = "gepo",
    seed: Annotated[int, typer.Option(help="Seed of model, task and sampling.")] = 0,
    cache: Annotated[Path, typer.Option(help="Directory that keeps the warm-started model for the next run.")] = Path(
        ".cache/heterorl"
    ),
    device: Annotated[str, typer.Option(help="Device of learner and samplers: `cpu`, or `cuda` for one GPU.")] = "cpu",
) -> None:
    """Train a small model while its samplers are 64 versions behind.

    It takes about two minutes. It warm-starts a small model on addition, then starts a coordinator, a
    learner and two samplers as processes. They talk gRPC over loopback, each with its own certificate. A line every
    five seconds shows the run. It writes report.html, summary.json and a Hugging Face model to --out.

    Exit code 0: all promises were kept. 1: one was broken, or the run failed. 2: an option is wrong; nothing was
    started. 130: Ctrl-C; all processes were stopped, and summary.json holds the results since the warm start.
    """
    from heterorl.demo.demo_config import DemoOptions, check_options

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
    """Show every key of a configuration, its value and its source.

    Example: `heterorl print-config sampler --config sampler.toml --set engine.kind=vllm`
    """
    loaded = load_service(service, config, set_ or ())
    if service == "sampler":
        from heterorl.sampler.sampler_config import with_workers

        sets = tuple(one.model_copy(update={"task": with_workers(one.task)}) for one in loaded.evaluation)
        loaded = loaded.model_copy(update={"task": with_workers(loaded.task), "evaluation": sets})
    _, sources = read_tables(config, set_ or ())
    for key, value, source in explain(loaded, sources):
        console_of().print(f"{key} = {json.dumps(value)}  # {source}", soft_wrap=True)


@app.command("verify-lineage", rich_help_panel=CHECK)
def verify_lineage(
    directory: Annotated[Path, typer.Argument(help="A stopped coordinator's data_dir (PostgreSQL: a backup).")],
    key: Annotated[
        list[str] | None, typer.Option("--key", help="Public key accepted for signatures; repeatable.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also rebuild every version's weights from its payloads; slow.")
    ] = False,
) -> None:
    """Check the whole history of a run offline.

    It checks version numbers, digests, payloads and, with --key, signatures. Exit code 2 on a fault.

    Example: `heterorl verify-lineage /var/lib/heterorl/coordinator --replay`
    """
    from heterorl.cli.verify_data_dir import verify_directory

    raise typer.Exit(verify_directory(directory, keys=key or (), is_replaying=replay, console=console_of()))


keys = typer.Typer(help="Keys with which a learner signs its versions.", no_args_is_help=True)
app.add_typer(keys, name="keys", rich_help_panel=NAMES)


@keys.command("new")
def keys_new(path: Annotated[Path, typer.Argument(help="New file for the private key.")]) -> None:
    """Create a private key and print its public key.

    Only you can read the private key. The public key is for the samplers' `trusted_keys`.
    """
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
app.add_typer(reward, name="reward", rich_help_panel=TRY)
app.add_typer(certs, name="certs", rich_help_panel=NAMES)


def add_lab(app: typer.Typer) -> None:
    """Add `lab`, or a hidden one that says what to install."""
    if importlib.util.find_spec(RESEARCH) is None:
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("lab", hidden=True, add_help_option=False, context_settings=anything)(_refuse_lab)
        return
    app.add_typer(importlib.import_module(f"{RESEARCH}.command").app, name="lab", rich_help_panel=TRY)


def _refuse_lab() -> NoReturn:
    raise OperatorError("heterorl-research is not installed", action="in a clone of heterorl: pip install ./research")


add_lab(app)


EXTRAS = {
    **dict.fromkeys(("httpx2", "packaging", "safetensors", "torch", "transformers"), "learner,sampler"),
    "jinja2": "launch,report,view",
    "matplotlib": "report",
    "pyarrow": "parquet",
    "tomli_w": "launch",
}
"""Optional packages that commands import, and the extras that install them."""


def main() -> None:
    """Run the command line; typed errors become one line and exit code.
    So do missing packages, and files that a command cannot use. SIGTERM and SIGHUP end a command as Ctrl-C does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In an encoding without a character a question mark is better than no output.
        sys.stdout.reconfigure(errors="replace")
    is_service = sys.argv[1:2] in ([service] for service in get_args(Service))
    for number in () if is_service else (signal.SIGTERM, signal.SIGHUP):
        # Under nohup a command outlives its terminal. Another handler, as of coverage, would leave incomplete files.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        app(prog_name="heterorl")
    except HeterorlError as error:
        _end(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        _end(DependencyMissing(package.replace("_", "-"), EXTRAS[package]))
    except OSError as error:
        refusal = _refusal(error)
        # A service may find its file at the next start, and its log needs the place in the code.
        if refusal is None or is_service:
            raise
        _end(refusal)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does here, also where the shell has SIGINT ignored."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


def _refusal(error: OSError) -> OperatorError | None:
    """The error for an unusable file or disk; None for other faults."""
    is_full = error.errno in NO_ROOM
    if error.filename is None:
        return OperatorError("no space left on the disk", action="free space, then retry") if is_full else None
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else error.filename
    if is_full:
        return DiskFull(str(name))
    action = "run the command as a user with that right" if isinstance(error, PermissionError) else "check the path"
    return OperatorError(f"cannot use {name}: {error.strerror}", action=action)


def _end(error: HeterorlError) -> NoReturn:

    if logs.is_for_machines():
        logging.getLogger("heterorl").error("error: %s", error)
    else:
        console_of(stderr=True).print(Text("error:", style="bold red"), str(error), soft_wrap=True)
    sys.exit(error.exit_code)
