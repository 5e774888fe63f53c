"""The live view: what it shows, and that it outlives its coordinator."""

import dataclasses
import io
import itertools

import pytest
from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.live.run_tables import status_rows
from heterorl.cli.live.watch_commands import View, frame, poll
from heterorl.cli.main import app
from heterorl.common.errors import PermissionDenied, Unreachable
from heterorl.common.process.clock import SystemClock
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import LearnerPhase, LearnerProgress, SourceReport, StepTimes
from heterorl.common.types.rollout import DropReason, ReturnReason
from heterorl.common.types.run import LedgerCounts, RunStatus, SiteStatus
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.v1 import run_pb2_grpc
from tests.support.evaluations import evaluation
from tests.support.links import PLAINTEXT
from tests.support.ports import free_port
from tests.support.run import REPORT
from tests.support.secure_run import SecureRun

ONCE = RetryPolicy(budget_s=0.0)
STATUS = RunStatus(
    run_id="[/r]", head_version=4, epoch=1, learner="l", is_draining=False, uptime_s=9.0,
    ledger=LedgerCounts(acked=6, pending=1, leased=1, consumed=4), bytes_full=100, bytes_last=10,
    changed_fraction=0.1, sites=(), last_report=dataclasses.replace(REPORT, step=3),
)  # fmt: skip


class Scripted:
    """A coordinator that answers what it is told to."""

    def __init__(self, status=STATUS):
        self.status = status
        self.asked = []
        self.evaluations = ()

    async def get_status(self):
        if isinstance(self.status, Exception):
            raise self.status
        return self.status

    async def list_steps(self, *, after_step, limit):
        self.asked.append(after_step)
        return tuple(
            dataclasses.replace(self.status.last_report, step=step, reward_mean=step / 10)
            for step in range(after_step + 1, self.status.last_report.step + 1)
        )

    async def list_evaluations(self, *, after_version, limit):
        return tuple(found for found in self.evaluations if found.version > after_version)


def shown(view, *, wall=1000.0):
    console = Console(width=160, file=io.StringIO(), record=True, markup=False)
    console.print(frame(view, wall=wall))
    return console.export_text()


async def test_picture_shows_run_series_and_rates():
    view, api = View(address="c:1"), Scripted()
    await poll(view, api, wall=1000.0, monotonic=0.0)
    api.status = dataclasses.replace(
        STATUS, head_version=6, ledger=dataclasses.replace(STATUS.ledger, consumed=34),
        last_report=dataclasses.replace(REPORT, step=5),
    )  # fmt: skip
    await poll(view, api, wall=1030.0, monotonic=30.0)
    text = shown(view)

    assert "c:1" in text
    assert "reachable" in text
    assert "[/r]" in text
    assert "0.500" in text
    # Two versions and 30 groups in half a minute.
    assert "4.0 versions and 60 groups a minute" in text
    await poll(view, api, wall=1032.0, monotonic=32.0)
    # Pages of steps are asked for when there is a new one.
    assert api.asked == [0, 2, 3, 0, 4, 5]


async def test_status_reads_on_where_an_answer_ends_early():
    class Full(Scripted):
        async def list_steps(self, *, after_step, limit):
            return (await super().list_steps(after_step=after_step, limit=limit))[:50]

    last = dataclasses.replace(REPORT, step=260)
    view = View(address="c:1")
    await poll(view, Full(dataclasses.replace(STATUS, last_report=last)), wall=1000.0, monotonic=0.0)

    assert [report.step for report in view.reports] == list(range(61, 261))


async def test_first_lines_of_a_small_screen_show_the_problems():
    view = View(address="c:1")
    site = SiteStatus(
        site="eu-1", incarnation="i", policy_version=3, state_root="", last_seen_s=2.0, groups_accepted=7,
        groups_dropped=0, tokens_per_s=9.0, work_leased=1, problem="the disk is full",
    )  # fmt: skip
    sites = [dataclasses.replace(site, site=f"eu-{number}", problem="") for number in range(2, 12)]
    await poll(view, Scripted(dataclasses.replace(STATUS, sites=(site, *sites))), wall=1000.0, monotonic=0.0)
    console = Console(width=80, file=io.StringIO(), record=True, markup=False)
    console.print(frame(view, wall=1000.0))

    lines = console.export_text().splitlines()
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines[:24])
    for part in ("run [/r]", "problem of", "the disk is full", "version ", "step ", "trained ", "sites: work", "eu-4"):
        assert part in text, part


@pytest.mark.parametrize(("height", "width", "has_curves"), [(24, 80, False), (40, 100, True)])
async def test_small_screen_shows_losses_ledger_and_sites_before_details(height, width, has_curves):
    site = SiteStatus(
        site="eu-1", incarnation="i", policy_version=3, state_root="", last_seen_s=2.0, groups_accepted=7,
        groups_dropped=0, tokens_per_s=9.0, work_leased=1,
    )  # fmt: skip
    ledger = dataclasses.replace(
        STATUS.ledger, acked=35, dropped={DropReason.STALE_AT_INGEST: 20, DropReason.SURPLUS: 9},
        closed={ReturnReason.REWARD_FAILED: 44, ReturnReason.PROMPT_REFUSED: 3},
    )  # fmt: skip
    sources = tuple(SourceReport(label=f"data-{n}", num_groups=n, reward_mean=0.1) for n in (1, 2, 3))
    times = StepTimes(
        period_s=20.0, waiting_s=4.0, examining_s=0.0, computing_s=15.0, evaluating_s=0.05, publishing_s=0.5
    )
    last = dataclasses.replace(STATUS.last_report, sources=sources, times=times, evaluation_accuracy=0.5)
    progress = LearnerProgress(
        step=4, phase=LearnerPhase.COMPUTING, phase_s=61.0, micro_batches_done=6, micro_batches=40
    )
    sites = [dataclasses.replace(site, site=name) for name in ("eu-1", "us-1", "asia-1")]
    status = dataclasses.replace(
        STATUS,
        sites=tuple(sites),
        ledger=ledger,
        last_report=last,
        progress=progress,
        delta_bytes=10,
        snapshot_bytes=80,
    )
    view = View(address="c:1")
    await poll(view, Scripted(status), wall=1000.0, monotonic=0.0)
    await poll(view, Scripted(status), wall=1060.0, monotonic=60.0)
    console = Console(width=width, file=io.StringIO(), record=True, markup=False)
    console.print(frame(view, wall=1060.0))

    text = "\n".join(console.export_text().splitlines()[:height])
    for part in (
        "now ", "step ", "data-3 50%", "trained 4 groups", "stale_at_ingest 20, surplus 9",
        "reward_failed 44, prompt_refused 3", "ledger  balanced", "a minute", "sites: work", "eu-1", "us-1", "asia-1",
    ):  # fmt: skip
        assert part in text, part
    assert ("sample size" in text) == has_curves


def test_sources_are_means_over_the_newest_steps():
    """A step of few groups has not each source, and none in its true share."""
    steps = []
    for step in range(1, 101):
        often = SourceReport(label="often", num_groups=3, reward_mean=step / 100)
        rare = SourceReport(label="rare", num_groups=1, reward_mean=0.25)
        steps.append(dataclasses.replace(REPORT, step=step, sources=(often, rare) if step % 2 else (often,)))
    status = dataclasses.replace(STATUS, last_report=steps[-1])

    assert dict(status_rows(status, reports=steps))["sources"] == (
        "often 86%, reward 0.755; rare 14%, reward 0.250 (50 steps)"
    )
    assert dict(status_rows(status))["sources"] == "often 100%, reward 1.000 (1 step)"


@pytest.mark.parametrize(
    ("step", "head", "is_shown"), [(4, 3, True), (3, 3, False), (2, 3, False), (2, 4, True)],
    ids=["the next one", "published", "older", "after a rollback"],
)  # fmt: skip
def test_progress_of_a_step_that_is_done_is_not_called_now(step, head, is_shown):
    progress = LearnerProgress(
        step=step, phase=LearnerPhase.EXAMINING, phase_s=1.0, micro_batches_done=0, micro_batches=0
    )
    last = dataclasses.replace(REPORT, step=3, version=3)
    status = dataclasses.replace(STATUS, progress=progress, head_version=head, last_report=last)

    assert ("now" in dict(status_rows(status))) == is_shown
    assert "now" in dict(status_rows(dataclasses.replace(status, last_report=None)))


def test_problems_stand_before_all_else():
    site = SiteStatus(
        site="eu", incarnation="i", policy_version=3, state_root="", last_seen_s=2.0, groups_accepted=7,
        groups_dropped=0, tokens_per_s=9.0, work_leased=1, quarantine="off", problem="the disk is full",
    )  # fmt: skip
    lost = dataclasses.replace(STATUS.ledger, acked=STATUS.ledger.acked + 1)
    status = dataclasses.replace(STATUS, sites=(site,), store_problem="no room", ledger=lost, rollback_to=2)
    names = ["STANDS STILL", "DISK FULL", "ledger", "quarantine of eu", "problem of eu", "ordered", "version"]

    rows = dict(status_rows(status))
    assert [name for name in rows if name in names] == [*names[:5], "version", "ordered"]
    assert list(rows)[:5] == names[:5]
    assert rows["ledger"].startswith("BROKEN")
    assert dict(status_rows(STATUS))["ledger"] == "balanced"


async def test_unreachable_coordinator_keeps_the_last_picture_and_says_since_when():
    view, api = View(address="c:1"), Scripted()
    await poll(view, api, wall=1000.0, monotonic=0.0)
    api.status = Unreachable("GetStatus: no answer")
    await poll(view, api, wall=1002.0, monotonic=2.0)
    await poll(view, api, wall=1060.0, monotonic=60.0)

    text = shown(view, wall=1062.0)
    assert "unreachable since" in text
    assert "(60 s): GetStatus: no answer" in text
    assert "run [/r]" in text

    api.status = STATUS
    await poll(view, api, wall=1070.0, monotonic=70.0)
    assert view.unreachable_since is None
    assert "unreachable" not in shown(view, wall=1070.0)


@pytest.mark.parametrize(
    ("changes", "step"),
    [({"epoch": 2, "head_version": 6}, 5), ({"epoch": 2}, 2), ({"head_version": 3}, 3), ({"run_id": "other"}, 1)],
    ids=["lost and repeated", "lost", "restored", "another run"],
)
async def test_what_a_run_that_went_back_had_is_shown_no_more(changes, step):
    view, api = View(address="c:1"), Scripted()
    api.evaluations = tuple(evaluation(version) for version in (2, 3, 4))
    await poll(view, api, wall=0.0, monotonic=0.0)
    assert sorted(version for version, _ in view.evaluations) == [2, 3, 4]

    api.evaluations = api.evaluations[:1]
    consumed = dataclasses.replace(STATUS.ledger, consumed=1)
    last = dataclasses.replace(REPORT, step=step, published_time=9.0)
    api.status = dataclasses.replace(STATUS, ledger=consumed, last_report=last, **changes)
    await poll(view, api, wall=30.0, monotonic=30.0)

    assert [(report.step, report.published_time) for report in view.reports] == [(n, 9.0) for n in range(1, step + 1)]
    assert [version for version, _ in view.evaluations] == [2]
    assert "a minute" not in shown(view, wall=30.0)


async def test_a_step_with_two_reports_is_shown_once():
    class Twice(Scripted):
        async def list_steps(self, *, after_step, limit):
            found = await super().list_steps(after_step=after_step, limit=limit)
            return [dataclasses.replace(report, version=version) for report in found for version in (1, 2)][:limit]

    view = View(address="c:1")
    await poll(view, Twice(), wall=0.0, monotonic=0.0)

    assert [(report.step, report.version) for report in view.reports] == [(1, 2), (2, 2), (3, 2)]


async def test_of_a_long_run_only_the_newest_steps_are_read():
    view, api = View(address="c:1"), Scripted()
    api.status = dataclasses.replace(STATUS, last_report=dataclasses.replace(REPORT, step=30_000))

    await poll(view, api, wall=0.0, monotonic=0.0)

    assert api.asked[0] == 29_800
    assert [report.step for report in view.reports] == list(range(29_801, 30_001))


async def test_certificate_that_is_no_operators_ends_the_view():
    with pytest.raises(PermissionDenied):
        await poll(View(address="c:1"), Scripted(PermissionDenied("a sampler may not")), wall=0.0, monotonic=0.0)


async def test_nothing_known_yet():
    view = View(address="c:1")
    await poll(view, Scripted(Unreachable("x")), wall=0.0, monotonic=0.0)

    assert "no answer from the coordinator yet" in shown(view)


async def test_real_coordinator_goes_away_and_comes_back(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    view = View(address=address)
    async with CoordinatorClient(address, tls=PLAINTEXT, policy=ONCE) as client:
        states = []
        for is_up in (True, False, True):
            if is_up:
                core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), SystemClock())
                server = Server(
                    CoordinatorConfig(max_message_bytes=2 << 20, max_concurrent_rpcs=64, run_id="run", tls=PLAINTEXT)
                )
                run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
                await server.start(address)
            # gRPC waits a moment before it dials again; the view does not care how often it asks.
            for attempt in itertools.count():
                await poll(view, client, wall=float(attempt), monotonic=float(attempt))
                if (view.unreachable_since is None) == is_up:
                    break
                await SystemClock().sleep(0.05)
            states.append(view.unreachable_since is None)
            if is_up:
                await core.end_streams()
                await server.stop(0.0)
                await core.close()

    assert states == [True, False, True]
    assert view.status.run_id == "run"


async def test_once_prints_one_picture_over_certificates(tmp_path):
    import asyncio

    async with SecureRun(tmp_path) as secure:
        await secure.run.publish()
        node = secure.certificates.node("operator", "eu-1")
        arguments = ["top", secure.address, "--once", "--credentials", str(node)]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)

    assert result.exit_code == 0, result.exception
    assert "reachable" in result.output
    assert "run run" in result.output
    assert "reward" in result.output


def test_once_ends_with_1_when_nobody_answers():
    result = CliRunner().invoke(app, ["top", f"127.0.0.1:{free_port()}", "--once", "--insecure"])

    assert result.exit_code == 1
    assert "unreachable since" in result.output
