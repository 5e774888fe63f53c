"""The one page (docs/results.md) stays one page, and each of its five sentences has its rows of claims.json."""

import json
import re

import pytest

from docs.markdown import ROOT
from heterorl_research.lab.report.data import Run
from research.docs import one_page

PAGE = (ROOT / "docs/results.md").read_text(encoding="utf-8")
ROWS = json.loads((one_page.RESULTS / "claims.json").read_bytes())
SENTENCES = [" ".join(part.split()) for part in re.findall(r"^\d\. .*?(?=^\d\. |\n\n)", PAGE, re.DOTALL | re.MULTILINE)]


def rows_of(experiment, mean, half):
    """Claims of an experiment with this difference, on either side of 0, and this half of an interval."""
    return [
        row
        for row in ROWS
        if row["experiment"] == experiment
        and row["difference"] is not None
        and f"{abs(row['difference']):.3f}" == mean
        and abs((row["high"] - row["low"]) / 2 - float(half)) < 0.0006
    ]


def run(algorithm, seed, last, *, lr=1e-3):
    return Run(
        run_id=f"{algorithm}-{seed}-{lr}", algorithm=algorithm, delay=64.0, delay_kind="fixed", delay_unit="versions",
        seed=seed, last=last, lr=lr,
    )  # fmt: skip


def test_page_has_five_sentences_three_pictures_and_two_tables_in_a_hundred_lines():
    assert len(PAGE.splitlines()) <= 100
    assert (len(SENTENCES), PAGE.count("!["), PAGE.count("\n|---")) == (5, 3, 2)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_number_of_a_sentence_has_its_row_of_claims(sentence):
    experiment = re.findall(r"\[`(\w+)`\]", sentence)[-1]
    found = [rows_of(experiment, *pair) for pair in re.findall(r"(\d\.\d+) \+- (\d\.\d+)", sentence)]

    assert found
    assert [] not in found
    assert {row["verdict"] for rows in found for row in rows} & {"shown", "suggested", "contradicted"}


def test_a_number_without_a_row_is_found():
    assert rows_of("confirm", "0.047", "0.014")
    assert not rows_of("confirm", "0.048", "0.014")
    assert not rows_of("whole", "0.047", "0.014")


def test_a_seed_counts_once_and_rates_of_a_seed_are_averaged(monkeypatch):
    first = [run("gepo", 1, 0.4), run("gepo", 1, 0.6, lr=2e-3), run("topr", 1, 0.6), run("topr", 1, 0.8, lr=2e-3)]
    second = [run("gepo", 1, 0.0), run("topr", 1, 1.0), run("gepo", 2, 0.5), run("topr", 2, 0.6), run("topr", 3, 0.9)]
    tables = {"first": first, "second": second}
    monkeypatch.setattr(one_page, "_finished", tables.__getitem__)
    monkeypatch.setattr(one_page, "_DELAYS", {64: ("first", "second")})

    found = one_page.by_lag()["topr"][64]

    assert (found.num, found.mean) == (2, pytest.approx(0.15))
