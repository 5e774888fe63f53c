"""`heterorl reward try`: one completion's reward and its parts, without a model."""

import json

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import AnswerUnreadable, ConfigError

REWARDS = """
def exact(prompt, completion, answer):
    return float(completion == answer)

def digits(prompt, completion, answer):
    if completion == "crash":
        raise RuntimeError("it crashed")
    return {"digits": sum(map(str.isdigit, completion)), "length": len(completion)}
"""
GUESS = """
class Guess:
    def reset(self, row, *, seed):
        return "Guess."

    def step(self, action):
        return None

    def score(self):
        return 0.0
"""


def tried(*arguments, config=None):
    named = ["--config", str(config)] if config else []
    return CliRunner().invoke(app, ["reward", "try", *named, *arguments])


@pytest.fixture
def config(tmp_path):
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"prompt": f"[/b] {number}", "answer": str(number)}) + "\n" for number in range(8))
    )
    (tmp_path / "rewards.py").write_text(REWARDS)
    path = tmp_path / "learner.toml"
    path.write_text(f'[task]\nname = "jsonl:{tmp_path}/q.jsonl"\nevaluation_size = 2\n')
    return path


def test_reward_of_a_built_in_task_needs_no_file():
    right = tried("--answer", "12", "--completion", "12")
    wrong = tried("--answer", "12", "--completion", "13")

    assert ("answer '12': reward 1\n" in right.stdout, "answer '12': reward 0\n" in wrong.stdout) == (True, True)
    assert "  correct: 1, weight 1\n" in right.stdout


def test_prompt_names_the_answer_unless_another_is_given(config):
    own = tried("--completion", "0", config=config).stdout
    number = next(number for number in range(8) if f"answer '{number}'" in own)

    assert "'[/b] " in own
    assert f"reward {int(number == 0)}\n" in own
    assert "reward 1\n" in tried("--completion", str(number), config=config).stdout
    assert "answer '9': reward 1\n" in tried("--completion", "9", "--answer", "9", config=config).stdout
    with pytest.raises(ConfigError, match=r"--prompt: must be from 0 to 5; got 6"):
        raise tried("--completion", "0", "--prompt", "6", config=config).exception


@pytest.mark.process
def test_parts_of_a_reward_stand_with_their_weights(config):
    rewards = [
        f'{{name = "{name}", kind = "function", function = "rewards:{name}", weight = {weight}}}'
        for name, weight in (("exact", 1.0), ("digits", 0.5))
    ]
    change = ("--set", f"task.rewards=[{', '.join(rewards)}]")

    found = tried("--completion", "12 a", "--answer", "12 a", *change, config=config)
    lost = tried("--completion", "crash", *change, config=config)

    assert found.exit_code == 0, found.exception
    lines = found.stdout.splitlines()
    assert lines[0].endswith("answer '12 a': reward 4")
    assert lines[1:] == [
        "  exact: 1, weight 1", "  digits/digits: 2, weight 0.5", "  digits/length: 4, weight 0.5"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no reward: .*it crashed"):
        raise lost.exception


def test_answer_reaches_the_source_of_a_mixture(config, tmp_path):
    source = f'{{name = "jsonl:{tmp_path}/q.jsonl", label = "own", evaluation_size = 2}}'
    change = ("--set", 'task.name="mixture"', "--set", f"task.sources=[{source}]")

    found = tried("--completion", "9", "--answer", "9", *change, config=config)

    assert found.exit_code == 0, found.exception
    assert "answer '9': reward 1\n" in found.stdout


@pytest.mark.process
def test_answer_that_cannot_be_read_and_an_environment_are_refused(config, tmp_path):
    pytest.importorskip("math_verify")
    change = ("--set", "task.match=math_verify", "--answer", "5 apples and 3 pears")
    with pytest.raises(AnswerUnreadable, match="cannot be parsed"):
        raise tried("--completion", "5", *change, config=config).exception
    (tmp_path / "guess.py").write_text(GUESS)
    with pytest.raises(ConfigError, match="env try"):
        raise tried(
            "--completion",
            "5",
            "--set",
            "task.environment=guess:Guess",
            "--set",
            "use_chat_template=true",
            config=config,
        ).exception
