"""Samples over a real server with certificates: the learner says texts, an operator reads them by the command."""

import asyncio
import dataclasses
import json
import stat

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import InvalidRequest, MessageTooLarge, PermissionDenied, UnknownSample
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, FinishReason, Rejection, RewardPart
from heterorl.common.types.sample import (
    EvaluationSample,
    RolloutNote,
    SampleFilter,
    SampleNote,
    SamplePage,
    SampleRollout,
)
from heterorl.v1 import sample_pb2
from tests.support.run import SITE
from tests.support.secure_run import SecureRun

ESCAPE = "\x1b[2J\u202e"


def noted(group_id, *, prompt="1+1=", completion="it is 2"):
    return SampleNote(
        group=group_id,
        prompt=prompt,
        answer=f"2{ESCAPE}",
        rollouts=tuple(
            RolloutNote(
                completion=f"{completion}, says {number}",
                reward_parts=(RewardPart(name="correct", value=1.0 - number),),
                log_ratios=np.array([0.5, -0.5, 0.25], np.float32),
                token_ends=np.array([2, 5, len(f"{completion}, says {number}")], np.int32),
            )
            for number in range(2)
        ),
    )


EVALUATION = EvaluationSample(
    version=1,
    task_set="held-out",
    site=SiteId(""),
    prompt_index=4,
    prompt="2+2=",
    answer="4",
    rollouts=(
        SampleRollout(completion="4", reward=1.0, reward_parts=(), finish_reason=FinishReason.EOS),
        SampleRollout(completion="5", reward=0.0, reward_parts=(), finish_reason=FinishReason.LENGTH),
    ),
)


@pytest.fixture
async def secure(tmp_path):
    async with SecureRun(tmp_path) as secure:
        # The default keeps one of 16; of the first 16 the second.
        ids = await secure.run.push(2)
        for _ in range(7):
            await secure.run.publish()
        await secure.run.publish(consumed=ids)
        secure.kept = ids[1]
        (work,) = await secure.run.lease(1)
        (outcome,) = await secure.push_groups([secure.run.group(work)])
        await secure.reject_groups(
            epoch=secure.run.epoch,
            rejections=[Rejection(id=outcome.id, reason=DropReason.REWARD_MISMATCH, detail=f"1, computed 0{ESCAPE}")],
        )
        secure.rejected = outcome.id
        await secure.learner.note_samples(
            epoch=secure.run.epoch,
            notes=[noted(secure.kept), noted(secure.rejected, completion=f"bad{ESCAPE}")],
            evaluations=[EVALUATION],
        )
        yield secure


def heterorl(secure, *arguments):
    """The command in a process of its own would find its own loop; here it has a thread."""
    directory = secure.directory / "operator"
    directory.mkdir(exist_ok=True)
    options = ["--credentials", str(secure.certificates.node("operator", "eu-1"))]
    return CliRunner().invoke(app, [*arguments, secure.address, *options], env={"COLUMNS": "160"})


async def invoke(secure, *arguments):
    result = await asyncio.to_thread(heterorl, secure, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


async def test_operator_reads_what_the_learner_said(secure):
    listed = await secure.operator.list_samples(wanted=SampleFilter(), page=SamplePage())

    assert [entry.kept_because for entry in listed.samples] == ["evaluation", "reward_mismatch", "consumed"]
    assert listed.next_page is None
    assert (listed.num_kept, listed.limit_bytes) == (3, secure.core.config.samples_bytes)
    evaluation, rejected, consumed = [await secure.operator.get_sample(sample_id=entry.id) for entry in listed.samples]
    assert (consumed.summary.group, consumed.summary.version) == (secure.kept, 8)
    assert [rollout.completion for rollout in consumed.rollouts] == ["it is 2, says 0", "it is 2, says 1"]
    assert consumed.rollouts[1].reward_parts == (RewardPart(name="correct", value=0.0),)
    assert consumed.rollouts[0].log_ratio_mean == pytest.approx(0.25 / 3)
    assert rejected.summary.group == secure.rejected
    # One line, however it was said.
    assert rejected.summary.detail.isprintable()
    assert [rollout.completion for rollout in evaluation.rollouts] == ["4", "5"]
    with pytest.raises(UnknownSample):
        await secure.operator.get_sample(sample_id=999)


async def test_only_operators_read_and_only_the_learner_says(secure):
    for client in (secure.sampler, secure.learner):
        with pytest.raises(PermissionDenied):
            await client.list_samples(wanted=SampleFilter(), page=SamplePage())
        with pytest.raises(PermissionDenied):
            await client.get_sample(sample_id=1)
    for client in (secure.sampler, secure.operator):
        with pytest.raises(PermissionDenied):
            await client.note_samples(epoch=secure.run.epoch, notes=[noted(secure.kept)])


async def test_notes_are_bounded_before_they_are_parsed(secure):
    pair = secure.certificates.pair("learner", SITE)
    many = sample_pb2.NoteSamplesRequest(epoch=secure.run.epoch, notes=[sample_pb2.SampleNote()] * 257)
    error = await secure.attempt(pair, "NoteSamples", many)
    assert isinstance(error, InvalidRequest)
    assert "notes: more than 256" in str(error)
    deep = sample_pb2.NoteSamplesRequest(
        notes=[sample_pb2.SampleNote(rollouts=[sample_pb2.RolloutNote()] * 4096) for _ in range(100)]
    )
    error = await secure.attempt(pair, "NoteSamples", deep)
    assert isinstance(error, InvalidRequest)
    assert "fields in one message" in str(error)
    with pytest.raises(MessageTooLarge):
        await secure.learner.note_samples(epoch=secure.run.epoch, notes=[noted(secure.kept, prompt="x" * (3 << 20))])
    with pytest.raises(DecodeError):
        sample_pb2.NoteSamplesRequest.FromString(b"\xff")


async def test_command_prints_one_object_a_completion(secure):
    lines = (await invoke(secure, "samples", "list", "--json")).splitlines()
    objects = [json.loads(line) for line in lines]

    assert [(each["kept_because"], each["index"]) for each in objects] == [
        ("evaluation", 0), ("evaluation", 1), ("reward_mismatch", 0), ("reward_mismatch", 1), ("consumed", 0),
        ("consumed", 1),
    ]  # fmt: skip
    first = objects[4]
    assert first["prompt"] == "1+1="
    assert (first["answer"], objects[0]["answer"]) == (f"2{ESCAPE}", "4")
    assert first["completion"] == "it is 2, says 0"
    assert first["reward_parts"] == {"correct": 1.0}
    assert (first["version"], first["site"], first["finish_reason"]) == (8, SITE, "eos")
    assert "token_ids" not in first
    (whole,) = [json.loads(line) for line in (
        await invoke(secure, "samples", "show", str(first["id"]), "--json", "--tokens", "--rollout", "1")
    ).splitlines()]  # fmt: skip
    assert whole["token_ids"] == [5, 6, 1]
    assert whole["log_ratios"] == [0.5, -0.5, 0.25]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--kind", "rejected"), ["reward_mismatch"]),
        (("--why", "consumed"), ["consumed"]),
        (("--site", SITE), ["reward_mismatch", "consumed"]),
        (("--site", "nobody"), []),
        (("--version", "8"), ["reward_mismatch", "consumed"]),
        (("--version", "2:"), ["reward_mismatch", "consumed"]),
        (("--version", ":7"), ["evaluation"]),
        (("--truncated",), ["evaluation"]),
        (("--whole",), ["reward_mismatch", "consumed"]),
        (("--min-reward", "1.5"), []),
        (("--max-reward", "0"), ["evaluation", "reward_mismatch", "consumed"]),
        (("--limit", "1"), ["evaluation"]),
        (("--limit", "2", "--before", "3"), ["reward_mismatch", "consumed"]),
    ],
)
async def test_command_filters(secure, options, expected):
    lines = (await invoke(secure, "samples", "list", "--json", *options)).splitlines()

    found = [json.loads(line)["kept_because"] for line in lines]
    assert found == [why for why in expected for _ in range(2)]


@pytest.mark.parametrize("options", [("list", "--tokens"), ("list", "--tokenizer", "x"), ("show", "2", "--tokens")])
async def test_option_of_json_is_refused_without_it(secure, options):
    result = await asyncio.to_thread(heterorl, secure, "samples", *options)

    assert "needs --json" in str(result.exception)


async def test_nothing_that_a_model_wrote_steers_the_terminal(secure):
    listed = await invoke(secure, "samples", "list")
    shown = await invoke(secure, "samples", "show", "2")

    for text in (listed, shown):
        assert "\x1b[2J" not in text
        assert "\u202e" not in text
    assert "\\x1b[2J\\u202e" in shown
    assert "reward_mismatch" in listed
    assert "3 samples kept" in listed
    assert "says 1" in shown
    assert "expected answer" in shown
    assert "correct" in shown
    alone = await invoke(secure, "samples", "show", "2", "--rollout", "0")
    assert "says 1" not in alone


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_export_holds_what_the_list_says(secure, suffix):
    out = secure.directory / f"run{suffix}"
    said = await invoke(secure, "samples", "export", str(out), "--tokens")
    assert "6 completions" in said
    assert stat.S_IMODE(out.stat().st_mode) == 0o600

    objects = [
        json.loads(line) for line in (await invoke(secure, "samples", "list", "--json", "--tokens")).splitlines()
    ]
    objects = [each for number in (2, 1, 0) for each in objects[2 * number : 2 * number + 2]]
    if suffix == ".jsonl":
        assert [json.loads(line) for line in out.read_text().splitlines()] == objects
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        rows = pq.read_table(out).to_pylist()
        for row in rows:
            row["reward_parts"] = dict(row["reward_parts"])
        assert rows == objects


async def test_sample_above_the_default_limit_of_a_message_is_read(tmp_path):
    secure = SecureRun(tmp_path)
    secure.changes = {"max_message_bytes": 32 << 20}
    async with secure:
        large = dataclasses.replace(EVALUATION, prompt="x" * (17 << 20))
        await secure.core.note_samples(epoch=secure.run.epoch, notes=[], evaluations=[large])

        first, _ = (await invoke(secure, "samples", "list", "--json")).splitlines()

    assert json.loads(first)["prompt"] == large.prompt


async def test_export_shows_how_far_it_is(secure, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    said = await invoke(secure, "samples", "export", str(secure.directory / "run.jsonl"))
    assert "6 completions so far" in said


async def test_export_that_fails_leaves_no_file(secure):
    result = await asyncio.to_thread(heterorl, secure, "samples", "export", str(secure.directory / "run.csv"))
    assert "must end in .jsonl or .parquet" in str(result.exception)
    out = secure.directory / "run.jsonl"
    result = await asyncio.to_thread(heterorl, secure, "samples", "export", str(out), "--version", "x")
    assert "is not N or A:B" in str(result.exception)
    result = await asyncio.to_thread(heterorl, secure, "samples", "list", "--version", "9:5")
    assert "'9:5' ends before it begins (give 5:9)" in str(result.exception)
    for command in (("list",), ("export", str(out))):
        result = await asyncio.to_thread(heterorl, secure, "samples", *command, "--why", "nonsense")
        assert "'nonsense' is not a reason (one of consumed, evaluation, stale_at_ingest, " in str(result.exception)
    await secure.server.stop(0.0)

    result = await asyncio.to_thread(heterorl, secure, "samples", "export", str(out))

    assert result.exit_code != 0
    assert list(secure.directory.glob("run.*")) == []
