"""What to look for in each figure of an experiment's report, by the beginning of the figure's name."""

from __future__ import annotations

_SENTENCES = {
    "accuracy_each": "Look for panels whose lines lie on each other: such an algorithm bears delay.",
    "accuracy": "Look for lines that rise and stay up, and for shades that do not overlap: only those differ for sure.",
    "difference_gepo": "Look for bands that leave zero and stay on one side: above zero is better than GEPO.",
    "difference_online": "Look for lines that return to zero: such an algorithm loses nothing to delay in the end.",
    "ladder": "Look for lines that cross zero: there the order turns.",
    "last": "Look for lines that stay level: what falls with the delay does not bear staleness.",
    "kl": "It grows with the delay; look for algorithms whose line runs away from the others.",
    "iw_variance": "Lower is better: high variance means that few answers decide a step.",
    "advantage_error": "Lower is better.",
    "bias": "Near 0 is better; GEPO pays for its low variance with some.",
    "ess": "Higher is better: 1 is every answer, near 0 single answers decide.",
    "clip": "Look for lines that climb with the delay: that part of the work is thrown away.",
    "grad_norm": "Level is good; a jump is an unstable step.",
    "staleness": "A check of the experiment: it should be the delay that was asked for.",
    "correlations": "Look for r near 1 or -1: such a pair moves together.",
    "training": "Look for a line that leaves the others for good: accuracy follows it.",
    "plane": "Look for the size of the blue field: a method that bears delay learns at every rate, not at a lucky one.",
    "sweep_difference": "Look for bars that leave zero: there a setting, or a rule at it, does better or worse.",
    "sweep": "Look for a broad top: a setting whose neighbours are as good needs no tuning.",
}


def look_for(name: str) -> str:
    """The sentence under the figure of a name; every figure has one."""
    return next(text for start, text in _SENTENCES.items() if name.startswith(start))
