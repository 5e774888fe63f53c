"""Trajectories stepped again: what a site may not state of an environment, and what is not held against it."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import EnvironmentFailed, PromptRefused, RewardError
from heterorl.common.tasks.environments.environment_task import EpisodeLimits
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import Conversations
from heterorl.common.types.rollout import GIVEN, MAX_REWARD, DropReason, FinishReason, RewardPart, Span
from heterorl.learner.checks.reward_checks import judge_episodes, judge_rewards
from tests.support.conversations import CHATML, prompter_of, words_of
from tests.support.training import group, rollout

PARTS = (RewardPart(name="found", value=0.5), RewardPart(name="speed", value=0.25, weight=2.0))


class Game:
    """Implements Conversation: gives 70 plus the number of the turn, is done after two, and fails on a token 9."""

    def __init__(self, *, max_turns=3):
        limits, episodes = EpisodeLimits(max_turns=max_turns, trajectory_s=60.0), SimpleNamespace(name="tools.py")
        self.spec = SimpleNamespace(open=self._open, limits=limits, episodes=episodes)
        self.fails_at_score = False
        self.error = EnvironmentFailed("nobody says 9")
        self.tick, self.num_opened = 0, 0
        self.parts = PARTS

    @contextlib.contextmanager
    def _open(self):
        self.num_opened += 1
        yield SimpleNamespace(num_turns=0, score=self._score)

    def step(self, episode, turn):
        if 9 in turn:
            raise self.error
        episode.num_turns += 1
        return (
            None
            if episode.num_turns == 2
            else np.array([70 + self.num_opened * self.tick + episode.num_turns], np.int32)
        )

    def _score(self):
        if self.fails_at_score:
            raise EnvironmentFailed("no score")
        return self.parts


def _played(ids=(5, 71, 6), *, drawn=(1, 0, 1), reward=1.0, reason=FinishReason.EOS, parts=PARTS, keeps=None):
    spans, start = [], 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or drawn[place] != drawn[start]:
            spans.append(Span(version=3 if drawn[start] else GIVEN, start=start, end=place,
                              keeps=None if drawn[start] else keeps))  # fmt: skip
            start = place
    return dataclasses.replace(
        rollout(ids, [-0.5] * sum(drawn), reward), spans=tuple(spans), reward_parts=parts, finish_reason=reason
    )


def _judged(member, *, game=None):
    return judge_episodes(group([_played(), member]), game or Game(), tolerance=1e-6)


def test_honest_trajectories_are_sound():
    assert _judged(_played()).is_sound
    one_turn = _played((5,), drawn=(1,), reason=FinishReason.TURNS)
    assert judge_episodes(group([one_turn, one_turn]), Game(max_turns=1), tolerance=1e-6).is_sound
    assert _judged(dataclasses.replace(one_turn, finish_reason=FinishReason.SECONDS)).is_sound
    assert _judged(_played(parts=())).is_sound


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        (_played((5, 72, 6)), "behind turn 1 is not the environment's"),
        (_played((5, 71, 71, 6), drawn=(1, 0, 0, 1)), "behind turn 1 is not the environment's"),
        (_played((5, 71, 6, 72, 7), drawn=(1, 0, 1, 0, 1)), "turn 2 ended the episode, and another one follows"),
        (_played((5,), drawn=(1,)), "finish_reason is eos, the episode goes on"),
        (_played(reason=FinishReason.TURNS), "finish_reason is turns, the episode ended"),
        (_played((5,), drawn=(1,), reason=FinishReason.TURNS), "finish_reason is turns after 1 of 3 turns"),
        (_played(reward=1.5), "reward: 1.5, computed 1"),
        (_played(parts=PARTS[:1]), "reward_parts: not "),
        (_played(parts=(dataclasses.replace(PARTS[0], value=0.4), PARTS[1])), "reward_parts: found is 0.4, computed "),
        (_played(keeps=1), "its history was rewritten"),
    ],
)
def test_what_an_environment_did_not_say_is_a_mismatch(member, problem):
    finding = _judged(member)

    assert finding.reason is DropReason.REWARD_MISMATCH
    assert finding.detail.startswith("rollouts[1]: ")
    assert problem in finding.detail


def test_a_trajectory_of_more_turns_than_its_source_allows_is_a_mismatch():
    # Another source of the mixture may allow more, and the coordinator bounds by the largest.
    finding = _judged(_played(), game=Game(max_turns=1))

    assert finding.reason is DropReason.REWARD_MISMATCH
    assert "it has 2 turns; task.max_turns is 1" in finding.detail


@pytest.mark.parametrize(
    "reason", [FinishReason.ENVIRONMENT_FAILED, FinishReason.TOOL_LOST, FinishReason.REWARD_FAILED]
)
def test_member_that_is_lost_here_too_is_sound(reason):
    assert _judged(_played((5, 71, 9), reward=0.0, parts=(), reason=reason)).is_sound
    game = Game()
    game.fails_at_score = True
    with pytest.raises(RewardError, match="failed"):
        _judged(_played(reward=0.0, parts=(), reason=reason), game=game)


def test_member_whose_answer_no_template_writes_is_lost_here_too():
    game = Game()
    game.error = PromptRefused("use_chat_template", "no message of a system")

    assert _judged(
        _played((5, 71, 9), reward=0.0, parts=(), reason=FinishReason.ENVIRONMENT_FAILED), game=game
    ).is_sound
    with pytest.raises(RewardError, match=r"rollouts\[1\] failed: .*no message of a system"):
        _judged(_played((9, 71, 6)), game=game)


def test_member_with_a_reward_beyond_the_largest_one_is_lost_here_too():
    game = Game()
    game.parts = (RewardPart(name="found", value=2 * MAX_REWARD),)
    lost = _played(reward=0.0, parts=(), reason=FinishReason.REWARD_FAILED)

    assert judge_episodes(group([lost, lost]), game, tolerance=1e-6).is_sound


def test_lost_member_whose_environment_goes_on_costs_its_group_and_not_its_site():
    finding = _judged(_played(reward=0.0, parts=(), reason=FinishReason.TOOL_LOST))

    assert not finding.is_sound
    assert finding.reason is None


def test_member_that_the_engine_lost_is_not_stepped():
    assert _judged(_played((9,), drawn=(1,), reason=FinishReason.ENGINE_FAILED)).is_sound


def test_environment_that_differs_from_itself_says_nothing_of_the_site():
    clock, dice = Game(), Game()
    clock.tick = 10
    with pytest.raises(RewardError, match=r"rollouts\[0\] failed: tools.py differs from itself .*is_deterministic = F"):
        _judged(_played(), game=clock)
    dice._score = lambda: (RewardPart(name="found", value=float(dice.num_opened)),)
    with pytest.raises(RewardError, match=r"rollouts\[0\] failed: tools.py differs from itself"):
        _judged(_played(), game=dice)
    # A second look costs an episode only where there is a difference, and the lost member's is none of its site's.
    steady = Game()
    assert _judged(_played((5, 72, 6)), game=steady).reason is DropReason.REWARD_MISMATCH
    assert steady.num_opened == 3


DATED = """
from pathlib import Path

class Dated:
    def reset(self, row, *, seed):
        return Path("date").read_text()

    def step(self, action):
        return None

    def score(self):
        return 1.0
"""


@pytest.mark.process
def test_first_messages_that_change_say_nothing_of_the_site(tmp_path):
    (tmp_path / "dated.py").write_text(DATED)
    (tmp_path / "date").write_text("today")
    place = {"environment": "dated:Dated", "environment_path": str(tmp_path), "environment_workers": 1}
    task = build_task(TaskConfig(name="seeds", size=4, evaluation_size=1, **place))
    prompter = prompter_of(tmp_path / "model", CHATML, words_of(eos="<|im_end|>"))
    made = Conversations(task, prompter)
    judge = functools.partial(judge_rewards, task=task, prompter=prompter, tolerance=0.0, conversations=made)
    other = group([_played()], prompt=made.encode(task.prompt(1))[:-1])

    assert judge(other).detail == "prompt_token_ids: prompt 1 has others"
    (tmp_path / "date").write_text("tomorrow")
    with pytest.raises(
        RewardError, match="an episode of the prompt failed: dated:Dated, reset: .* other first messages"
    ):
        judge(other)
    assert task.prompt(1).text == "tomorrow"
    task.close()


def test_environment_that_fails_here_says_nothing_of_the_site():
    with pytest.raises(RewardError, match="nobody says 9"):
        _judged(_played((9, 71, 6)))
