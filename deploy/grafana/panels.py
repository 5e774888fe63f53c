"""The one table of all panels; dashboards, preview and tests are made from it.

Data only: no layout, no JSON. In queries `$run` and `$site` are dashboard variables, `$window` the
rate window. Legends use Prometheus labels in double braces. `$run` is All at first: every query keeps the label `run`,
and every legend says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat", "table"]

RUN = 'run=~"$run"'
SITE = 'run=~"$run",site=~"$site"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: `unit` is Grafana's id of a unit, `note` why one would look at it."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    note: str = ""
    is_log: bool = False
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard; `uid` is stable, links point at it."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    has_sites: bool = True


def _query(expr: str, legend: str) -> tuple[Query, ...]:
    """One query whose legend begins with the run."""
    return (Query(expr=expr, legend=legend if "{{run}}" in legend else f"{{{{run}}}} {legend}".strip()),)


def _by(*labels: str) -> str:
    return ", ".join(dict.fromkeys(("run", *labels)))


def _gauge(metric: str, legend: str, selector: str = RUN) -> tuple[Query, ...]:
    return _query(f"{metric}{{{selector}}}", legend)


def _quantiles(
    metric: str, legend: str, selector: str, *by: str, share: tuple[float, ...] = (0.5, 0.95)
) -> tuple[Query, ...]:
    expr = f"sum by ({_by('le', *by)}) (rate({metric}_bucket{{{selector}}}[$window]))"
    return tuple(
        query for q in share for query in _query(f"histogram_quantile({q}, {expr})", f"{legend} p{q * 100:g}".strip())
    )


def _rate(metric: str, legend: str, selector: str, *by: str) -> tuple[Query, ...]:
    return _query(f"sum by ({_by(*by)}) (rate({metric}{{{selector}}}[$window]))", legend)


def _shares(metric: str, label: str) -> tuple[Query, ...]:
    """Seconds in a second by a label. They are counted when they end, so several minutes may end in one window."""
    rates = f"(rate({metric}{{{RUN}}}[$window]))"
    whole = f"clamp_min(sum by (run) {rates}, 1)"
    return _query(f"sum by ({_by(label)}) {rates} / on (run) group_left {whole}", f"{{{{{label}}}}}")


_STREAMS = "WatchHead|StreamGroups|UploadPayload|ReadPayload"
_UNARY = f'{RUN},method!~"{_STREAMS}"'

RUN_BOARD = Dashboard(
    uid="heterorl-run",
    title="heterorl / Run",
    panels=(
        Panel(title="Version", unit="none", kind="stat", queries=_gauge("heterorl_coordinator_head_version", "{{run}}"),
              note="Newest policy version."),
        Panel(title="Time since the last step", unit="s", kind="stat",
              queries=_query("time() - max by (run) ("
                             f"last_over_time(heterorl_learner_last_step_timestamp_seconds{{{RUN}}}[1d]) or "
                             f"last_over_time(heterorl_coordinator_head_timestamp_seconds{{{RUN}}}[1d]))", "{{run}}"),
              note="Or since the newest version, if that is newer. It grows for a day while the learner or the"
                   " coordinator is down."),
        Panel(title="Ledger balanced", unit="bool_yes_no", kind="stat",
              queries=_gauge("heterorl_coordinator_ledger_balanced", "{{run}}"),
              note="Acked = pending + leased + consumed + dropped."),
        Panel(title="Staleness used, p95 over the bound", unit="percentunit", kind="stat",
              queries=_query(f"last_over_time((histogram_quantile(0.95, sum by (run, le) (rate("
                             f"heterorl_learner_staleness_versions_bucket{{{RUN}}}[$window])))"
                             f" / on (run) heterorl_coordinator_max_staleness_versions{{{RUN}}} >= 0)[1h:])",
                             "{{run}}"),
              note="Of the newest steps within an hour, also while the learner is down."),
        Panel(title="Reward", unit="none", queries=_gauge("heterorl_learner_reward_mean", "{{run}}"),
              note="Mean reward of the newest step."),
        Panel(title="Held-out score", unit="none",
              queries=_gauge("heterorl_learner_evaluation_accuracy_ratio", "{{run}}"),
              note="Mean score of the newest evaluation; the accuracy where rewards are 0 and 1."),
        Panel(title="KL of sampler from learner policy", unit="none",
              queries=_gauge("heterorl_learner_sampler_kl_nats", "{{run}}"),
              note="Nats per sequence; how far the behaviour policy is away."),
        Panel(title="Effective sample size", unit="percentunit",
              queries=_gauge("heterorl_learner_ess_ratio", "{{run}}"),
              note="Share of the batch that counts after weighting.", minimum=0, maximum=1),
        Panel(title="Variance of importance weights", unit="none",
              queries=_gauge("heterorl_learner_importance_weight_variance", "{{run}}"), minimum=0),
        Panel(title="Clipped terms", unit="percentunit",
              queries=_gauge("heterorl_learner_clipped_terms_ratio", "{{run}}"), minimum=0),
        Panel(title="Bad rollouts that train", unit="percentunit",
              queries=_gauge("heterorl_learner_bad_rollouts_trained_ratio", "{{run}}"), minimum=0, maximum=1,
              note="Share of the rollouts with A < 0 that masks, clip and weight leave. Near 0 the loss only repeats "
                   "good rollouts."),
        Panel(title="KL a token without staleness", unit="none",
              queries=(*_gauge("heterorl_learner_kl_token_fresh_nats", "{{run}}"),
                       *_gauge("heterorl_coordinator_site_canary_kl_nats", "canary of {{site}}")), minimum=0,
              note="Nats; of groups that the step's own version made, and of canaries, which no staleness touches: the "
                   "mismatch of sampler and learner engines."),
        Panel(title="Staleness of trained groups", unit="none",
              queries=_quantiles("heterorl_learner_staleness_versions", "", RUN),
              note="Versions between the policy of a group and the head at its step.", minimum=0),
        Panel(title="Gradient norm", unit="none", queries=_gauge("heterorl_learner_grad_norm", "{{run}}"),
              is_log=True, note="Before clipping."),
        Panel(title="Learning rate", unit="none", queries=_gauge("heterorl_learner_learning_rate", "{{run}}"),
              note="Of the newest step: backend.lr by the schedule, and by the loss where that has a factor.",
              minimum=0),
        Panel(title="Completion length", unit="none", minimum=0,
              queries=_gauge("heterorl_learner_completion_tokens", "{{stat}}"),
              note="Tokens. Look for a creep towards the limit, and for high and low rewards that drift apart."),
        Panel(title="Truncated completions", unit="percentunit", minimum=0, maximum=1,
              queries=_gauge("heterorl_learner_truncated_ratio", "{{run}}"),
              note="Cut at max_new_tokens: such an answer is rarely right."),
        Panel(title="Groups with equal rewards", unit="percentunit", minimum=0, maximum=1,
              queries=_gauge("heterorl_learner_equal_reward_groups_ratio", "{{run}}"),
              note="They give no gradient: all right is too easy, all wrong too hard."),
        Panel(title="Replaced groups", unit="none", minimum=0,
              queries=_rate("heterorl_learner_replaced_groups_total", "{{run}}", RUN, "run"),
              note="Groups of equal rewards that a step replaced by others: work of samplers that taught nothing."),
        Panel(title="Parts of the reward", unit="none", queries=_gauge("heterorl_learner_reward_part_mean", "{{part}}"),
              note="Means of the newest step; one that rises alone is being gamed."),
        Panel(title="Metrics of the loss", unit="none",
              queries=_gauge("heterorl_learner_loss_metric_mean", "{{metric}}"),
              note="Of a loss of your own, docs/own-losses.md: means of the newest step."),
        Panel(title="Steps without a reward signal", unit="none",
              queries=_gauge("heterorl_learner_steps_without_signal", "{{run}}"),
              note="Steps in a row in which all rollouts of each group had one reward: no gradient.", minimum=0),
        Panel(title="Entropy", unit="none", queries=_gauge("heterorl_learner_entropy_nats", "{{run}}"),
              note="Nats per token; a collapse ends exploration.", minimum=0),
        Panel(title="Loss", unit="none", queries=_gauge("heterorl_learner_loss", "{{run}}")),
        Panel(title="Tokens per second", unit="none",
              queries=_rate("heterorl_tokens_total", "{{service}}", f'{RUN},service!="coordinator"', "service"),
              minimum=0),
        Panel(title="Step duration", unit="s", queries=_quantiles("heterorl_learner_step_seconds", "", RUN), minimum=0),
        Panel(title="What the trainer does", unit="percentunit",
              queries=_shares("heterorl_learner_phase_seconds_total", "phase"), minimum=0, maximum=1,
              note="Waiting: samplers or the link are the bottleneck. Examining: the checks are."
                   " Publishing: a version is rounded and copied, or takes longer than a step."),
        Panel(title="Progress of the step", unit="percentunit",
              queries=_gauge("heterorl_learner_step_progress_ratio", "{{run}}"), minimum=0, maximum=1,
              note="Micro-batches done of the current step; 0 between steps."),
        Panel(title="Steps per minute", unit="none",
              queries=_query(f"60 * sum by (run, applied) (rate(heterorl_learner_steps_total{{{RUN}}}[$window]))",
                             "applied {{applied}}"), minimum=0),
        # Runs without mixtures and evaluation sets have no data here.
        Panel(title="Reward by source", unit="none",
              queries=_gauge("heterorl_learner_source_reward_mean", "{{source}}"),
              note="Of a mixture of tasks: mean reward of a source's newest trained groups."),
        Panel(title="Groups trained by source", unit="short",
              queries=_query("sum by (run, source) (rate("
                             f"heterorl_learner_source_groups_total{{{RUN}}}[$window]))", "{{source}}"),
              note="Groups a second; their shares should be the weights of the mixture."),
        Panel(title="Evaluation sets", unit="none",
              queries=_gauge("heterorl_coordinator_evaluation_reward_mean", "{{set}}"),
              note="Mean reward of the newest version whose evaluation is done; intervals: heterorl status."),
        Panel(title="Evaluated version", unit="none",
              queries=_gauge("heterorl_coordinator_evaluation_version", "{{set}}"),
              note="A set that stays behind has no site that evaluates it, or too few.", minimum=0),
        Panel(title="Held-out prompts per second", unit="none",
              queries=_query(f"sum by (run, site) (rate("
                             f"heterorl_coordinator_evaluated_prompts_total{{{RUN}}}[$window]))", "{{site}}"),
              note="Counted by the coordinator, by the site that computed them.", minimum=0),
    ),
    has_sites=False,
)  # fmt: skip

LATENCY_BOARD = Dashboard(
    uid="heterorl-latency",
    title="heterorl / Latency",
    panels=(
        Panel(title="Round trip by site", unit="s", is_log=True,
              queries=_quantiles("heterorl_rpc_seconds", "{{site}}",
                                 f'{SITE},service="sampler",side="client",method="Heartbeat",code="OK"', "site"),
              note="An answered heartbeat as the sampler sees it, the coordinator's commit included."),
        Panel(title="Policy age at the swap", unit="s", is_log=True,
              queries=_quantiles("heterorl_sampler_policy_age_seconds", "{{site}}", f'{SITE},stage="apply"', "site"),
              note="From publication until a site generates with the version: transit, pull, apply, wait for a batch."),
        Panel(title="Policy age at the end of generation", unit="s", is_log=True,
              queries=_quantiles("heterorl_sampler_policy_age_seconds", "{{site}}", f'{SITE},stage="generate"',
                                 "site")),
        Panel(title="Push delay by site", unit="s", is_log=True,
              queries=_quantiles("heterorl_sampler_push_delay_seconds", "{{site}}", SITE, "site"),
              note="From the spool to the acknowledgement; an outage shows here."),
        Panel(title="Queue age by site", unit="s", is_log=True,
              queries=_quantiles("heterorl_coordinator_queue_age_seconds", "{{site}}", SITE, "site"),
              note="From arrival to the lease by the learner."),
        Panel(title="Policy age at the lease", unit="s", is_log=True,
              queries=_quantiles("heterorl_coordinator_policy_age_seconds", "{{site}}", SITE, "site"),
              note="From its publication; an old policy is not superseded while it is the newest."),
        Panel(title="Superseded at the lease", unit="s", is_log=True,
              queries=_quantiles("heterorl_coordinator_superseded_seconds", "{{site}}", SITE, "site")
              + _gauge("heterorl_coordinator_max_superseded_seconds", "bound"),
              note="Since the next version's publication; beyond the bound, groups are dropped."),
        Panel(title="Policy age when trained", unit="s", is_log=True,
              queries=_quantiles("heterorl_learner_policy_age_seconds", "{{site}}", SITE, "site"),
              note="The whole way: publish, apply, generate, push, queue, train."),
        Panel(title="Staleness when trained", unit="none",
              queries=_quantiles("heterorl_learner_staleness_versions", "{{site}}", SITE, "site"), minimum=0),
        Panel(title="Time in the learner's inbox", unit="s",
              queries=_quantiles("heterorl_learner_inbox_seconds", "", RUN), minimum=0),
        Panel(title="Rpc duration at the caller", unit="s", is_log=True,
              queries=_quantiles("heterorl_rpc_seconds", "{{service}}", f'{_UNARY},side="client"', "service",
                                 share=(0.5, 0.95, 0.99)), note="Without streams, which last."),
        Panel(title="Rpc duration at the server", unit="s", is_log=True,
              queries=_quantiles("heterorl_rpc_seconds", "", f'{_UNARY},side="server"', share=(0.5, 0.95, 0.99))),
        Panel(title="Rpc p95 by method, at the server", unit="s", is_log=True,
              queries=_quantiles("heterorl_rpc_seconds", "{{method}}", f'{_UNARY},side="server"', "method",
                                 share=(0.95,))),
        Panel(title="Rpcs that did not succeed", unit="ops",
              queries=_rate("heterorl_rpc_seconds_count", "{{method}} {{code}}", f'{RUN},side="client",code!="OK"',
                            "method", "code"), minimum=0,
              note="At the caller; refusals such as draining belong to a healthy end of a run."),
    ),
)  # fmt: skip

WEIGHTS_BOARD = Dashboard(
    uid="heterorl-weights",
    title="heterorl / Weights",
    panels=(
        Panel(title="Compression", unit="suffix:x", minimum=0,
              queries=_gauge("heterorl_learner_compression_ratio", "{{run}}"),
              note="Bytes of the weights over bytes of the newest version's smallest payload."),
        Panel(title="Changed weights", unit="percentunit", minimum=0,
              queries=_gauge("heterorl_learner_changed_ratio", "{{run}}")),
        Panel(title="Digest mismatches", unit="none", kind="stat",
              queries=_query(f"sum by (run) (heterorl_digest_mismatches_total{{{RUN}}})", "mismatches"),
              note="Anything but 0 is a broken disk, link or program; nothing wrong was generated with."),
        Panel(title="Payload of the newest version", unit="bytes", is_log=True,
              queries=_gauge("heterorl_learner_version_bytes", "{{kind}}")
              + _gauge("heterorl_learner_full_bytes", "weights")),
        Panel(title="Weight bytes moved, at the coordinator", unit="Bps",
              queries=_rate("heterorl_bytes_total", "{{direction}}", f'{RUN},service="coordinator",kind="weights"',
                            "direction"), minimum=0),
        Panel(title="Payload bytes of relays", unit="Bps",
              queries=_rate("heterorl_relay_payload_bytes_total", "{{way}} {{instance}}", RUN, "way", "instance"),
              note="from_coordinator and from_bucket cross the line, to_nodes stays at the site."),
        Panel(title="Payload reads at relays", unit="ops", minimum=0,
              queries=_rate("heterorl_relay_payload_reads_total", "{{outcome}}", RUN, "outcome"),
              note="passed: larger than cache_bytes, or no disk; damaged: a disk changed bytes, fetched again."),
        Panel(title="Cache of relays", unit="percentunit", minimum=0, maximum=1,
              queries=_query(f"heterorl_relay_cache_bytes{{{RUN}}} / heterorl_relay_cache_limit_bytes{{{RUN}}}",
                             "{{instance}}")),
        Panel(title="Calls at relays", unit="none", minimum=0, queries=_gauge("heterorl_relay_calls", "{{instance}}")),
        Panel(title="Weight bytes pulled by site", unit="Bps",
              queries=_rate("heterorl_bytes_total", "{{site}} {{kind}}",
                            f'{SITE},service="sampler",kind=~"delta|merged|snapshot",direction="in"', "site", "kind"),
              minimum=0),
        Panel(title="Versions per minute by kind", unit="none",
              queries=_query(f"60 * sum by (run, kind) (rate(heterorl_learner_versions_total{{{RUN}}}[$window]))",
                             "{{kind}}"),
              note="Snapshot where a delta would not be smaller: too much changed.", minimum=0),
        Panel(title="Newest version by variant", unit="bytes", is_log=True,
              queries=_gauge("heterorl_coordinator_variant_bytes", "{{variant}} {{kind}}"),
              note="Full is the size of the weights in that form; a site pulls the deltas of its own."),
        Panel(title="Sites by variant", unit="none", minimum=0,
              queries=_query(f"sum by (run, variant) (heterorl_coordinator_site_variant_info{{{SITE}}})",
                             "{{variant}}")),
        Panel(title="Encode", unit="s", queries=_quantiles("heterorl_learner_encode_seconds", "", RUN), minimum=0),
        Panel(title="Upload and commit", unit="s", queries=_quantiles("heterorl_learner_publish_seconds", "", RUN),
              minimum=0),
        Panel(title="Pull by site", unit="s", is_log=True,
              queries=_quantiles("heterorl_pull_seconds", "{{site}}", f'{SITE},service="sampler"', "site")),
        Panel(title="Apply and verify by site", unit="s", is_log=True,
              queries=_quantiles("heterorl_apply_seconds", "{{site}}", f'{SITE},service="sampler"', "site")),
        Panel(title="Load into the engine by site", unit="s", is_log=True,
              queries=_quantiles("heterorl_sampler_swap_seconds", "{{site}}", SITE, "site")),
    ),
)  # fmt: skip

SITES_BOARD = Dashboard(
    uid="heterorl-sites",
    title="heterorl / Sites",
    panels=(
        Panel(title="Versions behind the head", unit="none", minimum=0,
              queries=_query(f"max by (run) (heterorl_coordinator_head_version{{{RUN}}}) - on (run) group_right"
                             f" heterorl_coordinator_site_policy_version{{{SITE}}}", "{{site}}")),
        Panel(title="Silence", unit="s", queries=_gauge("heterorl_coordinator_site_silence_seconds", "{{site}}", SITE),
              note="Since the last sign of life.", minimum=0),
        Panel(title="Canary", unit="none", is_log=True,
              queries=_gauge("heterorl_coordinator_site_canary_nats", "{{site}}", SITE),
              note="Median difference of log-probs from the learner's, nats; above canary_threshold: quarantine."),
        Panel(title="Quarantine", unit="none", minimum=0,
              queries=(*_gauge("heterorl_coordinator_site_quarantined", "{{site}}", SITE),
                       *_gauge("heterorl_coordinator_standstill", "every site that answers", RUN))),
        Panel(title="Failed checks", unit="none", minimum=0,
              queries=_gauge("heterorl_coordinator_site_failed_groups", "{{site}}", SITE),
              note="Groups whose rewards, log-probs or draws the learner computed otherwise; too many: quarantine."),
        Panel(title="Checked groups", unit="none", minimum=0,
              queries=_query("60 * sum by (run, site, check, verdict) (rate(heterorl_learner_checked_groups_total"
                             f"{{{SITE}}}[$window]))", "{{site}} {{check}} {{verdict}}")),
        Panel(title="Duration of checks", unit="s", is_log=True,
              queries=_quantiles("heterorl_learner_check_seconds", "checks", RUN)),
        Panel(title="Push quotas", unit="percentunit", minimum=0, maximum=1,
              queries=_gauge("heterorl_coordinator_site_quota_ratio", "{{site}} {{quota}}", SITE)),
        Panel(title="Refused for a quota", unit="none", minimum=0,
              queries=_query("60 * sum by (run, site, quota) (rate(heterorl_coordinator_quota_refusals_total"
                             f"{{{SITE}}}[$window]))", "{{site}} {{quota}}")),
        Panel(title="Tokens per second", unit="none",
              queries=_rate("heterorl_tokens_total", "{{site}}", f'{SITE},service="sampler"', "site"), minimum=0),
        Panel(title="Trained tokens per second", unit="none", minimum=0,
              queries=_rate("heterorl_learner_site_tokens_total", "{{site}}", SITE, "site"),
              note="What a site gives the run; what it generates beyond that was late, surplus or refused."),
        Panel(title="Groups per minute", unit="none",
              queries=_query("60 * sum by (run, site, status) (rate(heterorl_coordinator_pushed_groups_total"
                             f"{{{SITE}}}[$window]))", "{{site}} {{status}}"), minimum=0),
        Panel(title="Generation batch", unit="s", is_log=True,
              queries=_quantiles("heterorl_sampler_generate_seconds", "{{site}}", SITE, "site")),
        Panel(title="Assignments held", unit="none", minimum=0,
              queries=(*_gauge("heterorl_coordinator_site_work_groups", "{{site}}", SITE),
                       *_gauge("heterorl_coordinator_site_away_groups", "{{site}} away", SITE)),
              note="Away: a silent site that works ahead holds them, and they count against no site until it returns."),
        Panel(title="Rejections", unit="ops", minimum=0,
              queries=_rate("heterorl_coordinator_pushed_groups_total", "{{site}} {{reason}}",
                            f'{SITE},status="dropped"', "site", "reason"),
              note="Groups that were acknowledged and dropped, by reason."),
        Panel(title="Lost members", unit="ops", minimum=0,
              queries=_rate("heterorl_coordinator_lost_members_total", "{{site}} {{reason}}", SITE, "site", "reason"),
              note="Rollouts of pushed groups that are not trained on; above max_lost_share their groups are dropped."),
        Panel(title="Egress", unit="Bps", minimum=0,
              queries=_rate("heterorl_bytes_total", "{{site}} {{kind}}", f'{SITE},service="sampler",direction="out"',
                            "site", "kind")),
        Panel(title="Ingress", unit="Bps", minimum=0,
              queries=_rate("heterorl_bytes_total", "{{site}} {{kind}}", f'{SITE},service="sampler",direction="in"',
                            "site", "kind")),
        Panel(title="Share of time spent waiting for the bandwidth cap", unit="percentunit", minimum=0,
              queries=_rate("heterorl_bandwidth_wait_seconds_total", "{{site}} {{direction}}",
                            f'{SITE},service="sampler"', "site", "direction")),
        Panel(title="Outbox", unit="none",
              queries=_gauge("heterorl_sampler_outbox_groups", "{{site}}", SITE), minimum=0,
              note="Groups waiting for the coordinator; grows in an outage, must fall after it."),
        Panel(title="Engine failures", unit="ops", minimum=0,
              queries=_rate("heterorl_sampler_engine_failures_total", "{{site}} {{reason}}", SITE, "site", "reason"),
              note="stale: after a swap the engine did not compute with the new weights; it is started again."),
        Panel(title="Verifier failures", unit="ops", minimum=0,
              queries=_rate("heterorl_sampler_reward_errors_total", "{{site}} {{source}}", SITE, "site", "source")),
        Panel(title="Refused prompts", unit="ops", minimum=0,
              queries=_rate("heterorl_sampler_refused_prompts_total", "{{site}} {{source}} {{reason}}", SITE,
                            "site", "source", "reason"),
              note="Rows that the template refuses, or too long for the engine; the sampler's log names them."),
        Panel(title="Share of a trajectory's time in its environment", unit="percentunit", minimum=0, maximum=1,
              queries=_query(
                  f'sum by (run, site, source) (rate(heterorl_sampler_trajectory_seconds_total{{{SITE},part="tools"}}'
                  "[$window])) / sum by (run, site, source)"
                  f" (rate(heterorl_sampler_trajectory_seconds_total{{{SITE}}}[$window]))", "{{site}} {{source}}"),
              note="Waits for a place count too: near 1 an engine idles, and more environment_workers help."),
        Panel(title="Endings of trajectories", unit="none", minimum=0,
              queries=_query("60 * sum by (run, site, source, reason) (rate(heterorl_sampler_trajectories_total"
                             f"{{{SITE}}}[$window]))", "{{site}} {{source}} {{reason}}"),
              note="A minute, by finish_reason: eos and length are the environment's, the others limits or losses."),
        Panel(title="Turns and tokens of a trajectory", unit="none", minimum=0, is_log=True,
              queries=(
                  *_query(f"sum by (run, site, source) (rate(heterorl_sampler_turns_total{{{SITE}}}[$window]))"
                          " / sum by (run, site, source)"
                          f" (rate(heterorl_sampler_trajectories_total{{{SITE}}}[$window]))",
                          "{{site}} {{source}} turns"),
                  *_query("sum by (run, site, source, kind)"
                          f" (rate(heterorl_sampler_trajectory_tokens_total{{{SITE}}}[$window]))"
                          " / on (run, site, source) group_left sum by (run, site, source)"
                          f" (rate(heterorl_sampler_trajectories_total{{{SITE}}}[$window]))",
                          "{{site}} {{source}} {{kind}}"))),
    ),
)  # fmt: skip

COORDINATOR_BOARD = Dashboard(
    uid="heterorl-coordinator",
    title="heterorl / Coordinator",
    panels=(
        Panel(title="Processes up", unit="none", kind="stat",
              queries=_query(f'sum by (run, service) (up{{job="heterorl",{RUN}}} or'
                             f' process_start_time_seconds{{job="heterorl-nodes",{RUN}}} ^ 0)', "{{service}}")),
        Panel(title="Epoch", unit="none", kind="stat", queries=_gauge("heterorl_coordinator_learner_epoch", "{{run}}"),
              note="Grows by one with every learner that takes the lease, and by a million at a restore."),
        Panel(title="Draining", unit="bool_yes_no", kind="stat",
              queries=_gauge("heterorl_coordinator_draining", "{{run}}")),
        Panel(title="Commit duration", unit="s", is_log=True,
              queries=_quantiles("heterorl_coordinator_commit_seconds", "", RUN, share=(0.5, 0.95, 0.99)),
              note="The fsync of the store; above 100 ms the disk is the bottleneck."),
        Panel(title="Commits and operations", unit="ops", minimum=0,
              queries=_rate("heterorl_coordinator_commit_seconds_count", "commits", RUN, "run")
              + _rate("heterorl_coordinator_commit_operations_total", "operations", RUN, "run"),
              note="Their ratio is how many operations share one fsync."),
        Panel(title="Queue", unit="none", queries=_gauge("heterorl_coordinator_queue_groups", "{{state}}"), minimum=0),
        Panel(title="Oldest pending group", unit="s", minimum=0,
              queries=_gauge("heterorl_coordinator_queue_oldest_seconds", "{{run}}")),
        Panel(title="Ledger", unit="none",
              queries=_gauge("heterorl_coordinator_ledger_groups", "{{account}}"), minimum=0),
        Panel(title="Dropped groups by reason", unit="none", minimum=0,
              queries=_gauge("heterorl_coordinator_ledger_dropped_groups", "{{reason}}")),
        Panel(title="Closed assignments by reason", unit="none", minimum=0,
              queries=_gauge("heterorl_coordinator_ledger_closed_assignments", "{{reason}}"),
              note="Rows of the data that gave no group at several returns; the coordinator's log names the prompts."),
        Panel(title="Disk free", unit="percentunit", minimum=0, maximum=1,
              queries=_query(f"heterorl_disk_free_bytes{{{RUN}}} / heterorl_disk_size_bytes{{{RUN}}}",
                             "{{service}} {{site}}")),
        Panel(title="Disk refuses", unit="bool_yes_no", kind="stat",
              queries=_gauge("heterorl_coordinator_disk_refuses", "{{run}}"),
              note="Full: groups are refused, then versions, until there is room; `heterorl status` says where."),
        Panel(title="Background loops that failed", unit="ops", minimum=0,
              queries=_rate("heterorl_coordinator_loop_failures_total", "{{loop}}", RUN, "loop"),
              note="The log has a repeated error once; the loop goes on after a pause."),
        Panel(title="Payload store", unit="bytes", minimum=0,
              queries=_gauge("heterorl_coordinator_store_used_bytes", "used")),
        Panel(title="Samples kept to be read", unit="bytes", minimum=0,
              queries=_gauge("heterorl_coordinator_sample_bytes", "{{kind}}"),
              note="Bounded by samples_bytes; `heterorl samples` reads them."),
        Panel(title="Texts of samples", unit="ops", minimum=0,
              queries=_rate("heterorl_learner_sample_notes_total", "{{outcome}}", RUN, "outcome"),
              note="Sent by the learner; without one a sample is shown by its tokens."),
        Panel(title="Age of the newest verified snapshot", unit="s", minimum=0,
              queries=_gauge("heterorl_coordinator_snapshot_age_seconds", "{{run}}"),
              note="A snapshot is due when the deltas after it are dear; 0 while there is none."),
        Panel(title="Payloads deleted", unit="Bps", minimum=0,
              queries=_rate("heterorl_coordinator_reclaimed_bytes_total", "{{run}}", RUN, "run"),
              note="At the full store it should keep up with what is published."),
        Panel(title="Damaged payloads", unit="none", kind="stat",
              queries=_query(f"sum by (run) (heterorl_coordinator_damaged_payloads_total{{{RUN}}})", "damaged"),
              note="Anything but 0 is a failing disk; changed files lie in `damaged` of data_dir or prefix."),
        Panel(title="Payload reads refused by the system", unit="ops", minimum=0,
              queries=_rate("heterorl_coordinator_unreadable_payloads_total", "{{run}}", RUN, "run"),
              note="No descriptor left, no permission, a disk that does not answer; the payloads stay in use."),
        Panel(title="Rpcs by method", unit="reqps", minimum=0,
              queries=_rate("heterorl_rpc_seconds_count", "{{method}}", f'{RUN},side="server"', "method")),
        Panel(title="Refusals", unit="reqps", minimum=0,
              queries=_rate("heterorl_rpc_seconds_count", "{{method}} {{code}}", f'{RUN},side="server",code!="OK"',
                            "method", "code")),
        Panel(title="Certificates refused", unit="ops", minimum=0,
              queries=_rate("heterorl_rpc_identity_refusals_total", "{{reason}}", RUN, "reason"),
              note="Calls by holders of a certificate of this authority that may not make them."),
        Panel(title="Certificate lifetime left", unit="s", minimum=0,
              queries=_query(f"(heterorl_certificate_expiry_seconds{{{RUN}}} > 0) - time()", "{{service}} {{site}}"),
              note="Empty over plaintext."),
        Panel(title="Memory of the main process", unit="bytes", minimum=0,
              queries=_gauge("process_resident_memory_bytes", "{{service}} {{site}}")),
        Panel(title="Processor of the main process", unit="percentunit", minimum=0,
              queries=_rate("process_cpu_seconds_total", "{{service}} {{site}}", RUN, "service", "site")),
    ),
    has_sites=False,
)  # fmt: skip

BOARDS = (RUN_BOARD, LATENCY_BOARD, WEIGHTS_BOARD, SITES_BOARD, COORDINATOR_BOARD)
