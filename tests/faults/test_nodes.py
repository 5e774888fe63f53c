"""The campaign against a learner on several machines: its plan, and that its account refuses each broken promise."""

import sqlite3

import pytest

from campaigns.nodes import SMALL, campaign, is_kept
from campaigns.nodes_evidence import differences, repeated, rise
from campaigns.nodes_faults import ENDED_S, ON_ONE, ON_TWO, RANKS_ENDED_S, TRAINS_S, Fault, Row, plan
from tests.support.cluster import Cluster
from tests.support.nodes import can_make_namespaces

KEPT = {
    "kills": 20, "lost": 0, "duplicated": 0, "late": [], "unasked_ends": 0, "ledger_balanced": True, "dense": True,
    "digests_equal": True, "held_out": {"rise": 0.1, "rise_low": 0.05},
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_every_fault_happens_and_the_machine_that_is_left_alone_is_hit_too():
    faults = plan(20, seed=0)

    assert len(faults) == 20
    assert set(ON_TWO) <= set(faults)
    assert plan(20, seed=0) == faults
    for number, fault in enumerate(faults[:-1]):
        if fault.kind == "machine" and faults[number - 1].kind != "machine":
            assert faults[number + 1] in ON_ONE


@pytest.mark.parametrize(
    "broken",
    [
        {"lost": 1}, {"duplicated": 1}, {"late": ["rank 0"]}, {"unasked_ends": 1}, {"ledger_balanced": False},
        {"dense": False}, {"digests_equal": False}, {"held_out": {"rise": 0.02, "rise_low": -0.01}},
    ],
    ids=lambda broken: next(iter(broken)),
)  # fmt: skip
def test_account_refuses_each_broken_promise(broken):
    assert is_kept(KEPT)
    assert not is_kept(KEPT | broken)


def test_versions_and_steps_that_took_effect_twice_are_found(cluster):
    (cluster.directory / "coordinator").mkdir()
    (cluster.directory / "learner").mkdir()
    journal = cluster.directory / "learner" / "versions.jsonl"
    journal.write_text('{"version": 0}\n{"version": 1}\n{"ver')
    with sqlite3.connect(cluster.directory / "coordinator" / "coordinator.sqlite") as store:
        store.execute("CREATE TABLE steps (step, version)")
        store.executemany("INSERT INTO steps VALUES (?, ?)", [(1, 1), (2, 2)])
    assert repeated(cluster) == 0

    journal.write_text('{"version": 0}\n{"version": 1}\n{"version": 1}\n')
    with store:
        store.execute("INSERT INTO steps VALUES (2, 3)")
    store.close()

    assert repeated(cluster) == 2


def test_states_that_differ_and_records_that_end_early_are_named():
    roots = {0: "a", 1: "b"}
    assert differences(roots, {"learner": [(0, "a"), (1, "b")], "site": [(1, "b")]}) == []

    assert differences(roots, {"learner": [(0, "a"), (1, "c")]}) == ["learner 1"]
    assert differences(roots, {"site": [(0, "a")], "learner": [(0, "a")]}) == ["site ends at 0"]
    assert differences(roots, {"site": [(1, "b"), (2, "b")]}) == ["site 2", "site ends at 2"]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({}, ""),
        ({"ranks_ended_s": RANKS_ENDED_S + 1}, "until no rank ran"),
        ({"ended_s": ENDED_S + 1}, "until no agent ran"),
        ({"next_version_s": TRAINS_S + 1}, "until a new version"),
    ],
)
def test_fault_is_late_beyond_its_stated_bounds(over, said):
    times = {"ranks_ended_s": RANKS_ENDED_S, "ended_s": ENDED_S, "next_version_s": TRAINS_S} | over
    row = Row(fault="rank", machine=1, machines=2, head=3, **times)

    assert bool(row.late()) == bool(said)
    assert said in row.late()


def test_rise_is_of_paired_prompts_with_an_interval():
    def evaluation(version, right):
        prompts = [
            {"prompt_index": index, "samples": [{"reward": float(draw < num)} for draw in range(2)]}
            for index, num in enumerate(right)
        ]
        return {"version": version, "prompts": prompts}

    found = rise({"evaluations": [evaluation(0, [0, 1, 1, 2]), evaluation(9, [1, 2, 1, 2])]})

    # Differences 1/2, 1/2, 0, 0: their deviation is 1 / sqrt(12), their standard error half of it, t(0.975, 3) = 3.182.
    assert found == {
        "prompts": 4, "version": 9, "before": 0.5, "after": 0.75, "rise": 0.25, "rise_low": -0.2093, "rise_high": 0.7093
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_killed_agent_of_one_of_two_machines_costs_no_group_and_no_version(tmp_path):
    """Two namespaces with addresses of their own, two agents of torchrun, two samplers as processes."""
    if not can_make_namespaces():
        pytest.skip("network namespaces need root and iproute2")

    summary = await campaign(tmp_path, [Fault("agent", 1)], SMALL, versions=8, seed=0)

    assert (summary["kills"], summary["lost"], summary["duplicated"]) == (1, 0, 0), summary
    assert summary["digests_differing"] == []
    assert summary["ledger_balanced"] and summary["dense"], summary  # noqa: PT018
    assert (summary["unasked_ends"], summary["late"]) == (0, []), summary
    assert summary["versions"] >= 8
