"""Metrics are served on a port of their own, with names by convention."""

import inspect
import itertools
import logging
import math
import re
import socket
import urllib.request

import pytest

from heterorl.common.errors import AddressUnusable, ConfigError
from heterorl.common.process import logs, metrics
from heterorl.common.process.pushed_metrics import series_of
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.limits import WAIT_S

UNITS = ("_seconds", "_bytes", "_per_second", "_versions", "_groups", "_nats", "_ratio", "_total", "_version", "_epoch",
         "_info", "_assignments")  # fmt: skip
WITHOUT_UNIT = {
    "heterorl_learner_loss", "heterorl_learner_reward_mean", "heterorl_learner_importance_weight_variance",
    "heterorl_learner_grad_norm", "heterorl_learner_learning_rate", "heterorl_coordinator_ledger_balanced", "heterorl_coordinator_draining",
    "heterorl_coordinator_site_quarantined", "heterorl_coordinator_site_stopped", "heterorl_coordinator_standstill", "heterorl_coordinator_disk_refuses",
    "heterorl_learner_steps_without_signal", "heterorl_coordinator_evaluation_reward_mean",
    "heterorl_learner_source_reward_mean", "heterorl_learner_completion_tokens", "heterorl_learner_reward_part_mean",
    "heterorl_learner_loss_metric_mean",
    "heterorl_relay_calls", "heterorl_coordinator_standing_by",
}  # fmt: skip
LABELS = {"side", "method", "code", "kind", "direction", "site", "status", "reason", "state", "account",
          "applied", "stage", "quota", "check", "verdict", "variant", "loop", "outcome", "phase", "stat",
          "set", "source", "part", "way", "metric"}  # fmt: skip


def _own(name):
    return name.startswith("heterorl_")


def test_metrics_are_served_and_a_taken_port_names_its_key():
    port = metrics.serve(0, service="coordinator")
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S).read().decode()

    assert "heterorl_coordinator_head_version" in page
    assert "heterorl_bytes_total" in page
    assert "process_resident_memory_bytes" in page
    assert "heterorl_learner_" not in page
    assert "heterorl_sampler_" not in page
    with pytest.raises(ConfigError, match="metrics_port: .* already in use"):
        metrics.serve(port, service="coordinator")
    # An address for documents, which no machine has.
    with pytest.raises(AddressUnusable, match="metrics_host: 192.0.2.1") as missing:
        metrics.serve(0, service="coordinator", address="192.0.2.1")
    assert missing.value.exit_code == 1


def test_an_idle_connection_is_closed_in_silence(monkeypatch, capsys):
    monkeypatch.setattr(metrics._Handler, "timeout", 0.05)
    port = metrics.serve(0, service="coordinator")

    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as idle:
        assert idle.recv(1) == b""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("schema", [CoordinatorConfig, LearnerConfig, SamplerConfig, RelayConfig])
def test_metrics_are_on_loopback_unless_the_file_says_otherwise(schema):
    assert schema.model_fields["metrics_host"].default == "127.0.0.1"
    assert inspect.signature(metrics.serve).parameters["address"].default == "127.0.0.1"


def test_second_service_that_was_given_no_port_finds_one_beside_the_first():
    first = metrics.serve(0, service="sampler")
    second = metrics.serve(first, service="sampler", may_move=True)

    assert second != first
    assert (second - first) % 10 == 0
    page = urllib.request.urlopen(f"http://127.0.0.1:{second}/metrics", timeout=WAIT_S).read().decode()
    assert "heterorl_sampler_policy_version" in page
    # A port that somebody wrote down is that port or an error.
    chosen, default = SamplerConfig(metrics_port=9103), SamplerConfig()
    assert "metrics_port" in chosen.model_fields_set
    assert "metrics_port" not in default.model_fields_set


def test_metric_names_follow_the_convention():
    found = [metric for metric in metrics.REGISTRY.collect() if _own(metric.name)]
    # A counter's family is named without the suffix that its samples carry.
    names = [f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in found]

    assert len(names) == len(set(names)) > 60
    assert all(re.fullmatch(r"heterorl_[a-z0-9_]+", name) for name in names)
    assert [name for name in names if not name.endswith(UNITS)] == sorted(WITHOUT_UNIT, key=names.index)
    assert [metric.name for metric in found if metric.type == "gauge" and metric.name.endswith("_total")] == []


def test_steps_of_an_age_are_as_narrow_above_two_hours_as_below():
    steps = metrics.SUPERSEDED_SECONDS._kwargs["buckets"]

    assert steps[-1] == 2 * 86400
    assert all(later <= 3 * earlier for earlier, later in itertools.pairwise(steps))


def test_a_duration_of_hours_is_shown():
    assert metrics.PULL_SECONDS._kwargs["buckets"][-1] == metrics.STEP_SECONDS._kwargs["buckets"][-1] == 4 * 3600


def test_metric_labels_are_of_a_closed_set_and_samplers_leave_the_site_to_the_scrape():
    declared = [value for value in vars(metrics).values() if hasattr(value, "_labelnames")]

    assert {label for metric in declared for label in metric._labelnames} == LABELS
    assert [m._name for m in declared if m._name.startswith("heterorl_sampler") and "site" in m._labelnames] == []


def test_site_labels_are_bounded_and_stable():
    labels = metrics.SiteLabels(limit=2)

    assert [labels.of(site) for site in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_disk_that_cannot_be_asked_hides_no_other_metric(tmp_path):
    metrics.watch_disk(tmp_path / "gone")

    shown = {one.name: one.values for one in series_of(metrics.registry_of("sampler"))}

    assert math.isnan(shown["heterorl_disk_free_bytes"][0])
    assert "heterorl_sampler_policy_version" in shown


def test_disk_is_measured_when_asked(tmp_path):
    metrics.watch_disk(tmp_path)

    free, size = (gauge.collect()[0].samples[0].value for gauge in (metrics.DISK_FREE_BYTES, metrics.DISK_SIZE_BYTES))
    assert 0 < free <= size


def test_logs_are_text_for_people(capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure(style="console")
        logging.getLogger("x").info("hello %s", "you")
    finally:
        root.handlers[:], root.level = handlers, level
    (text,) = capsys.readouterr().err.splitlines()

    assert text.endswith("Z INFO    x: hello you")
