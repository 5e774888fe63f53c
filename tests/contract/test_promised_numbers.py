"""Numbers that pages state of the product are those that it has: each fragment is written from the constant itself."""

import collections
import dataclasses
import inspect
import itertools
import json
import math
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.gpu import trial
from heterorl.certs import enrolment_server
from heterorl.cli import certs
from heterorl.cli.live import track
from heterorl.common.process import notify
from heterorl.common.process.backoff import Backoff
from heterorl.common.pull import fetcher, puller
from heterorl.common.rpc import server_limits
from heterorl.common.tasks.environments import episodes
from heterorl.common.tasks.rewards import answer_match, http_reward, math_expressions, worker_pool
from heterorl.common.tasks.rewards.sandbox import gym_reward
from heterorl.common.text import conversation
from heterorl.common.types.common import MAX_ASKED_S
from heterorl.common.types.rollout import MAX_ASSIGNMENTS, MAX_PART_VALUE, MAX_REWARD
from heterorl.common.types.sample import MAX_ANSWER, SampleKind
from heterorl.coordinator import sample_ring
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups import work_assignments
from heterorl.coordinator.payloads import storage_setup
from heterorl.coordinator.rpc import bounds, call_admission
from heterorl.coordinator.rpc.access import RULES
from heterorl.coordinator.sites import incarnations, node_metrics, quarantine
from heterorl.coordinator.store import database
from heterorl.demo import demo_config
from heterorl.launch import nodes
from heterorl.learner.backends.ranks import rank_group
from heterorl.learner.checks import findings, reward_checks
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss import custom
from heterorl.learner.loss.loss_spec import loss_spec_of, open_share
from heterorl.learner.publish import checkpoint_store
from heterorl.learner.run import resume, state_directory
from heterorl.plan.assumptions import Assumptions
from heterorl.plan.estimate import LR, Question, plan
from heterorl.relay import cached_weights
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler import sampler_config
from heterorl.sampler.outbox import delivery, turn_store
from heterorl.sampler.rollout import completion_collector, prefetch
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.track import follow, tracker
from heterorl.view import pages

ROOT = Path(__file__).parents[2]
WORDS = {
    1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eight", 10: "ten", 16: "16", 0.25: "a quarter",
    0.75: "three quarters",
}  # fmt: skip
COORDINATOR, LEARNER, SAMPLER, RELAY = CoordinatorConfig(), LearnerConfig(), SamplerConfig(), RelayConfig()
MIB, GIB = 1 << 20, 1 << 30
DEFAULT_BACKOFF = {each.name: each.default for each in dataclasses.fields(Backoff)}
DIVIDED = LearnerConfig.model_validate({"backend": {"kind": "fsdp2"}})


def at_once(service, name):
    return RULES[f"/heterorl.v1.{service}Service/{name}"].at_once


def first_dropped():
    """Number of the first group that a site of half groups has dropped."""
    shares = itertools.accumulate(itertools.repeat(0.5), quarantine.moved_share, initial=0.0)
    return next(
        number for number, share in enumerate(shares) if quarantine.lost_problem(share, COORDINATOR.max_lost_share)
    )


def groups_until(num_failures, *, cheated):
    """Groups by which 95 % of sites failed so many checks, from the floor on; the share of their groups is wrong."""
    config = findings.VerificationConfig(logprob_floor=0.05)
    enough = 10 * config.full_groups
    states, number = {(0, enough): 1.0}, 0
    while sum(states.values()) > 0.05:
        number += 1
        following = collections.defaultdict(float)
        for (failed, passed), odds in states.items():
            checked = findings.checked_share(passed, config)
            following[failed, passed] += odds * (1 - checked)
            following[failed, min(passed + 1, enough)] += odds * checked * (1 - cheated)
            following[failed + 1, 0] += odds * checked * cheated
        states = {state: odds for state, odds in following.items() if state[0] < num_failures}
    return number


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
    ("docs/environments.md", f"made no progress in {WORDS[turn_store.MAX_RESUMED]} starts"),
    (
        "docs/machines.md",
        f"rank 0 after {rank_group.CONNECT.total_seconds() / 60:g} minutes, the others after"
        f" {rank_group.MEETING_S / 60:g}",
    ),
    ("docs/machines.md", f"`backend.rank_timeout_s` is {DIVIDED.backend.rank_timeout_s:g} s"),
    ("docs/operate.md", f"ended by its watchdog after {notify.HUNG_S:g} to 90 s"),
    ("docs/operate.md", f"keeps one trained group in `samples_every` ({COORDINATOR.samples_every})"),
    ("docs/operate.md", f"at most `samples_bytes` ({COORDINATOR.samples_bytes // MIB} MiB; 0 keeps none)"),
    ("docs/operate.md", f"A certificate lasts {certs.DAYS} days"),
    (
        "docs/operate.md",
        f"`work_lease_s` ({COORDINATOR.work_lease_s:g} s) plus its `work_ahead_s` ({SAMPLER.work_ahead_s:g} s)",
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
    (
        "docs/trackers.md",
        f"every `--samples-every` ({inspect.signature(track.track).parameters['samples_every'].default})",
    ),
    ("docs/trackers.md", f"waits {WORDS[follow.LINGER_S / 60]} minutes at most"),
    (
        "docs/untrusted.md",
        f"`quarantine_failures` ({COORDINATOR.quarantine_failures}) within `quarantine_window_groups` "
        f"({COORDINATOR.quarantine_window_groups:,}) groups",
    ),
    ("docs/untrusted.md", f"more than `verification.max_versions` ({LEARNER.verification.max_versions}) versions"),
    ("docs/untrusted.md", f"within `margin_tolerance` ({LEARNER.verification.margin_tolerance:g} nats)"),
    ("docs/untrusted.md", f"within `margin_limit` ({LEARNER.verification.margin_limit:g} nats)"),
    (
        "docs/untrusted.md",
        f"can happen by chance: {quarantine.CODE_MISMATCHES * COORDINATOR.quarantine_failures} of them, not three,",
    ),
    (
        "docs/untrusted.md",
        f"A site that always cheats fails its first check within {groups_until(1, cheated=1.0)} groups (95 %),"
        f" its third, which quarantines, within {groups_until(COORDINATOR.quarantine_failures, cheated=1.0)}. For every"
        f" tenth group: {groups_until(1, cheated=0.1)} and {groups_until(COORDINATOR.quarantine_failures, cheated=0.1)}.",
    ),
    (
        "README.md",
        f"above about {round(checkpoint_store.LARGE_BYTES / checkpoint_store.STATE_BYTES / 1e6, -2):g} million"
        " parameters checkpoints come every tenth version. A learner that stops between them drops up to nine versions",
    ),
    ("ARCHITECTURE.md", f"a stop waits {completion_collector.HAND_BACK_S:g} s for the coordinator"),
    ("ARCHITECTURE.md", f"a reserve of assignments below {WORDS[prefetch.FULL_ENOUGH]}"),
    (
        "ARCHITECTURE.md",
        f"short requests end after {server_limits.SHORT_S:g} s, other messages after {server_limits.LONG_S:g} s",
    ),
    ("ARCHITECTURE.md", f"the directory's lock | the node; {enrolment_server.ANSWER_S:g} s; the lock's holder"),
    ("ARCHITECTURE.md", f"read {WORDS[resume.NUM_READS]} times, then the one before it is used"),
    (
        "ARCHITECTURE.md",
        f"`messages_in_flight_bytes` ({COORDINATOR.messages_in_flight_bytes // GIB} GiB) for all samplers,"
        f" {WORDS[1 / server_limits.SHORT_PART]} of it for requests up to {server_limits.SHORT_BYTES >> 10} KiB."
        f" A site has at most {WORDS[server_limits.OF_SITE]};"
        f" a sampler {server_limits.OF_CALLER} of the largest messages, the learner {server_limits.OF_PRIVILEGED}",
    ),
    ("ARCHITECTURE.md", f"`max_concurrent_rpcs` ({COORDINATOR.max_concurrent_rpcs}, or what descriptors allow)"),
    ("ARCHITECTURE.md", f"{bounds.DEFAULT.count} entries, {bounds.DEFAULT.length} printable characters"),
    ("ARCHITECTURE.md", f"an equal share less its debts; {MAX_ASSIGNMENTS} a call"),
    ("docs/environments.md", f"`shares_process = True` | up to {episodes.EPISODES_A_PROCESS} episodes in one process"),
    ("docs/evaluation.md", f"postpone newer weights by at most {SAMPLER.evaluation_hold_s:g} s (`evaluation_hold_s`)"),
    ("docs/evaluation.md", f"at most `evaluation_share` ({SAMPLER.evaluation_share:g}) of the rows"),
    ("docs/launch.md", f"plus {nodes.SHARED_MEMORY_GIB} GiB of shared memory with GPUs"),
    (
        "docs/operate.md",
        f"`listen`: {COORDINATOR.listen} | all nodes, operators | {COORDINATOR.metrics_port} | `data_dir`",
    ),
    ("docs/operate.md", f"its other machines | {LEARNER.metrics_port} | `state_dir`"),
    ("docs/operate.md", f"those programs | {SAMPLER.metrics_port} | `state_dir`"),
    ("docs/operate.md", f"`listen`: {RELAY.listen} | samplers of its place | {RELAY.metrics_port} | `cache_dir`"),
    ("docs/operate.md", f"`heterorl certs serve` | 0.0.0.0:{certs.DESK_PORT}"),
    ("docs/operate.md", f"If you raise `metrics_nodes` ({COORDINATOR.metrics_nodes})"),
    ("docs/operate.md", f"`canary_threshold` (median, {COORDINATOR.canary_threshold:g} nats)"),
    ("docs/operate.md", f"the answer up to {MAX_ANSWER:,} characters"),
    ("docs/operate.md", f"`payload_space_bytes` | {COORDINATOR.payload_space_bytes >> 40} TiB"),
    ("docs/operate.md", f"`merged_bytes` | {COORDINATOR.merged_bytes // GIB} GiB"),
    ("docs/operate.md", f"`min_free_bytes` | {COORDINATOR.min_free_bytes // MIB} MiB"),
    # The new one is there before the oldest goes.
    (
        "docs/operate.md",
        f"room for {WORDS[checkpoint_store.NUM_KEPT + 1]} checkpoints (one new) of {checkpoint_store.STATE_BYTES} bytes a"
        " parameter",
    ),
    ("docs/own-losses.md", f"name -> [B, T] or [B] | at most {custom.MAX_METRICS}, shown as means"),
    (
        "docs/quickstart.md",
        f"share of right answers on {demo_config.FULL.num_evaluation} held-out prompts | ends at least"
        f" {demo_config.FULL.required_gain:g} above its start",
    ),
    (
        "docs/quickstart.md",
        f"{demo_config.FULL.lag_versions} to 68; the demo allows {demo_config.FULL.max_staleness_versions}",
    ),
    ("docs/quickstart.md", f"({demo_config.TINY.max_steps} steps, {demo_config.TINY.lag_versions} versions behind)"),
    ("docs/recipes.md", f"`work_ahead_s` (sampler) | {SAMPLER.work_ahead_s:g} s"),
    ("docs/recipes.md", f"`outbox_bytes` (sampler) | {SAMPLER.outbox_bytes // GIB} GiB"),
    ("docs/recipes.md", f"`max_work_ahead_s` (coordinator) | {COORDINATOR.max_work_ahead_s:g} s"),
    ("docs/recipes.md", f"`work_lease_s` (coordinator) | {COORDINATOR.work_lease_s:g} s"),
    (
        "docs/recipes.md",
        f"`max_superseded_s` (coordinator) | {COORDINATOR.max_staleness_versions}; {COORDINATOR.max_superseded_s:g} s",
    ),
    ("docs/recipes.md", f"({(COORDINATOR.work_lease_s + SAMPLER.work_ahead_s) / 60:g} minutes by default)"),
    ("docs/recipes.md", f"(checkpoints below {checkpoint_store.LARGE_BYTES // GIB} GiB), else every tenth"),
    (
        "docs/relay.md",
        f"{(2 * cached_weights.MANIFEST_BYTES + cached_weights.PLAN_BYTES) // MIB} MiB for plans and manifests",
    ),
    (
        "docs/rewards.md",
        f"processes (sampler {sampler_config.REWARD_WORKERS}, learner {LEARNER.task.reward_workers} unless set)",
    ),
    (
        "docs/rewards.md",
        f"`task.reward_timeout_s` ({SAMPLER.task.reward_timeout_s:g} s) of processor time, so the load of a machine"
        f" does not change its score. By the clock it has {WORDS[worker_pool.PATIENCE]} times as much",
    ),
    (
        "docs/rewards.md",
        f"math_verify has at most {answer_match.LIMIT_S:g} s (by the clock {answer_match.PATIENCE:g} times). Below",
    ),
    ("docs/rewards.md", f"words, up to {WORDS[math_expressions.MAX_WORDS]}"),
    (
        "docs/rewards.md",
        f"Values beyond 1e{math.log10(MAX_PART_VALUE):g} and rewards beyond 1e{math.log10(MAX_REWARD):g} either way",
    ),
    ("docs/rewards.md", f"other status, redirect, above {http_reward.MAX_REPLY_BYTES // MIB} MiB"),
    (
        "docs/rewards.md",
        f"half of `task.reward_timeout_s`, at most {gym_reward.LIMIT_S:g} s of processor time;"
        f" {gym_reward.MEMORY_BYTES // GIB} GiB a process, {gym_reward.NUM_PROCESSES} processes or threads,"
        f" {gym_reward.WORK_BYTES // MIB} MiB of files",
    ),
    (
        "docs/rewards.md",
        f"only if its own {WORDS[reward_checks.RUN_AGAIN + 1]} runs agree and none took more than"
        f" {WORDS[worker_pool.NEAR]} of a limit",
    ),
    ("docs/scale.md", f"tokens of one pass, {LEARNER.backend.micro_batch_tokens} by default"),
    ("docs/trackers.md", f"cut at {tracker.MAX_TEXT:,} characters"),
    (
        "docs/untrusted.md",
        f"decayed over {quarantine.WINDOW_GROUPS} groups. Above `max_lost_share` ({COORDINATOR.max_lost_share:g})",
    ),
    ("docs/untrusted.md", f"that calls half of each group lost has its groups dropped from the {first_dropped()}th on"),
    # As a comment of the constant says: at most 2.9 times as much disk.
    ("docs/view.md", f"about {2.9 * pages.LIMIT_BYTES / 1e9:.0f} GB"),
    ("deploy/README.md", f"A service whose loop hangs for {notify.HUNG_S:g} s is ended and started again"),
    (
        "deploy/README.md",
        f"(an engine: {completion_collector.HUNG_S:g} s and {completion_collector.HUNG_TIMES:g} longest completions)",
    ),
    (
        "deploy/README.md",
        f"`docker pause` and `scontrol suspend` count (ranks: {1.25 * DIVIDED.backend.rank_timeout_s:g} s)",
    ),
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


def test_places_kept_from_samplers():
    assert call_admission.RESERVED_PART == 8
    assert server_limits.OF_SITE == 0.75
    words = "an eighth for learner and operator; one site three quarters of the rest"
    assert words in " ".join((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split())


def test_a_lease_is_renewed_three_times_a_term():
    assert state_directory.RENEWALS_PER_TERM == 3
    assert "| learner.renew | a third of the lease |" in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("parameters", "gpus", "backend", "words"),
    [
        (3e9, 1, "torch", "| 3 billion | one, `torch` | {} GB: the largest for a card of 80 GB |"),
        (3.9e9, 1, "fsdp2", "| 3.9 billion | one, `fsdp2` | {} GB: the largest for a card of 80 GB |"),
        (8e9, 1, "torch", "| 8 billion | one, `torch` | {} GB: too much |"),
        (8e9, 2, "fsdp2", "| 8 billion | two, `fsdp2` | {} GB: too much |"),
        (8e9, 4, "fsdp2", "| 8 billion | four, `fsdp2` | {} GB |"),
    ],
)
def test_memory_of_the_page_is_that_of_a_plan(parameters, gpus, backend, words):
    found = plan(Question(parameters=parameters, gpus=gpus, backend=backend))

    assert words.format(f"{found.memory.total / 1e9:.0f}") in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert found.fits == ("too much" not in words)
    if "the most" in words:
        assert not plan(Question(parameters=1.03 * parameters, gpus=gpus, backend=backend)).fits


def test_options_of_a_plan_have_the_defaults_of_the_page():
    asked, given = Question(parameters=1e9), Assumptions()
    page = " ".join((ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split())

    for words in (
        f"| `--gpus`, `--gpus-per-node` | {asked.gpus}, {asked.gpus_per_node} |",
        f"| `--backend`, `--compute-dtype` | {asked.backend}, {asked.products} |",
        f"| `--link`, `--rtt` | {asked.link_bits_per_s / 1e9:g}Gbit, {1000 * asked.rtt_s:g}ms |",
        f"| `--tokens-per-step` | {asked.tokens_per_step} |",
        f"| `--steps-per-version` | {asked.steps_per_version} |",
        f"| `--sites` | {asked.sites} |",
        f"| `--lr`, `--changed-fraction` | {LR:.0e}, none |".replace("e-0", "e-"),
        f"`mfu` {given.mfu:g}, `hbm_gb` {given.hbm_gb:g}, `sequence_tokens` {given.sequence_tokens:g}",
    ):
        assert words in page


@pytest.mark.parametrize(("tokens", "kl_token"), [(101, 0.01), (1000, 0.0011), (1000, 0.003), (4000, 0.0011)])
def test_share_of_bad_rollouts_that_train_is_computed(tokens, kl_token):
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    rules = [
        loss_spec_of(LearnerConfig.model_validate({"loss": {"kind": kind}}).loss)
        for kind in ("gepo_whole", "topr", "gepo_product")
    ]
    whole, topr, product = (open_share(rule, max_new_tokens=tokens, kl_token=kl_token) for rule in rules)

    assert topr == product
    assert re.search(rf"\| {tokens:,} \| {kl_token:g}[^|]*\| {100 * whole:.0f} % \| {100 * topr:.0f} % \|", page)


def test_oldest_versions_of_the_page_are_those_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needs = {
        (extra, found["name"]): found["version"]
        for extra in ("learner", "sampler", "vllm", "deepspeed", "verifiers")
        for line in extras[extra]
        if (found := re.match(r"(?P<name>[a-z0-9-]+)>=(?P<version>[\d.]+)", line))
    }
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")

    assert (
        f"torch {needs['learner', 'torch']} and transformers {needs['learner', 'transformers']} (sampler:"
        f" {needs['sampler', 'torch']} and {needs['sampler', 'transformers']}). vLLM is {needs['vllm', 'vllm']},"
        f" DeepSpeed {needs['deepspeed', 'deepspeed']}."
    ) in page
    games = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    assert f"(extra `verifiers`: version {needs['verifiers', 'verifiers']})" in games


def test_python_is_that_of_the_readme():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]

    assert f"Python {needs.removeprefix('>=')}" in (ROOT / "README.md").read_text()


def test_a_job_of_slurm_tries_ten_times():
    (attempts,) = re.findall(r"HETERORL_ATTEMPTS:-(\d+)", (ROOT / "deploy" / "slurm" / "learner.sbatch").read_text())

    assert f"{WORDS[int(attempts)]} times (`HETERORL_ATTEMPTS`)" in (ROOT / "docs" / "machines.md").read_text()


def test_a_job_of_slurm_has_the_gpus_the_port_and_the_end_of_the_page():
    script = (ROOT / "deploy" / "slurm" / "learner.sbatch").read_text()
    page = " ".join((ROOT / "docs" / "machines.md").read_text().split())
    (gpus,) = re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", script, re.MULTILINE)
    (seconds,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    ((first, ports),) = re.findall(r"^port=\$\(\((\d+) \+ SLURM_JOB_ID % (\d+)\)\)$", script, re.MULTILINE)

    assert f"A machine gives {gpus} GPUs unless `--gpus-per-node` differs." in page
    assert f"torchrun's port is {first} + the job's number modulo {ports}." in page
    assert int(seconds) == 1200
    assert "Twenty minutes before its time limit the job stops in order and is queued again." in page


def test_parts_of_the_trial_of_a_card_have_the_shares_of_the_page():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")

    assert [int(share) for share in re.findall(r"^\| [^|]+ \| (\d+) % \|", page, re.MULTILINE)] == [
        round(100 * part.share) for part in trial.PARTS
    ]


def test_the_first_run_has_the_steps_and_questions_of_the_page():
    files, page = ROOT / "examples" / "first-run", (ROOT / "docs" / "two-sites.md").read_text(encoding="utf-8")
    steps = tomllib.loads((files / "learner.toml").read_text())["max_steps"]

    assert f"has four configurations, {len((files / 'questions.jsonl').read_text().splitlines())} questions" in page
    assert f"After the learner's `max_steps`, {steps} here" in page


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
