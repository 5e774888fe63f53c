"""The house stays easy to see: short files, telling names, prose in ASCII."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "services").rglob("*.py"))
MAX_LINES = 300


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_is_short_and_ascii(path):
    text = path.read_text(encoding="utf-8")

    assert len(text.splitlines()) <= MAX_LINES or "over 300 lines because" in text
    assert text.isascii()


def test_no_file_is_named_for_nothing():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    assert [name for name in names if Path(name).stem in {"util", "utils", "helper", "helpers", "misc"}] == []
