"""The command `heterorl plan`: quantities with units in, tables or JSON out."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from heterorl.cli.connection import console_of
from heterorl.common.errors import ConfigError
from heterorl.common.model.model_shape import shape_of_directory
from heterorl.common.types.common import strict_json
from heterorl.plan.assumptions import facts, parse
from heterorl.plan.estimate import LR, Plan, Question, changed_by
from heterorl.plan.estimate import plan as estimate


def plan(
    params: Annotated[float, typer.Option(help="Parameters of the model, such as 8e9.", show_default=False)] = 0.0,
    model_dir: Annotated[
        Path | None, typer.Option(help="A Hugging Face directory: exact sizes from its config.json.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the learner, one rank each.")] = 8,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of one machine.")] = 8,
    backend: Annotated[str, typer.Option(help="Backend: torch, fsdp2, zero-1, zero-2 or zero-3.")] = "fsdp2",
    compute_dtype: Annotated[str, typer.Option(help="Type of the forward and backward passes: bf16 or fp32.")] = "bf16",
    link: Annotated[
        str, typer.Option(help="Bandwidth of a site's link to the coordinator, such as 1Gbit or 300Mbit.")
    ] = "1Gbit",
    rtt: Annotated[str, typer.Option(help="Round trip of that link, such as 100ms.")] = "100ms",
    tokens_per_step: Annotated[float, typer.Option(help="Tokens of one step, prompts and completions.")] = 1048576,
    steps_per_version: Annotated[int, typer.Option(help="Steps of one version, as the learner's key.")] = 1,
    sites: Annotated[int, typer.Option(help="Sites that share the completions of a step.")] = 1,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate, 1e-6 by default: a step changes 1.4 % of the weights, at 1e-5 9 %."),
    ] = None,
    changed_fraction: Annotated[
        float | None,
        typer.Option(help="Share of published weights that a version changes, 0 to 1; default: from --lr."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an assumption: `--set mfu=0.4`; the table lists all.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Estimate the cost of a run.

    It states the time of a step, memory, sampler GPUs, bytes over the WAN, and a verdict on the link. It loads no
    model and needs no GPU or network. Exit code 0: answered, even if memory does not suffice. 2: an option is wrong.

    Example: `heterorl plan --params 8e9 --gpus 8 --link 1Gbit`
    """
    shape = shape_of_directory(model_dir) if model_dir is not None else None
    if not params and shape is None:
        raise ConfigError("--params", "is not set", action="give --params 8e9 or --model-dir DIR")
    answer = estimate(
        Question(
            parameters=params or (shape.parameters if shape else 0.0),
            shape=shape,
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            backend=backend,
            products=compute_dtype,
            link_bits_per_s=bits_per_s(link),
            rtt_s=seconds(rtt),
            tokens_per_step=tokens_per_step,
            steps_per_version=steps_per_version,
            sites=sites,
            changed=_changed(lr, changed_fraction, steps=steps_per_version),
            given=parse(set_ or ()),
        )
    )
    if json_:
        typer.echo(strict_json(answer.as_dict(), indent=2))
    else:
        show(answer, console_of())


def _changed(lr: float | None, fraction: float | None, *, steps: int) -> float:
    if fraction is not None:
        if lr is not None:
            raise ConfigError("--lr", "is given together with --changed-fraction", action="give one of them")
        return fraction
    lr = LR if lr is None else lr
    if not 0.0 < lr < 1.0:
        raise ConfigError("--lr", f"must be above 0 and below 1; got {lr:g}")
    return changed_by(lr * max(1, steps))


def rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Rows of the table: name, amount, and its parts."""
    memory, asked = plan.memory, plan.question
    room = f"{'fits' if plan.fits else 'DOES NOT FIT'} into nine tenths of {asked.given.hbm_gb:g} GB"
    return [
        (
            "step",
            time_words(plan.step_s),
            f"passes {time_words(plan.compute_s)}, between ranks {time_words(plan.sharding_s)}, optimizer"
            f" {time_words(plan.optimizer_s)}",
        ),
        (
            "publication",
            time_words(plan.publication_s),
            f"round and exchange {time_words(plan.gather_s)}, code {time_words(plan.encode_s)},"
            f" write {time_words(plan.write_s)}, send {time_words(plan.send_s)}; the last two overlap a step",
        ),
        ("checkpoint", time_words(plan.checkpoint_s), "masters and moments, written by all ranks to one disk"),
        (
            "memory of a rank",
            size_words(memory.total),
            f"masters {size_words(memory.masters)}, moments {size_words(memory.moments)}, gradients"
            f" {size_words(memory.gradients)}, rounded {size_words(memory.rounded)}, gathered"
            f" {size_words(memory.gathered)}, activations {size_words(memory.activations)} with gradient_checkpointing"
            f" ({size_words(memory.kept_activations)} without), logits {size_words(memory.logits)}; {room}",
        ),
        (
            "memory of rank 0's host",
            size_words(plan.host_bytes),
            "its share of two versions; whole ones for variants and evaluation",
        ),
        ("WAN, a version up", size_words(plan.delta_bytes), f"{asked.changed:.2%} of the elements change"),
        ("WAN, a pull", size_words(plan.delta_bytes), f"{time_words(plan.pull_s)}, one version behind"),
        ("WAN, a new sampler", size_words(plan.snapshot_bytes), f"{time_words(plan.join_s)} for a snapshot"),
        ("WAN, groups of a step", size_words(plan.groups_bytes), "from all sites together"),
        (
            "WAN, a day of a site",
            f"{size_words(plan.day_in_bytes)} in",
            f"and {size_words(plan.day_out_bytes)} out; the coordinator carries that for each of {asked.sites} sites",
        ),
        (
            "GPUs of samplers",
            str(plan.sampler_gpus),
            f"draw the tokens of a step while one is computed: {plan.drawing.tokens_per_gpu_s:,.0f} tokens a second and"
            f" GPU, {plan.drawing.sequences} sequences at once, engines of {plan.drawing.gpus}",
        ),
        (
            "staleness",
            f"{plan.staleness_versions:.1f} versions",
            f"a pull, a sequence drawn, and the step; {time_words(plan.version_s)} a version; queues add to it",
        ),
        ("the line", "suffices" if plan.is_line_enough else "IS TOO SLOW", _verdict(plan)),
    ]


def _verdict(plan: Plan) -> str:
    least = plan.least_link_bits_per_s
    said = f"a pull takes {plan.pull_s / plan.version_s:.0%} of the time between versions"
    if not math.isfinite(least):
        return f"{said}; no line suffices, as applying takes {time_words(plan.applying_s)}: raise --steps-per-version"
    return f"{said}; {size_words(least, 'bit/s')} is the least for every version"


def title(plan: Plan) -> str:
    """The question in words."""
    asked = plan.question
    return (
        f"{asked.parameters / 1e9:.3g}B parameters (layers of {plan.shape.name}), {asked.backend} in {asked.products}"
        f" on {asked.gpus} GPUs, {asked.gpus_per_node} a node, link {asked.link_bits_per_s / 1e9:g} Gbit/s,"
        f" {asked.tokens_per_step:,.0f} tokens a step"
    )


def show(plan: Plan, console: Console) -> None:
    """Print the plan and its assumptions."""
    table = Table("", "amount", "made of", title=title(plan))
    for row in rows(plan):
        table.add_row(*row)
    console.print(table)
    assumed = Table("assumption", "value", "what", "source", title="Assumptions: --set NAME=VALUE changes one")
    for fact in facts(plan.question.given):
        assumed.add_row(fact["name"], f"{fact['value']:g} {fact['unit']}", fact["meaning"], fact["source"])
    console.print(assumed)


_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def bits_per_s(text: str) -> float:
    """Bits per second of a bandwidth such as `300 Mbit/s`; raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError("--link", f"{text!r} is not a bandwidth", action="write it as 1Gbit or 300Mbit")
    return float(match[1]) * _BITS[match[2].lower()]


def seconds(text: str) -> float:
    """Seconds of a time such as `100ms`; raises ConfigError for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip())
    if match is None:
        raise ConfigError("--rtt", f"{text!r} is not a time", action="write it as 100ms")
    return float(match[1]) / (1000.0 if match[2] == "ms" else 1.0)


def size_words(number: float, unit: str = "B") -> str:
    """Bytes, or another unit, in three digits, such as `96.1 GB`."""
    scale, prefix = next((each for each in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if number >= each[0]), (1e3, "k"))
    return f"{_digits(number / scale)} {prefix}{unit}"


def time_words(duration_s: float) -> str:
    """Seconds in three digits, such as `12.3 s`; minutes from 600 s."""
    if duration_s >= 600.0:
        return f"{_digits(duration_s / 60.0)} min"
    return f"{_digits(duration_s)} s" if duration_s >= 1.0 else f"{_digits(1000.0 * duration_s)} ms"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100.0 else f"{value:.1f}" if value >= 10.0 else f"{value:.2f}"
