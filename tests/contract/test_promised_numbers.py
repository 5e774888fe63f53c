"""Numbers that pages state of the product are those that it has: each fragment is written from the constant itself."""

import dataclasses
import itertools
import json
import math
import re
import tomllib
from pathlib import Path

import pytest

from heterorl.certs import enrolment_server
from heterorl.cli import certs
from heterorl.common.process import notify
from heterorl.common.process.backoff import Backoff
from heterorl.common.pull import fetcher, puller
from heterorl.common.text import conversation
from heterorl.common.types.common import MAX_ASKED_S
from heterorl.common.types.sample import SampleKind
from heterorl.coordinator import sample_ring
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups import work_assignments
from heterorl.coordinator.payloads import storage_setup
from heterorl.coordinator.rpc.access import RULES
from heterorl.coordinator.sites import incarnations, node_metrics, quarantine
from heterorl.coordinator.store import database
from heterorl.learner.backends.ranks import rank_group
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay import cached_weights
from heterorl.sampler.outbox import delivery, turn_store
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.track import follow
from heterorl.view import pages

ROOT = Path(__file__).parents[2]
WORDS = {1: "one", 3: "three", 5: "five", 8: "eight", 10: "ten"}
COORDINATOR, LEARNER, SAMPLER = CoordinatorConfig(), LearnerConfig(), SamplerConfig()
MIB = 1 << 20
DEFAULT_BACKOFF = {each.name: each.default for each in dataclasses.fields(Backoff)}
DIVIDED = LearnerConfig.model_validate({"backend": {"kind": "fsdp2"}})


def at_once(service, name):
    return RULES[f"/heterorl.v1.{service}Service/{name}"].at_once


def share(kind):
    return f"1/{1 / sample_ring.SHARES[kind]:g}"


PROMISES = [
    ("ARCHITECTURE.md", f"up to {delivery.BATCH_GROUPS:,} groups or {delivery.BATCH_BYTES // MIB} MiB a call"),
    ("ARCHITECTURE.md", f"is closed after {WORDS[work_assignments.MAX_RETURNS]} returns"),
    (
        "ARCHITECTURE.md",
        f"`site_concurrent_rpcs` ({COORDINATOR.site_concurrent_rpcs}); {at_once('Rollout', 'PushGroups')} pushes,"
        f" {at_once('Policy', 'WatchHead')} watches, {at_once('Policy', 'ReadPayload')} reads,"
        f" {at_once('Diagnosis', 'Diagnose')} diagnosis",
    ),
    ("ARCHITECTURE.md", f"the newest {incarnations.KEPT}, and older ones that pushed"),
    ("ARCHITECTURE.md", f"the newest {database.MAX_KEPT} of a kind"),
    (
        "ARCHITECTURE.md",
        f"A plan may take {WORDS[fetcher.MAX_COPIES]} copies of the weights and {puller.MAX_BYTES // MIB} MiB of"
        f" manifests, a wait {MAX_ASKED_S:g} s",
    ),
    ("docs/environments.md", f"Turns beyond {turn_store.MAX_BYTES // MIB} MiB are drawn again"),
    ("docs/environments.md", f"after {WORDS[turn_store.MAX_RESUMED]} starts without"),
    (
        "docs/machines.md",
        f"{rank_group.MEETING_S / 60:g} minutes; {rank_group.CONNECT.total_seconds() / 60:g} at rank 0",
    ),
    ("docs/machines.md", f"`backend.rank_timeout_s` is {DIVIDED.backend.rank_timeout_s:g} s"),
    ("docs/operate.md", f"ended by its watchdog after {notify.HUNG_S:g} to 90 s"),
    ("docs/operate.md", f"keeps every `samples_every`-th trained group ({COORDINATOR.samples_every})"),
    ("docs/operate.md", f"within `samples_bytes` ({COORDINATOR.samples_bytes // MIB} MiB; 0 keeps none)"),
    ("docs/operate.md", f"A certificate lasts {certs.DAYS} days"),
    (
        "docs/operate.md",
        f"`work_lease_s` ({COORDINATOR.work_lease_s:g} s) plus the site's `work_ahead_s` ({SAMPLER.work_ahead_s:g} s)",
    ),
    ("docs/operate.md", f"valid `url_lifetime_s` ({COORDINATOR.payloads.url_lifetime_s / 3600:g} h)"),
    (
        "docs/configuration.md",
        f"{share(SampleKind.CONSUMED)} trained groups, {share(SampleKind.REJECTED)} failed checks,"
        f" {share(SampleKind.DROPPED)} dropped groups, {share(SampleKind.EVALUATION)} evaluations",
    ),
    ("docs/relay.md", f"a plan is kept {cached_weights.PLAN_S:g} s at most"),
    (
        "docs/security.md",
        f"{enrolment_server.OF_ADDRESS} connections an address, {enrolment_server.SPEAK_S:g} s for the token",
    ),
    ("docs/signatures.md", f"asks again within {DEFAULT_BACKOFF['cap_s']:g} s"),
    ("docs/trackers.md", f"waits {WORDS[follow.LINGER_S / 60]} minutes at most"),
    (
        "docs/untrusted.md",
        f"so {WORDS[quarantine.CODE_MISMATCHES]} count as one failure:"
        f" {quarantine.CODE_MISMATCHES * COORDINATOR.quarantine_failures} such groups quarantine a site, otherwise"
        f" {COORDINATOR.quarantine_failures}",
    ),
    # As often as a sound group passes the floor, 95 % of such sites have failed a check by then.
    (
        "docs/untrusted.md",
        f"At a floor of 5 % a site that always cheats is found within {math.ceil(math.log(0.05, 0.95))} groups with 95 %",
    ),
    # As a comment of the constant says: 2.7 times as much disk.
    ("docs/view.md", f"at most {math.floor(2.7 * pages.LIMIT_BYTES / 1e9):g} GB"),
    ("deploy/README.md", f"A service that hangs for {notify.HUNG_S:g} s is ended"),
]


@pytest.mark.parametrize(("page", "words"), PROMISES, ids=[words[:40] for _, words in PROMISES])
def test_the_page_states_the_number_that_the_product_has(page, words):
    assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_numbers_in_words():
    assert node_metrics.KEPT_S == 60.0
    assert "serves them at `/nodes` for a minute" in " ".join((ROOT / "docs" / "operate.md").read_text().split())
    assert storage_setup.WAIT_S == 60.0
    assert "a start waits a minute, then ends with code 1" in (ROOT / "docs" / "operate.md").read_text()
    assert conversation.NUM_ANSWERS == 1000
    assert "The start reads a thousand answers" in (ROOT / "docs" / "rewards.md").read_text()


def test_python_is_that_of_the_readme():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]

    assert f"Python {needs.removeprefix('>=')}" in (ROOT / "README.md").read_text()


def test_a_job_of_slurm_tries_ten_times():
    (attempts,) = re.findall(r"HETERORL_ATTEMPTS:-(\d+)", (ROOT / "deploy" / "slurm" / "learner.sbatch").read_text())

    assert f"{WORDS[int(attempts)]} times (`HETERORL_ATTEMPTS`)" in (ROOT / "docs" / "machines.md").read_text()


def test_a_start_waits_for_the_lock_as_long_as_the_page_says():
    engine = pytest.importorskip("heterorl.coordinator.store.postgres.postgres_engine")

    assert (
        f"waits {engine.HELD_S:g} s for the lock, then ends with code 1" in (ROOT / "docs" / "operate.md").read_text()
    )


def smaller(lr, versions):
    """How many times smaller a delta of the default scheme is, as pages write it."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "weights.json").read_text())["rows"]
    [ratio] = [
        row["ratio"]
        for row in rows
        if (row["scheme"], row.get("lr"), row.get("lag_versions")) == ("gapulp", lr, versions)
    ]
    return f"{ratio:.0f}" if ratio > 20 else f"{ratio:.1f}"


def test_deltas_are_as_small_as_the_committed_measurement():
    readme, measurements, variants = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "benchmarks/README.md", "docs/variants.md")
    )

    assert f"[{smaller(1e-5, 1)} times smaller](benchmarks/README.md#what-a-version-costs-on-the-link)" in readme
    assert f"at learning rate 1e-5, {smaller(1e-6, 1)} times at 1e-6" in readme
    for lr, versions in itertools.product((1e-6, 1e-5, 1e-4), (1, 8)):
        row = rf"\| {lr:g} \| {versions} \| [\d.]+ % \| [\d.]+x \| {re.escape(smaller(lr, versions))}x \|"
        assert re.search(row, measurements)
    for lr, versions in ((1e-6, 1), (1e-6, 8), (1e-6, 24), (1e-5, 1), (1e-4, 1)):
        assert re.search(rf"\| {lr:g} \| {versions} \| [\d.]+ % \| {re.escape(smaller(lr, versions))}x \|", variants)
