"""What a run says of itself: numbers where it measured, promises where it finished, a failure where it failed."""

import dataclasses

import pytest

from heterorl.common.types.run import LedgerCounts, RunStatus
from heterorl.demo.demo_config import TINY
from heterorl.demo.demo_results import broken_promises, digest_mismatches, measure, verdict
from tests.support.run import REPORT

REGIME = dataclasses.replace(TINY, max_steps=2, lag_versions=1, required_gain=0.2)
STATUS = RunStatus(
    run_id="demo", head_version=2, epoch=1, learner="l", is_draining=False, uptime_s=9.0,
    ledger=LedgerCounts(acked=2, pending=0, leased=0, consumed=2), bytes_full=1000, bytes_last=250, changed_fraction=0.1, sites=(),
    last_report=REPORT,
)  # fmt: skip
VERSIONS = [{"version": n, "state_root": f"r{n}", "bytes": 100 + n, "full_bytes": 400} for n in range(3)]
PATHS = {"logs": "out/logs", "summary": "out/summary.json", "report": "out/report.html", "model_dir": "out/model"}
CODES = {"coordinator": 0, "learner": 0}


def evaluation(version, accuracy):
    return {"version": version, "accuracy": accuracy, "num_prompts": 32}


def record(**changes):
    values = {
        "reports": [REPORT, dataclasses.replace(REPORT, step=2, version=2, evaluation_accuracy=0.9)],
        "status": STATUS,
        "versions": VERSIONS,
        "evaluations": [evaluation(0, 0.25), evaluation(1, 0.5), evaluation(2, 0.5)],
        "samplers": [VERSIONS],
    }
    return {**values, **changes}


def summary(**changes):
    shown = {"status": "complete", "failure": None, "problems": [], **PATHS}
    return {**shown, **measure(**record(), regime=REGIME), **changes}


def test_start_and_end_are_the_learners_own_evaluations_of_the_same_prompts():
    numbers = measure(**record(), regime=REGIME)

    assert (numbers["warm_start_accuracy"], numbers["final_accuracy"]) == (0.25, 0.5)
    assert (numbers["final_accuracy_version"], numbers["evaluation_prompts"]) == (2, 32)


def test_nothing_measured_is_nothing_claimed():
    numbers = measure(reports=[], status=None, versions=[], evaluations=[], samplers=[[], []], regime=REGIME)

    claims = ["warm_start_accuracy", "final_accuracy", "best_accuracy", "staleness_versions_mean", "ledger_balanced"]
    assert [numbers[name] for name in claims] == [None] * 5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ledger_balanced": False}, "ledger does not balance"),
        ({"ledger_balanced": None}, "ledger does not balance"),
        ({"digest_mismatches": 1}, "1 sampler states differ"),
        ({"steps": 1}, "1 of 2 steps"),
        ({"final_accuracy": 0.44}, "accuracy rose by 0.190, promised is 0.20"),
        ({"warm_start_accuracy": None}, "not measured"),
    ],
)
def test_each_broken_promise_is_named(changes, problem):
    kept = broken_promises(summary(), regime=REGIME, algorithm="gepo", exit_codes=CODES)
    broken = broken_promises(summary(**changes), regime=REGIME, algorithm="gepo", exit_codes=CODES)

    assert kept == []
    assert len(broken) == 1
    assert problem in broken[0]


def test_process_that_ended_badly_breaks_a_promise():
    assert broken_promises(summary(), regime=REGIME, algorithm="gepo", exit_codes={"learner": -9}) == [
        "learner ended with code -9"
    ]


def test_rise_is_promised_of_gepo_alone():
    flat = summary(final_accuracy=0.25)

    assert broken_promises(flat, regime=REGIME, algorithm="grpo", exit_codes=CODES) == []
    assert broken_promises(flat, regime=REGIME, algorithm="gepo", exit_codes=CODES) != []


def test_failed_run_says_what_failed_and_what_was_written_all_the_same():
    failed = {"status": "failed", "failure": "learner ended with code 2; log: out/logs/learner.log"}
    text = "\n".join(verdict(summary(**failed)))
    none = "\n".join(verdict(summary(**failed, report=None, model_dir=None)))

    assert "failed after 2 of 2 steps: learner ended with code 2; log: out/logs/learner.log" in text
    assert "report: out/report.html" in text
    assert "model: out/model" in text
    assert "no report was written; what is known: out/summary.json" in none
    assert "out/model" not in none
    assert "heterorl report out makes a page" in none
    assert "makes a page" not in text


def test_interrupted_run_says_so_and_what_it_knows():
    text = "\n".join(verdict(summary(status="interrupted", steps=1)))

    assert "interrupted after 1 of 2 steps" in text
    assert "out/summary.json" in text


def test_complete_run_shows_both_accuracies_report_and_model():
    text = "\n".join(verdict(summary(problems=["[/x]"])))

    for part in ("0.250 -> 0.500 (version 2", "same 32 prompts", "out/report.html", "out/model", "promise: [/x]"):
        assert part in text
    assert f"3 versions published; 2 groups accepted, {2 * REPORT.num_groups} trained" in text
    assert len(text.splitlines()) <= 8


def test_digest_mismatch_is_counted():
    versions = [{"version": 0, "state_root": "a"}, {"version": 1, "state_root": "b"}]

    assert digest_mismatches(versions, [versions, versions[1:]]) == 0
    assert digest_mismatches(versions, [[{"version": 1, "state_root": "x"}, {"version": 9, "state_root": "b"}]]) == 2
