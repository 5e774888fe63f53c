"""A service whose rewards or episodes fail says so at its start, before a model is loaded."""

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.learner import learner_parts as learner
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler import sampler_app as sampler
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.conversations import save_chat_model

pytestmark = pytest.mark.process

SHORT = {"sampling": {"max_new_tokens": 4}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=1))


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    save_chat_model(directory)
    return str(directory)


@pytest.fixture
def task(tmp_path):
    (tmp_path / "mine.py").write_text("def score(prompt, completion, answer):\n    return 1 / 0\n")
    return {"digits": 1, "reward": "mine:score", "reward_path": str(tmp_path)}


class Loaded(Exception):
    """The model would have been loaded."""


def load(*args, **kwargs):
    raise Loaded


@pytest.mark.parametrize(
    ("module", "begin", "schema", "loading"),
    [
        (learner, learner.assemble, LearnerConfig, "build_backend"),
        (sampler, sampler.load_components, SamplerConfig, "build_engines"),
    ],
    ids=["learner", "sampler"],
)
def test_reward_that_fails_ends_the_start(module, begin, schema, loading, model_dir, task, monkeypatch):
    monkeypatch.setattr(module, loading, load)

    with pytest.raises(
        ConfigError, match="^task: the reference answer of prompt 0 gets no reward here: .*ZeroDivisionError"
    ):
        begin(schema(**SHORT, model_dir=model_dir, task=task))
    with pytest.raises(Loaded):
        begin(schema(**SHORT, model_dir=model_dir, task={"digits": 1}))


def test_a_start_of_a_sampler_names_a_set_whose_prompts_the_run_trains_on(model_dir, tmp_path, monkeypatch, caplog):
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"prompt": "{number}+1=", "answer": "{number + 1}"}}\n' for number in range(9)))
    task = {"name": f"jsonl:{file}"}
    monkeypatch.setattr(sampler, "build_engines", load)

    with pytest.raises(Loaded):
        sampler.load_components(
            SamplerConfig(
                **SHORT,
                model_dir=model_dir,
                task={**task, "evaluation_size": 1},
                evaluation=[{"name": "sums", "task": task}],
            )
        )

    assert "evaluation.sums: the run trains on 3 of its 4 held-out prompts" in caplog.text


def test_a_start_of_a_sampler_names_draws_that_no_run_takes(model_dir, monkeypatch, caplog):
    monkeypatch.setattr(sampler, "build_engines", load)
    task = {"digits": 1}

    with pytest.raises(Loaded):
        sampler.load_components(
            SamplerConfig(
                **SHORT, model_dir=model_dir, task=task, evaluation=[{"name": "sums", "seed": 1, "task": task}]
            )
        )
    assert "evaluation.sums.seed: a run draws as the coordinator's" in caplog.text


EPISODE = """
class Door:
    shares_process = True

    def reset(self, row, *, seed):
        return "Open?"

    def step(self, action):
        raise ValueError("it is locked")

    def score(self):
        return 1.0
"""


@pytest.mark.parametrize(
    ("module", "begin", "schema", "loading"),
    [
        (learner, learner.assemble, LearnerConfig, "build_backend"),
        (sampler, sampler.load_components, SamplerConfig, "build_engines"),
    ],
    ids=["learner", "sampler"],
)
def test_environment_that_fails_ends_the_start(module, begin, schema, loading, chat_dir, tmp_path, monkeypatch):
    (tmp_path / "house.py").write_text(EPISODE)
    monkeypatch.setattr(module, loading, load)
    values = {"sampling": {"max_new_tokens": 8}, "model_dir": chat_dir, "use_chat_template": True}
    task = {"name": "seeds", "size": 64, "environment": "house:Door", "environment_path": str(tmp_path)}

    with pytest.raises(ConfigError, match=r"^task\.environment: an episode of prompt 0 .*it is locked") as caught:
        begin(schema(**values, task=task))
    assert caught.value.exit_code == 2


def test_a_learner_that_computes_no_rewards_needs_none(model_dir, task, monkeypatch):
    monkeypatch.setattr(learner, "build_backend", load)

    with pytest.raises(Loaded):
        learner.assemble(
            LearnerConfig(**SHORT, model_dir=model_dir, task=task, verification={"recompute_rewards": False})
        )
