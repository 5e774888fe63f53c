"""The tables that documents show of results are what the committed results hold."""

import re

import pytest

from docs import tables
from docs.markdown import ROOT, filled


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_committed_tables_are_those_of_the_committed_results(name):
    text = (ROOT / name).read_text(encoding="utf-8")

    assert text == filled(text, tables.TABLES), "run python -m docs.generate"


def test_every_table_stands_in_a_document():
    shown = "".join((ROOT / name).read_text(encoding="utf-8") for name in tables.DOCUMENTS)

    assert [name for name in tables.TABLES if f"<!-- table: {name} -->" not in shown] == []


def test_a_changed_number_is_written_anew():
    text = filled("a\n<!-- table: pull -->\n<!-- end of table -->\nb\n", tables.TABLES)

    assert filled(text.replace("0.75 GB/s", "9.99 GB/s"), tables.TABLES) == text
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")


@pytest.mark.parametrize("text", ["<!-- table: pull -->\n| 1 |\n", "| 1 |\n<!-- end of table -->\n"])
def test_a_table_without_an_end_is_refused(text):
    with pytest.raises(ValueError, match="end"):
        filled(text, tables.TABLES)


def test_an_unknown_table_is_refused():
    with pytest.raises(KeyError, match="nothing"):
        filled("<!-- table: nothing -->\n<!-- end of table -->\n", tables.TABLES)


def test_readme_and_results_show_the_same_numbers_of_experiments():
    block = re.compile(r"<!-- table: horizon-short -->.*?<!-- end of table -->", re.DOTALL)
    (one,), (other,) = (block.findall((ROOT / name).read_text()) for name in ("README.md", "research/docs/results.md"))

    assert one == other
