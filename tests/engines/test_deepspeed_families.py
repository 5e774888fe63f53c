"""Architectures with DeepSpeed: each publishes what the torch backend publishes and takes its step."""

import pytest

from tests.support.families import TRAINED
from tests.support.rank_families import check_family
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(1)
    yield ranks
    assert ranks.close() == 0


@pytest.mark.parametrize("name", TRAINED)
def test_family_is_trained_as_the_torch_backend_trains_it(ranks, tmp_path, name):
    check_family(ranks, name, tmp_path, "deepspeed")
