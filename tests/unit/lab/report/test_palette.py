"""Each algorithm has one look, whatever else is in the report."""

from heterorl.lab.report.data import Arm
from heterorl.lab.report.drawing.palette import looks


def test_thirty_algorithms_look_different():
    found = looks([Arm(f"algorithm_{index}") for index in range(30)])

    assert len({(look.color, str(look.dash)) for look in found.values()}) == 30


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
