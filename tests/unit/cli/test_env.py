"""`heterorl env try`: an episode by hand needs no model; one of a model is what a sampler would play."""

import contextlib
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.env_episode import ModelPlayer, Screen, play
from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, PromptRefused
from heterorl.common.generation import inference_engine
from heterorl.common.model.model_loading import TokenLimits
from heterorl.common.tasks.environments.environment import Observation
from heterorl.common.tasks.environments.environment_task import EpisodeLimits
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import Conversations
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.rollout import FinishReason, RewardPart
from tests.support.conversations import QWEN3, save_chat_model

GUESS = """
class Guess:
    def reset(self, row, *, seed):
        self.number, self.tries = 1 + seed % 9, 0
        return "Guess a number from 1 to 9."

    def step(self, action):
        self.tries += 1
        if action.text == "crash":
            raise RuntimeError("it crashed")
        if action.answer.strip() == str(self.number):
            return None
        return "\\x1b[31mno" if action.is_cut else "no"

    def score(self):
        return {"found": 1.0, "speed": 1 / self.tries} if self.tries else 0.0

class Closed(Guess):
    def reset(self, row, *, seed):
        raise OSError("closed")
"""
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def score(messages, answer):
    return float(messages[-1]["content"].strip() == answer)
'''


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"), QWEN3)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "games.py").write_text(GUESS)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "2 and 3", "answer": "5"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1 and 1", "answer": "2"}\n')
    path = tmp_path / "learner.toml"
    path.write_text(
        'use_chat_template = true\n[task]\nname = "seeds"\nsize = 20\nevaluation_size = 4\n'
        'environment = "games:Guess"\nmax_turns = 3\n[sampling]\nmax_new_tokens = 8\n[tls]\ninsecure = true\n'
    )
    return path


def _try(config, *arguments, typed=None):
    return CliRunner().invoke(app, ["env", "try", "--config", str(config), *arguments], input=typed)


@pytest.mark.process
def test_a_source_of_a_mixture_is_chosen_by_its_label(config):
    text = config.read_text()
    ours, others = text.split("[task]\n")[0], text[text.index("[sampling]") :]
    config.write_text(
        ours + '[task]\nname = "mixture"\nevaluation_size = 4\n[[task.sources]]\nlabel = "sums"\n'
        'name = "arithmetic"\ndigits = 1\n[[task.sources]]\nlabel = "games"\nname = "seeds"\nsize = 20\n'
        'environment = "games:Guess"\nmax_turns = 3\n' + others
    )

    assert "Guess a number" in _try(config, "--by-hand", "--source", "games", typed="1\n").output
    error = _try(config, "--by-hand", typed="1\n").exception
    assert "prompt 0 has no task.environment (set --source to one of these: games)" in str(error)
    error = _try(config, "--by-hand", "--source", "none", typed="1\n").exception
    assert "none is not a source of training prompts; there are: sums, games" in str(error)
    error = _try(config, "--by-hand", "--source", "games", "--prompt", "20", typed="1\n").exception
    assert "--prompt: must be from 0 to 19; got 20" in str(error)


def _sums(config):
    path = config.parent
    pairs = (
        f"task.name=jsonl:{path}/sums.jsonl",
        f"task.evaluation_path={path}/held.jsonl",
        "task.environment=tools.py",
    )
    return [word for pair in pairs for word in ("--set", pair)]


@pytest.mark.process
def test_a_person_plays_without_a_model(config):
    result = _try(config, "--by-hand", "--prompt", "1", typed="1\n3\n")

    assert result.exit_code == 0, result.exception
    assert result.output.startswith("games:Guess, prompt 1, seed 2\n\nuser\n  Guess a number from 1 to 9.\n")
    assert "user\n  no\n" in result.output
    assert result.output.endswith(
        "end after 2 turns: the environment ended it (eos)\nreward 1.5 = found 1 + speed 0.5\n"
    )


@pytest.mark.process
def test_the_end_of_the_input_and_the_limit_of_turns_are_scored(config):
    assert (
        "end after 1 turn: you ended it\nreward 2 = found 1 + speed 1\n"
        in _try(config, "--by-hand", typed="8\n").output
    )
    result = _try(config, "--by-hand", "--held-out", "--json", typed="9\n8\n7\n6\n")

    found = json.loads(result.stdout)
    assert found["finish_reason"] == "turns"
    assert [turn["text"] for turn in found["turns"]] == ["9", "8", "7"]
    assert found["turns"][0]["given"]["messages"] == [{"role": "user", "content": "no"}]
    assert found["prompt"]["seed"] == 1
    assert "token_ids" not in found["prompt"]


@pytest.mark.process
@pytest.mark.parametrize("form", ["{}", "I add. <tool_call>{}</tool_call>"])
def test_a_line_of_json_calls_a_tool(config, form):
    call = form.format('{"name": "add", "arguments": {"a": 2, "b": 3}}')

    result = _try(config, "--by-hand", *_sums(config), typed=f"{call}\n5\n")

    assert "tool add(a, b): Add two numbers.\n" in result.output
    assert "tool add\n  5\n" in result.output
    assert result.output.endswith("(eos)\nreward 1\n")


@pytest.mark.process
def test_a_model_plays_what_a_learner_would_step_again(config, chat):
    result = _try(config, "--model", str(chat), "--json")

    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert (found["finish_reason"], len(found["turns"])) == ("turns", 3)
    prompter = Prompter(str(chat), use_chat_template=True)
    task = build_task(TaskConfig(name="seeds", environment="games:Guess", environment_path=str(config.parent)))
    try:
        prompt = task.prompt(0)
        conversation = Conversations(task, prompter).of(prompt)
        assert found["prompt"]["token_ids"] == conversation.encode(prompt).tolist()
        with conversation.spec.open() as episode:
            for turn in found["turns"]:
                given = conversation.step(episode, np.array(turn["token_ids"], np.int32))
                assert turn["given"]["token_ids"] == given.tolist()
            assert found["reward"] == sum(part.value for part in episode.score())
    finally:
        task.close()


@pytest.mark.process
def test_a_models_episode_is_shown_with_its_tokens(config, chat):
    result = _try(config, "--model", str(chat), "--set", "sampling.max_trajectory_tokens=20")

    assert result.exit_code == 0, result.exception
    assert "policy, turn 1: 8 tokens, cut at sampling.max_new_tokens, " in result.output
    assert "user\n  \\x1b[31mno\n" in result.output, "no text steers the terminal"
    assert (
        "end after 1 turn: no room for another turn in sampling.max_trajectory_tokens or the model (context)\n"
        in result.output
    )
    assert "tokens: 8 drawn, " in result.output


class Counting:
    """An environment that goes on for ever, and a tool of which a program stated the name alone."""

    limits = EpisodeLimits(max_turns=9, trajectory_s=60.0)
    episodes, seed, tools = SimpleNamespace(name="program:agent.py:run"), 1, ({"function": {"name": "now"}},)

    def open(self):
        return contextlib.nullcontext(SimpleNamespace(score=lambda: (RewardPart(name="reward", value=0.5),)))


def test_a_model_without_room_for_another_turn_ends_an_episode_that_is_scored(monkeypatch):
    """As at a sampler, whose engine refuses the turn."""
    drawn = SimpleNamespace(token_ids=np.array([1, 2], np.int32), finish_reason=FinishReason.EOS)
    monkeypatch.setattr(inference_engine, "generate_all", lambda *_, **__: [[drawn]])
    conversation = SimpleNamespace(
        prompter=SimpleNamespace(decode=lambda ids: "x"), given=lambda said, turn: np.array([7, 7], np.int32),
        answer=lambda episode, turn: Observation((Message(role="user", content="no"),)),
    )  # fmt: skip
    config = SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=2, max_trajectory_tokens=1000))
    room = TokenLimits(positions=12, vocab_size=50)
    player = ModelPlayer(None, conversation, np.array([3, 4], np.int32), room=room, config=config)
    shown = io.StringIO()
    screen = Screen(Console(file=shown, width=200))

    screen.begin(Prompt(index=0, text="Go.", answer=""), Counting(), num_tokens=2)
    played = play(Counting(), player, screen)

    assert (played.finish_reason, len(played.turns), played.reward) == (FinishReason.CONTEXT, 3, 0.5)
    assert "tool now()\n" in shown.getvalue()


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["--by-hand", "--model", "x"], ConfigError, "--model: --by-hand is given too"),
        (["--by-hand", "--set", "task.environment="], ConfigError, "task.environment: is not set"),
        (["--by-hand", "--prompt", "20"], ConfigError, "--prompt: must be from 0 to 19; got 20"),
        (["--by-hand", "--set", "task.environment=games:Gues"], ConfigError, "task.environment: "),
        (["--by-hand", "--set", "task.environment=games:Closed"], PromptRefused, "task.environment: no episode of "),
        (["--by-hand"], ConfigError, "task.environment: turn 2: games:Guess, step: "),
        ([], ConfigError, "model_dir: is not set"),
        (["--model", "CHAT", "--set", "backend.device=cuda:99"], ConfigError, "backend.device: cannot use cuda:99"),
    ],
)
def test_what_cannot_be_played_is_told_by_its_key(config, chat, arguments, kind, words):
    arguments = [str(chat) if argument == "CHAT" else argument for argument in arguments]
    settings = [] if "task.environment=" not in arguments else ["--set", "task.name=arithmetic"]
    error = _try(config, *arguments, *settings, typed="8\ncrash\n").exception

    assert type(error) is kind
    assert str(error).startswith(words)
