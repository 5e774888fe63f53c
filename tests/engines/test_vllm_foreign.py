"""vLLM's processes, the worker with our class among them, start in a project with a package `services` of its own."""

import sys

import pytest

from tests.support.engines import PROMPTS
from tests.support.foreign import foreign_project, run

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
PROGRAM = """
from pathlib import Path
from heterorl.common.generation.inference_engine import generate_all
from tests.support.engines import PROMPTS, disturbed, vllm_engine, write_model

if __name__ == "__main__":
    engine = vllm_engine(write_model(Path("model").absolute(), family="Llama"), Path("weights").absolute())
    try:
        # Our worker class loads it.
        engine.load(disturbed(engine.base(), seed=1), 1)
        print("groups", len(generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=1)))
    finally:
        engine.close()
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_engine_generates_beside_foreign_services(start, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", start)

    with foreign_project(tmp_path, monkeypatch) as project:
        (project / "program.py").write_text(PROGRAM)
        said = run(sys.executable, "program.py", timeout_s=800)

    assert f"groups {len(PROMPTS)}" in said
