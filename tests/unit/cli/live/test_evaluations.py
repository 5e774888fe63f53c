"""A run's evaluations as people see them: asked for in pages, and only what may have changed."""

from heterorl.cli.live.run_tables import evaluation_tables, read_evaluations
from heterorl.common import api as module
from heterorl.common.errors import RemoteError
from heterorl.common.evaluation.summary import evaluation_rows
from heterorl.common.types.evaluation import (
    Estimate,
    Evaluation,
    EvaluationDraws,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
)

DRAWS = EvaluationDraws(num_prompts=9, num_samples=4, temperature=1.0, max_new_tokens=8)


def evaluation(version, mean=None, *, state=EvaluationState.DONE, name="math", num_prompts=9):
    found = None if mean is None else Estimate(mean=mean, low=mean - 0.1, high=mean + 0.1, num_prompts=num_prompts)
    summary = EvaluationSummary(
        num_prompts=num_prompts, num_samples=4 * num_prompts, num_errors=0, num_truncated=0, mean_tokens=3.0,
        average=found, passes=() if found is None else (PassEstimate(k=4, estimate=found),),
    )  # fmt: skip
    return Evaluation(
        version=version, task_set=name, state=state, num_wanted=9, draws=DRAWS, task_digest="d" * 64, summary=summary,
        sites=(("eu-1", num_prompts),), planned_time=1.0, ended_time=2.0,
    )  # fmt: skip


class Api:
    def __init__(self, *evaluations):
        self.evaluations, self.asked = list(evaluations), []

    async def list_evaluations(self, *, after_version, limit):
        self.asked.append(after_version)
        return tuple(found for found in self.evaluations if found.version > after_version)[:limit]


async def test_all_pages_are_read_and_then_what_may_have_changed(monkeypatch):
    monkeypatch.setattr(module, "PAGE", 2)
    running = evaluation(30, state=EvaluationState.RUNNING, num_prompts=4)
    api, known = Api(evaluation(10, 0.5), evaluation(20, 0.7), running), {}
    await read_evaluations(api, known)
    assert sorted(known) == [(10, "math"), (20, "math"), (30, "math")]

    # 30 was given up for 40, which nobody has begun.
    api.evaluations[2] = evaluation(40, state=EvaluationState.OPEN, num_prompts=0)
    api.asked.clear()
    await read_evaluations(api, known)

    assert sorted(version for version, _ in known) == [10, 20, 40]
    assert api.asked == [29, 40]


async def test_a_coordinator_without_an_answer_takes_none_away():
    class Old:
        async def list_evaluations(self, **_):
            raise RemoteError("UNIMPLEMENTED: no such method")

    for kept in ({}, {(30, "math"): evaluation(30, 0.5)}):
        known = dict(kept)
        await read_evaluations(Old(), known)
        assert known == kept
    assert evaluation_tables(()) == ()


def test_a_set_has_its_newest_number_best_last_gap_and_what_is_under_way():
    rows = evaluation_rows(
        [
            evaluation(20, 0.7), evaluation(10, 0.5), evaluation(30, 0.6),
            evaluation(25, 0.9, state=EvaluationState.INCOMPLETE),
            evaluation(40, state=EvaluationState.RUNNING, num_prompts=4),
            evaluation(40, state=EvaluationState.OPEN, name="code", num_prompts=0),
        ]
    )  # fmt: skip

    assert rows == [
        ("code", "-", "-", "-", "-", "-", "-", "40: 0 of 9", "-"),
        ("math", "30", "0.600 [0.500, 0.700]", "@4 0.600 [0.500, 0.700]", "0.700 (20)", "0.600 (30)", "0.100",
         "40: 4 of 9", "eu-1"),
    ]  # fmt: skip
    (table,) = evaluation_tables([evaluation(1, 0.5)])
    assert [column.header for column in table.columns][:3] == ["set", "version", "avg@n"]
