"""What a launcher says in the environment, taken or refused."""

import pytest

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.ranks.collectives import missing_device, rank_device
from heterorl.learner.backends.ranks.rank_env import RankEnv, rank_env_of

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


def test_place_is_what_torchrun_says():
    place = rank_env_of(TORCHRUN)

    assert place == RankEnv(rank=5, local_rank=1, world_size=8, local_world_size=4, host="10.0.0.1", port=29500)


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"WORLD_SIZE": "2", "MASTER_ADDR": "a"}])
def test_no_launcher_is_no_place(environment):
    assert rank_env_of(environment) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "8"), ("RANK", "-1"), ("RANK", "one"), ("WORLD_SIZE", ""), ("LOCAL_RANK", ""), ("LOCAL_RANK", "4"),
        ("LOCAL_WORLD_SIZE", "9"), ("MASTER_PORT", ""), ("MASTER_PORT", "65536"), ("MASTER_ADDR", ""),
    ],
)  # fmt: skip
def test_contradiction_names_its_variable(name, value):
    with pytest.raises(ConfigError, match=f"^{name}:"):
        rank_env_of({**TORCHRUN, name: value})


def test_device_is_that_of_the_number_on_the_machine():
    place = rank_env_of(TORCHRUN)

    assert str(rank_device("cuda", place)) == "cuda:1"
    assert str(rank_device("cpu", place)) == "cpu"
    assert missing_device("cpu", place) == ""
