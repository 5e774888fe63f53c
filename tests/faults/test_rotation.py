"""Certificates and the coordinator are replaced under traffic: nothing is lost, nothing fails, nobody ends."""

import json

import pytest

from campaigns.rotation import Rotation, is_kept


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_rotation_and_restart_under_traffic_fail_no_group(tmp_path, record_property):
    summary = await Rotation(tmp_path).campaign(rounds=1)

    record_property("rotation", json.dumps(summary))
    assert is_kept(summary), summary
    assert summary["acknowledged"] >= 16, summary
