"""The benchmark of learning curves: its games, its demonstrations in tokens, its rows, numbers and limits."""

import random

import pytest
import torch

from benchmarks.curves.games import GAMES, Calculator, Guess, Mastermind, matches
from benchmarks.curves.records import (
    GOAL,
    WINDOW,
    Arm,
    curve_of,
    held_out_of,
    limits,
    summary_of,
    verdicts,
    versions_to_evaluate,
)
from benchmarks.curves.trl_run import Player
from benchmarks.curves.warm_start import TEMPLATE, Demonstrator, batch_of, build_tokenizer
from heterorl.common.tasks.environments.environment import Action, ToolCall
from heterorl.common.tasks.environments.tools import schema_of
from heterorl.common.text.conversation import try_turns
from tests.support.conversations import prompter_of


def score_of(game, seed, turns):
    episode = game()
    episode.reset({}, seed=seed)
    for turn in turns:
        if episode.step(turn if isinstance(turn, Action) else Action(turn)) is None:
            break
    return episode.score()


def played(game, *, skill, seed):
    episode, chooser = type("Skilled", (game,), {"skill": skill})(), random.Random(seed)
    episode.reset({}, seed=seed)
    for _ in range(game.max_turns):
        text = episode.demonstrate(chooser)
        call = text.startswith("{") and (ToolCall("mul", dict(zip("ab", episode.factors, strict=True))),)
        if episode.step(Action(text, call or ())) is None:
            break
    return episode.score()


@pytest.mark.parametrize("game", GAMES.values())
def test_a_skilled_player_always_wins(game):
    assert {played(game, skill=1.0, seed=seed) for seed in range(100)} == {1.0}


@pytest.mark.parametrize("game", [Guess, Mastermind])
def test_an_unskilled_player_seldom_wins(game):
    assert 0.1 < sum(played(game, skill=0.0, seed=seed) for seed in range(300)) / 300 < 0.4


def test_a_product_needs_all_its_digits():
    factors = Calculator()
    factors.reset({}, seed=3)
    product = factors.factors[0] * factors.factors[1]

    assert score_of(Calculator, 3, [f"{product:05d}"]) == 1.0
    assert score_of(Calculator, 3, [f"{product + 1:05d}"]) == 0.0
    assert score_of(Calculator, 3, [Action("", (ToolCall("mul", {"a": 1, "b": "x"}),))]) == 0.0


def test_answers_of_the_games():
    episode = Guess()
    episode.reset({}, seed=0)

    said = [episode.step(Action(text)) for text in ("x", str(episode.number + 1), str(episode.number))]

    assert [each and each.messages[0].content for each in said] == ["higher", "lower", None]
    assert [matches("AB", guess) for guess in ("AB", "BA", "AA", "CD", "CA")] == ["20", "02", "10", "00", "01"]


@pytest.mark.parametrize("game", GAMES.values())
def test_a_demonstration_is_a_trajectory_in_tokens(game, tmp_path):
    prompter = prompter_of(tmp_path, TEMPLATE, build_tokenizer(game.words))
    tools = [schema_of(tool) for tool in getattr(game, "tools", ())]
    parser = try_turns(prompter, tools=tools, tool_parser="json")
    demonstrator = Demonstrator(game, prompter)
    rows = [demonstrator.play(random.Random(seed)) for seed in range(20)]
    ids, targets = batch_of(rows, pad_id=prompter.tokenizer.pad_token_id)

    assert parser == ("json" if tools else None)
    assert ids.shape[1] <= 100
    for row, own in zip(rows, targets, strict=True):
        drawn = [one for one, is_drawn in zip(row.token_ids, row.is_drawn, strict=True) if is_drawn]
        assert own[own >= 0].tolist() == drawn
        assert row.token_ids[-1] == drawn[-1] == prompter.eos_token_id
        turns = prompter.decode(own[own >= 0].numpy(), keeps_special=True).split("<|end|>")[:-1]
        assert max(len(prompter.tokens(turn)) + 1 for turn in turns) <= game.max_new_tokens
        assert 1 <= len(turns) <= game.max_turns


class Script:
    """A model that draws given turns, padded on the right."""

    def __init__(self, turns):
        self.turns = list(turns)

    def generate(self, *, input_ids, pad_token_id, **_):
        drawn = torch.tensor([[*self.turns.pop(0), pad_token_id, pad_token_id]])
        return torch.cat([input_ids, drawn], 1)


@pytest.mark.parametrize("game", GAMES.values())
def test_trl_gets_the_tokens_of_a_trajectory(game, tmp_path):
    prompter = prompter_of(tmp_path, TEMPLATE, build_tokenizer(game.words))
    chooser = random.Random(3)
    row = Demonstrator(game, prompter).play(chooser)
    seed = random.Random(3).getrandbits(32)
    begin = row.is_drawn.index(True)
    turns, last = [], False
    for one, is_drawn in zip(row.token_ids, row.is_drawn, strict=True):
        if is_drawn:
            turns = [*turns[:-1], [*turns[-1], one]] if last else [*turns, [one]]
        last = is_drawn

    (played,) = Player(game, prompter).play(Script(turns), [seed])

    assert played.prompt_ids == row.token_ids[:begin]
    assert played.ids == row.token_ids[begin:]
    assert played.is_drawn == row.is_drawn[begin:]
    assert played.num_turns == len(turns)


def report(step, reward, **values):
    completions = {"turns_mean": 2.0, "given_mean": 7.0, "length_mean": 15.0, "endings": [{"name": "eos", "mean": 1.0}]}
    row = {"step": step, "reward_mean": reward, "staleness_mean": 64.0, "staleness_max": 65, "kl": 0.1}
    return {**row, "is_applied": True, "completions": completions, **values}


def test_a_curve_has_the_last_row_of_each_applied_step():
    journal = [report(1, 0.25), report(2, 0.5), report(2, 0.75), report(3, 1.0, is_applied=False)]

    curve = curve_of([*journal, report(4, 0.5, completions=None)])

    assert [(row["step"], row["reward"]) for row in curve] == [(1, 0.25), (2, 0.75), (4, 0.5)]
    assert (curve[0]["turns"], curve[0]["endings"], curve[0]["staleness"]) == (2.0, {"eos": 1.0}, 64.0)
    assert "turns" not in curve[2]


def run_of(rewards, held_out=(), *, environment="guess", seed=0):
    rows = [{"version": number, "mean": mean} for number, mean in enumerate(held_out)]
    curve = curve_of([report(step, reward) for step, reward in enumerate(rewards, 1)])
    return {
        "trainer": "heterorl", "environment": environment, "lag": 64, "seed": seed, "curve": curve, "held_out": rows, "failure": None,
    }  # fmt: skip


def test_a_gain_is_of_held_out_episodes_where_there_are_some():
    rewards = [0.25] * WINDOW + [0.5] * WINDOW

    assert summary_of(run_of(rewards))["gain"] == 0.25
    assert summary_of(run_of(rewards, [0.25, 0.5, 0.75]))["gain"] == 0.5
    assert summary_of(run_of(rewards, [0.25]))["gain"] == 0.25
    assert summary_of(run_of([]))["gain"] is None
    assert summary_of(run_of([]))["steps"] == 0


def test_the_goal_needs_three_seeds_that_all_gain():
    def of(*gains):
        return verdicts(
            [summary_of(run_of([0.1], [0.0, gain] if gain else [], seed=n)) for n, gain in enumerate(gains)]
        )

    assert [found["is_goal_reached"] for found in of(GOAL, 0.5, 0.9)] == [True]
    assert of(GOAL, 0.5, 0.9)[0]["least_gain"] == GOAL
    assert [found["is_goal_reached"] for found in of(0.5, 0.9)] == [False]
    assert [found["is_goal_reached"] for found in of(GOAL - 0.01, 0.5, 0.9)] == [False]
    both = [summary_of(run_of([0.5], environment=name)) for name in ("guess", "mastermind")]
    assert [found["environment"] for found in verdicts(both)] == ["guess", "mastermind"]


def test_versions_of_the_held_out_curve():
    assert versions_to_evaluate(300) == [0, 50, 100, 150, 200, 250, 300]
    assert versions_to_evaluate(2) == [0, 1, 2]
    assert versions_to_evaluate(0) == [0]


def test_numbers_of_an_evaluation():
    average = {"mean": 0.25, "low": 0.2, "high": 0.3}
    row = {"version": 3, "average": average, "num_samples": 8, "num_errors": 1, "mean_tokens": 3.0}

    found = held_out_of({"evaluations": [row, {**row, "average": None}]})

    assert found == [{"version": 3, **average, "num_samples": 8, "num_errors": 1}]


def test_runs_that_wait_get_their_share_of_the_time():
    whole, halves, short = (limits(minutes, num_runs=9, jobs=jobs) for minutes, jobs in ((8, 9), (8, 5), (1, 9)))

    assert (whole.end_s, halves.end_s, short.end_s) == (480, 240, 60)
    assert (whole.train_s, short.train_s) == (400, 30)
    assert Arm(environment="guess", seed=1, lag=64).name == "heterorl-guess-lag64-seed1"
