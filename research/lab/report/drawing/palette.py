"""The look of each algorithm: one colour, dash and marker, the same in every figure and every report.

What the documents draw has a look of its own in `_NAMED`, by colours that people with any colour vision tell apart
(Okabe and Ito, with wine, and grey in place of yellow, which does not show on white). All others take what is left of
eight colours times four dashes, by their place in a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterorl_research.lab.report.data import Arm

_ORANGE, _BLUE, _GREEN, _PINK, _AMBER, _SKY, _BLACK, _GREY, _WINE = (
    "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C", "#771155",
)  # fmt: skip
_COLOURS = (_ORANGE, _BLUE, _GREEN, _PINK, _AMBER, _SKY, _BLACK, _GREY)
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.3)), (0, (6, 1.5, 1, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_NAMED = {
    "gepo": (_ORANGE, 0, "o"),
    "gepo-1s": (_PINK, 0, "D"),
    "gepo-product": (_GREEN, 0, "^"),
    "gepo-whole": (_WINE, 0, "P"),
    "gepo-topr": (_WINE, 1, "v"),
    "gepo-quantile": (_AMBER, 2, "<"),
    "gepo-tempered": (_WINE, 2, "p"),
    "gspo": (_BLUE, 0, "s"),
    "gspo-opsm": (_SKY, 1, "h"),
    "gspo-tight": (_SKY, 2, ">"),
    "topr": (_BLACK, 0, "X"),
    "grpo": (_AMBER, 0, "v"),
    "reinforce": (_GREY, 2, "p"),
}
"""Colour, number of the dash, marker. Rules of one family that are drawn together have colours far apart."""
# A name keeps its place for ever; new ones are added at the end.
_KNOWN = (
    "dr_grpo", "bnpo", "dapo", "gmpo", "cispo", "tis", "mis", "delta_l", "gspo_token", "m2po", "vespo", "sapo", "opsm",
    "icepop", "seq_tis_ess", "aspo", "cppo_kl", "ds_gspo", "decoupled_ppo",
)  # fmt: skip
_LEFT = tuple(
    (colour, dash)
    for dash in range(len(_DASHES))
    for colour in _COLOURS
    if (colour, dash) not in {(of, at) for of, at, _ in _NAMED.values()}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How the lines and dots of one arm are drawn."""

    color: str
    dash: Any
    marker: str
    width: float


def looks(arms: Sequence[Arm]) -> dict[Arm, Look]:
    """The look of each arm: by algorithm; where variants differ, they choose dash and marker."""
    algorithms = sorted({arm.algorithm for arm in arms} - _NAMED.keys())
    places = {name: _KNOWN.index(name) for name in algorithms if name in _KNOWN}
    taken = set(places.values())
    free = (place for place in range(len(_KNOWN) + len(algorithms)) if place not in taken)
    places |= dict(zip([name for name in algorithms if name not in places], free, strict=False))
    variants = sorted({arm.variant for arm in arms})
    found: dict[Arm, Look] = {}
    for arm in arms:
        color, dash, marker = _NAMED.get(arm.algorithm) or _of_place(places[arm.algorithm])
        if len(variants) > 1:
            within = variants.index(arm.variant)
            dash, marker = within, _MARKERS[within % len(_MARKERS)]
        found[arm] = Look(
            color=color, dash=_DASHES[dash % len(_DASHES)], marker=marker, width=2.4 if arm.algorithm == "gepo" else 1.5
        )
    return found


def _of_place(place: int) -> tuple[str, int, str]:
    colour, dash = _LEFT[place % len(_LEFT)]
    return colour, dash, _MARKERS[place % len(_MARKERS)]
