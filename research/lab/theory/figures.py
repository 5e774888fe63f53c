"""The pictures of the theory page: each is a pure function from numbers to a drawn figure.

Guarantees: drawn without a display and without global state; the same numbers give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heterorl_research.lab.theory import checks, theorems
from heterorl_research.lab.theory.estimators import MEANS
from heterorl_research.lab.theory.samples import GROUP, BiasCurves, SoftmaxCases
from heterorl_research.lab.theory.theorems import Array

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#1f77b4", "#e6790e", "#2a9d4a", "#c62f3b", "#7a8793"
_KL_LABELS = ("KL(p||q), nats", "KL(q||p), nats")
_VARIANCE = "variance under q"
_SOLID_AND_DASHED = "solid: p/q, dashed: p/E_q[q]"


def save(path: Path, draw: Any, *, width: float, num_panels: int) -> None:
    """Write one PNG with panels side by side; `draw` takes the list of axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
    draw(panels)
    for axes in panels:
        axes.grid(alpha=0.25)
        # They would be most of the drawing time, and say nothing on a logarithmic axis of many decades.
        axes.minorticks_off()
    figure.savefig(path)


def draw_bernoulli(panels: Sequence[Any]) -> None:
    """Variance of both weights against both divergences, for three families of two-outcome policies."""
    rising = np.linspace(0.501, 0.99999, 400)
    families = [
        ("p = (a, 1-a), q = (1-a, a)", _BLUE, rising, 1.0 - rising),
        ("p = (a, 1-a), q = (0.1, 0.9)", _ORANGE, np.linspace(0.102, 0.99999, 400), np.full(400, 0.1)),
        ("p = (0.6, 0.4), q = (a, 1-a)", _GREEN, np.full(400, 0.6), 1.0 - np.geomspace(0.38, 1e-6, 400)),
    ]
    for label, colour, first, second in families:
        p, q = theorems.bernoulli(first), theorems.bernoulli(second)
        for axes, divergence in zip(panels, (theorems.kl(p, q), theorems.kl(q, p)), strict=True):
            axes.plot(divergence, theorems.variance_ordinary(p, q), color=colour, label=label)
            axes.plot(divergence, theorems.variance_shared(p, q), color=colour, linestyle="--")
    floor = np.linspace(0.02, 8.0, 200)
    panels[0].plot(floor, np.expm1(floor), color=_GREY, linestyle=":", label="exp(KL) - 1, floor of Var[p/q]")
    for axes, label in zip(panels, _KL_LABELS, strict=True):
        _log_variance(axes, label, low=1e-3, high=1e4)
        axes.set_xlim(0, 8)
    panels[0].set_title(_SOLID_AND_DASHED, fontsize=10)
    panels[1].set_title("the same against the reverse divergence", fontsize=10)
    panels[0].legend(fontsize=8, loc="center right")


def draw_gaussian(panels: Sequence[Any]) -> None:
    """Variance against both divergences as the mean moves, and against the width with its two poles."""
    shift = np.linspace(0.0, 4.0, 300)
    for deviation, colour in ((0.5, _GREEN), (1.0, _BLUE), (1.3, _ORANGE)):
        width = np.full_like(shift, deviation)
        ordinary = theorems.gaussian_variance_ordinary(shift, width)
        shared = theorems.gaussian_variance_shared(shift, width)
        for axes, divergence in zip(panels[:2], theorems.gaussian_kls(shift, width), strict=True):
            axes.plot(divergence, ordinary, color=colour, label=f"s = {deviation:g}")
            axes.plot(divergence, shared, color=colour, linestyle="--")
    for axes, label in zip(panels[:2], _KL_LABELS, strict=True):
        _log_variance(axes, label, low=1e-3, high=1e4)
        axes.set_xlim(0, 8)
    panels[0].legend(fontsize=8, loc="center right")
    panels[0].set_title(_SOLID_AND_DASHED, fontsize=10)
    panels[1].set_title("q = N(0, 1), p = N(m, s^2), m from 0 to 4", fontsize=10)
    # Up to the pole: 2 - s^2 falls to 1e-10.
    widths = np.concatenate([np.geomspace(0.003, 1.0, 400), np.sqrt(2.0 - np.geomspace(1.0, 1e-10, 400))])
    panels[2].plot(widths, theorems.gaussian_variance_ordinary(np.zeros(800), widths), color=_BLUE, label="p/q")
    wide = np.geomspace(0.003, 3.0, 600)
    shared = theorems.gaussian_variance_shared(np.zeros(600), wide)
    panels[2].plot(wide, shared, color=_BLUE, linestyle="--", label="p/E_q[q]")
    panels[2].axvline(np.sqrt(2.0), color=_RED, linestyle=":", label="s = sqrt(2): p/q infinite beyond")
    panels[2].set_xscale("log")
    _log_variance(panels[2], "s, standard deviation of p", low=1e-3, high=1e4)
    panels[2].set_title("m = 0: both diverge as s goes to 0", fontsize=10)
    panels[2].legend(fontsize=8, loc="upper center")


def draw_softmax(panels: Sequence[Any], cases: SoftmaxCases) -> None:
    """Scatter of both variances against both divergences, one dot per pair of policies."""
    for axes, divergence, label in zip(panels, (cases.forward, cases.reverse), _KL_LABELS, strict=True):
        axes.plot(divergence, cases.ordinary, ".", color=_BLUE, markersize=3, alpha=0.5, label="Var[p/q]")
        axes.plot(divergence, cases.shared, ".", color=_ORANGE, markersize=3, alpha=0.5, label="Var[p/E_q q]")
        axes.set_xscale("log")
        axes.set_xlim(1e-4, 20)
        _log_variance(axes, label, low=1e-4, high=1e5)
    line = np.geomspace(1e-4, 20, 200)
    panels[0].plot(line, np.expm1(line), color=_GREY, linestyle=":", label="exp(KL) - 1")
    panels[0].legend(fontsize=8, loc="upper left", markerscale=3)


def draw_denominators(panels: Sequence[Any], curves: Sequence[BiasCurves]) -> None:
    """Relative bias of the three means against the group size; lines exact or limit, dots simulated."""
    colours = dict(zip(MEANS, (_RED, _BLUE, _GREEN), strict=True))
    for axes, curve in zip(panels, curves, strict=True):
        for kind in MEANS:
            colour = colours[kind]
            simulated = np.array(curve.simulated[kind])
            axes.errorbar(
                curve.group_sizes,
                100 * simulated[:, 0],
                yerr=200 * simulated[:, 1],
                fmt="o",
                color=colour,
                markersize=4,
                label=kind,
            )
            if curve.exact[kind]:
                sizes = curve.group_sizes[: len(curve.exact[kind])]
                axes.plot(sizes, 100 * np.array(curve.exact[kind]), color=colour)
            axes.axhline(100 * curve.limits[kind], color=colour, linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(curve.group_sizes, [str(size) for size in curve.group_sizes])
        axes.set_xlabel("G, samples of the group")
        axes.set_ylabel("bias of the mean, % of E_q[q]")
        axes.set_title(curve.title, fontsize=10)
    panels[0].legend(fontsize=8, loc="right", bbox_to_anchor=(0.99, 0.65))


def draw_theorems(panels: Sequence[Any], first: checks.TheoremOne, rng: np.random.Generator) -> None:
    """One panel per theorem: slack of the constant, bias against bound, and a family that breaks the third."""
    sizes = np.array([n for n, _ in first.worst_by_outcomes])
    line = np.geomspace(2, 100, 100)
    ceiling = checks.sharper_constant(line) / (line**2 + 1)
    panels[0].axhline(1.0, color=_GREY, linestyle=":", label="violation above this line")
    panels[0].plot(line, ceiling, color=_GREEN, label="proved: (1 + n^2/4)/(n^2 + 1)")
    panels[0].plot(sizes, [ratio for _, ratio in first.worst_by_outcomes], "o", color=_BLUE, label="worst trial")
    panels[0].set_xscale("log")
    panels[0].set_xticks(sizes, [str(n) for n in sizes])
    panels[0].set_ylim(0, 1.45)
    panels[0].set_xlabel("n, number of outcomes")
    panels[0].set_ylabel("(exp(KL) - difference) / (n^2 + 1)")
    panels[0].set_title("Theorem 1: true, constant 4 times too large", fontsize=10)
    panels[0].legend(fontsize=8, loc="upper right")

    p, q = (checks.random_policies(rng, num_outcomes=10, num_cases=1500) for _ in range(2))
    draws = rng.uniform(-1.0, 1.0, size=p.shape)
    for advantages, colour, label in (
        (np.ones_like(p), _RED, "A = 1"),
        (checks.centre(draws, p), _GREEN, "E_p[A] = 0, |A| <= 1"),
    ):
        bias, bound = checks.bias_and_bound(p, q, advantages)
        panels[1].loglog(bound, bias, ".", color=colour, markersize=3, alpha=0.6, label=label)
    panels[1].loglog([0.2, 5], [0.2, 5], color=_GREY, linestyle=":", label="violation above this line")
    panels[1].set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    panels[1].set_xlim(0.2, 5)
    panels[1].set_ylim(1e-3, 100)
    panels[1].set_xlabel("bound ||p|| / ||q||")
    panels[1].set_ylabel("|bias| of E_q[w A]")
    panels[1].set_title("Theorem 2: needs centred advantages (n = 10)", fontsize=10)
    panels[1].legend(fontsize=8, loc="upper left", markerscale=3)

    mass = np.linspace(0.3, 1.0, 400)
    for likeliest, others, colour in ((0.5, 2, _BLUE), (0.3, 14, _ORANGE)):
        q = np.concatenate([[likeliest], np.full(others, (1 - likeliest) / others)])
        p = np.concatenate([mass[:, None], np.repeat((1 - mass[:, None]) / others, others, axis=1)], -1)
        left, right = checks.third_sides(p, q[None], np.ones_like(p), is_repaired=False)
        needed = left - right
        inverse = 1.0 / float(np.square(q).sum())
        name = f"q = ({likeliest:g}, {others} x {(1 - likeliest) / others:g})"
        panels[2].plot(mass, 1.0 - needed / inverse, color=colour, label=f"{name}, C as stated")
        repaired = (inverse - needed) / (1.0 + inverse**2)
        panels[2].plot(mass, repaired, color=colour, linestyle="--", label="the same, C repaired")
    panels[2].axhline(1.0, color=_GREY, linestyle=":", label="violation above this line")
    panels[2].set_xlabel("p of the first outcome; A = 1")
    panels[2].set_ylabel("(exp(KL) - difference) / C")
    panels[2].set_title("Theorem 3: false as stated", fontsize=10)
    panels[2].legend(fontsize=8, loc="upper left")


def draw_on_policy(panels: Sequence[Any], weights: Array, policy: Array) -> None:
    """The weights of one on-policy group with the clip range, and the distribution that GEPO in effect samples."""
    panels[0].bar(range(1, len(weights) + 1), weights, color=[_ORANGE if w > 1 else _BLUE for w in weights])
    panels[0].axhspan(0.8, 1.2, color=_GREEN, alpha=0.15, zorder=0, label="clip range 1 +- 0.2")
    panels[0].axhline(1.0, color=_GREY, linestyle=":", label="unbiased weight")
    panels[0].axhline(float(weights.mean()), color=_RED, linewidth=1, label=f"mean weight {weights.mean():.3f}")
    panels[0].set_xticks(range(1, len(weights) + 1), [f"q = {value:.3f}" for value in GROUP])
    panels[0].set_ylim(0, 1.7)
    panels[0].set_ylabel("GEPO weight with p = q")
    panels[0].set_title("One group, learner and sampler identical", fontsize=10)
    panels[0].legend(fontsize=8, loc="upper right")
    ranks = np.arange(1, len(policy) + 1)
    panels[1].bar(ranks - 0.2, policy, width=0.4, color=_BLUE, label="policy q")
    tilted = theorems.effective_distribution(policy, policy)
    panels[1].bar(ranks + 0.2, tilted, width=0.4, color=_ORANGE, label="q^2 / sum q^2")
    panels[1].set_xlabel("completion, likeliest first")
    panels[1].set_ylabel("probability")
    panels[1].set_xticks(ranks)
    panels[1].set_title("What exact on-policy GEPO averages over", fontsize=10)
    panels[1].legend(fontsize=8)


def _log_variance(axes: Any, label: str, *, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlabel(label)
    axes.set_ylabel(_VARIANCE)
