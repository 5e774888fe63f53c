"""The look of each algorithm: one colour, dash and marker, the same in every figure and every report.

Eight colours that people with any colour vision tell apart (Okabe and Ito, yellow replaced by grey, which shows on
white), times four dashes: 32 algorithms differ. Markers repeat every 11, so that dots differ as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterorl.lab.report.data import Arm

_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.3)), (0, (6, 1.5, 1, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
# A name keeps its place for ever; new ones are added at the end.
_KNOWN = (
    "gepo", "gspo", "grpo", "dr_grpo", "bnpo", "dapo", "gmpo", "cispo", "topr", "tis", "mis", "delta_l", "gspo_token",
    "m2po", "vespo", "sapo", "opsm", "icepop", "seq_tis_ess", "aspo", "cppo_kl", "ds_gspo", "reinforce",
    "decoupled_ppo",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How the lines and dots of one arm are drawn."""

    color: str
    dash: Any
    marker: str
    width: float


def looks(arms: Sequence[Arm]) -> dict[Arm, Look]:
    """The look of each arm: by algorithm; where variants differ, they choose dash and marker."""
    algorithms = sorted({arm.algorithm for arm in arms})
    places = {name: _KNOWN.index(name) for name in algorithms if name in _KNOWN}
    taken = set(places.values())
    free = (place for place in range(len(_KNOWN) + len(algorithms)) if place not in taken)
    places |= dict(zip([name for name in algorithms if name not in places], free, strict=False))
    variants = sorted({arm.variant for arm in arms})
    found: dict[Arm, Look] = {}
    for arm in arms:
        place = places[arm.algorithm]
        within = variants.index(arm.variant)
        dash, marker = (place // len(_COLOURS), place) if len(variants) == 1 else (within, within)
        found[arm] = Look(
            color=_COLOURS[place % len(_COLOURS)],
            dash=_DASHES[dash % len(_DASHES)],
            marker=_MARKERS[marker % len(_MARKERS)],
            width=2.4 if arm.algorithm == "gepo" else 1.3,
        )
    return found
