"""The campaign against a learner on several machines: its plan, and that its account refuses each broken promise."""

import json
import sqlite3

import pytest

from tests.faults.nodes import ON_ONE, ON_TWO, is_kept, plan
from tests.faults.nodes_evidence import accuracies, differences, repeated
from tests.support.cluster import Cluster

KEPT = {
    "kills": 20, "lost": 0, "duplicated": 0, "late": [], "unasked_ends": 0, "ledger_balanced": True, "dense": True,
    "digests_equal": True, "accuracy_before": 0.3, "accuracy_after": 0.5,
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
        {"dense": False}, {"digests_equal": False}, {"accuracy_after": 0.31},
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
    assert differences(roots, {"site": [(0, "a")]}) == ["site ends at 0"]
    assert differences(roots, {"site": [(1, "b"), (2, "b")]}) == ["site 2", "site ends at 2"]


def test_accuracy_is_that_of_the_first_and_of_the_last_two_evaluations(cluster):
    (cluster.directory / "learner").mkdir()
    rows = [{"accuracy": value} for value in (0.25, 0.3, 0.5, 0.6)]
    (cluster.directory / "learner" / "evaluations.jsonl").write_text("\n".join(map(json.dumps, rows)))

    found = accuracies(cluster)

    assert (found["accuracy_before"], found["accuracy_after"]) == (0.25, 0.55)
