"""The house stays easy to see: short files, telling names, prose in ASCII."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for path in (ROOT / "services").rglob("*.py") if "v1" not in path.parts)
MAX_LINES = 300


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_is_short_and_ascii(path):
    text = path.read_text(encoding="utf-8")

    assert len(text.splitlines()) <= MAX_LINES or "over 300 lines because" in text
    assert text.isascii()


def test_no_file_is_named_for_nothing():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    assert [name for name in names if Path(name).stem in {"util", "utils", "helper", "helpers", "misc"}] == []


def test_make_help_shows_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:")).split()[1:]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    ).stdout.splitlines()

    assert sorted(line.split()[0] for line in shown) == sorted(phony)
    # Sentences begin in one column, whatever the longest name is.
    column = shown[0].index("Show the targets")
    assert [line for line in shown if not (line[column - 1] == " " and line[column].isupper())] == []
