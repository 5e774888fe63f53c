"""ZeRO at every stage under two agents of torchrun takes the torch backend's steps, and its checkpoints come back."""

import pytest

from tests.support.two_nodes import assert_parity

pytestmark = pytest.mark.timeout(300)


def test_zero_over_two_nodes_trains_what_one_process_trains(tmp_path):
    assert_parity(tmp_path, [{"kind": "deepspeed", "stage": stage} for stage in (1, 2, 3)])
