"""`heterorl plan`: a table for people, one object for programs, a named option for each mistake."""

import json

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.cli.plan import bits_per_s, seconds, size_words, time_words
from heterorl.common.errors import ConfigError
from heterorl.plan.estimate import changed_by

RUN = CliRunner()


def test_json_has_the_plan_and_what_it_assumes():
    result = RUN.invoke(
        app, ["plan", "--params", "8e9", "--gpus", "8", "--link", "1Gbit", "--set", "mfu=0.5", "--json"]
    )

    found = json.loads(result.stdout)
    assert found["question"]["nodes"] == 1
    assert found["shape"]["name"] == "Qwen3-8B"
    assert found["memory_per_rank"]["fits"] is True
    [mfu] = [fact for fact in found["assumptions"] if fact["name"] == "mfu"]
    assert (mfu["value"], mfu["source"]) == (0.5, "set")
    for key in ("step_s", "publication_s", "checkpoint_s", "delta_bytes", "snapshot_bytes", "pull_s"):
        assert found[key] > 0


def test_sequence_longer_than_a_micro_batch_takes_the_memory_of_its_own_pass():
    base = ["plan", "--params", "8e9", "--set", "sequence_tokens=65536", "--json"]
    long, batch = (
        json.loads(RUN.invoke(app, [*base, *more]).stdout) for more in ([], ["--set", "micro_batch_tokens=65536"])
    )

    # 36 layers of 4096, and one in full: 4 x 4096, twice 4096 of queries and 1024 of keys, 4 x 12288; in bf16.
    one = 36 * 4096 + 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 12288
    assert long["memory_per_rank"]["activations"] == pytest.approx(65536 * 2 * one)
    assert long["memory_per_rank"]["kept_activations"] == pytest.approx(1.67 * 65536 * 2 * 36 * (one - 36 * 4096))
    assert long["memory_per_rank"] == batch["memory_per_rank"]
    assert long["sharding_s"] == batch["sharding_s"]


def test_table_says_what_does_not_fit(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = RUN.invoke(app, ["plan", "--params", "32e9", "--gpus", "1", "--backend", "torch"])

    assert result.exit_code == 0
    assert "DOES NOT FIT" in result.stdout
    assert "publication" in result.stdout
    assert "benchmarks/results/pull.json" in result.stdout


def test_verdict_names_the_least_line_that_suffices(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    base = ["plan", "--params", "7e9", "--lr", "1e-5"]

    slow, fast = (RUN.invoke(app, [*base, "--link", link]).stdout for link in ("200Mbit", "300Mbit"))
    exact = json.loads(RUN.invoke(app, [*base, "--json"]).stdout)

    assert "IS TOO SLOW" in slow
    assert "suffices" in fast
    assert "Mbit/s is the least for every version" in slow
    assert 2e8 < exact["line"]["least_bits_per_s"] < 3e8
    assert exact["question"]["changed"] == pytest.approx(0.09055)
    # Publishing in less time than applying takes, no line would do.
    hopeless = RUN.invoke(app, ["plan", "--params", "7e9", "--tokens-per-step", "1000"]).stdout
    assert "no line suffices" in hopeless


def test_steps_of_a_version_are_an_option():
    base = ["plan", "--params", "8e9", "--json"]
    one, eight = (json.loads(RUN.invoke(app, [*base, *more]).stdout) for more in ([], ["--steps-per-version", "8"]))

    assert one["question"]["changed"] == pytest.approx(0.01369)
    assert eight["question"]["changed"] == pytest.approx(changed_by(8e-6))
    assert eight["version_s"] == pytest.approx(8 * one["version_s"])
    # More bytes a version, fewer bytes a day.
    assert eight["delta_bytes"] > one["delta_bytes"]
    assert eight["site_day"]["in_bytes"] < one["site_day"]["in_bytes"]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--params", "1e9", "--lr", "1e-6", "--changed-fraction", "0.1"], "--lr"),
        (["--params", "1e9", "--lr", "0"], "--lr"),
        (["--params", "1e9", "--sites", "0"], "--sites"),
        (["--params", "1e9", "--steps-per-version", "0"], "--steps-per-version"),
        ([], "--params"),
        (["--params", "8"], "--params"),
        (["--params", "1e9", "--link", "fast"], "--link"),
        (["--params", "1e9", "--rtt", "1"], "--rtt"),
    ],
)
def test_wrong_option_is_named(arguments, key):
    result = RUN.invoke(app, ["plan", *arguments])

    assert isinstance(result.exception, ConfigError)
    assert result.exception.key == key


def test_model_directory_may_be_small(tmp_path):
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1}
    config = {"model_type": "qwen3", "num_attention_heads": 4, "head_dim": 16, "tie_word_embeddings": True, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))

    result = RUN.invoke(app, ["plan", "--model-dir", str(tmp_path), "--json"])

    assert json.loads(result.stdout)["question"]["parameters"] < 1e5


def test_amounts():
    assert [bits_per_s(text) for text in ("1Gbit", "300 Mbit/s", "2.5gbit")] == [1e9, 3e8, 2.5e9]
    assert [seconds(text) for text in ("100ms", "0.1s")] == [0.1, 0.1]
    assert [size_words(number) for number in (9.61e10, 1.5e3, 2e12)] == ["96.1 GB", "1.50 kB", "2.00 TB"]
    assert [time_words(number) for number in (0.0123, 12.34, 1200.0)] == ["12.3 ms", "12.3 s", "20.0 min"]
