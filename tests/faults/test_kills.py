"""Promises of durability under SIGKILL, on real processes (T10, T11: nothing skipped, nothing trained twice)."""

import json

import pytest

from campaigns.kills import campaign, is_kept
from campaigns.turn_kills import playing, turn_campaign
from tests.support.cluster import Cluster


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.slow)])
async def test_nothing_acknowledged_is_lost_or_doubled_when_processes_are_killed(tmp_path, record_property, kills):
    """The first four kills are one of each: coordinator, learner, two samplers."""
    summary = await campaign(Cluster(tmp_path), kills=kills, seed=11, pause_s=(0.1, 1.5))

    record_property("kills", json.dumps(summary))
    assert is_kept(summary), json.dumps(summary)
    assert summary["acknowledged"] >= summary["kills"], summary
    assert min(summary["killed"].values()) >= 1, summary


@pytest.mark.timeout(900)
@pytest.mark.slow
async def test_trajectories_go_on_when_processes_are_killed(tmp_path, record_property):
    """The first four kills are one of each: a sampler, a worker of its environment, coordinator, learner."""
    summary = await turn_campaign(playing(tmp_path, seed=24), kills=24, seed=24)

    record_property("kills", json.dumps(summary))
    assert is_kept(summary), json.dumps(summary)
    assert summary["acknowledged"] >= summary["kills"], summary
    assert summary["continued"], summary
    assert min(summary["killed"].values()) >= 1, summary


async def test_campaign_in_which_a_process_ends_by_itself_fails_and_does_not_wait(tmp_path):
    """Without its learner a run takes groups until its queue is full; a campaign would wait for an hour."""
    cluster = Cluster(tmp_path, learner={"max_steps": 2})
    with pytest.raises(ExceptionGroup) as group:
        await campaign(cluster, kills=1000, seed=11, pause_s=(60.0, 60.0))
    # The learner, or a sampler that drained after it and was seen first.
    assert " ended with 0: " in str(group.value.exceptions[0])
