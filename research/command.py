"""The command `heterorl lab`. Imports what a subcommand needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from heterorl_research.lab.fast.orders import Means


class Engine(enum.Enum):
    """What computes the runs of an experiment."""

    SERVICES = "services"
    FAST = "fast"


app = typer.Typer(
    help="Experiments on this machine: what delay does to every algorithm, with the services' own code.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


OutOption = Annotated[Path | None, typer.Option(help="Directory of the results; `runs/lab/NAME` if not given.")]
JobsOption = Annotated[int, typer.Option(help="Processes; 0 takes all cores.", min=0)]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one key: `--set section.key=value`.")]
EngineOption = Annotated[
    Engine, typer.Option(help="`services`: their own code; `fast`: many runs at once, no messages under way.")
]
DeviceOption = Annotated[str, typer.Option(help="Where the engine `fast` computes: cpu, cuda or cuda:N.")]


@app.command("run")
def run(
    experiment: Annotated[str, typer.Argument(help="Name of a shipped experiment, such as `quick`, or a TOML file.")],
    out: OutOption = None,
    jobs: JobsOption = 0,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(help="Results of another experiment, a directory or results.json: equal runs are taken over."),
    ] = None,
    set_: SetOption = None,
    engine: EngineOption = Engine.SERVICES,
    device: DeviceOption = "cpu",
) -> None:
    """Run an experiment, or what is missing of it, and write results.json and report.html."""
    from heterorl_research.lab.run import run_experiment

    means = _means(jobs, reuse, engine, device)
    raise typer.Exit(run_experiment(experiment, out=out, overrides=set_ or (), means=means))


@app.command("tune")
def tune(
    experiment: Annotated[str, typer.Argument(help="Name of a shipped experiment with a protocol, or a TOML file.")],
    out: OutOption = None,
    jobs: JobsOption = 0,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(help="Trials of another experiment; runs that are the same are taken from there."),
    ] = None,
    set_: SetOption = None,
    engine: EngineOption = Engine.SERVICES,
    device: DeviceOption = "cpu",
) -> None:
    """Choose each arm's learning rate on the tuning seeds and write learning_rates.json, which `run` reads."""
    from heterorl_research.lab.tune import tune_experiment

    means = _means(jobs, reuse, engine, device)
    raise typer.Exit(tune_experiment(experiment, out=out, overrides=set_ or (), means=means))


def _means(jobs: int, reuse: list[Path] | None, engine: Engine, device: str) -> Means:
    from heterorl_research.lab.fast.orders import Means

    return Means(jobs=jobs, reuse=reuse or (), engine=engine.value, device=device)


@app.command("claims")
def claims(
    results: Annotated[Path, typer.Option(help="Directory of results, a file for each experiment.")] = Path(
        "research/results"
    ),
    out: Annotated[Path | None, typer.Option(help="The table; `claims.json` in that directory if not given.")] = None,
) -> None:
    """Test every claim of the paper and of the README on the results that are there, and write the table."""
    from heterorl_research.lab.claims.verdicts import write_claims

    path = out or results / "claims.json"
    Console(markup=False, emoji=False, highlight=False).print(f"{write_claims(results, path)} claims: {path}")


@app.command("report")
def report(directory: Annotated[Path, typer.Argument(help="Directory of an experiment's results.")]) -> None:
    """Write the report of results that are there: HTML, pictures, CSV."""
    from heterorl_research.lab.report.report import write_report

    Console(markup=False, emoji=False, highlight=False).print(f"report: {write_report(directory)}")


@app.command("theory")
def theory(
    out: Annotated[Path, typer.Option(help="Directory of the page.")] = Path("runs/lab/theory"),
    seed: Annotated[int, typer.Option(help="Seed of the random trials.")] = 0,
) -> None:
    """Check the paper's theorems numerically and write a page with figures and counterexamples."""
    from heterorl_research.lab.theory.page import main as write_page

    Console(markup=False, emoji=False, highlight=False).print(f"page: {write_page(out, seed=seed)}")
