"""Wrong options are named at once, before anything is trained, written or started."""

import sys
from pathlib import Path

import pytest

from heterorl.cli.main import main
from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.demo.demo_config import (
    FULL,
    MAX_SEED,
    SITES,
    TINY,
    DemoOptions,
    algorithms,
    check_options,
    coordinator_tables,
    learner_tables,
    sampler_tables,
)
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.sampler_config import SamplerConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm", "ppo"], "--algorithm: 'ppo' is not one of gepo, "),
        (["--algorithm", "[/x]"], "--algorithm: '[/x]' is not one of gepo, "),
        (["--seed", "-1"], "--seed: -1 is not between 0 and"),
        (["--seed", str(2**31)], "--seed"),
        (["--cache", "file"], "--cache: file is not a directory"),
        (["--cache", "file/below"], "--cache: cannot create"),
        (["--out", "file"], "--out: file is not a directory"),
        (["--out", "."], "--out: . is not empty"),
    ],
)
def test_wrong_option_is_named_before_anything_happens(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["heterorl", "demo", "--tiny", *arguments])

    with pytest.raises(SystemExit) as end:
        main()

    output = capsys.readouterr()
    assert end.value.code == 2
    assert message in output.err
    assert output.out == ""
    assert Path("file").read_text() == "mine"
    assert not Path("runs").exists()


def test_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else object())

    with pytest.raises(DependencyMissing, match=r"matplotlib .*'\.\[demo\]'"):
        check_options(DemoOptions(cache=tmp_path))


def test_algorithms_are_those_of_the_learner():
    assert {"gepo", "gspo", "grpo"} <= set(algorithms())
    for name in algorithms():
        assert LearnerConfig.model_validate({"loss": {"kind": name}}).loss.kind == name


@pytest.mark.parametrize("regime", [FULL, TINY])
@pytest.mark.parametrize("seed", [0, MAX_SEED])
def test_every_configuration_of_a_checked_option_is_valid(tmp_path, regime, seed):
    options = DemoOptions(out=tmp_path, seed=seed, device="cuda" if seed else "cpu")
    place = {"address": "127.0.0.1:1", "model_dir": tmp_path}

    CoordinatorConfig.model_validate(coordinator_tables(regime, options))
    LearnerConfig.model_validate(learner_tables(regime, options, **place))
    for site in SITES:
        SamplerConfig.model_validate(sampler_tables(regime, options, site=site, **place))
    with pytest.raises(ConfigError):
        check_options(DemoOptions(seed=MAX_SEED + 1))


def test_devices_are_the_cpu_and_a_card_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    with pytest.raises(ConfigError, match=r"--device: 'tpu' is not one of cpu, cuda"):
        check_options(DemoOptions(cache=tmp_path, device="tpu"))
    with pytest.raises(ConfigError, match=r"--device: torch sees no CUDA device"):
        check_options(DemoOptions(cache=tmp_path, device="cuda"))
