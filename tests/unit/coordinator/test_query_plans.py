"""No statement of a start or of a call reads a table that grows with the run: by the plans of all that were run."""

import re
import sqlite3

import pytest

from heterorl.common.types.evaluation import EvaluationSet, PromptResult, ScoredSample
from heterorl.common.types.rollout import DropReason, Rejection
from heterorl.common.types.run import CanaryReport, Heartbeat
from heterorl.common.types.sample import EvaluationSample, RolloutNote, SampleFilter, SampleKind, SampleNote, SamplePage
from heterorl.coordinator import run_metrics
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.store.sqlite import connect
from heterorl.coordinator.versions import lineage
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, Run, credits_of

SETS = [{"name": "held", "num_prompts": 2, "samples_per_prompt": 64, "temperature": 1.0}]
GROWING = frozenset(
    {"groups", "versions", "variant_versions", "steps", "work", "out_work", "audit", "failures", "canaries",
     "signatures", "manifests", "beyond_watermark", "sharer", "waiting", "samples", "sample_payloads",
     "evaluation_jobs", "evaluation_results", "prompts"}
)  # fmt: skip
"""Tables that grow with versions, groups, sites or what is out. Others are bounded by retention or by names."""
OF_FEW = frozenset({"versions_abandoned", "work_open", "sharer_owed"})
"""Indexes of a few rows of such a table."""
NEWEST = re.compile(r"ORDER BY [\w., ]+ DESC LIMIT 1$")

pytestmark = pytest.mark.sqlite


def scans(connection, statement):
    """Lines of a statement's plan that read a growing table from its beginning to its end."""
    try:
        plan = [str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
    except sqlite3.Error:
        # No query: a pragma, a savepoint.
        return []
    if NEWEST.search(statement) and "WHERE" not in statement and not any("TEMP B-TREE" in line for line in plan):
        return []
    found = []
    for line in plan:
        match = re.match(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?", line)
        if match and match[1] in GROWING and match[2] not in OF_FEW:
            found.append(line)
    return found


@pytest.fixture
def statements(monkeypatch):
    """Statements of all connections that are opened from here on, as they are run."""
    seen = {}
    connect = sqlite3.connect

    def traced(*arguments, **options):
        connection = connect(*arguments, **options)
        connection.set_trace_callback(lambda text: None if text.startswith("--") else seen.setdefault(text))
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    return seen


async def every_call(core, run, clock):
    """What learner, samplers and operators call, each at least once."""
    await run.register("other")
    await core.register(run.registration(work_ahead_s=600.0, held=(1,), lowest_sequence=1))
    beat = Heartbeat(site=SITE, incarnation=INCARNATION, policy_version=0, state_root="", tokens_per_s=1.0)
    await core.heartbeat(beat)
    ids = await run.push(4)
    left = await run.lease(2)
    await core.abandon_work(site=SITE, incarnation=INCARNATION, assignments=[left[0].id])
    again = await core.lease_work(
        site=SITE, incarnation=INCARNATION, max_groups=2, policy_version=run.head, request_id="r"
    )
    await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=2, policy_version=run.head, request_id="r")
    sent = run.group(again.assignments[0])
    await core.push_groups([sent, sent])
    await core.push_groups([run.group(again.assignments[1], version=run.head + 9)])
    clock.advance(core.config.work_lease_s + 1)
    await run.lease(1)
    clock.advance(601.0)
    await run.lease(1)
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(3))
    queued = [await anext(stream) for _ in range(3)]
    await stream.aclose()
    await run.publish(consumed=[queued[0].group.id])
    await core.reject_groups(
        epoch=run.epoch, rejections=[Rejection(id=ids[1], reason=DropReason.LOGPROB_MISMATCH, detail="0.3 nats")]
    )
    await core.release_site(site=SITE, reason="test")
    await core.abandon_groups(epoch=run.epoch, ids=ids[2:3], reason="test")
    await core.report_canary(CanaryReport(site=SITE, incarnation=INCARNATION, version=0, logprobs=(1.0,)))
    note = SampleNote(
        group=queued[0].group.id, prompt="p", rollouts=(RolloutNote(completion="c", reward_parts=()),) * 2
    )
    tried = EvaluationSample(version=0, site=SITE, prompt_index=0, prompt="p", rollouts=())
    for _ in range(2):
        await core.note_samples(epoch=run.epoch, notes=[note], evaluations=[tried])
    for wanted in (
        SampleFilter(), SampleFilter(site=SITE), SampleFilter(kind=SampleKind.CONSUMED), SampleFilter(min_reward=0.5),
        SampleFilter(kept_because="consumed"), SampleFilter(first_version=1, last_version=1),
    ):  # fmt: skip
        listed = await core.list_samples(wanted=wanted, page=SamplePage())
        assert listed.num_kept > 3
    await core.get_sample(sample_id=listed.samples[0].id)
    sets = [EvaluationSet(name="held", task_digest="d" * 64, num_prompts=9)]
    for site, count in (("us", 1), (SITE, 2), (SITE, 2)):
        if site != SITE:
            await run.register(site)
        grant = await core.lease_work(
            site=site, incarnation=INCARNATION, max_groups=count, policy_version=run.head, sets=sets, request_id="e"
        )
        assert len(grant.assignments) == 1
    await core.abandon_work(site="us", incarnation=INCARNATION, assignments=[grant.assignments[0].id])
    sample = ScoredSample(reward=1.0, num_tokens=1, is_truncated=False)
    for _ in range(2):
        (work,) = (
            await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=1, policy_version=run.head, sets=sets)
        ).assignments or grant.assignments
        tried = PromptResult(assignment=work.id, prompt_index=work.prompt_index, samples=(sample,) * 64)
        await core.push_evaluation(
            site=SITE, incarnation=INCARNATION, state_root=grant.evaluation.state_root, results=[tried]
        )
    await core.list_evaluations()
    watch = core.watch_head(after_version=0)
    await anext(watch)
    await watch.aclose()
    await core.plan_pull(have_version=0, have_root=run.roots[0], want_version=run.head, accept_merged=True)
    await core.list_manifests(first_version=0, last_version=run.head)
    await core.list_steps(after_step=0, limit=10)
    await core.run.note_revoked(frozenset({7}), {})
    await core.rollback(to_version=0, request_id="b")
    await core.renew_lease(epoch=run.epoch)
    await run.publish(lineage_version=0, snapshot=True)
    await run_metrics.observe_run(core)
    await core.collector.work()
    await core.collector.collect()
    await core.acquire_lease(holder="learner", contract=run.contract, request_id="r2")


async def test_no_statement_reads_what_grows(tmp_path, statements):
    clock = ManualClock()
    config = CoordinatorConfig(data_dir=tmp_path / "data", quarantine_failures=1, samples_every=1, evaluation=SETS)
    core = await Coordinator.open(config, clock)
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await every_call(core, run, clock)
    await core.close()
    # The ring shrinks.
    core = await Coordinator.open(config.model_copy(update={"samples_bytes": 7000}), clock)
    await run_metrics.observe_run(core)
    assert (await core.list_samples(wanted=SampleFilter(), page=SamplePage())).num_kept == 1

    bad = await core.database.run(
        lambda connection: {text: found for text in list(statements) if (found := scans(connection, text))}
    )
    await core.close()
    assert len(statements) > 100
    assert bad == {}


async def test_ages_are_read_without_manifests(tmp_path, statements):
    def plans(connection):
        statements.clear()
        lineage.superseded_s(connection, 1, reach=64, now=0.0)
        lineage.oldest_usable(connection, head=9, max_versions=64, max_s=60.0, now=0.0)
        lineage.coming(connection, 1.0, head=9, now=0.0)
        texts = [text for text in list(statements) if "FROM versions" in text]
        return [str(connection.execute(f"EXPLAIN QUERY PLAN {text}").fetchone()[3]) for text in texts]

    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    found = await core.database.run(plans)
    await core.close()

    assert len(found) == 3
    assert all("COVERING INDEX versions_ages" in plan for plan in found)


@pytest.mark.parametrize(
    ("statement", "is_bad"),
    [
        ("SELECT count(*) FROM groups", True),
        ("SELECT * FROM groups WHERE num_bytes > 4", True),
        ("SELECT * FROM groups WHERE state = 'pending'", False),
        ("SELECT version FROM versions ORDER BY version DESC LIMIT 1", False),
        ("SELECT version FROM versions ORDER BY published DESC LIMIT 1", True),
        ("SELECT * FROM work WHERE is_leased = 1", True),
        ("SELECT assignment FROM work WHERE is_leased = 0 ORDER BY assignment LIMIT 5", False),
    ],
)
def test_a_scan_is_seen(tmp_path, statement, is_bad):
    connection = connect(tmp_path / "store.sqlite")
    assert bool(scans(connection, statement)) == is_bad
    connection.close()
