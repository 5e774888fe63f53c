"""Curves as people read them: what a learner states is shown, what it does not state is absent."""

import dataclasses

from heterorl.cli.live.step_curves import progress_words, report_rows, series, time_words
from heterorl.common.types.common import (
    CompletionNumbers,
    LearnerPhase,
    LearnerProgress,
    PartMean,
    SiteTokens,
    StepTimes,
)
from tests.support.run import REPORT

NUMBERS = CompletionNumbers(
    length_mean=212.4, length_p95=498.0, length_max=512, length_high_reward=180.0, truncated_fraction=0.04,
    uniform_fraction=0.25, reward_parts=tuple(PartMean(name=f"p{n}", mean=n / 8) for n in range(8)),
    sites=(SiteTokens(site="eu-1", num_groups=1, num_tokens=100), SiteTokens(site="us-2", num_groups=2, num_tokens=400)),
)  # fmt: skip
TIMES = StepTimes(
    period_s=20.0, waiting_s=4.0, examining_s=0.0, computing_s=15.0, evaluating_s=0.05, publishing_s=0.5
)  # fmt: skip
STATED = dataclasses.replace(REPORT, completions=NUMBERS, times=TIMES)


def test_earlier_learner_has_no_rows_and_no_curves_of_what_it_does_not_state():
    assert report_rows(REPORT) == []
    assert ("learning rate", "5e-07") in report_rows(dataclasses.replace(REPORT, lr=5e-7))
    names = [name for name, _, _ in series([REPORT, REPORT])]
    assert names == ["reward", "KL", "entropy", "staleness", "sample size", "step"]


def test_rows_of_a_report():
    rows = dict(report_rows(STATED))

    assert rows["completions"] == (
        "212 tokens mean, 498 p95, 512 max; 4.0% truncated; equal rewards in 25% of the groups"
    )
    assert rows["reward parts"].startswith("p0 0.000, p1 0.125")
    assert rows["reward parts"].endswith("p5 0.625 and 2 more")
    assert rows["time"] == "20.00 s a step: computing 75%, waiting 20%, publishing 2%"
    # Tokens of the step over the time since the step before, the largest site first.
    assert rows["trained from"] == "us-2 20 tokens/s, eu-1 5 tokens/s"


def test_trajectories_of_many_turns_have_a_row():
    endings = (PartMean(name="eos", mean=0.75), PartMean(name="turns", mean=0.25))
    numbers = dataclasses.replace(NUMBERS, turns_mean=2.25, turns_max=6, given_mean=80.4, endings=endings)

    assert dict(report_rows(dataclasses.replace(STATED, completions=numbers)))["trajectories"] == (
        "2.2 turns mean, 6 max; 80 given tokens mean; ended by eos 75%, turns 25%"
    )
    assert "trajectories" not in dict(report_rows(STATED))


def test_bad_rollouts_and_the_engines_gap_have_rows_where_they_are_known():
    rows = dict(report_rows(dataclasses.replace(REPORT, mask_share_bad=0.125, kl_token_fresh=0.0011)))

    assert rows == {
        "bad rollouts": "12% of those with A < 0 train", "engine gap": "0.0011 nats a token, at a staleness of 0",
    }  # fmt: skip


def test_replaced_groups_are_said_with_the_useful_share_before_and_after():
    # 32 groups of which a quarter is uniform, and 48 that were replaced: 24 of 80 were useful.
    report = dataclasses.replace(STATED, num_groups=32, num_replaced=48)

    assert dict(report_rows(report))["replaced"] == (
        "48 groups of equal rewards; 30% of the 80 received were useful, 75% of the 32 in the step"
    )
    assert "replaced" not in dict(report_rows(STATED))
    assert {name: newest for name, newest, _ in series([STATED, report])}["replaced"] == "48 groups of equal rewards"


def test_curves_skip_steps_of_an_earlier_learner_and_a_dash_is_no_number():
    by_name = {name: (newest, values) for name, newest, values in series([REPORT, STATED])}
    assert by_name["length"] == ("212 tokens", [212.4])
    assert by_name["of high reward"] == ("180 tokens", [180.0])
    assert "of low reward" not in by_name
    assert by_name["part p3"] == ("0.375", [0.375])

    after_a_downgrade = {name: newest for name, newest, _ in series([STATED, REPORT])}
    assert after_a_downgrade["length"] == "-"


def test_period_without_any_time_is_bookkeeping():
    nothing = StepTimes(
        period_s=0.0, waiting_s=0.0, examining_s=0.0, computing_s=0.0, evaluating_s=0.0, publishing_s=0.0
    )
    assert time_words(nothing) == "0.00 s a step: bookkeeping"
    assert "trained from" not in dict(report_rows(dataclasses.replace(STATED, times=nothing)))


def test_progress_names_the_micro_batch_that_is_computed():
    progress = LearnerProgress(
        step=12, phase=LearnerPhase.COMPUTING, phase_s=61.0, micro_batches_done=6, micro_batches=40
    )

    assert progress_words(progress, 2.4) == "step 12: computing micro-batch 7 of 40, for 61 s (stated 2 s ago)"
    done = dataclasses.replace(progress, micro_batches_done=40)
    assert "micro-batch 40 of 40" in progress_words(done, 0.0)
    waiting = dataclasses.replace(progress, phase=LearnerPhase.WAITING)
    assert progress_words(waiting, 0.0) == "step 12: waiting for groups, for 61 s (stated 0 s ago)"
