"""The tables that documents show of experiments are what the committed results hold."""

import pytest

from docs.markdown import ROOT, filled
from heterorl_research.lab.report.data import Run
from research.docs import generate, lab_tables


def run(seed: int, last: float | None, *, algorithm: str = "gepo", failed: str | None = None) -> Run:
    return Run(
        run_id=f"{algorithm}-{seed}", algorithm=algorithm, delay=64.0, delay_kind="fixed", delay_unit="versions",
        seed=seed, task="add3", variant="", last=last, failed=failed,
    )  # fmt: skip


@pytest.mark.parametrize("name", generate.DOCUMENTS)
def test_committed_tables_are_those_of_the_committed_results(name):
    text = (ROOT / name).read_text(encoding="utf-8")

    assert text == filled(text, generate.TABLES), "run make docs"


def test_every_table_stands_in_a_document():
    shown = "".join((ROOT / name).read_text(encoding="utf-8") for name in generate.DOCUMENTS)

    assert [name for name in generate.TABLES if f"<!-- table: {name} -->" not in shown] == []


def test_cells_have_mean_interval_worst_seed_and_failures():
    # t of two degrees of freedom is 4.3027, and s of these three is 0.1.
    three = [run(0, 0.4), run(1, 0.5), run(2, 0.6)]

    assert lab_tables.cell(three) == "0.500 +- 0.248, worst 0.400"
    assert lab_tables.cell([*three, run(3, None, failed="lost")]) == "0.500 +- 0.248, worst 0.400, 1 failed"
    assert lab_tables.cell([run(0, 0.4)]) == "0.400, worst 0.400"
    assert lab_tables.cell([]) == "-"


def test_pairs_are_of_equal_seeds():
    runs = [run(0, 0.4), run(1, 0.5), run(2, 0.9), run(0, 0.5, algorithm="topr"), run(1, 0.4, algorithm="topr")]

    assert lab_tables.paired("topr", "gepo", runs, 64.0) == "+0.000 +- 1.271, worst -0.100, 1 of 2"
