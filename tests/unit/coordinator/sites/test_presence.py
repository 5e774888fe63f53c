"""A site that falls silent or comes back is said once each."""

import pytest

from heterorl.common.types.common import SiteId
from heterorl.common.types.run import SiteStatus
from heterorl.coordinator.sites.presence import Presence


def site(name, last_seen_s, incarnation="i", **changes):
    return SiteStatus(
        site=SiteId(name), incarnation=incarnation, policy_version=0, state_root="", last_seen_s=last_seen_s,
        groups_accepted=0, groups_dropped=0, tokens_per_s=0.0, work_leased=0, canary_difference=None, quarantine="",
        **changes,
    )  # fmt: skip


def test_silence_and_return_are_said_once():
    presence = Presence()
    said = []
    for seen_s in (0.0, 2.0, 29.0, 30.0, 31.0, 300.0, 1.0, 2.0):
        said += presence.look([site("eu", seen_s), site("us", 1.0)])

    assert said == [
        "site eu is silent for 30 s; its work is handed out again when its lease ends",
        "site eu is back after 300 s",
    ]


def test_silence_of_a_site_that_works_ahead_says_what_becomes_of_its_work():
    (words,) = Presence().look([site("eu", 30.0, work_ahead_s=600.0)])

    assert words == (
        "site eu is silent for 30 s; its work waits for it, up to 600 s beyond its lease, and others get new work"
    )


@pytest.mark.parametrize("others", [[-1.0], [-1.0, 9999.0, 0.5], [0.5, 9999.0]])
def test_incarnations_of_before_are_not_missed(others):
    presence = Presence()
    assert presence.look([site("eu", seen_s, f"i{number}") for number, seen_s in enumerate(others)]) == []
