"""The tables that documents show of results are what the committed results hold."""

import json
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


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def row_of_cheat(name, row):
    return f"| {name} | {row['rollouts']:,} | {row['rates']['any']:.2%} | {row['group_rate']:.2%} |"


def rows_of_variants():
    found = results("weights")
    weights = {("bf16", row["lr"], row["lag_versions"]): row for row in found["rows"] if row["scheme"] == "gapulp"} | {
        (row["variant"], row["lr"], row["lag_versions"]): row for row in found["variants"]
    }
    for lr, versions in ((1e-6, 1), (1e-6, 8), (1e-6, 24), (1e-5, 1), (1e-4, 1)):
        for name in ("int8", "fp8_e4m3"):
            row = weights[name, lr, versions]
            digits = 2 if row["changed_fraction"] < 0.01 else 1
            yield lr, versions, f" | {100 * row['changed_fraction']:.{digits}f} % | {row['ratio']:,.0f}x |"


def row_of_routing(row):
    if "replayed" not in row:
        return f"| {row['model']} | {shortest(row['mean'])} | | |"
    cells = (f"{shortest(row['mean'])} | {row['differing']:.0%}".replace("%", " %"), shortest(row["replayed"]))
    return f"| {row['model']} | {cells[0]} | {cells[1]} |"


def shortest(value):
    return f"{value:.4f}"[1:] if value < 0.01 else f"{value:.3f}"[1:]


def test_rows_that_people_wrote_are_those_of_the_committed_results():
    untrusted, variants, models, relay = (
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for name in ("untrusted", "variants", "models", "relay")
    )

    for name, row in results("verify")["cases"].items():
        assert row_of_cheat(name, row) in untrusted
    for lr, versions, cells in rows_of_variants():
        (line,) = [line for line in variants.splitlines() if line.startswith(f"| {number(lr)} | {versions} |")]
        assert cells in line
    for row in results("routing")["rows"]:
        if row["pair"] == "hf bf16 - vllm bf16":
            assert row_of_routing(row) in models
    line = results("relay")
    names = {
        "one_pull": "one sampler, no relay",
        "without_relay": "eight, no relay",
        "with_relay": "eight behind a relay",
    }
    for key, name in (names | {"kept": "eight more, of the same version"}).items():
        num_bytes = line["rows"][key]["bytes_on_line"]
        ratio = num_bytes / line["bytes_of_one_pull"]
        assert f"| {name} | {num_bytes / 1e6:.2f} | {ratio:.2f} |" in relay


def number(lr):
    return "0.0001" if lr == 1e-4 else f"{lr:g}"
