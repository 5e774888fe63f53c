"""The pictures of documents are those of the committed results; by what they show, never by pixels."""

import json
from dataclasses import replace

import pytest
from matplotlib.text import Text
from PIL import Image

from heterorl_research.lab.report.drawing.canvas import figure_of
from heterorl_research.lab.report.drawing.drawn import digest
from research.docs import pictures

MOST_PIXELS = 1600
LEAST_POINTS = 8.5
"""At 160 points to the inch 19 pixels of 1600, 10 on a page of 850."""


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The committed results of one experiment in a directory that a test may change."""
    path = tmp_path / "ladder.json"
    path.write_bytes((pictures.RESULTS / "ladder.json").read_bytes())
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_committed_picture_is_that_of_the_committed_results(name):
    path, picture = pictures.ASSETS / f"{name}.png", pictures.made(name)
    figure = figure_of(picture)
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]

    assert pictures.noted(path) == digest(picture), "run make pictures"
    with Image.open(path) as image:
        assert image.width <= MOST_PIXELS
    assert min(text.get_fontsize() for text in texts) >= LEAST_POINTS


def test_every_picture_of_the_documents_is_made():
    assert {path.stem for path in pictures.ASSETS.glob("*.png")} == set(pictures.PICTURES)


@pytest.mark.slow
def test_a_changed_result_is_another_picture_and_is_drawn_anew(results, tmp_path):
    assert pictures.write(["ladder"], directory=tmp_path) == ["ladder"]
    before = pictures.noted(tmp_path / "ladder.png")
    found = json.loads(results.read_bytes())
    found["runs"][0]["last"] += 0.01
    results.write_text(json.dumps(found))

    assert digest(pictures.made("ladder")) != before
    pictures.write(["ladder"], directory=tmp_path)
    assert pictures.noted(tmp_path / "ladder.png") == digest(pictures.made("ladder"))


def test_only_what_is_not_up_to_date_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "PICTURES", {"ladder": pictures.PICTURES["ladder"]})

    assert pictures.write(directory=tmp_path) == ["ladder"]
    assert pictures.write(directory=tmp_path) == []
    assert pictures.write(directory=tmp_path, is_forced=True) == ["ladder"]


def test_a_picture_without_a_digest_is_not_up_to_date(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "ladder.png")

    assert pictures.noted(tmp_path / "ladder.png") == ""


def test_small_words_and_wide_pictures_are_found():
    picture = replace(pictures.made("ladder"), panel_width=11.0)

    assert figure_of(picture).get_size_inches()[0] * 160 > MOST_PIXELS
