"""How a learner goes on where no checkpoint is left; the rows of those that are there: publish/test_publish."""

from pathlib import Path

import pytest

from heterorl.common.errors import OperatorError
from heterorl.learner.run.resume import ResumePlan, decide_without


def test_without_a_checkpoint_a_run_begins_or_its_head_is_adopted():
    where = {"state_dir": Path("/state"), "run_id": "run"}

    assert decide_without(head_version=-1, num_checkpoints=0, **where) is ResumePlan.START
    assert decide_without(head_version=0, num_checkpoints=2, **where) is ResumePlan.ADOPT
    with pytest.raises(OperatorError, match="the coordinator has no version of it"):
        decide_without(head_version=-1, num_checkpoints=1, **where)
