"""A service computes rewards with the packages of its own requirements file, and with no other."""

import json
import re
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

from heterorl.common.process.config import load
from heterorl.learner.config import LearnerConfig
from heterorl.sampler.config import SamplerConfig

ROOT = Path(__file__).parents[2]
SCORE = """
import json, sys
from pathlib import Path
from heterorl.common.process.config import load
from heterorl.common.tasks.registry import build_task
from heterorl.common.model.trial import try_reward
from heterorl.{role}.config import {schema}

config = load({schema}, Path(sys.argv[1]), sys.argv[2:])
task = build_task(config.task)
print(json.dumps(try_reward(task, None)))
"""
CONFIGS = [
    ("learner", LearnerConfig, ROOT / "deploy/config/learner.toml"),
    ("sampler", SamplerConfig, ROOT / "deploy/config/sampler.toml"),
    ("learner", LearnerConfig, ROOT / "examples/first-run/learner.toml"),
    ("sampler", SamplerConfig, ROOT / "examples/first-run/eu-1.toml"),
]


def environment(directory, role, without=()):
    """An environment that has what requirements/ROLE.txt names, by links to what is installed here."""
    venv.create(directory, symlinks=True, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    for line in (ROOT / "requirements" / f"{role}.txt").read_text().splitlines():
        name = line.partition("==")[0]
        if line.startswith("#") or name in without:
            continue
        for top in {file.parts[0] for file in distribution(name).files if file.parts[0] not in ("..", "__pycache__")}:
            target = Path(str(distribution(name).locate_file(top)))
            if target.exists() and not (packages / top).exists():
                (packages / top).symlink_to(target)
    (packages / "heterorl.pth").write_text(f"{ROOT / 'src'}\n")
    return directory / "bin" / "python"


def score(python, role, schema, config, directory, *overrides):
    """One answer of the task that a shipped file configures, with a data file of the test's where it is the site's."""
    data = directory / "train.jsonl"
    rows = [{"prompt": f"What is half of {number}?", "answer": f"$\\frac{{{number}}}{{2}}$"} for number in (1, 3, 5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = re.search(r'name = "jsonl:(.*)"', config.read_text())[1]
    overrides = [f"task.name=jsonl:{data if own.startswith('/') else config.parent / own}", "task.reward_timeout_s=60"]
    code = SCORE.format(role=role, schema=schema.__name__)
    return subprocess.run(
        [str(python), "-P", "-c", code, str(config), *overrides],
        cwd=directory, capture_output=True, text=True, timeout=200, check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("role", "schema", "config"), CONFIGS, ids=[f"{c[2].parent.name}-{c[2].stem}" for c in CONFIGS]
)
def test_shipped_configuration_scores_an_answer_in_its_own_packages(tmp_path, role, schema, config):
    python = environment(tmp_path / "venv", role)

    result = score(python, role, schema, config, tmp_path)

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == pytest.approx(1.0)


@pytest.mark.timeout(220)
def test_the_environment_has_nothing_else(tmp_path):
    role, schema, config = CONFIGS[0]
    python = environment(tmp_path / "venv", role, without={"math-verify"})

    result = score(python, role, schema, config, tmp_path)

    assert result.returncode != 0
    assert "math-verify is not installed (pip install 'heterorl[tasks]')" in result.stderr


def test_the_first_runs_files_agree():
    directory = ROOT / "examples/first-run"
    learner = load(LearnerConfig, directory / "learner.toml")
    for name in ("eu-1", "us-1"):
        site = load(SamplerConfig, directory / f"{name}.toml")
        assert site.site == name
        for key in ("task", "sampling", "group_size", "model_dir", "coordinator", "use_chat_template"):
            assert getattr(site, key) == getattr(learner, key)
