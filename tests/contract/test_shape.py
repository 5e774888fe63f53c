"""The house stays easy to see: short files, telling names, prose in ASCII."""

import subprocess
from pathlib import Path

import pytest

from tests.support.import_graph import RESEARCH, modules

ROOT = Path(__file__).parents[2]
# Without the stubs, which protoc writes.
SOURCES = sorted([*modules().values(), *modules(RESEARCH).values()])
MAX_LINES = 500


def test_sources_are_short_and_ascii():
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES}

    assert [name for name, text in texts.items() if len(text.splitlines()) > MAX_LINES] == []
    assert [name for name, text in texts.items() if not text.isascii()] == []


@pytest.mark.process
def test_no_file_is_named_for_nothing():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    assert [name for name in names if Path(name).stem in {"util", "utils", "helper", "helpers", "misc"}] == []


def test_no_two_modules_have_one_name():
    names = [path.name for path in modules().values() if path.name != "__init__.py"]

    assert sorted({name for name in names if names.count(name) > 1}) == []
