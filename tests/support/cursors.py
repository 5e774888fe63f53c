"""Cursors of a learner that took some steps."""

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GroupId
from heterorl.learner.publish.checkpoint_store import Cursor
from tests.support.learner_world import NumpyBackend, queued


def make_cursor(version=1, **changes):
    report = NumpyBackend().train_step([queued(1), queued(2)], head_version=version, step=7)
    values = {
        "run_id": "run",
        "step": 7,
        "step_id": "key",
        "version": version,
        "parent_version": version - 1,
        "lineage_version": version - 1,
        "state_root": "0" * 64,
        "manifest": b"\x00\xff",
        "consumed": (GroupId(site=SiteId("eu"), incarnation="a", sequence=1),),
        "reports": (report,),
    }
    return Cursor(**{**values, **changes})
