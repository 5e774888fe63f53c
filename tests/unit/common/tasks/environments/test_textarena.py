"""Games of textarena: rules, moves and rewards, the same for the same seed and moves in any process."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.tasks.environments.environment import Action
from heterorl.common.tasks.environments.episodes import Episodes

pytestmark = pytest.mark.process
NEEDS_GAMES = pytest.mark.skipif(find_spec("textarena") is None, reason="the extra games is not installed")
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


@NEEDS_GAMES
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MOVES)
def test_a_game_repeats_for_the_same_seed_and_moves_in_two_processes(name):
    episodes = episodes_of(name)
    try:
        first = played(episodes, name, seed=7)
        held = episodes.open({}, seed=1)
        second = played(episodes, name, seed=7)
        others = [played(episodes, name, seed=seed) for seed in range(8, 13)]

        assert first == second
        assert len({worker.process.pid for worker in episodes._pool.workers if worker.process}) == 2
        assert any(other[0] != first[0] for other in others), "seeds are different games"
        assert all(0 <= parts[0].value <= 1 for _, parts in (first, *others))
        assert any(said[-1].done for said, _ in (first, *others))
        assert episodes.is_deterministic
        assert not episodes.tools
        held.close()
    finally:
        episodes.close()


@NEEDS_GAMES
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


@NEEDS_GAMES
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "words"),
    [("GuessTheNumbers-v0", "did you mean GuessTheNumber-v0"), ("TicTacToe-v0", "cannot be played here by one player")],
)
def test_what_is_no_game_of_one_player_is_refused(name, words):
    with pytest.raises(ConfigError, match=f"^task.environment: textarena:{name}: .*{words}"):
        episodes_of(name)


@pytest.mark.skipif(find_spec("textarena") is not None, reason="textarena is installed")
def test_without_the_package_the_extra_is_named():
    said = r"textarena is not installed \(in a clone of heterorl: pip install '\.\[games\]'\)"
    with pytest.raises(DependencyMissing, match=said):
        episodes_of("GuessTheNumber-v0")
