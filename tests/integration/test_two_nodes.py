"""FSDP2 under two agents of torchrun takes the torch backend's steps, and its checkpoints come back."""

import pytest

from tests.support.two_nodes import assert_parity

pytestmark = pytest.mark.slow


def test_fsdp2_over_two_nodes_trains_what_one_process_trains(tmp_path):
    assert_parity(tmp_path, [{"kind": "fsdp2"}, {"kind": "fsdp2", "overlap_checkpoint": False}])
