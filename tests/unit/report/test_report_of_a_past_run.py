"""A page about a run from its files alone; and what is said about directories that are no run's."""

import asyncio
import base64
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import heterorl
from heterorl.cli.main import app
from heterorl.common.errors import CorruptStore, Draining, OperatorError, QuotaExceeded
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.common import CompletionNumbers, PartMean, SourceReport, StepTimes
from heterorl.common.types.run import changed_steps
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.run.state_directory import write_run_file
from heterorl.report import figures
from heterorl.report import report_page as page_of
from heterorl.report.past_run import InUse, SiteTotals, ask_run, read_run
from heterorl.report.report_page import columns_of, render
from tests.support.run import REPORT, Run
from tests.support.secure_run import SecureRun

PNG = b"\x89PNG\r\n"


@pytest.fixture
def no_pictures(monkeypatch):
    """Tests of a page's text draw nothing."""
    monkeypatch.setattr(page_of, "picture", lambda draw, **_: PNG)


async def past(directory, *, versions=3):
    """A coordinator's data of a run that published some versions and pushed groups, closed in order."""
    core = await Coordinator.open(CoordinatorConfig(data_dir=directory, groups_per_version=2), SystemClock())
    run = Run(core, directory.parent)
    await run.begin()
    await run.publish()
    await run.register()
    for _ in range(versions - 1):
        await run.publish(consumed=[])
    await run.push(2)
    await core.close()


def journal(directory, *, steps=4, extra=()):
    directory.mkdir()
    reports = [dataclasses.replace(REPORT, step=step, version=step) for step in range(1, steps + 1)]
    rows = [*map(dataclasses.asdict, reports), *extra]
    (directory / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    versions = [{"version": n, "bytes": 10, "full_bytes": 80} for n in range(steps + 1)]
    (directory / "versions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in versions))


async def test_coordinators_files_alone_are_enough_and_stay_as_they_are(tmp_path):
    await past(tmp_path / "data")
    before = {path: path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()}

    run = read_run(tmp_path / "data")
    page, pngs = render(run)

    assert (run.run_id, len(run.versions), [report.step for report in run.reports]) == ("run", 3, [1, 2])
    assert (run.ledger.acked, run.ledger.pending) == (2, 2)
    assert [(site.site, site.accepted) for site in run.sites] == [("eu-1", 2)]
    assert set(pngs) == {*figures.PICTURES, "progress", "sites"}
    assert all(png.startswith(PNG) for png in pngs.values())
    # One file: every picture is inside, nothing is fetched.
    inside = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert {base64.b64decode(text) for text in inside} == set(pngs.values())
    assert page.count("<img") == len(inside)
    assert "href=" not in page
    # A phone lays it out at its own width, and under each picture stands what to look for.
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert page.count('<p class="note">') == len(inside)
    # Nothing was evaluated, so nothing is called so.
    assert "<h2>Reward</h2>" in page
    assert "held out</h2>" not in page
    assert "http" not in page
    assert {path: path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()} == before


async def test_learners_journal_adds_what_only_it_knows(tmp_path, no_pictures):
    await past(tmp_path / "data")
    rejected = dataclasses.asdict(dataclasses.replace(REPORT, step=5, is_applied=False, loss=float("nan")))
    journal(tmp_path / "learner", extra=[rejected])
    rows = [{"version": n, "accuracy": 0.1 * n + 0.2, "num_prompts": 4} for n in (0, 2, 4)]
    (tmp_path / "learner" / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    run = read_run(tmp_path)
    page, _ = render(run)

    assert len(run.reports) == 5
    assert "1 step changed nothing, because the loss or gradient was not finite" in page
    assert "<b>0.200 and 0.600</b><span>held-out reward, first and last; best 0.600" in page
    assert "every group accounted for" in page
    # A reward may be partial credit: its mean is no accuracy.
    assert "<h2>Reward, trained and held out</h2>" in page
    assert "accuracy" not in page


async def test_steps_of_the_learner_before_stay_when_another_went_on(tmp_path):
    """It began with an empty state_dir, so that its journal has no earlier step; the newer version of a step counts."""
    await past(tmp_path / "data")
    journal(tmp_path / "learner", steps=0)
    own = [dataclasses.replace(REPORT, step=step, version=version) for step, version in ((2, 7), (3, 8))]
    own.append(dataclasses.replace(REPORT, step=4, version=9, is_applied=False))
    rows = "".join(json.dumps(dataclasses.asdict(report)) + "\n" for report in own)
    (tmp_path / "learner" / "steps.jsonl").write_text(rows)

    found = [(report.step, report.version, report.is_applied) for report in read_run(tmp_path).reports]

    assert found == [(1, 1, True), (2, 7, True), (3, 8, True), (4, 9, False)]


def test_learners_journal_alone_says_what_is_missing(tmp_path, no_pictures):
    journal(tmp_path / "learner")
    with (tmp_path / "learner" / "steps.jsonl").open("a") as file:
        file.write('{"torn')

    run = read_run(tmp_path / "learner")
    page, pngs = render(run)

    assert "store is missing" in page
    assert set(pngs) == set(figures.PICTURES)


def test_versions_are_counted_where_they_are_not_listed(tmp_path):
    """A running coordinator is asked for steps only."""
    journal(tmp_path / "learner")
    run = dataclasses.replace(read_run(tmp_path), versions=())

    assert dict(page_of._numbers(run, run.reports))["versions published"] == "5"


def test_picture_of_many_sites_has_a_bar_for_each_large_one():
    """A bar for each of 800 sites took 46 s, and the picture was 70,000 pixels high."""
    sites = [
        SiteTotals(site=f"site-{number}", engines=("hf",), accepted=number, dropped=1, state_dirs=1)
        for number in range(800)
    ]

    assert page_of.largest(sites) == sites[-page_of.MOST_BARS :]
    assert page_of.largest(sites[:3]) == sites[:3]


def test_steps_without_a_signal_are_not_called_infinite(tmp_path):
    """The loss dropped their groups, whose rewards were equal."""
    empty = dataclasses.replace(REPORT, step=5, is_applied=False, num_tokens=0)
    broken = dataclasses.replace(REPORT, step=6, is_applied=False)
    journal(tmp_path / "learner", extra=map(dataclasses.asdict, (empty, broken)))

    remarks = " ".join(page_of._remarks(read_run(tmp_path)))

    assert "1 step changed nothing, because the loss or gradient was not finite." in remarks
    assert "1 step changed nothing, because the rewards of each group were equal." in remarks


def test_curves_are_drawn_from_where_a_learner_states_them(tmp_path):
    numbers = CompletionNumbers(
        length_mean=5.0, length_p95=7.5, length_max=8, truncated_fraction=0.25, uniform_fraction=0.5,
        reward_parts=(PartMean(name="$right_", mean=0.75),),
    )  # fmt: skip
    times = StepTimes(
        period_s=2.0, waiting_s=0.5, examining_s=0.0, computing_s=1.0, evaluating_s=0.0, publishing_s=0.25
    )
    sources = (SourceReport(label="$sums_", num_groups=1, reward_mean=0.5),)
    stated = [
        dataclasses.replace(REPORT, step=n, version=n, completions=numbers, times=times, sources=sources)
        for n in (5, 6)
    ]
    journal(tmp_path / "learner", extra=[dataclasses.asdict(report) for report in stated])

    page, pngs = render(read_run(tmp_path / "learner"))

    assert set(pngs) == {*figures.PICTURES, *figures.TITLES}
    assert all(f"<h2>{title}</h2>" in page for title in figures.TITLES.values())
    assert set(figures.TITLES) == set(figures.NOTES)


def test_curve_of_a_source_is_the_mean_of_its_groups_in_the_newest_steps():
    """Few groups of a step are of one source, and some steps have none."""
    axes, reports = [], []
    for step in range(1, 121):
        rare = SourceReport(label="rare", num_groups=1, reward_mean=float(step > 60))
        often = SourceReport(label="often", num_groups=3 if step % 2 else 1, reward_mean=1.0 if step % 2 else 0.0)
        reports.append(dataclasses.replace(REPORT, step=step, sources=(often, rare) if step % 4 == 0 else (often,)))
    draw = figures.curves(reports)["sources"]
    figures.picture(lambda one: (draw(one), axes.append(one)))

    lines = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes[0].get_lines()}
    often, rare = lines["often, 89%"], lines["rare, 11%"]
    assert often[120] == often[50] == 0.75
    assert (min(rare), rare[60], rare[120]) == (4, 0.0, 1.0)
    assert 0.0 < rare[80] < 1.0


@pytest.mark.parametrize("variance", [math.inf, 1.7e308])
def test_numbers_that_cannot_be_drawn_leave_a_gap(tmp_path, variance):
    """An own loss may give weights that overflow, with a loss that is finite."""
    odd = dataclasses.replace(REPORT, step=5, version=5, ess_fraction=math.nan, iw_variance=variance, kl=math.nan)
    journal(tmp_path / "learner", steps=0, extra=[dataclasses.asdict(odd)])
    alone = render(read_run(tmp_path / "learner"))[1]
    journal(tmp_path / "more", extra=[dataclasses.asdict(odd)])

    assert set(render(read_run(tmp_path / "more"))[1]) == set(alone) == set(figures.PICTURES)


@pytest.mark.parametrize("name", ["kl", "iw_variance"])
def test_logarithmic_axis_has_plain_numbers(name):
    axes = []
    values = [2e-7, 1e-5, 1e-5, 3e-5, 0.02, 3.0]
    reports = [dataclasses.replace(REPORT, step=n, **{name: value}) for n, value in enumerate(values)]
    draw = figures.drawings(reports, [], None)[name]
    figures.picture(lambda one: (draw(one), axes.append(one)))

    labels = [label.get_text() for label in axes[0].get_yticklabels(which="both") if label.get_text()]
    assert axes[0].get_yscale() == "log"
    assert {"1e-5", "0.001"} <= set(labels)
    assert all(float(label) for label in labels)


def test_a_later_row_of_a_step_replaces_an_earlier_one(tmp_path):
    again = dataclasses.asdict(dataclasses.replace(REPORT, step=4, version=9, reward_mean=0.75))
    journal(tmp_path / "learner", extra=[again])

    assert [(r.step, r.version) for r in read_run(tmp_path).reports] == [(1, 1), (2, 2), (3, 3), (4, 9)]


def test_steps_of_abandoned_versions_that_were_not_repeated_are_left_out(tmp_path):
    """The learner went on from an older checkpoint, and ended before it came as far again."""
    later = dataclasses.replace(REPORT, step=2, version=5), dataclasses.replace(REPORT, step=3, is_applied=False)
    journal(tmp_path / "learner", extra=map(dataclasses.asdict, later))

    run = read_run(tmp_path)

    assert [(report.step, report.is_applied) for report in run.reports] == [(1, True), (2, True), (3, False)]
    assert dict(page_of._numbers(run, run.reports[:2]))["optimizer steps"] == "2"


def test_foreign_text_is_text(tmp_path, no_pictures):
    journal(tmp_path / "l")
    run = dataclasses.replace(read_run(tmp_path), run_id="<script>x</script>")

    assert "<script>" not in render(run)[0]


async def test_directory_that_is_no_runs_is_refused_by_what_it_lacks(tmp_path):
    with pytest.raises(OperatorError, match="has coordinator.sqlite or steps.jsonl"):
        read_run(tmp_path)
    with pytest.raises(OperatorError, match="not a directory"):
        read_run(tmp_path / "missing")
    journal(tmp_path / "a")
    journal(tmp_path / "b")
    with pytest.raises(OperatorError, match="several runs"):
        read_run(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "steps.jsonl").write_text("")
    with pytest.raises(OperatorError, match="took no step"):
        read_run(tmp_path / "c")
    for row in ('{"step": 1}', "[" * 100_000):
        (tmp_path / "c" / "steps.jsonl").write_text(f"{row}\n")
        with pytest.raises(CorruptStore, match="journal"):
            read_run(tmp_path / "c")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "coordinator.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(CorruptStore):
        read_run(tmp_path / "d")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("versions", '{"version": Infinity, "bytes": 1, "full_bytes": 1}'),
        ("versions", '{"version": 1e400, "bytes": 1, "full_bytes": 1}'),
        ("versions", '{"version": "7", "bytes": Infinity, "full_bytes": 1}'),
        ("versions", '{"version": 7}'),
        ("evaluations", '{"version": Infinity, "accuracy": 0.5}'),
        ("evaluations", '{"version": 7, "accuracy": "high"}'),
        ("steps", json.dumps(dataclasses.asdict(REPORT) | {"step": math.inf})),
        ("steps", json.dumps(dataclasses.asdict(REPORT) | {"step": "7"})),
    ],
    ids=lambda text: text[:40],
)
def test_a_row_that_is_none_of_ours_is_named(tmp_path, name, row):
    journal(tmp_path / "learner")
    with (tmp_path / "learner" / f"{name}.jsonl").open("a") as file:
        file.write(f"{row}\n")

    with pytest.raises(CorruptStore, match="a journal has a bad row"):
        read_run(tmp_path)


@pytest.mark.process
def test_running_coordinator_is_left_alone(tmp_path):
    asyncio.run(past(tmp_path / "data"))
    # Another process, because SQLite's locks do not show to the one that holds them; as the coordinator opens it.
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "c.execute('PRAGMA locking_mode=EXCLUSIVE'); c.execute('PRAGMA journal_mode=WAL'); "
        "c.execute('UPDATE ledger SET count = count'); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data" / "coordinator.sqlite")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        (tmp_path / "data" / "address").write_text("coord.example:50051\n")
        with pytest.raises(
            OperatorError, match="in use.*heterorl report coord.example:50051 --credentials DIR, or with --insecure"
        ):
            read_run(tmp_path / "data")
        said = CliRunner().invoke(app, ["report", str(tmp_path / "data")])
        assert isinstance(said.exception, InUse)
        holder.stdin.close()


async def test_run_that_is_going_on_is_asked_of_its_coordinator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal(tmp_path / "learner")
    async with SecureRun(tmp_path) as secure:
        with pytest.raises(OperatorError, match="took no step"):
            await ask_run(secure.operator, address=secure.address)
        await secure.run.publish()
        await secure.learner.describe_run(epoch=secure.run.epoch, facts={"model": "/models/live"})
        node = secure.certificates.node("operator", "eu-1")
        arguments = ["report", secure.address, "--credentials", str(node), "--out", "live.html"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        monkeypatch.setenv("HETERORL_ADDRESS", secure.address)
        again = await asyncio.to_thread(CliRunner().invoke, app, ["report", "--credentials", str(node)])
        run = await ask_run(secure.operator, address=secure.address)
        whole = await ask_run(secure.operator, address=secure.address, journal=tmp_path / "learner")
        await secure.learner.drain(reason="step 1 of 1 is reached", epoch=secure.run.epoch)
        leaving = await ask_run(secure.operator, address=secure.address)
        await secure.learner.release_lease(epoch=secure.run.epoch)
        ended = await ask_run(secure.operator, address=secure.address)

    assert (result.exit_code, again.exit_code) == (0, 0), (result.exception, again.exception)
    assert "written: report.html" in again.output
    page = (tmp_path / "live.html").read_text()
    assert "Run run" in page
    assert "The run was still going when this page was written." in page
    assert "<span>model</span>/models/live</div>" in page
    assert (run.run_id, [report.step for report in run.reports], run.is_live) == ("run", [1], True)
    assert [site.site for site in run.sites] == ["eu-1"]
    # The learner's journal beside it knows more.
    assert (len(whole.reports), len(whole.versions)) == (4, 5)
    assert leaving.is_live
    assert "was still going" not in render(ended)[0]


async def test_running_coordinator_that_is_busy_is_asked_again_and_no_evaluation_left_out():
    class Api:
        async def get_status(self):
            return SimpleNamespace(run_id="run", sites=(), ledger=None, facts={}, has_ended=False)

        async def list_steps(self, *, after_step, limit):
            return (REPORT,) if after_step < REPORT.step else ()

        async def list_evaluations(self, *, after_version, limit):
            raise error

    for error in (Draining("stopping"), QuotaExceeded("too many calls", retry_after_s=1.0)):
        with pytest.raises(type(error)):
            await ask_run(Api(), address="a:1")


async def test_steps_that_a_running_learner_took_back_are_not_counted():
    abandoned = [dataclasses.replace(REPORT, step=step, version=step) for step in range(1, 11)]
    again = [dataclasses.replace(REPORT, step=step, version=step + 10) for step in range(5, 8)]

    class Api:
        async def get_status(self):
            return SimpleNamespace(run_id="run", sites=(), ledger=None, facts={}, has_ended=False)

        async def list_steps(self, *, after_step, limit):
            rows = sorted([*abandoned, *again], key=lambda report: (report.step, report.version))
            return tuple(row for row in rows if row.step > after_step)

        async def list_evaluations(self, *, after_version, limit):
            return ()

    run = await ask_run(Api(), address="a:1")

    assert [report.version for report in run.reports] == [1, 2, 3, 4, 15, 16, 17]


async def test_a_runs_own_backups_are_no_other_run(tmp_path):
    await past(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    shutil.move(tmp_path / "copy", tmp_path / "data" / "backups" / "monday")

    assert read_run(tmp_path / "data").sources == (tmp_path / "data",)
    assert read_run(tmp_path / "data" / "backups").sources == (tmp_path / "data" / "backups" / "monday",)


def test_runs_are_found_several_directories_deep_and_not_for_ever(tmp_path):
    deep = tmp_path / "runs" / "2026" / "may"
    deep.mkdir(parents=True)
    journal(deep / "learner")
    assert len(read_run(tmp_path).reports) == 4
    far = tmp_path / "far"
    (far / "a" / "b" / "c" / "d").mkdir(parents=True)
    journal(far / "a" / "b" / "c" / "d" / "e")
    (far / "loop").symlink_to(tmp_path)
    with pytest.raises(OperatorError, match="has no run"):
        read_run(far)


@pytest.mark.slow
def test_page_names_what_was_run(tmp_path, no_pictures):
    journal(tmp_path / "learner")
    config = LearnerConfig(model_dir="/models/[small]", state_dir=tmp_path / "learner", max_steps=77)
    without, _ = render(read_run(tmp_path))
    write_run_file(config)

    page, _ = render(read_run(tmp_path))

    assert "model, task and settings are unknown" in without
    assert "model, task and settings are unknown" not in page
    for name, value in (
        ("model", "/models/[small]"), ("task", "arithmetic"), ("loss", "gepo"), ("group size, answers", "8"),
        ("steps wanted", "77"), ("learner&#39;s heterorl", heterorl.__version__),
    ):  # fmt: skip
        assert f"<span>{name}</span>{value}</div>" in page
    assert "<span>configuration</span>" in page
    assert "&#34;holder&#34;: &#34;learner&#34;" in page


async def test_page_marks_what_a_start_changed(tmp_path, monkeypatch):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=2), SystemClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.publish(consumed=[])
    for rate in ("0.0003", "0.001"):
        await core.describe_run(epoch=run.epoch, facts={"learning rate": rate})
    (step,) = changed_steps((await core.get_status()).facts)
    await core.close()
    marked = []
    monkeypatch.setattr(page_of, "picture", lambda draw, *, marks, **_: marked.append(tuple(marks)) or PNG)

    page, _ = render(read_run(tmp_path))

    assert f"<span>changed after step {step}</span>learning rate 0.0003 -&gt; 0.001</div>" in page
    assert "A restart changed the configuration" in page
    assert set(marked) == {(step,)}
    # The learner's own directory knows the newest values, the coordinator what they were.
    journal(tmp_path / "learner")
    write_run_file(LearnerConfig(state_dir=tmp_path / "learner"))
    assert changed_steps(read_run(tmp_path).facts) == (step,)


@pytest.mark.parametrize("count", range(5, 15))
def test_no_card_stands_alone_in_the_last_row(count):
    assert count % columns_of(count) != 1


@pytest.mark.slow
async def test_command_writes_one_file_and_the_pictures_on_demand(tmp_path, monkeypatch):
    await past(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    arguments = ["report", "data", "--out", "r.html", "--pictures", "p"]
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.exception
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "p" / "kl.png").read_bytes().startswith(PNG)
    assert "cannot write" in str(CliRunner().invoke(app, [*arguments[:3], str(tmp_path)]).exception)
    # Where nothing is named the page lies with the run.
    assert "written: data/report.html" in CliRunner().invoke(app, ["report", "data"]).stdout
    assert (tmp_path / "data" / "report.html").is_file()


def test_rewards_of_another_scale_are_not_cut_at_1():
    axes = []
    reports = [dataclasses.replace(REPORT, step=step, reward_mean=value) for step, value in ((1, -2.0), (2, 5.0))]
    draw = figures.drawings(reports, [], None)["accuracy"]
    figures.picture(lambda one: (draw(one), axes.append(one)))

    low, high = axes[0].get_ylim()
    assert low <= -2.0
    assert high >= 5.0
    assert axes[0].get_ylabel() == "mean reward"


def test_held_out_rewards_of_another_scale_are_not_cut_at_1():
    axes = []
    reports = [dataclasses.replace(REPORT, step=step, reward_mean=0.5, evaluation_accuracy=3.0) for step in (1, 2)]
    draw = figures.drawings(reports, [], None)["accuracy"]
    figures.picture(lambda one: (draw(one), axes.append(one)))

    assert axes[0].get_ylim()[1] >= 3.0


def test_the_legend_names_a_part_that_begins_with_an_underscore():
    axes = []
    parts = (PartMean(name="_format", mean=0.5), PartMean(name="right", mean=0.75))
    numbers = CompletionNumbers(
        length_mean=5.0, length_p95=7.5, length_max=8, truncated_fraction=0.25, uniform_fraction=0.5, reward_parts=parts
    )
    draw = figures.curves([dataclasses.replace(REPORT, completions=numbers)])["parts"]
    figures.picture(lambda one: (draw(one), axes.append(one)))

    assert [text.get_text().strip() for text in axes[0].get_legend().get_texts()] == ["_format", "right"]


def test_the_legend_hides_no_held_out_point():
    axes = []
    scored = [dataclasses.replace(REPORT, step=step, evaluation_accuracy=0.99) for step in (1, 2)]
    draw = figures.drawings(scored, [], 0.98)["accuracy"]
    figures.picture(lambda one: (draw(one), axes.append(one)))

    assert axes[0].get_legend().get_window_extent().y0 >= axes[0].get_window_extent().y1
    assert [text.get_text() for text in axes[0].get_legend().get_texts()][1] == "held-out prompts, learner"
