"""The picture of an outage counts from the run's begin and needs no Prometheus."""

import json

import pytest
from PIL import Image

from campaigns.wan_picture import PANELS, draw, since

TIMES = {"begin": 1000.0, "cut": 1060.0, "heal": 1260.0, "end": 1360.0}


def row(site, *values):
    """What Prometheus answers: instants in seconds since the epoch, values as texts."""
    return {"metric": {"site": site}, "values": [[1000.0 + 10 * place, value] for place, value in enumerate(values)]}


@pytest.fixture
def found():
    sites = [row("witness", "1", "1"), row("site-b2", "3", "NaN", "4"), row("site-b1", "2", "0")]
    return since(TIMES, dict.fromkeys(PANELS, sites))


def test_instants_are_seconds_since_the_begin_and_the_witness_is_last(found):
    assert (found["cut_s"], found["heal_s"]) == (60.0, 260.0)
    assert list(found["series"]["silence"]) == ["site-b1", "site-b2", "witness"]
    assert found["series"]["silence"]["site-b2"] == [(0.0, 3.0), (20.0, 4.0)]


def test_picture_is_drawn_again_from_its_numbers(found, tmp_path):
    draw(found, tmp_path / "a.png")
    draw(json.loads(json.dumps(found)), tmp_path / "b.png")

    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (1600, 1200)
        assert image.getpixel((2, 2))[:3] == (255, 255, 255)
