"""A report's row has every number of it."""

import dataclasses

from heterorl.common.types.common import CompletionNumbers, PartMean, SiteTokens, SourceReport, StepReport, StepTimes
from heterorl.track.tracker import row_of
from tests.support.run import REPORT

COMPLETIONS = CompletionNumbers(
    length_mean=3.5, length_p95=9.0, length_max=9, truncated_fraction=0.1, uniform_fraction=0.2,
    reward_parts=(PartMean(name="correct", mean=0.25),), sites=(SiteTokens(site="eu-1", num_groups=2, num_tokens=6),),
)  # fmt: skip
TIMES = StepTimes(period_s=2.0, waiting_s=0.1, examining_s=0.2, computing_s=0.3, evaluating_s=0.4, publishing_s=0.5)


def test_row_has_what_the_learner_said():
    source = SourceReport(label="sums", num_groups=3, reward_mean=0.75)
    report = dataclasses.replace(REPORT, completions=COMPLETIONS, times=TIMES, sources=(source,), num_tokens=8)
    report = dataclasses.replace(report, mask_share_bad=0.5, kl_token_fresh=0.01)
    row = row_of(dataclasses.replace(report, published_time=1.5e9))

    numbers = {field.name for field in dataclasses.fields(StepReport)}
    assert numbers - {"evaluation_accuracy", "completions", "times", "sources"} <= row.keys()
    assert row["is_applied"] == 1
    assert {f"times/{field.name}" for field in dataclasses.fields(StepTimes)} <= row.keys()
    assert row["completions/truncated_fraction"] == 0.1
    assert "completions/length_high_reward" not in row
    assert row["reward_parts/correct"] == 0.25
    assert (row["sites/eu-1/num_tokens"], row["sites/eu-1/tokens_per_s"], row["tokens_per_s"]) == (6, 3.0, 4.0)
    assert (row["sources/sums/num_groups"], row["sources/sums/reward_mean"]) == (3, 0.75)


def test_what_was_not_said_is_not_there():
    assert row_of(REPORT).keys() <= {field.name for field in dataclasses.fields(StepReport)}
    assert "tokens_per_s" not in row_of(dataclasses.replace(REPORT, completions=COMPLETIONS))
    assert "published_time" not in row_of(REPORT)
