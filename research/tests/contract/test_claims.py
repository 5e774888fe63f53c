"""The committed verdicts and their page are what the commands make of the committed results."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl_research.lab.results import mixed_warm_starts
from research.docs import generate

RESULTS = Path(__file__).parents[2] / "results"


def test_committed_verdicts_are_those_of_the_committed_results(tmp_path):
    path = tmp_path / "claims.json"
    answer = CliRunner().invoke(app, ["lab", "claims", "--results", str(RESULTS), "--out", str(path)])

    assert answer.exit_code == 0, answer.output
    assert path.read_text() == (RESULTS / "claims.json").read_text(), "run heterorl lab claims"


def test_committed_page_shows_them():
    assert generate.CLAIMS.read_text(encoding="utf-8") == generate.render_claims(), "run make docs"


def test_what_the_committed_results_test_has_numbers_and_what_they_do_not_has_none():
    rows = json.loads((RESULTS / "claims.json").read_text())

    tested = [row for row in rows if row["verdict"] != "not tested"]
    assert {row["experiment"] for row in tested} >= {"stale64", "stale256+gspo64", "recommend", "stale256"}
    assert all(row["low"] <= row["difference"] <= row["high"] for row in tested)
    assert [row for row in tested if row["seeds"] < 5 and row["evidence"] != "exploratory"] == []
    # What was run before there was a protocol shows nothing by itself.
    assert all(row["evidence"] == "exploratory" for row in tested if row["experiment"] in {"stale64", "recommend"})
    assert not any(row["verdict"] in {"shown", "contradicted"} for row in rows if row["evidence"] == "exploratory")
    assert all(row["p"] is row["difference"] is None and row["seeds"] == 0 for row in rows if row not in tested)


def test_evidence_that_keeps_every_rule_is_of_experiments_that_do():
    rows = json.loads((RESULTS / "claims.json").read_text())
    decided = [row for row in rows if row["evidence"] in {"protocol", "confirmation"}]

    assert {row["experiment"] for row in decided if not row["relaxed"]} == {
        "horizon", "sawtooth", "horizon+sawtooth", "candidates", "confirm", "whole",
    }  # fmt: skip
    assert all("8 seeds" in row["relaxed"] for row in decided if row["experiment"] in {"ladder", "arms", "lengths"})
    ends = [row for row in decided if row["experiment"] in {"ladder", "candidates_ends"}]
    assert {row["claim"][:3] for row in ends if "2 x delay" in row["relaxed"]} == {"256"}
    assert not any(row["relaxed"] for row in rows if row["verdict"] == "not tested")


# What is joined for a claim is one experiment to it.
@pytest.mark.parametrize(
    "names", ["horizon+sawtooth", "stale256+gspo64", *sorted(path.stem for path in RESULTS.glob("*.json"))]
)
def test_pairs_of_committed_runs_began_from_equal_weights(names):
    results = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names.split("+")]

    rows = [row for found in results if isinstance(found, dict) for row in found.get("runs", ())]
    assert mixed_warm_starts(rows) == []
