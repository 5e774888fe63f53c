"""Generates docs/configuration.md, docs/map.md and the tables of measurements in other pages.

Run `python -m docs.generate`; tests compare the pages with their sources.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs import house, markdown, reference, tables

MAP = Path(__file__).parent / "map.md"
PACKAGE = Path(__file__).parents[1] / "services"
_MAP_HEAD = """# Map of the code

For someone who reads or changes the code. The package `heterorl` is the folder `services`. `make docs` makes this page
from the folders' docstrings. [A picture](../ARCHITECTURE.md#the-map) shows which folder may import which.

## Start here

These six files, in this order, show a whole run:

| file | what it shows |
|---|---|
"""
_START = {
    "services/common/api.py": "the coordinator as learner, samplers and operators call it",
    "services/common/types/rollout.py": "what travels up: a group and its rollouts",
    "services/coordinator/core.py": "how the coordinator joins its parts over one store",
    "services/sampler/sampler_app.py": "the sampler's loops, and what each of them waits for",
    "services/learner/run/training_loop.py": "the learner's loop: groups in, a step, a version out",
    "services/learner/loss/loss_spec.py": "a loss as a value of parts, and how a kind becomes it",
}
_FOLDERS_HEAD = """
Then follow [a group and a version through the code](../ARCHITECTURE.md#the-life-of-a-group).

## Every folder

| folder | what it holds | open first |
|---|---|---|
"""
_BESIDE = """
## Outside the package

| folder | what it holds |
|---|---|
| `protos/` | messages and services of the wire, the maker of stubs, the baseline for `buf` |
| `tests/unit/` | the folders of `services/` |
| `tests/contract/` | rules of the repository: imports, sizes, documents, configurations, deployment files |
| `tests/integration/`, `tests/e2e/` | real servers in one process; whole runs as processes |
| `tests/faults/` | kills, cut lines, lost machines of a learner, full disks, rotated certificates |
| `tests/engines/`, `tests/trackers/`, `tests/verifiers/`, `tests/gpu/` | vLLM, DeepSpeed, trackers, verifiers; a GPU |
| `tests/support/` | fakes of clock, network and faults; builders of values |
| `campaigns/` | programs of minutes to hours: kills, cut lines, fresh machines, `fuzz` |
| `benchmarks/` | [measurements](../benchmarks/README.md) |
| `research/` | [experiments](../research/README.md) about losses under delay |
| `deploy/`, `requirements/` | installer, images, Compose files, dashboards, alerts; exact versions for each role |
| `examples/` | whole runs, and the results that each must reach |
"""


def render_map() -> str:
    """The whole page about the code: six files, then each package by its own docstring."""
    start = "".join(f"| `{file}` | {meaning} |\n" for file, meaning in _START.items())
    folders = "".join(
        f"| `{folder}/` | {' '.join(summary.split())} | {first} |\n" for folder, summary, first in packages()
    )
    return _MAP_HEAD + start + _FOLDERS_HEAD + folders + _BESIDE


def packages() -> Iterator[tuple[str, str, str]]:
    """Each package's folder, the first paragraph of its docstring, and the file that it says to open first."""
    for source in sorted(PACKAGE.rglob("__init__.py"), key=lambda path: path.parent.parts):
        folder = source.parent.relative_to(PACKAGE.parent).as_posix()
        if folder.startswith("services/v1"):
            continue
        text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        first = re.search(r"Open `([\w/.]+)`", text)
        name = "" if first is None else f"{first[1].removesuffix('.py')}.py"
        yield folder, reference.escaped(text.partition("\n\n")[0]), name if (source.parent / name).is_file() else ""


if __name__ == "__main__":
    reference.PATH.write_text(reference.render(), encoding="utf-8")
    MAP.write_text(render_map(), encoding="utf-8")
    house.PATH.write_text(house.render(), encoding="utf-8")
    markdown.fill(tables.DOCUMENTS, tables.TABLES)
