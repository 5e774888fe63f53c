"""The page of the architecture names every folder at the top, and is written to be read: short lines and paragraphs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MAP = TEXT.partition("## The map")[2].partition("Three columns")[0]
WIDEST, LONGEST = 120, 125


def prose(text):
    """Paragraphs and lists, without tables."""
    return [part for part in text.split("\n\n") if not part.startswith("|")]


def test_every_folder_at_the_top_is_on_the_map():
    folders = {path.parent.name for path in (ROOT / "services").glob("*/__init__.py")} - {"v1"}

    assert folders - set(re.findall(r"`(\w+)/`", MAP)) == set()


def test_lines_outside_tables_are_short():
    assert [line for part in prose(TEXT) for line in part.splitlines() if len(line) > WIDEST] == []


def test_paragraphs_are_short():
    assert [part for part in prose(TEXT) if len(part.split()) > LONGEST] == []


def test_every_number_of_an_invariant_is_a_row_or_said_to_be_free():
    rows = {int(number) for number in re.findall(r"^\| I(\d+) \|", TEXT, re.MULTILINE)}
    free = re.search(r"that stay: (.*) name no\s+statement", TEXT)

    assert free
    assert set(range(1, max(rows) + 1)) - rows == {int(number) for number in re.findall(r"I(\d+)", free[1])}
