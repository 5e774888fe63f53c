"""Real processes, real packages: what a tracker has at the end is what the coordinator lists, whatever was killed."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import wandb
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient
from mlflow.utils import validation
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from trackio.sqlite_storage import SQLiteStorage

from heterorl.common.errors import ConfigError
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import CompletionNumbers, Digest, PartMean, SiteTokens, SourceReport, StepTimes
from heterorl.common.types.evaluation import EvaluationSet, EvaluationState, PromptResult, ScoredSample
from heterorl.common.types.sample import RolloutNote, SampleNote
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.track.to_mlflow import Mlflow, _name
from heterorl.track.to_tensorboard import TensorBoard
from heterorl.track.to_trackio import Trackio
from heterorl.track.to_wandb import WandB, read_back, rows_in, rows_of_run
from heterorl.track.tracker import Had, Mark, Place, TextTable, TrackerFailed, evaluation_row, row_of
from tests.support.evaluations import evaluation
from tests.support.ports import free_port, serves
from tests.support.run import INCARNATION, REPORT, SITE, Run

TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio")
PRIVATE = "the answer is"
TEXTS = [f"{PRIVATE} {number}" for number in range(2)]
PATIENT = RetryPolicy(budget_s=30.0, base_s=0.05, cap_s=0.5)


PUBLISHED = 1_700_000_000.0


def report(step, version=None):
    completions = CompletionNumbers(
        length_mean=step + 1 / 3, length_p95=9.0, length_max=9, length_high_reward=None if step % 2 else 4.0,
        truncated_fraction=0.1, uniform_fraction=0.2, reward_parts=(PartMean(name="form: a%", mean=0.1 * step),),
        sites=(SiteTokens(site="eu-1", num_groups=2, num_tokens=step),),
    )  # fmt: skip
    times = StepTimes(
        period_s=1.0, waiting_s=0.1, examining_s=0.2, computing_s=0.3, evaluating_s=0.1, publishing_s=0.1
    )  # fmt: skip
    return dataclasses.replace(
        REPORT, step=step, version=step if version is None else version, loss=1 / (step + 3), completions=completions,
        sources=(SourceReport(label="sums", num_groups=2, reward_mean=step / 7),),
        times=None if step == 1 else times, evaluation_accuracy=0.5 if step % 3 == 0 else None,
        published_time=PUBLISHED + step,
    )  # fmt: skip


class World:
    """A coordinator and a tracker as processes, a learner's calls from here."""

    def __init__(self, directory):
        self.directory = directory
        self.address = f"127.0.0.1:{free_port()}"
        self.config = directory / "coordinator.toml"
        self.config.write_text(
            f'run_id = "run"\ndata_dir = "{directory / "data"}"\nlisten = "{self.address}"\nmetrics_port = 0\n'
            "learner_lease_s = 60.0\nstop_grace_s = 1.0\nsamples_every = 1\n[tls]\ninsecure = true\n"
            '[[evaluation]]\nname = "math"\nnum_prompts = 2\nsamples_per_prompt = 4\ntemperature = 0.6\n'
        )
        self.environment = {
            **os.environ, "WANDB_MODE": "offline", "NO_COLOR": "1",
            "HOME": str(directory), "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_TRACKING_URI": "",
        }  # fmt: skip
        self.children = []

    def start(self, name, *words):
        log = self.directory / f"{name}-{len(self.children)}.log"
        with log.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, "-m", "heterorl", *words], stdout=file, stderr=subprocess.STDOUT, env=self.environment
            )
        self.children.append(child)
        return child, log

    def coordinator(self):
        return self.start("coordinator", "coordinator", "--config", str(self.config))[0]

    def track(self, *words):
        to = [word for name in TRACKERS for word in ("--to", name)]
        texts = ["--samples", "1", "--samples-every", "4"]
        options = ["--insecure", "--every", "0.2", "--dir", str(self.directory / "track"), *texts, *to]
        return self.start("track", "track", self.address, *options, *words)

    def kill(self, child):
        child.kill()
        child.wait()

    def close(self):
        for child in self.children:
            if child.poll() is None:
                self.kill(child)


async def until(log, child, text):
    while any(f" {name} took " not in line for name, line in _newest(log, text).items()):
        assert child.poll() is None, log.read_text()
        await asyncio.sleep(0.05)


def _newest(log, text):
    lines = log.read_text(errors="replace").splitlines()
    return {name: next((line for line in lines if f" {name} took " in line and text in line), "") for name in TRACKERS}


async def publish(run, *reports, **changes):
    request = await run.prepare(**changes)
    version = run.head + 1
    reports = tuple(dataclasses.replace(entry, version=version) for entry in reports)
    run.head = await run.api.publish_version(dataclasses.replace(request, reports=reports))
    run.roots[run.head] = manifest_from_bytes(request.manifest).state_root


async def note(run, ids):
    """The learner says the texts of groups."""
    notes = [
        SampleNote(
            group=group, prompt="1 + 1 =",
            rollouts=tuple(RolloutNote(completion=f"{PRIVATE} {number}", reward_parts=()) for number in range(2)),
        )
        for group in ids
    ]  # fmt: skip
    await run.api.note_samples(epoch=run.epoch, notes=notes, evaluations=[])


async def evaluate(run):
    """A site evaluates the head."""
    sets = [EvaluationSet(name="math", task_digest=Digest("d" * 64), num_prompts=50)]
    grant = await run.api.lease_work(
        site=SITE, incarnation=INCARNATION, policy_version=run.head, sets=sets, max_groups=16
    )
    samples = tuple(ScoredSample(reward=float(n < run.head), num_tokens=n, is_truncated=n == 0) for n in range(4))
    results = tuple(
        PromptResult(assignment=each.id, prompt_index=each.prompt_index, samples=samples) for each in grant.assignments
    )
    await run.api.push_evaluation(
        site=SITE, incarnation=INCARNATION, state_root=grant.evaluation.state_root, results=results
    )


async def _tell(world):
    """The story of a run: the tracker is killed, the coordinator is killed, steps are taken back; what it listed."""
    coordinator = world.coordinator()
    await serves(coordinator, world.address)
    async with CoordinatorClient(world.address, tls=TlsConfig(insecure=True), policy=PATIENT) as client:
        run = Run(client, world.directory)
        await run.begin()
        await publish(run)
        await run.register()
        ids = await run.push(2)
        await publish(run, report(1), consumed=ids)
        await note(run, ids)
        await publish(run, report(2), report(3))
        await evaluate(run)
        tracker, log = world.track()
        await until(log, tracker, "up to step 3 of version 2")
        world.kill(tracker)
        await publish(run, report(4))
        await publish(run, report(5))
        await evaluate(run)
        world.kill(coordinator)
        coordinator = world.coordinator()
        await serves(coordinator, world.address)
        tracker, log = world.track()
        await until(log, tracker, "up to step 5 of version 4")
        world.kill(coordinator)
        while "coordinator is asked again" not in log.read_text(errors="replace"):  # noqa: ASYNC110 - of a file
            await asyncio.sleep(0.05)
        coordinator = world.coordinator()
        await serves(coordinator, world.address)
        # An upload is tried once: the coordinator must answer before.
        await client.get_status()
        evaluated = await client.list_evaluations()
        # Steps 4 and 5 are taken back and taken again, and the run goes on beyond them.
        await publish(run, report(4), lineage_version=2, snapshot=True)
        await publish(run, report(5))
        await publish(run, report(6), report(7))
        await evaluate(run)
        await client.drain(reason="done", epoch=run.epoch)
        await client.release_lease(epoch=run.epoch)
        listed = await client.list_steps(after_step=-1, limit=100)
        # That of version 4 is not listed any more, but it was, and a tracker that has it keeps it.
        evaluated += await client.list_evaluations(after_version=4)
        assert await asyncio.to_thread(tracker.wait) == 0, log.read_text()
    return listed, [found for found in evaluated if found.state is EvaluationState.DONE]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    try:
        listed, world.evaluated = asyncio.run(_tell(world))
        marks = [(entry.step, entry.version) for entry in listed]
        assert marks == [(1, 1), (2, 2), (3, 2), (4, 5), (5, 6), (6, 7), (7, 7)]
        assert [found.version for found in world.evaluated] == [2, 4, 7]
        yield world, listed
    finally:
        world.close()


def check(rows, listed, evaluated):
    """Nothing twice, in the order of publication, and of each step the newest version is what is listed; evaluations
    are what is listed. No table is there twice; one that was buffered when its process was killed may be lost.
    """
    evaluations = [row for row in rows if "evaluation/math/version" in row]
    tables = [row["samples/version"] for row in rows if "samples/version" in row]
    rows = [row for row in rows if "version" in row]
    assert evaluations == list(map(evaluation_row, evaluated))
    assert tables in ([2, 4], [4])
    marks = [(row["version"], row["step"]) for row in rows]
    assert marks == sorted(set(marks))
    newest = {row["step"]: row for row in rows}
    assert [newest[entry.step] for entry in listed] == [row_of(entry) for entry in listed]
    assert len(newest) == len(listed)
    # What was taken back stays, under its version.
    assert len(rows) == len(listed) + 2


pytestmark = pytest.mark.timeout(300)


def test_wandb_has_every_step_once(told):
    world, listed = told
    folder = world.directory / "track" / "wandb"
    files = sorted(folder.glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    rows = [row for path in files for row in rows_in(path)]

    assert [row["_step"] for row in rows] == list(range(1, len(rows) + 1))
    own = [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]
    check(own, listed, world.evaluated)
    (table,) = {path.read_text() for path in folder.glob("*/files/media/**/*.table.json")}
    assert [row[3] for row in json.loads(table)["data"]] == TEXTS


def test_mlflow_has_every_step_once(told):
    world, listed = told
    client = MlflowClient(f"sqlite:///{world.directory / 'track' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("heterorl").experiment_id])
    rows = {}
    for name in run.data.metrics:
        is_step = not name.startswith("evaluation/")
        for entry in client.get_metric_history(run.info.run_id, name):
            row = rows.setdefault((is_step, entry.timestamp), {})
            assert name not in row
            row[name.replace("_3a_", ":").replace("_25_", "%")] = entry.value
            if is_step:
                assert entry.step == row.setdefault("step", entry.step)
            elif name.endswith("/version"):
                assert entry.step == entry.value

    # MLflow has the newest table alone.
    assert run.data.tags["heterorl_samples"] == "4"
    check([*(rows[key] for key in sorted(rows)), {"samples/version": 4}], listed, world.evaluated)
    table = world.directory / "track" / "mlartifacts" / run.info.run_id / "artifacts" / "samples.json"
    assert [row[3] for row in json.loads(table.read_text())["data"]] == TEXTS


def shown(folder):
    """The rows of a folder by step, and its reader."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rows = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            row = rows.setdefault(event.step, {})
            assert name not in row
            row[name] = event.value
    return rows, events


def as_float32(row):
    return {name: float(np.float32(value)) for name, value in row.items()}


def test_tensorboard_shows_what_is_listed(told):
    world, listed = told
    folder = world.directory / "track" / "tensorboard" / "run"
    rows, events = shown(folder)
    evaluations, _ = shown(folder / "evaluation")
    _, texts = shown(folder / "samples")

    assert rows == {entry.step: as_float32(row_of(dataclasses.replace(entry, published_time=0.0))) for entry in listed}
    # Also in a backfill a step stands at the time at which it was published.
    assert [event.wall_time for event in events.Scalars("loss")] == [entry.published_time for entry in listed]
    assert evaluations == {found.version: as_float32(evaluation_row(found)) for found in world.evaluated}
    tables = texts.Tensors("samples")
    assert [event.step for event in tables] == [2, 4]
    assert texts.SummaryMetadata("samples").plugin_data.plugin_name == "text"
    assert [row[3].decode() for row in make_ndarray(tables[-1].tensor_proto)] == ["completion", *TEXTS]


def test_trackio_has_every_step_once(told):
    world, listed = told
    # One run, though two processes opened it.
    assert [run["name"] for run in SQLiteStorage.get_run_records("heterorl")] == ["run"]
    logs = SQLiteStorage.get_logs("heterorl", "run")
    tables = [row["samples"] for row in logs if "samples" in row]
    rows = [{name: value for name, value in row.items() if name not in ("timestamp", "step")} for row in logs]

    for row, log in zip(rows, logs, strict=True):
        if "version" in row:
            row["step"] = log["step"]
    check(rows, listed, world.evaluated)
    assert [row["completion"] for row in tables[-1]["_value"]] == TEXTS


def place(directory):
    return Place(project="heterorl", run="run", directory=directory, facts={"model": "m"})


def test_mlflow_ends_a_batch_that_was_cut(tmp_path, told, monkeypatch):
    # The story's database: making one takes MLflow seconds.
    world, _ = told
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{world.directory / 'track' / 'mlflow.db'}")
    own = dataclasses.replace(place(tmp_path), project="cut")
    tracker = Mlflow(own)
    tracker.write([report(1)])
    (run,) = tracker._client.search_runs([tracker._client.get_experiment_by_name("cut").experiment_id])
    later = int(time.time() * 1000) + 5
    tracker._client.log_batch(run.info.run_id, metrics=[Metric("loss", 1 / 5, later, 2)])

    again = Mlflow(own)
    assert (again.had.steps, again.had.published) == (Mark(1, 1), PUBLISHED + 1)
    again.write([report(2)])

    for name in ("loss", "kl", "version"):
        history = tracker._client.get_metric_history(run.info.run_id, name)
        assert [entry.step for entry in history] == [1, 2], name


def test_mlflow_cuts_a_long_name_and_refuses_a_quote(tmp_path):
    long = ["reward_parts/" + "中" * 42 + end for end in "ab"]
    short = [_name(name) for name in long]
    assert short[0] != short[1]
    assert [len(name) for name in short] == [MAX_ENTITY_KEY_LENGTH] * 2
    with pytest.raises(ConfigError, match="--run"):
        Mlflow(dataclasses.replace(place(tmp_path), run="bob's run"))


@pytest.mark.parametrize("name", ["a//b", "a/", "/a", ".", "..", "../a", "a/./b", "./a", "a/../b"])
def test_mlflow_takes_parts_whose_names_are_no_plain_path(name):
    validation._validate_metric_name(_name(f"{name}"))
    validation._validate_metric_name(_name(f"reward_parts/{name}"))


@pytest.mark.parametrize("mode", ["sqlite", "jsonl"])
def test_trackio_goes_on_behind_what_it_has(tmp_path, capsys, monkeypatch, mode):
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", mode)
    monkeypatch.setenv("TRACKIO_SERVER_URL", "another machine's")
    own = dataclasses.replace(place(tmp_path), project=mode)
    tracker = Trackio(own)
    tracker.write([report(1), report(2)])
    tracker.write_evaluations([evaluation(2)])
    tracker.write_table(TextTable(version=2, rows=((2, "eu-1", "1 + 1 =", "2", 1.0, "", 1, "eos"),)))
    tracker.close()

    again = Trackio(own)
    assert again.had == Had(steps=Mark(2, 2), published=PUBLISHED + 2, evaluations={"math": 2}, table=2)
    again.write([report(3)])
    again.close()

    assert [row["step"] for row in SQLiteStorage.get_logs(mode, "run") if "version" in row] == [1, 2, 3]
    assert len(SQLiteStorage.get_run_records(mode)) == 1
    assert SQLiteStorage.get_run_config(mode, "run")["model"] == "m"
    # Its greetings would tear the table of a terminal.
    assert capsys.readouterr().out == ""


def test_wandb_is_opened_again_after_its_service_was_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandB(place(tmp_path))
    service = wandb.setup().ensure_service()._proc._process
    service.kill()
    service.wait()

    with contextlib.suppress(TrackerFailed):
        tracker.write([report(1)])
    tracker.close()
    again = WandB(place(tmp_path))
    again.write([report(1)])
    again.close()
    wandb.teardown()
    assert [row["step"] for row in rows_of_run(tmp_path, "run")][-1:] == [1]


def test_trackio_says_what_it_cannot_write(tmp_path):
    tracker = Trackio(dataclasses.replace(place(tmp_path), project="unwritable"))
    SQLiteStorage.get_project_db_path("unwritable").mkdir()

    with pytest.raises(TrackerFailed, match="trackio"):
        tracker.write([report(1)])
    tracker.close()


def test_tensorboard_goes_on_before_a_record_that_was_torn(tmp_path):
    tracker = TensorBoard(place(tmp_path))
    tracker.write([report(1), report(2)])
    tracker.close()
    (path,) = (tmp_path / "tensorboard" / "run").iterdir()
    path.write_bytes(path.read_bytes()[:-3])

    again = TensorBoard(place(tmp_path))
    assert (again.had.steps, again.had.published) == (Mark(1, 1), PUBLISHED + 1)
    again.write([report(2)])
    again.close()

    had = TensorBoard(place(tmp_path)).had
    assert (had.steps, had.published) == (Mark(2, 2), PUBLISHED + 2)


def test_tensorboard_says_what_it_cannot_write(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")

    with pytest.raises(TrackerFailed, match="tensorboard"):
        TensorBoard(place(tmp_path))


def test_wandb_reads_back_a_run_opened_twice_in_one_second(tmp_path, monkeypatch):
    """W&B names directories by seconds, and the second one of a second otherwise."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb.Settings, "timespec", "20260101_000000")
    for step in (1, 2):
        tracker = WandB(place(tmp_path))
        assert tracker.had.steps == (Mark(step - 1, step - 1) if step > 1 else None)
        tracker.write([report(step)])
        tracker.close()
    wandb.teardown()

    assert len(list((tmp_path / "wandb").glob("offline-run-20260101_000000-run*"))) == 2
    assert [row["step"] for row in rows_of_run(tmp_path, "run")] == [1, 2]


def test_wandb_reads_back_over_blocks_and_before_a_torn_end(tmp_path, told):
    world, _ = told
    path = max((world.directory / "track" / "wandb").glob("offline-run-*/*.wandb"))
    whole = len(list(rows_in(path)))
    target = tmp_path / "wandb" / "offline-run-20260101_000000-run" / "run-run.wandb"
    target.parent.mkdir(parents=True)
    data = path.read_bytes()
    counts = set()
    for length in (*range(7, len(data), 61), len(data)):
        target.write_bytes(data[:length])
        counts.add(len(list(rows_in(target))))
    assert counts == set(range(whole + 1))
    assert read_back(rows_of_run(tmp_path / "nothing", "run")) == (0, Had())
