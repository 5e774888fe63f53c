"""Committed results of the lab -> the pictures of documents, in research/docs/assets.

python -m research.docs.pictures writes those that are not up to date; --all writes every one, and names write those. A
picture carries the digest of what it shows in its own file; a test computes the digests anew. Pixels are never
compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from heterorl.learner.loss.loss_spec import LossSpec, open_share
from heterorl_research.lab.report import curves, differences, forest, ladders, plane, sweeps
from heterorl_research.lab.report.data import Arm, Results
from heterorl_research.lab.report.drawing.canvas import PAIRED_BAR, Picture, Sign, beside, save
from heterorl_research.lab.report.drawing.drawn import digest
from heterorl_research.lab.report.drawing.palette import Look, looks
from heterorl_research.lab.report.reading import load_table
from heterorl_research.lab.report.sweeps import Paired
from heterorl_research.lab.statistics.intervals import Interval
from research.docs import one_page
from research.docs.lab_tables import RESULTS

ASSETS = Path(__file__).parent / "assets"
KEYWORD = "Heterorl-Drawn"
"""Of the text in a PNG file that holds its digest."""
TOKENS = {"t5": 5, "t21": 21, "t101": 101, "t101-slow": 101}
_RATES = {
    "t101": "101 tokens, 64 versions behind, learning rate 1e-4",
    "t101-slow": "101 tokens, 64 versions behind, learning rate 3e-5",
}
_REGIME = {"G": "8", "kl": "0.005", "temperature": "1.0", "top_k": "all", "top_p": "1.0"}


_VARIANTS = {"noise": "3e-5, engines .0011 nats a token apart", "exact-1e-4": "1e-4"}


def _lab(name: str, *, without: Collection[str] = (), tasks: Collection[str] = ()) -> Results:
    found = load_table(RESULTS / f"{name}.json")
    runs = [run for run in found.runs if run.algorithm not in without and (not tasks or run.task in tasks)]
    return found.model_copy(update={"runs": runs})


def _horizon() -> Picture:
    # GSPO with the paper's tight clip hardly learns, and with OPSM instead it is GSPO without delay.
    results = _lab("horizon", without=("gspo-tight", "gspo-opsm"))
    found = {picture.name: picture for picture in differences.pictures(results, looks(results.arms))}
    return replace(found["difference_gepo"], panels=["no delay", "64 versions behind"])


def _ladder() -> Picture:
    results = _lab("ladder")
    (picture,) = ladders.ladders(results, looks(results.arms))
    return picture


def _lengths() -> Picture:
    results = _lab("lengths")
    return ladders.by_tokens(results, looks(results.arms), TOKENS)


def _plane() -> Picture:
    (picture,) = plane.pictures(_lab("plane"))
    return picture


def _one_side() -> Picture:
    seen, fresh = (
        replace(sweeps.paired(_lab(name), Paired(baseline="gepo-1s", floor=-0.3)), panels=[title])
        for name, title in (("candidates", "candidates: 16 seeds"), ("confirm", "confirm: 16 other seeds"))
    )
    return beside("one-side", seen, fresh)


def _sweeps() -> Picture:
    return sweeps.paired(_lab("s7_sweeps"), Paired(regime=_REGIME))


def _long() -> Picture:
    # GEPO without its upper clip lies on GEPO's line.
    results = _lab("lengths", tasks=_RATES, without=("gepo-1s",))
    return curves.across_tasks(results, looks(results.arms), _RATES)


def _cliff() -> Picture:
    # gepo-1s has GEPO's rewards in every step here.
    found = _lab("cliff301", without=("gepo-1s",))
    runs = [run.model_copy(update={"task": run.variant, "variant": ""}) for run in found.runs]
    results = found.model_copy(update={"runs": runs})
    return curves.across_tasks(results, looks(results.arms), _VARIANTS)


def _product() -> Picture:
    results = _lab("long")
    picture, _ = curves.accuracy(results, looks(results.arms))
    return replace(picture, panels=["101 tokens, no delay, learning rate 1e-4", _RATES["t101"]])


def _whole() -> Picture:
    rates, ends, lengths = (_lab(name).finished for name in ("whole", "whole_ends", "whole_lengths"))
    settings = {
        "no delay, 5 tokens": [run for run in ends if run.delay == 0.0],
        **{
            f"64 versions, 5 tokens, rate {rate:g}": [run for run in rates if run.lr == rate]
            for rate in sorted({run.lr for run in rates if run.lr is not None})
        },
        "256 versions, 5 tokens": [run for run in ends if run.delay == 256.0],
        **{
            f"64 versions, {TOKENS[task]} tokens": [run for run in lengths if run.task == task]
            for task in ("t21", "t101")
        },
    }
    return forest.forest(settings, "gepo-whole")


_LAG_RULES = ("gepo-1s", "gepo-whole", "topr", "gspo", "grpo")
_LENGTH_RULES = ("gepo-1s", "gepo-1s-d0", "gepo-whole", "topr", "gspo", "grpo")
_GATE_RULES = ("gepo", "gepo-1s-d0", "gepo-whole", "topr")
_SOFT = "#57606a"
_PAPER_KL = 0.003
"""KL a token of the paper's runs 25 to 40 versions behind, by its published log, nats."""
_PAPER_LENGTHS = (500, 1_000, 2_000)
_PAPER_ENGINES = 0.0011
"""The KL a token of its engines at staleness 0."""


def _bars(axes: Any, points: Mapping[float, Interval], look: Look, *, is_hollow: bool = False) -> None:
    """Means with intervals, and the number of seeds at each."""
    axes.errorbar(
        list(points), [found.mean for found in points.values()], yerr=[found.half or 0.0 for found in points.values()],
        color=look.color, marker=look.marker, linestyle="", markersize=6,
        elinewidth=1.2, capsize=2, markerfacecolor="white" if is_hollow else look.color,
    )  # fmt: skip
    for place, found in points.items():
        # On the side away from 0, and clear of a dot whose bar is shorter than the dot.
        side = 1 if found.mean >= 0.0 else -1
        axes.annotate(
            str(found.num), (place, found.mean + side * max(found.half or 0.0, 0.012)), xytext=(0, 3 * side),
            textcoords="offset points", ha="center", va="bottom" if side > 0 else "top", color=look.color, fontsize=8.5,
        )  # fmt: skip


def _by_lag() -> Picture:
    legend = looks([Arm(name) for name in _LAG_RULES])
    pooled, own = one_page.by_lag(), one_page.own_rates()

    def draw(grid: Sequence[Any]) -> None:
        (axes,) = grid
        axes.axhline(0.0, color=_SOFT, linewidth=1.0)
        for number, (arm, look) in enumerate(legend.items()):
            aside = (number - 2) * 0.13
            points = {place + aside: pooled[arm.algorithm].get(lag) for place, lag in enumerate(one_page.LAGS)}
            _bars(axes, {place: found for place, found in points.items() if found is not None}, look)
            if arm.algorithm == "grpo":
                found = own[arm.algorithm]
                chosen = {one_page.LAGS.index(lag) + aside + 0.11: found[lag] for lag in found}
                _bars(axes, chosen, look, is_hollow=True)
        axes.set_xticks(range(len(one_page.LAGS)), [f"{lag} versions behind" for lag in one_page.LAGS])
        axes.set_xlim(-0.5, len(one_page.LAGS) - 0.5)
        axes.margins(y=0.08)
        axes.set_ylabel("last accuracy minus GEPO's, equal seeds")
        axes.grid(visible=False, axis="x")

    return Picture(
        name="by-lag", title="Difference to GEPO by lag", caption="",
        panels=["three-digit addition, five tokens; numbers are seeds"],
        draw=draw, panel_height=4.6, legend=legend,
        signs=(PAIRED_BAR, Sign(mark="hollow", text="GRPO at a learning rate of its own")),
    )  # fmt: skip


def _by_length() -> Picture:
    legend = looks([Arm(name) for name in ("gepo", *_LENGTH_RULES)])
    found = one_page.by_length()
    lengths = one_page.LENGTHS

    def draw(grid: Sequence[Any]) -> None:
        above, below = grid
        above.axhline(0.0, color=_SOFT, linewidth=1.0)
        for number, (arm, look) in enumerate(legend.items()):
            aside = (number - 3) * 0.1
            points = found[arm.algorithm]
            places = {length: lengths.index(length) + aside for length in points}
            if arm.algorithm != one_page.BASELINE:
                _bars(above, {places[length]: point.difference for length, point in points.items()}, look)
            nats = {places[length]: point.nats for length, point in points.items() if point.nats is not None}
            below.plot(
                list(nats), list(nats.values()), color=look.color, marker=look.marker, linestyle="", markersize=6
            )
        below.axhline(1.1, color=_SOFT, linewidth=1.0, linestyle="--")
        below.annotate("the limit of gepo-whole, 1.1", (3.48, 1.1), xytext=(0, 3), textcoords="offset points",
                       ha="right", color=_SOFT, fontsize=8.5)  # fmt: skip
        below.set_yscale("log")
        below.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
        below.set_yticks([], minor=True)
        for axes in grid:
            axes.set_xticks(range(len(lengths)), [*(f"{one} tokens" for one in lengths[:-1]), "301 tokens, 120 steps"])
            axes.set_xlim(-0.5, len(lengths) - 0.5)
            axes.grid(visible=False, axis="x")
        above.margins(y=0.1)
        above.set_ylabel("last accuracy minus GEPO's,\nequal seeds")
        below.set_ylabel("KL of a completion, nats")

    return Picture(
        name="by-length", title="Difference to GEPO and drift by length", caption="",
        panels=["64 versions behind; numbers are seeds", "drift from the samplers, mean over training"],
        draw=draw, columns=1, panel_width=9.0, panel_height=3.4, legend=legend, signs=(PAIRED_BAR,),
    )  # fmt: skip


def _with_limit(tokens: int) -> LossSpec:
    """The limit of gepo-1s-d0 for completions of a length."""
    return LossSpec(drift_limit=max(1.1, 5.0 * _PAPER_ENGINES * tokens))


def _gates() -> Picture:
    legend = looks([Arm(name) for name in _GATE_RULES])
    points = list(one_page.gates(_GATE_RULES))
    nats = [0.02 * 1.06**step for step in range(130)]
    losses = {
        "gepo-whole": LossSpec(drift_limit=1.1),
        "topr": LossSpec(level="sequence", normalisation="raw"),
        "gepo-1s-d0": _with_limit(301),
    }
    lines = {name: [open_share(loss, max_new_tokens=1, kl_token=one) for one in nats] for name, loss in losses.items()}
    paper = [open_share(_with_limit(tokens), max_new_tokens=tokens, kl_token=_PAPER_KL) for tokens in _PAPER_LENGTHS]

    def draw(grid: Sequence[Any]) -> None:
        (axes,) = grid
        for tokens in _PAPER_LENGTHS:
            place, unit = tokens * _PAPER_KL, " tokens" if tokens == _PAPER_LENGTHS[0] else ""
            axes.axvline(place, color=_SOFT, linewidth=1.0, linestyle=":")
            axes.annotate(
                f"{tokens:,}{unit}", (place, 1.06), xytext=(2, 0), textcoords="offset points", color=_SOFT, fontsize=8.5
            )
        for arm, look in legend.items():
            own = [(drift, share) for rule, drift, share in points if rule == arm.algorithm]
            axes.plot(
                [drift for drift, _ in own], [share for _, share in own], color=look.color, marker=look.marker,
                linestyle="", markersize=4, alpha=0.7,
            )  # fmt: skip
            if arm.algorithm in lines:
                axes.plot(nats, lines[arm.algorithm], color=look.color, linewidth=1.5)
            if arm.algorithm == "gepo-1s-d0":
                axes.plot(
                    [tokens * _PAPER_KL for tokens in _PAPER_LENGTHS], paper, color=look.color, marker=look.marker,
                    linestyle="", markersize=8, markerfacecolor="white",
                )  # fmt: skip
        axes.axhline(0.5, color=_SOFT, linewidth=1.0, linestyle="--")
        axes.annotate("below one half an alert fires", (0.021, 0.5), xytext=(0, -12), textcoords="offset points",
                      color=_SOFT, fontsize=8.5)  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlim(0.02, 30.0)
        axes.set_ylim(0.0, 1.12)
        axes.set_xticks([0.03, 0.1, 0.3, 1, 3, 10, 30], ["0.03", "0.1", "0.3", "1", "3", "10", "30"])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("drift of a completion, nats: tokens x KL a token")
        axes.set_ylabel("share of the bad rollouts that train")

    return Picture(
        name="gates", title="Bad rollouts that train by drift", caption="",
        panels=["lines computed, dots measured; dotted: the paper's drift, by tokens"],
        draw=draw, panel_height=4.4, legend=legend,
        signs=(Sign(mark="hollow", text="gepo-1s-d0 at the paper's drift, computed: its limit grows with the tokens"),),
    )  # fmt: skip


PICTURES: dict[str, Callable[[], Picture]] = {
    "by-lag": _by_lag,
    "by-length": _by_length,
    "cliff": _cliff,
    "gates": _gates,
    "horizon": _horizon,
    "ladder": _ladder,
    "lengths": _lengths,
    "long": _long,
    "one-side": _one_side,
    "plane": _plane,
    "product": _product,
    "sweeps": _sweeps,
    "whole": _whole,
}
"""Name of the file to what is drawn, from committed results alone."""


def made(name: str) -> Picture:
    """The picture of a file, not yet drawn."""
    return replace(PICTURES[name](), name=name)


def _note(path: Path, text: str) -> None:
    """Write a PNG file again with a text, and with 256 colours, which are enough and a third of the bytes."""
    image = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    info = PngInfo()
    info.add_text(KEYWORD, text)
    image.save(path, pnginfo=info, optimize=True)


def noted(path: Path) -> str:
    """The digest that a PNG file says it shows; empty where it says none."""
    with Image.open(path) as image:
        return str(image.info.get(KEYWORD, ""))


def write(names: Collection[str] = (), *, directory: Path = ASSETS, is_forced: bool = False) -> list[str]:
    """Draw what is not up to date, or is named, or all; returns the names of what was drawn."""
    drawn = []
    for name in names or PICTURES:
        picture, path = made(name), directory / f"{name}.png"
        found = digest(picture)
        if names or is_forced or not path.is_file() or noted(path) != found:
            save(picture, directory)
            _note(path, found)
            drawn.append(name)
    return drawn


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--all"]
    sys.stdout.write("".join(f"drawn: {name}.png\n" for name in write(arguments, is_forced="--all" in sys.argv)))
