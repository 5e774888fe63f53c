"""`make wan` names every promise that its run did not keep."""

from campaigns.wan import problems


def test_every_broken_promise_of_a_run_is_named():
    kept = {
        "groups_of_site_b": {"before": 1, "during": 0, "after": 1}, "heads": {"cut": 1, "heal": 2, "end": 3}, "rtt_ms": 150,
        "loss_seen": 0.01, "lost": 0, "duplicated": 0, "ledger_balanced": True, "dense": True, "dropped": {"groups": 0},
        "witness_refused": [], "ended": {}, "spooled_in_outage_max": 1, "recovery": {"first_group_s": 1.0, "outage_delivered_s": 2.0},
        "groups_per_s": {"before": 10.0, "in_outage": 9.5}, "outage_s": 200,
        "prometheus": {
            "up_in_outage": 0, "up_at_end": 1, "silence_s_max": 200, "silence_s_end": 1, "policy_age_p95_s_max": 200,
            "versions_behind_max": 1, "alerts_at_end": [],
            "alerts_fired": ["HeterorlProcessDown", "HeterorlSiteSilent"],
        },
    }  # fmt: skip

    assert problems(kept) == []
    for changes in (
        {"lost": 1}, {"duplicated": 1}, {"ledger_balanced": False}, {"dropped": {"groups": 1}}, {"ended": {"learner": 1}},
        {"groups_of_site_b": {"before": 1, "during": 1, "after": 1}}, {"heads": {"cut": 1, "heal": 2, "end": 2}},
        {"recovery": {**kept["recovery"], "first_group_s": 100.0}},
        {"recovery": {**kept["recovery"], "outage_delivered_s": 20.0}}, {"groups_per_s": {"before": 10.0, "in_outage": 8.0}}, {"prometheus": {**kept["prometheus"], "alerts_fired": []}},
        {"prometheus": {**kept["prometheus"], "alerts_at_end": ["HeterorlSiteSilent"]}},
    ):  # fmt: skip
        assert len(problems({**kept, **changes})) == 1, changes
