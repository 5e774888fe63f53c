"""A service loads its configuration and computes rewards with the packages of its own requirements file, and no other."""

from pathlib import Path

import pytest

from heterorl.common.process.config_file import load
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.engines import write_model
from tests.support.environments import check_and_score, environment

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "coordinator": [ROOT / "deploy/config/coordinator.toml", ROOT / "examples/first-run/coordinator.toml"],
    "learner": [ROOT / "deploy/config/learner.toml", ROOT / "examples/first-run/learner.toml"],
    "sampler": [ROOT / "deploy/config/sampler.toml", ROOT / "examples/first-run/eu-1.toml"],
}
CASES = [(role, path) for role, paths in CONFIGS.items() for path in paths]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("role", "config"), CASES, ids=[f"{path.parent.name}-{path.stem}" for _, path in CASES])
def test_shipped_configuration_is_valid_and_scores_an_answer_in_its_own_packages(tmp_path, model, role, config):
    python = environment(tmp_path / "venv", role)

    result = check_and_score(python, role, config, tmp_path, *[f"model_dir={model}"] * (role != "coordinator"))

    assert result.returncode == 0, result.stdout + result.stderr
    said = result.stdout.splitlines()
    assert said[0] == f"{role} configuration is valid"
    if role != "coordinator":
        assert said[-1] == "1.0"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_environment_has_nothing_else(tmp_path, model):
    role = "learner"
    python = environment(tmp_path / "venv", role, without={"math-verify"})

    result = check_and_score(python, role, CONFIGS[role][0], tmp_path, f"model_dir={model}")

    assert result.returncode == 2
    assert "math-verify is not installed (in a clone of heterorl: pip install '.[tasks]')" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("role", "file", "package"), [("learner", "learner-deepspeed", "deepspeed"), ("sampler", "sampler-vllm", "vllm")]
)
def test_configuration_of_an_engine_is_refused_where_the_engine_is_not(tmp_path, model, role, file, package):
    python = environment(tmp_path / "venv", role)

    result = check_and_score(python, role, ROOT / f"deploy/config/{file}.toml", tmp_path, f"model_dir={model}")

    assert result.returncode == 2
    assert f"{package} is not installed (in a clone of heterorl: pip install '.[{package}]')" in result.stderr


def test_the_first_runs_files_agree():
    directory = ROOT / "examples/first-run"
    learner = load(LearnerConfig, directory / "learner.toml")
    for name in ("eu-1", "us-1"):
        site = load(SamplerConfig, directory / f"{name}.toml")
        assert site.site == name
        for key in ("task", "sampling", "group_size", "model_dir", "coordinator", "use_chat_template"):
            assert getattr(site, key) == getattr(learner, key)
