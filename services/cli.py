"""The one command `heterorl`. Imports what a subcommand needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.backup_command import backup
from services.certs.cli import app as certs
from services.certs.token_cli import join
from services.common.config import Config, explain, load, read_tables
from services.common.errors import HeterorlError
from services.common.tls import check_tls
from services.doctor.command import doctor
from services.lab.cli import app as lab
from services.operator_link import (
    AddressArgument,
    CaOption,
    CertOption,
    CredentialsOption,
    InsecureOption,
    KeyOption,
    ask,
    link_files,
)
from services.orders import audit, rollback, sites
from services.report.command import report
from services.top import top

app = typer.Typer(
    name="heterorl",
    help="Train language models by reinforcement learning across sites that are joined only by the Internet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Service = Literal["coordinator", "learner", "sampler"]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the service.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one key: `--set section.key=value`.")]
LogOption = Annotated[str, typer.Option("--log", help="`console` for people, `json` for machines.")]

_SCHEMAS: dict[str, tuple[str, str]] = {
    "coordinator": ("services.coordinator.config", "CoordinatorConfig"),
    "learner": ("services.learner.config", "LearnerConfig"),
    "sampler": ("services.sampler.config", "SamplerConfig"),
}


def _console(*, stderr: bool = False) -> Console:
    # Names, paths and logs are text: a bracket in them is never markup, a colon never an emoji.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _schema(service: str) -> type[Config]:
    module, name = _SCHEMAS[service]
    schema: type[Config] = getattr(importlib.import_module(module), name)
    return schema


def _check_link(service: str, config: Any) -> None:
    """Say at once, before a model is loaded, that a link would be refused."""
    key = "listen" if service == "coordinator" else "coordinator"
    check_tls(config.tls, key=key, address=getattr(config, key))


def _serve(service: str, config: Path | None, overrides: list[str] | None, log: str, **options: int) -> None:
    from services.common import logs
    from services.common.allocator import keep_freed_frames

    logs.configure(style="json" if log == "json" else "console")
    loaded: Any = load(_schema(service), config, overrides or ())
    _check_link(service, loaded)
    module = importlib.import_module(f"services.{service}.app")
    keep_freed_frames()
    raise typer.Exit(asyncio.run(module.main(loaded, **options)))


@app.command()
def coordinator(config: ConfigOption = None, set_: SetOption = None, log: LogOption = "console") -> None:
    """Run the coordinator: versions policies, brokers weights, queues groups. One per run, needs no GPU."""
    _serve("coordinator", config, set_, log)


@app.command()
def learner(
    config: ConfigOption = None,
    set_: SetOption = None,
    log: LogOption = "console",
    nproc: Annotated[int, typer.Option(help="Processes; more than 1 needs backend deepspeed.", min=1)] = 1,
) -> None:
    """Run the learner: streams whole groups, takes optimizer steps, publishes versions."""
    _serve("learner", config, set_, log, num_ranks=nproc)


@app.command()
def sampler(config: ConfigOption = None, set_: SetOption = None, log: LogOption = "console") -> None:
    """Run a sampler: pulls weights, generates, scores and pushes groups. As many as you like, at any site."""
    _serve("sampler", config, set_, log)


@app.command()
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
) -> None:
    """Watch a small model improve by GEPO on this machine while its samplers are 64 versions behind.

    Warm-starts a small model on addition, starts one coordinator, one learner and two samplers as processes that talk
    only gRPC over loopback, each with a certificate of its own, and shows the run live. Ends with report.html,
    summary.json and a Hugging Face model in --out.

    Exit code 0: every promise was kept. 1: one was not, or the run failed. 2: an option is wrong, nothing was started.
    130: Ctrl-C; the processes were stopped in order, and summary.json says what is known.
    """
    from services.demo.options import DemoOptions, check_options

    options = DemoOptions(out=out, tiny=tiny, algorithm=algorithm, seed=seed, cache=cache)
    check_options(options)
    from services.demo.run import run_demo

    raise typer.Exit(run_demo(options))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Option(help="A learner's checkpoint directory or its state directory.")],
    model_dir: Annotated[Path, typer.Option(help="The model that the run started from (config, tokenizer).")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapters alone, as peft reads them.")] = False,
) -> None:
    """Write a trained model as a Hugging Face directory (safetensors, config, tokenizer); adapters are merged."""
    from services.learner.export import export_model

    export_model(model_dir=model_dir, source=checkpoint, out_dir=out, adapter_only=adapter)
    _console().print(f"model written to {out}")


app.command()(rollback)
app.command()(backup)


@app.command()
def status(
    address: AddressArgument,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    credentials: CredentialsOption = None,
    ca: CaOption = "",
    cert: CertOption = "",
    key: KeyOption = "",
    insecure: InsecureOption = False,
) -> None:
    """Show a run: versions, queue, ledger, sites. Needs an operator's certificate: `heterorl certs issue operator`."""
    from services.status import status_json, status_tables

    tls = link_files(address, credentials=credentials, ca=ca, cert=cert, key=key, insecure=insecure)
    answer = ask(address, tls=tls, call=lambda run: run.get_status())
    if json_:
        typer.echo(json.dumps(status_json(answer), indent=2))
    else:
        console = _console()
        console.print(*status_tables(answer, width=console.width))


@app.command()
def health(
    address: AddressArgument,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=0.1)] = 5.0,
    credentials: CredentialsOption = None,
    ca: CaOption = "",
    cert: Annotated[str, typer.Option(help="PEM file of a certificate of the run, the coordinator's own too.")] = "",
    key: KeyOption = "",
    insecure: InsecureOption = False,
) -> None:
    """Ask a coordinator whether it serves; for health checks of containers and load balancers.

    Exit code 0: it serves. 1: it does not, is stopping, or cannot be reached. 2: an option is wrong.
    """
    from services.common.rpc.health import check_health

    tls = link_files(address, credentials=credentials, ca=ca, cert=cert, key=key, insecure=insecure)
    answer = asyncio.run(check_health(address, tls=tls, timeout_s=timeout))
    _console(stderr=not answer.is_serving).print(answer.reason)
    raise typer.Exit(0 if answer.is_serving else 1)


app.command("join")(join)
app.command("doctor")(doctor)
app.command("top")(top)
app.command("report")(report)


@app.command("check-config")
def check_config(service: Service, config: ConfigOption = None, set_: SetOption = None) -> None:
    """Check a configuration without starting anything; names every wrong key."""
    loaded: Any = load(_schema(service), config, set_ or ())
    _check_link(service, loaded)
    _console().print(f"{service} configuration is valid")


@app.command("print-config")
def print_config(service: Service, config: ConfigOption = None, set_: SetOption = None) -> None:
    """Show every key of a configuration, its value, and where the value comes from."""
    loaded = load(_schema(service), config, set_ or ())
    _, sources = read_tables(config, set_ or ())
    table = Table("key", "value", "source", title=f"{service} configuration")
    for row in explain(loaded, sources):
        table.add_row(row.key, json.dumps(row.value), row.source)
    _console().print(table)


@app.command("verify-lineage")
def verify_lineage(
    directory: Annotated[Path, typer.Argument(help="A coordinator's data_dir; the coordinator must not be running.")],
    key: Annotated[list[str] | None, typer.Option("--key", help="Public key that may have signed; repeatable.")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Also rebuild every state from its payloads.")] = False,
) -> None:
    """Check the whole history of a run, offline: numbers, digests, signatures, payloads. Exit code 2 on any fault."""
    from services.coordinator.verify_command import verify_directory

    raise typer.Exit(verify_directory(directory, keys=key or (), is_replaying=replay, console=_console()))


keys = typer.Typer(help="The key that a learner signs its versions with.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.command("new")
def keys_new(path: Annotated[Path, typer.Argument(help="File to write the private key to; must not exist.")]) -> None:
    """Make a private key, readable by you alone, and print its public key for the samplers' `trusted_keys`."""
    from services.common.signing import new_key

    typer.echo(new_key(path).public_key)


@keys.command("show")
def keys_show(path: Annotated[Path, typer.Argument(help="File of a private key.")]) -> None:
    """Print the public key of a private key."""
    from services.common.signing import load_signer

    typer.echo(load_signer(path).public_key)


app.add_typer(sites, name="sites")
app.add_typer(audit, name="audit")
app.add_typer(lab, name="lab")
app.add_typer(certs, name="certs")


def main() -> None:
    """Run the command line; a typed error becomes one line and exit code 2."""
    try:
        app(prog_name="heterorl")
    except HeterorlError as error:
        _console(stderr=True).print(Text("error:", style="bold red"), str(error), soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
