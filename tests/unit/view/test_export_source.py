"""Files of exports: read as they were written, and refused by line where they were not."""

import asyncio
import json
import math
import re

import pytest

from heterorl.cli.samples.sample_reader import exporting
from heterorl.common.errors import ConfigError
from heterorl.common.types.sample import rollout_json
from heterorl.view import export_source as export
from heterorl.view.export_source import ExportedSamples, read_export
from heterorl.view.sample_index import SampleIndex
from tests.support.limits import WAIT_S
from tests.support.samples import make_sample, make_turns

ROW = rollout_json(make_sample(1), 0, with_tokens=True)


def written(path, samples, *, with_tokens=True):
    with exporting(path, with_tokens=with_tokens) as file:
        for sample in samples:
            file.add(sample)
    return path


def lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("with_tokens", [True, False])
def test_what_the_export_wrote_is_read(tmp_path, with_tokens):
    wanted = [make_sample(n) for n in range(1, 40)]

    found = list(read_export(written(tmp_path / "run.jsonl", wanted, with_tokens=with_tokens)))

    assert [sample.prompt for sample in found] == [sample.prompt for sample in wanted]
    for got, want in zip(found, wanted, strict=True):
        for name in ("id", "kind", "kept_because", "detail", "site", "group", "version", "oldest_version", "kept_time",
                     "prompt_index", "num_rollouts", "num_truncated", "num_tokens", "has_texts"):  # fmt: skip
            assert getattr(got.summary, name) == getattr(want.summary, name), name
        assert got.summary.reward_mean == pytest.approx(want.summary.reward_mean)
        for read, rollout in zip(got.rollouts, want.rollouts, strict=True):
            assert (read.completion, read.reward, read.reward_parts) == (
                rollout.completion, rollout.reward, rollout.reward_parts
            )  # fmt: skip
            assert read.token_ids.tolist() == (rollout.token_ids.tolist() if with_tokens else [])
            if rollout.log_ratio_mean is not None:
                assert read.log_ratio_mean == pytest.approx(rollout.log_ratio_mean, abs=1e-6)
            if with_tokens:
                assert read.token_ends.tolist() == rollout.token_ends.tolist()
                assert read.sampler_logprobs.tolist() == pytest.approx(rollout.sampler_logprobs.tolist())


@pytest.mark.parametrize("with_tokens", [True, False])
def test_turns_and_lost_members_are_read_as_they_were_written(tmp_path, with_tokens):
    want = make_turns(3)

    (found,) = read_export(written(tmp_path / "run.jsonl", [want], with_tokens=with_tokens))

    for name in ("num_rollouts", "num_truncated", "num_lost", "num_tokens", "reward_min", "reward_mean", "reward_max"):
        assert getattr(found.summary, name) == getattr(want.summary, name), name
    for got, one in zip(found.rollouts, want.rollouts, strict=True):
        assert (got.spans, got.finish_reason, got.completion) == (one.spans, one.finish_reason, one.completion)
        assert got.versions == one.versions
        if with_tokens:
            assert got.turn_texts == one.turn_texts
            assert got.log_ratios.tolist() == one.log_ratios.tolist()


def test_numbers_and_texts_that_are_none_are_read(tmp_path):
    row = ROW | {"prompt": None, "completion": None, "reward": None, "reward_parts": {"a": None}, "group": None,
                 "log_ratios": [None] * len(ROW["token_ids"])}  # fmt: skip

    (sample,) = read_export(lines(tmp_path / "x.jsonl", row))

    assert not sample.summary.has_texts
    assert sample.summary.reward_mean is None
    assert math.isnan(sample.rollouts[0].reward)


def test_rewards_whose_sum_is_no_float_have_a_mean(tmp_path):
    (sample,) = read_export(lines(tmp_path / "x.jsonl", *(ROW | {"index": n, "reward": 1e308} for n in range(2))))

    assert sample.summary.reward_mean == 1e308


def test_halves_of_pairs_become_question_marks_of_the_same_length(tmp_path):
    (sample,) = read_export(lines(tmp_path / "x.jsonl", ROW | {"completion": "a\ud800b", "prompt": "\udfff"}))

    assert (sample.rollouts[0].completion, sample.prompt) == ("a?b", "?")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("3", "valid dictionary"),
        (ROW | {"id": 0}, "id: "),
        (ROW | {"id": 1 << 63}, "id: "),
        (ROW | {"reward": "high"}, "reward: "),
        (ROW | {"finish_reason": "tired"}, "finish_reason: "),
        (ROW | {"kept_because": "love"}, "kept_because: "),
        (ROW | {"token_ids": [1 << 40]}, "token_ids.0: "),
        (ROW | {"group": "eu-1"}, "group: "),
        (ROW | {"group": "eu-1/a/" + "1" * 5000}, "group: "),
        (ROW | {"spans": [{"start": 0, "end": -1, "version": 3}]}, "spans.0.end: "),
        (ROW | {"spans": [{"start": 0, "end": 1, "version": 3}]}, "spans: completion 0 has tokens outside"),
        (
            ROW | {"spans": [{"start": 1, "end": len(ROW["token_ids"]), "version": 3}]},
            "spans: completion 0 has tokens outside",
        ),
        ({key: ROW[key] for key in ROW if key != "kept_because"}, "kept_because: "),
    ],
    ids=str,
)
def test_a_line_that_is_wrong_is_named(tmp_path, row, words):
    with pytest.raises(ConfigError, match="row 1") as caught:
        list(read_export(lines(tmp_path / "x.jsonl", row)))

    assert words in str(caught.value)
    assert "samples export" in str(caught.value)


WRONG = (5, "x", True, [1], [[1, 2]], [[[], 1]], [["a"]], {"a": "b"}, {"a": {}}, 10**400, math.inf, -(10**30))


@pytest.mark.parametrize("key", export._Row.model_fields)
def test_a_value_of_a_wrong_type_is_read_or_named(tmp_path, key):
    for value in WRONG:
        try:
            said = (
                f"row 1: {key}:" if len(list(read_export(lines(tmp_path / "x.jsonl", ROW | {key: value})))) == 1 else ""
            )
        except ConfigError as error:
            said = str(error)
        assert re.search(rf"row 1: ({key}[.:]|spans: )", said), (value, said)


def test_a_line_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MAX_LINE_BYTES", 1000)

    with pytest.raises(ConfigError, match="row 2: is over 1,000 bytes"):
        list(read_export(lines(tmp_path / "x.jsonl", "", ROW)))


def test_samples_come_in_the_order_of_their_ids(tmp_path):
    with pytest.raises(ConfigError, match="row 3: sample 1 comes after sample 2"):
        list(read_export(lines(tmp_path / "x.jsonl", ROW, ROW | {"id": 2}, ROW | {"index": 1})))
    with pytest.raises(ConfigError, match="completion 0 of sample 1 appears twice"):
        list(read_export(lines(tmp_path / "x.jsonl", ROW, ROW)))


def test_file_of_another_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.parquet, row 1: is not JSON.*OUT\.jsonl"):
        list(read_export(lines(tmp_path / "x.parquet", "PAR1")))


def test_a_file_that_cannot_be_read_is_refused_before_a_page_is_served(tmp_path):
    index = SampleIndex(tmp_path, limit_bytes=1 << 30)

    with pytest.raises(ConfigError, match="cannot be read"):
        ExportedSamples(tmp_path / "none.jsonl", index)
    index.close()


async def test_a_fault_is_said_beside_what_was_read_before_it(tmp_path):
    index = SampleIndex(tmp_path, limit_bytes=1 << 30)
    rows = [ROW | {"id": n} for n in range(1, 201)]
    # A sample of two completions, one of them faulty, would have a wrong mean.
    rows[100:101] = [rows[100], rows[100] | {"index": 1, "token_ids": 3}]
    source = ExportedSamples(lines(tmp_path / "x.jsonl", *rows), index)

    source.start()
    await asyncio.to_thread(source._thread.join, WAIT_S)

    assert source.progress.is_done
    assert "row 102: token_ids: " in source.progress.problem
    assert index.held().num_samples == 100
    index.close()
