"""Every metric of every service, declared once.

Names follow heterorl_<service>_<thing>_<unit>, labels are bounded.

Metrics of several services carry no service in their name. A process shows its own and the common ones. The scrape
configuration or the coordinator adds the labels `run`, `service` and, at samplers and relays, `site`; so no metric has
the first two, and no metric of a sampler or relay the third.

    policy age   publish -> apply, generate   heterorl_sampler_policy_age_seconds
                 publish -> lease             heterorl_coordinator_policy_age_seconds
                 publish -> train             heterorl_learner_policy_age_seconds
"""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from heterorl.common.process.address import listen_error

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

REGISTRY = CollectorRegistry(auto_describe=True)
ProcessCollector(registry=REGISTRY)
Service = Literal["coordinator", "learner", "sampler", "relay"]
SERVICES: tuple[Service, ...] = ("coordinator", "learner", "sampler", "relay")
MAX_SITES = 256
"""Sites with a label of their own; all later names share one label."""
OTHER_SITES = "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400)
_AGES = (
    0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 2400, 2880, 3600, 5760, 7200, 11520, 14400, 21600,
    34560, 43200, 69120, 86400, 172800,
)  # fmt: skip
"""With steps at 80 % of 1, 2, 4, 12 and 24 hours: an alert compares ages with that share of `max_superseded_s`."""
_VERSIONS = (0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
_labels: dict[str, tuple[str, ...]] = {}


def _declared(name: str, labels: tuple[str, ...]) -> str:
    _labels[f"heterorl_{name}".removesuffix("_total")] = labels
    return f"heterorl_{name}"


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(_declared(name, labels), text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(_declared(name, labels), text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
    return Histogram(_declared(name, labels), text, labels, registry=REGISTRY, buckets=buckets)


# every service
RPC_SECONDS = _histogram("rpc_seconds", "Duration of an rpc, by where it was measured.", "side", "method", "code")
BYTES = _counter("bytes_total", "Payload and group bytes moved, from this process's side.", "kind", "direction")
TOKENS = _counter("tokens_total", "Completion tokens generated (samplers) or trained (learner).")
DISK_FREE_BYTES = _gauge("disk_free_bytes", "Free space of the disk that holds this process's state.")
DISK_SIZE_BYTES = _gauge("disk_size_bytes", "Size of that disk.")
IDENTITY_REFUSALS = _counter("rpc_identity_refusals_total", "Calls refused for what their certificate says.", "reason")
CERTIFICATE_EXPIRY = _gauge("certificate_expiry_seconds", "When this node's certificate expires, since the epoch.")
BANDWIDTH_WAIT = _counter("bandwidth_wait_seconds_total", "Time that bytes waited for the cap.", "direction")

# pullers of weights: samplers, and a learner that resumes
PULL_SECONDS = _histogram("pull_seconds", "Duration of fetching a version.")
APPLY_SECONDS = _histogram("apply_seconds", "Duration of applying and verifying a version.")
DIGEST_MISMATCHES = _counter("digest_mismatches_total", "Versions whose recomputed state or payload was wrong.")

# relay
RELAY_BYTES = _counter(
    "relay_payload_bytes_total",
    "Bytes of payloads: from_coordinator and from_bucket over the line, to_nodes at this site.",
    "way",
)
RELAY_READS = _counter("relay_payload_reads_total", "Reads of payloads, by where the bytes came from.", "outcome")
RELAY_CACHE_BYTES = _gauge("relay_cache_bytes", "Bytes of payloads that are kept or arriving.")
RELAY_CACHE_LIMIT_BYTES = _gauge("relay_cache_limit_bytes", "Bytes that they may occupy.")
RELAY_CALLS = _gauge("relay_calls", "Calls of samplers in progress.")

# coordinator: the run
STANDING_BY = _gauge(
    "coordinator_standing_by", "1 while it waits for the store of another coordinator, 0 once it serves."
)
HEAD_VERSION = _gauge("coordinator_head_version", "Newest policy version.")
HEAD_TIMESTAMP = _gauge("coordinator_head_timestamp_seconds", "When the newest version was published (start if later).")
LEARNER_EPOCH = _gauge("coordinator_learner_epoch", "Current learner epoch.")
DRAINING = _gauge("coordinator_draining", "1 while no work is handed out because the run ends.")
MAX_SUPERSEDED_SECONDS = _gauge("coordinator_max_superseded_seconds", "Bound on the time since a newer version.")
MAX_STALENESS_VERSIONS = _gauge("coordinator_max_staleness_versions", "Configured bound on staleness.")

# coordinator: groups
QUEUE_GROUPS = _gauge("coordinator_queue_groups", "Groups by state.", "state")
QUEUE_OLDEST_SECONDS = _gauge("coordinator_queue_oldest_seconds", "How long the oldest pending group has waited.")
QUEUE_AGE_SECONDS = _histogram(
    "coordinator_queue_age_seconds", "Time from a group's arrival to its lease.", "site", buckets=_AGES
)
LEASED_POLICY_AGE_SECONDS = _histogram(
    "coordinator_policy_age_seconds",
    "Time from a policy's publication to the lease of its groups.",
    "site",
    buckets=_AGES,
)
SUPERSEDED_SECONDS = _histogram(
    "coordinator_superseded_seconds", "Time from a newer version to the lease of a group.", "site", buckets=_AGES
)
LEDGER_GROUPS = _gauge("coordinator_ledger_groups", "Groups by account of the conservation law.", "account")
LEDGER_CLOSED_ASSIGNMENTS = _gauge(
    "coordinator_ledger_closed_assignments", "Assignments closed because their rows gave no group.", "reason"
)
LEDGER_DROPPED_GROUPS = _gauge("coordinator_ledger_dropped_groups", "Acknowledged groups not trained on.", "reason")
LEDGER_BALANCED = _gauge("coordinator_ledger_balanced", "1 while every acknowledged group is accounted for.")
PUSHED_GROUPS = _counter("coordinator_pushed_groups_total", "Groups pushed, by outcome.", "site", "status", "reason")
LOST_MEMBERS = _counter("coordinator_lost_members_total", "Members of groups that their sites lost.", "site", "reason")

# coordinator: sites
SITE_POLICY_VERSION = _gauge("coordinator_site_policy_version", "Version that a site generates with.", "site")
SITE_SILENCE_SECONDS = _gauge("coordinator_site_silence_seconds", "Time since a site's last sign of life.", "site")
SITE_STOPPED = _gauge("coordinator_site_stopped", "1 if a site's sampler stopped in order.", "site")
SITE_WORK_GROUPS = _gauge("coordinator_site_work_groups", "Assignments leased to a site.", "site")
SITE_AWAY_GROUPS = _gauge("coordinator_site_away_groups", "Those that left with a site that fell silent.", "site")
SITE_CANARY_NATS = _gauge(
    "coordinator_site_canary_nats", "Median difference of a site's canary log-probs from the learner's.", "site"
)
SITE_CANARY_KL = _gauge(
    "coordinator_site_canary_kl_nats", "KL a token of a site's engine from the learner's, by the canary.", "site"
)
SITE_QUARANTINED = _gauge("coordinator_site_quarantined", "1 while a site is in quarantine.", "site")
STANDSTILL = _gauge(
    "coordinator_standstill", "1 while every site that answers is in quarantine, so that no work is leased."
)
SITE_FAILED_GROUPS = _gauge(
    "coordinator_site_failed_groups", "Groups of a site that failed the learner's checks and still count.", "site"
)
SITE_QUOTA_RATIO = _gauge("coordinator_site_quota_ratio", "Used share of a site's quota, 0 to 1.", "site", "quota")
QUOTA_REFUSALS = _counter("coordinator_quota_refusals_total", "Pushes refused for a quota.", "site", "quota")
SITE_VARIANT = _gauge(
    "coordinator_site_variant_info", "1 for the form of the weights that a site pulls.", "site", "variant"
)

# coordinator: evaluations
EVALUATION_REWARD = _gauge("coordinator_evaluation_reward_mean", "Mean reward of the newest one that is done.", "set")
EVALUATION_VERSION = _gauge("coordinator_evaluation_version", "Version of the newest one that is done.", "set")
EVALUATED_PROMPTS = _counter("coordinator_evaluated_prompts_total", "Held-out prompts counted.", "site")

# coordinator: store
COMMIT_SECONDS = _histogram("coordinator_commit_seconds", "Duration of a commit, its fsync included.")
COMMIT_OPERATIONS = _counter("coordinator_commit_operations_total", "Operations that shared these commits.")
STORE_USED_BYTES = _gauge("coordinator_store_used_bytes", "Bytes of payloads stored, damaged or being uploaded.")
STORE_LIMIT_BYTES = _gauge("coordinator_store_limit_bytes", "Bytes that payloads may occupy.")
SNAPSHOT_AGE_SECONDS = _gauge(
    "coordinator_snapshot_age_seconds", "Age of the version of the newest verified snapshot; 0 while there is none."
)
VARIANT_BYTES = _gauge(
    "coordinator_variant_bytes", "Bytes of the newest version: its state (full), its payloads.", "variant", "kind"
)
SAMPLE_BYTES = _gauge("coordinator_sample_bytes", "Bytes of samples that are kept to be read, by why.", "kind")
DISK_REFUSES = _gauge("coordinator_disk_refuses", "1 while the disk is nearly full and groups or versions are refused.")
LOOP_FAILURES = _counter("coordinator_loop_failures_total", "Turns of a background loop that failed.", "loop")
RECLAIMED_BYTES = _counter("coordinator_reclaimed_bytes_total", "Bytes of deleted payloads that no node needed.")
DAMAGED_PAYLOADS = _counter("coordinator_damaged_payloads_total", "Payloads found changed or lost on disk.")
UNREADABLE_PAYLOADS = _counter(
    "coordinator_unreadable_payloads_total", "Reads that the system refused; the payloads stay in use."
)

# learner: steps
STEPS = _counter("learner_steps_total", "Optimizer steps; empty: no group had rewards that differ.", "applied")
STEP_SECONDS = _histogram("learner_step_seconds", "Duration of a step.")
PHASE_SECONDS = _counter("learner_phase_seconds_total", "What the trainer's time went to.", "phase")
STEP_PROGRESS = _gauge("learner_step_progress_ratio", "Share of finished micro-batches of the current step.")
LAST_STEP_TIMESTAMP = _gauge("learner_last_step_timestamp_seconds", "When the last step ended (start if none).")
STALENESS_VERSIONS = _histogram("learner_staleness_versions", "Staleness of trained groups.", "site", buckets=_VERSIONS)
POLICY_AGE_SECONDS = _histogram(
    "learner_policy_age_seconds",
    "Time from a policy's publication to the end of the step on its groups.",
    "site",
    buckets=_AGES,
)
INBOX_SECONDS = _histogram("learner_inbox_seconds", "Time of a trained group in the learner.", buckets=_AGES)
LOSS = _gauge("learner_loss", "Loss of the newest step.")
REWARD = _gauge("learner_reward_mean", "Mean reward of the newest step.")
SOURCE_REWARD = _gauge("learner_source_reward_mean", "Mean reward of a source's newest trained groups.", "source")
SOURCE_GROUPS = _counter("learner_source_groups_total", "Groups trained, by source of a mixture of tasks.", "source")
SAMPLER_KL = _gauge("learner_sampler_kl_nats", "KL of sampler from learner policy, per sequence.")
ESS = _gauge("learner_ess_ratio", "Effective sample size over batch size.")
IMPORTANCE_WEIGHT_VARIANCE = _gauge("learner_importance_weight_variance", "Variance of the importance weights.")
CLIPPED_TERMS = _gauge("learner_clipped_terms_ratio", "Share of clipped terms.")
BAD_ROLLOUTS_TRAINED = _gauge(
    "learner_bad_rollouts_trained_ratio", "Share of the newest step's rollouts with a negative advantage that train."
)
KL_TOKEN_FRESH = _gauge(
    "learner_kl_token_fresh_nats", "KL a token of groups that the step's own version made: the engines' mismatch."
)
ENTROPY = _gauge("learner_entropy_nats", "Mean entropy per token.")
GRAD_NORM = _gauge("learner_grad_norm", "Gradient norm before clipping.")
LEARNING_RATE = _gauge("learner_learning_rate", "Step size of the newest step, with the schedule's factor.")
COMPLETION_TOKENS = _gauge(
    "learner_completion_tokens",
    "Length of the newest step's completions: mean, p95, max; mean of those with a reward above the step's mean"
    " (high_reward) and of the others (low_reward).",
    "stat",
)
TRUNCATED_RATIO = _gauge("learner_truncated_ratio", "Share of completions cut at the longest length.")
EQUAL_REWARD_GROUPS = _gauge("learner_equal_reward_groups_ratio", "Share of groups in which all rewards are equal.")
REPLACED_GROUPS = _counter("learner_replaced_groups_total", "Groups of equal rewards that steps replaced by others.")
REWARD_PART = _gauge("learner_reward_part_mean", "Mean of each named part of the reward.", "part")
LOSS_METRIC = _gauge("learner_loss_metric_mean", "Mean of each metric of a loss of the user's own.", "metric")
SITE_TOKENS = _counter("learner_site_tokens_total", "Completion tokens trained, by the site that made them.", "site")
STEPS_WITHOUT_SIGNAL = _gauge("learner_steps_without_signal", "Steps in a row in which no group's rewards differed.")
EVALUATION_ACCURACY = _gauge("learner_evaluation_accuracy_ratio", "Held-out accuracy.")

# learner: checks of what sites send
CHECKED_GROUPS = _counter(
    "learner_checked_groups_total", "Groups checked, by check and verdict.", "site", "check", "verdict"
)
SAMPLE_NOTES = _counter("learner_sample_notes_total", "Texts of kept samples, sent or given up.", "outcome")
CHECK_SECONDS = _histogram("learner_check_seconds", "Duration of the checks of one group.")

# learner: versions
LEARNER_VERSION = _gauge("learner_version", "Newest version published by this learner.")
ENCODE_SECONDS = _histogram("learner_encode_seconds", "Duration of encoding a version.")
PUBLISH_SECONDS = _histogram("learner_publish_seconds", "Duration of upload and commit.")
VERSIONS = _counter("learner_versions_total", "Versions published, by what a sampler at the parent pulls.", "kind")
VERSION_BYTES = _gauge("learner_version_bytes", "Bytes of the newest payload of a kind.", "kind")
FULL_BYTES = _gauge("learner_full_bytes", "Bytes of the weights, uncompressed.")
COMPRESSION_RATIO = _gauge(
    "learner_compression_ratio", "Bytes of the weights over bytes of the newest version's smallest payload."
)
CHANGED_RATIO = _gauge("learner_changed_ratio", "Share of the weights that the newest version changed.")

# sampler
POLICY_VERSION = _gauge("sampler_policy_version", "Version that this sampler generates with.")
SAMPLER_POLICY_AGE_SECONDS = _histogram(
    "sampler_policy_age_seconds",
    "Time from a policy's publication to its swap (apply), or to the end of a group made with it (generate).",
    "stage",
    buckets=_AGES,
)
SWAP_SECONDS = _histogram(
    "sampler_swap_seconds", "Time to load a version into the engine; vLLM pauses for a part of it."
)
GENERATE_SECONDS = _histogram("sampler_generate_seconds", "Time from a group's beginning to its last completion.")
PUSH_DELAY_SECONDS = _histogram(
    "sampler_push_delay_seconds", "Time from a group's generation to its acknowledgement.", buckets=_AGES
)
OUTBOX_GROUPS = _gauge("sampler_outbox_groups", "Groups waiting in the outbox.")
OUTBOX_SET_ASIDE = _counter(
    "sampler_outbox_set_aside_total",
    "What a sampler did not deliver: damaged groups (row), a damaged file (file), groups that the coordinator refused "
    "for good (refused). And damaged turns, which are drawn again (turn).",
    "kind",
)
ENGINE_FAILURES = _counter(
    "sampler_engine_failures_total",
    "Times the engine was not trusted: its canary differed from the reference (stale), or its process failed (died).",
    "reason",
)
REFUSED_PROMPTS = _counter(
    "sampler_refused_prompts_total",
    "Assignments given back for prompts that template or engine refused.",
    "source",
    "reason",
)
TURNS = _counter("sampler_turns_total", "Turns that the policy drew in environments.", "source")
TRAJECTORY_SECONDS = _counter(
    "sampler_trajectory_seconds_total",
    "Time of members in environments: for a turn of the engine (model), for the environment or a place in it (tools).",
    "source",
    "part",
)
TRAJECTORIES = _counter(
    "sampler_trajectories_total", "Members that ended in environments, by finish_reason.", "source", "reason"
)
TRAJECTORY_TOKENS = _counter("sampler_trajectory_tokens_total", "Their tokens: drawn, given.", "source", "kind")
REWARD_ERRORS = _counter(
    "sampler_reward_errors_total", "Verifier failures; each loses the members that were scored.", "source"
)
MAX_MOVES = 50
"""Services of one role on one machine that can share a default port."""


class SiteLabels:
    """Label values of sites: `limit` own names, then OTHER_SITES for all others."""

    def __init__(self, limit: int = MAX_SITES) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def of(self, site: str) -> str:
        if site not in self._known:
            if len(self._known) >= self._limit:
                return OTHER_SITES
            self._known.add(site)
        return site


SITES = SiteLabels()


def watch_disk(path: Path) -> None:
    """Show free space and size of a directory's disk, NaN after errors."""
    DISK_FREE_BYTES.set_function(lambda: _disk(path, "free"))
    DISK_SIZE_BYTES.set_function(lambda: _disk(path, "total"))


def _disk(path: Path, field: Literal["free", "total"]) -> float:
    try:
        return float(getattr(shutil.disk_usage(path), field))
    except OSError:
        # An error would hide all other metrics, and end their push for good.
        return math.nan


def labels_of(metric: Metric) -> tuple[str, ...]:
    """The names of a metric's own labels; none of the process metrics."""
    return _labels.get(metric.name, ())


def is_of(metric: Metric, service: Service) -> bool:
    """Whether a service shows a metric; other services' metrics would read 0."""
    return not metric.name.startswith(tuple(f"heterorl_{other}_" for other in SERVICES if other != service))


def _all() -> Container[str] | None:
    return None


class _Own(Collector):
    def __init__(self, service: Service, shown: Callable[[], Container[str] | None]) -> None:
        self._service = service
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        names = self._shown()
        for metric in REGISTRY.collect():
            if is_of(metric, self._service) and (
                names is None or metric.name in names or metric.name.startswith("process_")
            ):
                yield metric


def registry_of(service: Service, shown: Callable[[], Container[str] | None] = _all) -> CollectorRegistry:
    """Metrics that a service's process shows: all, or `shown` at each scrape."""
    own = CollectorRegistry(auto_describe=False)
    own.register(_Own(service, shown))
    return own


def serve(
    port: int,
    *,
    service: Service,
    address: str = "127.0.0.1",
    may_move: bool = False,
    pages: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    shown: Callable[[], Container[str] | None] = _all,
) -> int:
    """Serve a service's /metrics; returns the port, for 0 a free one.

    With `may_move` the port is a default: if it is taken, as by a second sampler, use one of the next. `pages` are
    further paths, made for each request in a thread of its own. `shown` is asked at each scrape for the names to show
    with the names of the process; None shows all.

    Raises:
        ConfigError: the port is taken.
        AddressUnusable: the address is not one of this machine's.
    """
    own = registry_of(service, shown)
    # Steps of 10 avoid the defaults of other services.
    candidate, last = port, port + 10 * MAX_MOVES if may_move else port
    while True:
        try:
            server, _ = start_http_server(candidate, addr=address, registry=own)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise listen_error("metrics_host", address, error) from error
            if candidate == last:
                raise listen_error("metrics_port", f"{address}:{port}", error) from error
        candidate += 10
    server.RequestHandlerClass = _Handler
    _add_pages(server, pages)
    return int(server.server_port)


def serve_by(config: Any, *, service: Service, **more: Any) -> int:
    """`serve` by a service's keys; a default port may move."""
    may_move = "metrics_port" not in config.model_fields_set
    return serve(config.metrics_port, service=service, address=config.metrics_host, may_move=may_move, **more)


class _Handler(WSGIRequestHandler):
    """Ends an idle connection, which holds a thread; logs no request."""

    timeout = 10.0

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError):
            super().handle()

    def log_message(self, *_: Any, **__: Any) -> None: ...


def _add_pages(server: WSGIServer, pages: Mapping[str, Callable[[], bytes]]) -> None:
    metrics_page = server.get_app()
    assert metrics_page is not None, "prometheus_client sets it before it returns"

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        page = pages.get(environ["PATH_INFO"])
        if page is None:
            return metrics_page(environ, start_response)
        start_response("200 OK", [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")])
        return [page()]

    if pages:
        server.set_app(answer)
