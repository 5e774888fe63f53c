"""The house stays easy to see: short files, telling names, prose in ASCII."""

import ast
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


PROGRAMS = [
    path
    for folder in ("tests", "campaigns", "benchmarks", "docs", "research")
    for path in (ROOT / folder).rglob("*.py")
]


def _test_modules(source):
    """What a file imports of files that hold tests."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = {name: name.split(".") for name in names}
    return {name for name, own in parts.items() if "tests" in own[:2] and any(part.startswith("test_") for part in own)}


def test_no_file_imports_from_tests():
    found = {str(path.relative_to(ROOT)): _test_modules(path.read_text()) for path in PROGRAMS}

    assert {name: modules for name, modules in found.items() if modules} == {}, "what tests share is in tests/support"


@pytest.mark.parametrize(
    "source", ["from tests.unit.test_a import b", "import research.tests.unit.test_a", "from tests.e2e import test_a"]
)
def test_an_import_from_tests_is_found(source):
    assert _test_modules(source)
    assert _test_modules("from tests.support.run import Run; from campaigns import kills") == set()
