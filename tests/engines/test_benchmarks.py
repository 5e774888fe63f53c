"""Benchmarks of engines start in the engines' environment, which lacks what only a coordinator needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load_memory", "loop", "parity", "publish", "routing", "sampler"])
def test_benchmark_starts(name):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
