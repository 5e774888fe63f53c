"""Each algorithm has one look, whatever else is in the report, and others tell it from its neighbours."""

import itertools

import numpy as np
import pytest

from heterorl_research.lab.report.data import Arm
from heterorl_research.lab.report.drawing.palette import _NAMED, looks


def test_thirty_algorithms_look_different():
    names = [*_NAMED, *(f"algorithm_{index}" for index in range(17))]

    found = looks([Arm(name) for name in names])

    assert len({(look.color, str(look.dash)) for look in found.values()}) == 30


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
LEAST = 15.0
"""Distance in CIELAB: some 2 are just seen side by side, colours of thin lines need more."""


def seen(colour, vision):
    """CIELAB of a colour as a vision has it."""
    rgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(VISIONS[vision] @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def alike(named, vision):
    """Pairs that neither dash nor colour tells apart."""
    return [
        (first, second)
        for first, second in itertools.combinations(named, 2)
        if named[first][1] == named[second][1]
        and np.linalg.norm(seen(named[first][0], vision) - seen(named[second][0], vision)) < LEAST
    ]


@pytest.mark.parametrize("vision", VISIONS)
def test_named_algorithms_differ_for_every_colour_vision(vision):
    assert alike(_NAMED, vision) == []


def test_colours_that_one_vision_confuses_are_found():
    named = {"a": ("#CC79A7", 0, "o"), "b": ("#8C8C8C", 0, "s"), "c": ("#8C8C8C", 1, "s")}

    assert alike(named, "normal") == []
    assert alike(named, "deutan") == [("a", "b")]


def test_gepo_and_topr_have_colours_far_apart():
    assert all(np.linalg.norm(seen(_NAMED["gepo"][0], v) - seen(_NAMED["topr"][0], v)) > 2 * LEAST for v in VISIONS)


def test_known_algorithm_keeps_its_look_in_other_company():
    alone = looks([Arm("gspo")])[Arm("gspo")]
    company = looks([Arm("aaa"), Arm("gepo"), Arm("gspo"), Arm("zzz")])

    assert company[Arm("gspo")] == alone
    assert len({look.color for look in company.values()}) == 4


def test_variants_share_the_colour_of_their_algorithm_and_differ_in_dash_and_marker():
    found = looks([Arm("gepo", "lr=1"), Arm("gepo", "lr=2")])

    first, second = found.values()
    assert first.color == second.color
    assert first.dash != second.dash
    assert first.marker != second.marker
