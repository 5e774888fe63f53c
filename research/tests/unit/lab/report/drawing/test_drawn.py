"""A digest is of what a picture shows: another number, word or colour is another digest, another machine is not."""

from dataclasses import replace

import pytest

from heterorl_research.lab.report.data import Arm
from heterorl_research.lab.report.drawing import drawn
from heterorl_research.lab.report.drawing.canvas import BAND, Picture, Sign, beside, figure_of
from heterorl_research.lab.report.drawing.palette import looks


def picture(values=(0.1, 0.2), *, word="step", color="#000000", panel="a", low=0.0, text="t"):
    def draw(grid):
        for axes in grid:
            axes.plot([1, 2], values, color=color)
            axes.fill_between([1, 2], [low, low], [1.0, 1.0])
            axes.text(1, 0.5, text)
            axes.set_xlabel(word)

    return Picture(name="p", title="P", caption="", panels=[panel], draw=draw, legend=looks([Arm("gepo")]))


def test_equal_pictures_have_one_digest():
    assert drawn.digest(picture()) == drawn.digest(picture())
    assert drawn.digest(picture((0.1, 0.2 + 1e-12))) == drawn.digest(picture())
    assert drawn.digest(picture((0.0, 1e-17))) == drawn.digest(picture((-1e-17, 0.0)))


@pytest.mark.parametrize(
    "change",
    [
        {"values": (0.1, 0.201)}, {"word": "steps"}, {"color": "#000001"}, {"panel": "b"}, {"low": 0.01}, {"text": "u"},
    ],
)  # fmt: skip
def test_whatever_is_shown_is_part_of_the_digest(change):
    assert drawn.digest(picture(**change)) != drawn.digest(picture())


@pytest.mark.parametrize(
    "change", [{"legend": looks([Arm("gspo")])}, {"signs": (BAND,)}, {"panel_height": 4.0}, {"panels": ["a", "a"]}]
)
def test_legend_and_size_are_part_of_the_digest(change):
    assert drawn.digest(replace(picture(), **change)) != drawn.digest(picture())


def test_another_style_is_another_digest(monkeypatch):
    before = drawn.digest(picture())
    monkeypatch.setattr(drawn, "STYLE", drawn.STYLE + 1)

    assert drawn.digest(picture()) != before


def test_pictures_stand_beside_each_other_in_one_range_with_one_legend():
    first = replace(picture((0.1, 0.2)), legend=looks([Arm("gepo"), Arm("topr")]))
    second = replace(picture((0.1, 3.0), panel="b"), legend=looks([Arm("gepo"), Arm("gspo")]))

    both = beside("both", first, second)
    left, right = figure_of(both).axes

    assert (both.name, list(both.panels)) == ("both", ["a", "b"])
    assert [arm.algorithm for arm in both.legend] == ["gepo", "topr", "gspo"]
    assert left.get_ylim() == right.get_ylim()
    assert left.get_ylim()[1] > 3.0


def test_legends_say_what_marks_are_and_show_markers_where_there_are_dots():
    marks = ("thick", "thin", "band", "bar", "hollow", "plus", "minus")
    signs = tuple(Sign(mark=mark, text=mark) for mark in marks)

    above, below = figure_of(replace(picture(), signs=signs)).legends
    (alone,) = figure_of(replace(picture(), has_markers=False)).legends

    assert [text.get_text() for text in above.get_texts()] == list(marks)
    assert below.get_lines()[0].get_marker() == "o"
    assert alone.get_lines()[0].get_marker() == ""
