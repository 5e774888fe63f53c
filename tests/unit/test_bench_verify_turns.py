"""The table of forged trajectories in small: what a check is made for it sees, and honest sites pass."""

import pytest

from benchmarks import verify_turns

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with verify_turns.open_site("guess", tmp_path_factory.mktemp("model"), warm_steps=40) as site:
        return verify_turns.run(site, num_honest_turns=100, num_forged=8)


@pytest.mark.parametrize("case", ["honest, float32", "honest, bfloat16"])
def test_honest_trajectories_pass(rows, case):
    assert rows[case]["turns"] >= 100
    assert (rows[case]["rejected"], rows[case]["dropped"]) == (0, 0)


@pytest.mark.parametrize(
    ("case", "check"),
    [
        ("another answer of the environment", "episode"),
        ("a reward of 1", "episode"),
        ("without the last turn", "episode"),
        ("a drawn turn said to be given", "episode"),
        ("log-probs of later turns shifted by -0.1, in all eight", "log-probs"),
        ("the right last turn, true log-probs", "draws"),
        ("later turns drawn again, true log-probs", "draws"),
    ],
)
def test_forgery_is_seen_by_the_check_that_is_made_for_it(rows, case, check):
    row = rows[case]

    assert row["groups"] > 0
    assert row["by"][check] == row["rejected"] == row["groups"]


def test_true_draws_hide_nothing_but_the_end(rows):
    for case in ("the right last turn, true log-probs", "later turns drawn again, true log-probs"):
        assert not any(count for check, count in rows[case]["by"].items() if check != "draws")
    assert rows["without the last turn, said to be out of time"]["rejected"] == 0


def test_a_trajectory_that_a_site_calls_lost_costs_its_group_without_blame(rows):
    row = rows["a wrong trajectory said to be lost"]

    assert (row["rejected"], row["dropped"]) == (0, row["groups"])
