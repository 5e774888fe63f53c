"""The shipped configurations of vLLM and DeepSpeed load, compute and score in environments of their own pinned files.

A GPU's packages cannot be installed here: what is shown is the files for the CPU, and that the GPU's pin the same
versions is `tests/contract/test_requirements.py`.
"""

import sys
from pathlib import Path

import pytest

from requirements.subsets import ENGINES, engine_subset
from tests.support.engines import write_model
from tests.support.environments import CHECK_AND_SCORE, check_and_score, environment

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
LOCKED = [str(path) for path in ROOT.glob(".venv/lib/python*/site-packages")]
"""DeepSpeed is deployed beside the lock's versions, and transformers for vLLM is another one."""
COMPUTE = {
    "sampler": """
    import numpy as np
    from heterorl.common.generation.inference_engine import generate_all
    from heterorl.sampler.sampler_app import load_components

    parts = load_components(config)
    parts.engine.load(parts.base(), 0)
    ((completion,),) = generate_all(parts.engine, [np.array([2, 3, 12, 4], np.int32)], seeds=[1], num_per_prompt=1)
    print(parts.engine.name, 0 < completion.token_ids.size == completion.logprobs.size)
    parts.close()
""",
    "learner": """
    from heterorl.learner.learner_parts import build_backend

    backend, close = build_backend(config, 2)
    print(type(backend).__name__, backend.layout.full_bytes > 0)
    close()
    import deepspeed, transformers
    print(deepspeed.__version__, transformers.__version__)
""",
}
SMALL = {
    "sampler": [
        "engine.compute_dtype=fp32", "engine.kv_cache_bytes=33554432", "engine.batch_rows=8", "engine.threads=1",
        "sampling.max_new_tokens=8",
    ],
    "learner": ["backend.device=cpu", "backend.compute_dtype=fp32", "backend.threads=1", "sampling.max_new_tokens=8"],
}  # fmt: skip
CASES = [
    ("learner", "learner-deepspeed", "learner-deepspeed", "ShardedBackend True"),
    ("sampler", "sampler-vllm-cpu", "sampler-vllm", "vllm-0.32.0 True"),
]


@pytest.mark.parametrize("service", ENGINES)
def test_file_is_what_the_engines_environment_says(service):
    assert (ROOT / "requirements" / f"{service}.txt").read_text() == engine_subset(service), "run 'make subsets'"


@pytest.mark.parametrize(("role", "packages", "file", "said"), CASES, ids=[case[1] for case in CASES])
def test_shipped_configuration_computes_and_scores_in_its_own_packages(tmp_path, role, packages, file, said):
    if packages == "learner-deepspeed" and not LOCKED:
        pytest.skip("the lock's environment is not there: make test-engines makes both")
    model = write_model(tmp_path / "model")
    python = environment(tmp_path / "venv", packages, places=[*LOCKED, *sys.path])

    result = check_and_score(
        python, role, ROOT / f"deploy/config/{file}.toml", tmp_path, f"model_dir={model}", *SMALL[role],
        code=CHECK_AND_SCORE + COMPUTE[role],
    )  # fmt: skip

    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert f"{role} configuration is valid" in lines
    assert "1.0" in lines
    assert said in lines
