"""Architectures with FSDP2: each publishes what the torch backend publishes, takes its step, or is refused alike."""

import pytest

from tests.support.families import FAMILIES, TRAINED, write_family
from tests.support.rank_families import check_family, family_config
from tests.support.rank_processes import Ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(1)
    yield ranks
    assert ranks.close() == 0


@pytest.mark.parametrize("name", TRAINED)
def test_family_is_trained_as_the_torch_backend_trains_it(ranks, tmp_path, name):
    check_family(ranks, name, tmp_path, "fsdp2")


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.refused])
def test_family_that_cannot_be_trained_is_refused_at_the_start(ranks, tmp_path, name):
    key, words = FAMILIES[name].refused

    [answer] = ranks.ask(family_config(name, write_family(name, tmp_path), "fsdp2"), [["train", 0]])

    assert answer["error"] == "ConfigError"
    assert answer["message"].startswith(f"{key}: ")
    assert words in answer["message"]
