"""Games of textarena: rules, moves and rewards, the same for the same seed and moves in any process."""

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.curves.records import GOAL
from benchmarks.curves.textarena_games import GuessTheNumber, Secretary
from benchmarks.curves.warm_start import TEMPLATE, Demonstrator, build_tokenizer, words_of
from heterorl.common.errors import ConfigError
from heterorl.common.tasks.environments.environment import Action
from heterorl.common.tasks.environments.episodes import Episodes
from tests.support.conversations import prompter_of

pytestmark = pytest.mark.process
MOVES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in (10, 5, 15, 3, 18, 7, 12, 1, 20, 9)],
    "Mastermind-v0": [
        "[1 2 3 4]",
        "nothing",
        "[3 4 5 6]",
        "<think>[6 5 4 3]</think>[6 1 2 5]",
        "[1 2 3 4]",
        "[1 2 3 4]",
    ],
}


def episodes_of(name, **changes):
    limits = {"step_timeout_s": 60.0, "memory_bytes": 1 << 30, "max_observation_chars": 10_000, "num_processes": 2}
    return Episodes(f"textarena:{name}", directory=Path(), **{**limits, **changes})


def played(episodes, name, seed):
    with episodes.open({}, seed=seed) as episode:
        said = [episode.first]
        for move in MOVES[name]:
            observation = episode.step(Action(move))
            said.append(observation)
            if observation.done:
                break
        return said, episode.score()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MOVES)
def test_a_game_repeats_for_the_same_seed_and_moves_in_two_processes(name):
    episodes, elsewhere = episodes_of(name), episodes_of(name)
    try:
        first = played(elsewhere, name, seed=7)
        # The same process plays another game meanwhile.
        held = episodes.open({}, seed=1)
        held.step(Action(MOVES[name][0]))
        second = played(episodes, name, seed=7)
        others = [played(episodes, name, seed=seed) for seed in range(8, 13)]

        assert first == second
        assert len([worker for worker in episodes._pool.workers if worker.process]) == 1
        assert any(other[0] != first[0] for other in others), "seeds are different games"
        assert all(0 <= parts[0].value <= 1 for _, parts in (first, *others))
        assert any(said[-1].done for said, _ in (first, *others))
        assert episodes.is_deterministic
        assert not episodes.tools
        held.close()
    finally:
        episodes.close()
        elsewhere.close()


@pytest.mark.timeout(240)
def test_each_observation_says_what_is_new_and_a_game_cut_short_counts_so_far():
    episodes = episodes_of("GuessTheNumber-v0")
    try:
        with episodes.open({}, seed=3) as episode:
            assert "between 1 and 20" in episode.first[0].content
            (hint,) = episode.step(Action("[5]")).messages
            assert hint.content in ("The target number is higher.", "The target number is lower.")
            (part,) = episode.score()
            assert 0 < part.value < 1
    finally:
        episodes.close()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"])
def test_moves_that_a_game_refuses_have_a_score(name):
    """These games swap texts and numbers in what they state of a refused move."""
    episodes = episodes_of(name)
    try:
        with episodes.open({}, seed=3) as episode:
            for _ in range(9):
                if episode.step(Action("[none]")).done:
                    break
            (part,) = episode.score()
            assert 0.0 <= part.value <= 1.0
    finally:
        episodes.close()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "words"),
    [("GuessTheNumbers-v0", "did you mean GuessTheNumber-v0"), ("TicTacToe-v0", "cannot be played here by one player")],
)
def test_what_is_no_game_of_one_player_is_refused(name, words):
    with pytest.raises(ConfigError, match=f"^task.environment: textarena:{name}: .*{words}"):
        episodes_of(name)


@pytest.mark.parametrize("game", [GuessTheNumber, Secretary])
def test_a_demonstration_of_the_benchmark_is_a_trajectory_of_the_game(game, tmp_path):
    words = words_of(game)
    prompter = prompter_of(tmp_path, TEMPLATE, build_tokenizer(words))
    demonstrator = Demonstrator(game, prompter)
    rows = [demonstrator.play(random.Random(seed)) for seed in range(20)]
    turns = [
        prompter.decode(np.array(row.token_ids)[np.array(row.is_drawn)], keeps_special=True).split("<|end|>")[:-1]
        for row in rows
    ]

    assert max(len(row.token_ids) for row in rows) <= 160
    assert {len(own) for own in turns} <= set(range(1, game.max_turns + 1))
    assert max(len(prompter.tokens(turn)) + 1 for own in turns for turn in own) <= game.max_new_tokens


def mean_score(game, skill):
    total = 0.0
    for seed in range(200):
        episode, chooser = type("Skilled", (game,), {"skill": skill})(), random.Random(seed)
        episode.reset({}, seed=seed)
        for _ in range(game.max_turns):
            if episode.step(Action(episode.demonstrate(chooser))) is None:
                break
        total += episode.score()
    return total / 200


def test_skill_earns_more_than_demonstrations_by_the_benchmarks_goal():
    assert mean_score(GuessTheNumber, 1.0) - mean_score(GuessTheNumber, GuessTheNumber.skill) > GOAL
    assert mean_score(Secretary, 1.0) - mean_score(Secretary, Secretary.skill) > GOAL
