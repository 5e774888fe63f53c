"""The table of cheats in small: what must be seen is seen, what cannot be is not, and honest sites pass."""

import pytest

from benchmarks import verify
from heterorl.common.generation.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=1)
    return verify.run(str(model_dir), digits=2, num_honest=320, num_cheated=80)


@pytest.mark.parametrize("case", ["honest, float32", "honest, bfloat16"])
def test_honest_rollouts_pass(rows, case):
    assert rows[case]["rollouts"] == 320
    assert rows[case]["caught"]["any"] == 0


@pytest.mark.parametrize(
    ("case", "check"),
    [
        ("forged rewards", "reward"),
        ("log-probs shifted by -0.1", "log-probs"),
        ("doctored completion, true log-probs", "draws"),
        ("cherry-picked, best of 4", "draws"),
        ("completion cut short", "ending"),
    ],
)
def test_cheat_is_seen_in_nearly_every_group_by_the_check_that_it_is_made_for(rows, case, check):
    row = rows[case]

    assert row["groups"] > 0
    assert row["group_rate"] >= 0.9
    others = set(verify.CHECKS) - {check}
    assert row["caught"][check] > max(row["caught"][other] for other in others)


def test_true_logprobs_hide_what_only_the_draws_show(rows):
    for case in ("doctored completion, true log-probs", "cherry-picked, best of 4"):
        assert rows[case]["caught"]["without draws"] == 0


def test_weights_of_64_small_steps_ago_are_not_seen_and_the_table_says_so(rows):
    assert rows["weights of 64 versions ago, lr 1e-06"]["rates"]["any"] <= 0.1
    text = verify.table(rows)
    assert all(f"| {name} |" in text for name in rows)
