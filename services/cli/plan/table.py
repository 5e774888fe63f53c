"""A plan as rows of words, and as tables of a terminal. Pure but for the drawing."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from heterorl.cli.plan.amounts import rate_words, size_words, time_words
from heterorl.plan.assumptions import facts
from heterorl.plan.plan import Plan


def rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Name, amount and what it is made of, in the order in which people ask."""
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
            f" write {time_words(plan.write_s)}, send {time_words(plan.send_s)}; the last two beside a step",
        ),
        ("checkpoint", time_words(plan.checkpoint_s), "masters and moments, written by all ranks to one disk"),
        (
            "memory of a rank",
            size_words(memory.total),
            f"masters {size_words(memory.masters)}, moments {size_words(memory.moments)}, gradients"
            f" {size_words(memory.gradients)}, rounded {size_words(memory.rounded)}, gathered"
            f" {size_words(memory.gathered)}, activations {size_words(memory.activations)}, logits"
            f" {size_words(memory.logits)}; {room}",
        ),
        (
            "memory of rank 0's host",
            size_words(plan.host_bytes),
            "its share of two versions; whole ones for flavours and evaluation",
        ),
        ("WAN, a version up", size_words(plan.delta_bytes), f"{asked.changed:.2%} of the elements change"),
        ("WAN, a pull", size_words(plan.delta_bytes), f"{time_words(plan.pull_s)}, one version behind"),
        ("WAN, a new sampler", size_words(plan.snapshot_bytes), f"{time_words(plan.join_s)} for a snapshot"),
        ("WAN, groups of a step", size_words(plan.groups_bytes), "from all sites together"),
        (
            "WAN, a day of a site",
            f"{size_words(plan.day_in_bytes)} in",
            f"and {size_words(plan.day_out_bytes)} out; the coordinator sends and receives that of each of"
            f" {asked.sites} sites",
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
            "a pull, a whole sequence drawn, and the step; queues add to it",
        ),
        ("the line", "suffices" if plan.is_line_enough else "IS TOO SLOW", _verdict(plan)),
    ]


def _verdict(plan: Plan) -> str:
    least = plan.least_link_bits_per_s
    said = f"a pull takes {plan.pull_s / plan.step_s:.0%} of a step"
    if not math.isfinite(least):
        return (
            f"{said}; no line suffices, as applying a version takes {time_words(plan.applying_s)}: publish less often"
        )
    return f"{said}; {rate_words(least)} is the least for every version"


def title(plan: Plan) -> str:
    """The question in words."""
    asked = plan.question
    return (
        f"{asked.parameters / 1e9:.3g}B parameters (layers of {plan.shape.name}), {asked.backend} in {asked.products}"
        f" on {asked.gpus} GPUs, {asked.gpus_per_node} a node, link {asked.link_bits_per_s / 1e9:g} Gbit/s,"
        f" {asked.tokens_per_step:,.0f} tokens a step"
    )


def show(plan: Plan, console: Console) -> None:
    """Print the plan and what it assumes."""
    table = Table("", "amount", "made of", title=title(plan))
    for row in rows(plan):
        table.add_row(*row)
    console.print(table)
    assumed = Table("assumption", "value", "what", "source", title="Assumptions: --set NAME=VALUE changes one")
    for fact in facts(plan.question.given):
        assumed.add_row(fact["name"], f"{fact['value']:g} {fact['unit']}", fact["meaning"], fact["source"])
    console.print(assumed)
