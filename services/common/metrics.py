"""Every metric of every service, declared once; names follow heterorl_<service>_<thing>_<unit>, labels are bounded."""

from __future__ import annotations

import errno

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from services.common.errors import PortInUse

REGISTRY = CollectorRegistry(auto_describe=True)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_VERSIONS = (0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)

# every service
RPC_SECONDS = Histogram(
    "heterorl_rpc_seconds", "Duration of an rpc at its server.", ["method", "code"], registry=REGISTRY, buckets=_SECONDS
)
RPC_CLIENT_SECONDS = Histogram(
    "heterorl_rpc_client_seconds",
    "Duration of an rpc at its caller.",
    ["method", "code"],
    registry=REGISTRY,
    buckets=_SECONDS,
)
RPC_ERRORS = Counter("heterorl_rpc_errors", "Typed refusals.", ["method", "reason"], registry=REGISTRY)
BYTES = Counter("heterorl_bytes", "Payload bytes moved.", ["kind", "direction"], registry=REGISTRY)
TOKENS = Counter("heterorl_tokens", "Completion tokens generated or trained.", ["service"], registry=REGISTRY)
POLICY_AGE_SECONDS = Histogram(
    "heterorl_policy_age_seconds",
    "Time from a policy's publication to the training on its groups.",
    registry=REGISTRY,
    buckets=_SECONDS,
)

# coordinator
HEAD_VERSION = Gauge("heterorl_coordinator_head_version", "Newest policy version.", registry=REGISTRY)
LEARNER_EPOCH = Gauge("heterorl_coordinator_learner_epoch", "Current learner epoch.", registry=REGISTRY)
QUEUE_GROUPS = Gauge("heterorl_coordinator_queue_groups", "Groups by state.", ["state"], registry=REGISTRY)
LEDGER_GROUPS = Gauge("heterorl_coordinator_ledger_groups", "Groups by final account.", ["account"], registry=REGISTRY)
LEDGER_BALANCED = Gauge("heterorl_coordinator_ledger_balanced", "1 while every group is accounted.", registry=REGISTRY)
PUSHED_GROUPS = Counter(
    "heterorl_coordinator_pushed_groups", "Groups pushed, by outcome.", ["status", "reason"], registry=REGISTRY
)
SITE_POLICY_VERSION = Gauge(
    "heterorl_coordinator_site_policy_version", "Version that a site generates with.", ["site"], registry=REGISTRY
)
STORE_BYTES = Gauge(
    "heterorl_coordinator_store_bytes", "Bytes of payloads on disk, or of the limit.", ["what"], registry=REGISTRY
)
SNAPSHOT_AGE_SECONDS = Gauge(
    "heterorl_coordinator_snapshot_age_seconds",
    "Age of the version of the newest verified snapshot.",
    registry=REGISTRY,
)
RECLAIMED_BYTES = Counter(
    "heterorl_coordinator_reclaimed_bytes", "Bytes of payloads that nobody needed any more.", registry=REGISTRY
)
DAMAGED_PAYLOADS = Counter(
    "heterorl_coordinator_damaged_payloads", "Payloads found changed or lost on disk.", registry=REGISTRY
)

# learner
STEPS = Counter("heterorl_learner_steps", "Optimizer steps.", ["applied"], registry=REGISTRY)
STEP_SECONDS = Histogram("heterorl_learner_step_seconds", "Duration of a step.", registry=REGISTRY, buckets=_SECONDS)
ENCODE_SECONDS = Histogram(
    "heterorl_learner_encode_seconds", "Duration of encoding a version.", registry=REGISTRY, buckets=_SECONDS
)
PUBLISH_SECONDS = Histogram(
    "heterorl_learner_publish_seconds", "Duration of upload and commit.", registry=REGISTRY, buckets=_SECONDS
)
STALENESS_VERSIONS = Histogram(
    "heterorl_learner_staleness_versions", "Staleness of trained groups.", registry=REGISTRY, buckets=_VERSIONS
)
LEARNER_VERSION = Gauge("heterorl_learner_version", "Newest version published by this learner.", registry=REGISTRY)
LOSS = Gauge("heterorl_learner_loss", "Loss of the newest step.", registry=REGISTRY)
REWARD = Gauge("heterorl_learner_reward_mean", "Mean reward of the newest step.", registry=REGISTRY)
KL = Gauge("heterorl_learner_kl_nats", "KL of sampler from learner policy, per sequence.", registry=REGISTRY)
ESS = Gauge("heterorl_learner_ess_ratio", "Effective sample size over batch size.", registry=REGISTRY)
IW_VARIANCE = Gauge("heterorl_learner_iw_variance", "Variance of the importance weights.", registry=REGISTRY)
CLIP_FRACTION = Gauge("heterorl_learner_clip_ratio", "Share of clipped terms.", registry=REGISTRY)
ENTROPY = Gauge("heterorl_learner_entropy_nats", "Mean entropy per token.", registry=REGISTRY)
GRAD_NORM = Gauge("heterorl_learner_grad_norm", "Gradient norm before clipping.", registry=REGISTRY)
EVALUATION_ACCURACY = Gauge("heterorl_learner_evaluation_accuracy_ratio", "Held-out accuracy.", registry=REGISTRY)

# sampler
POLICY_VERSION = Gauge(
    "heterorl_sampler_policy_version", "Version that this sampler generates with.", registry=REGISTRY
)
PULL_SECONDS = Histogram(
    "heterorl_sampler_pull_seconds", "Duration of fetching a version.", registry=REGISTRY, buckets=_SECONDS
)
APPLY_SECONDS = Histogram(
    "heterorl_sampler_apply_seconds",
    "Duration of applying and verifying a version.",
    registry=REGISTRY,
    buckets=_SECONDS,
)
SWAP_SECONDS = Histogram(
    "heterorl_sampler_swap_seconds", "Pause of generation for a swap.", registry=REGISTRY, buckets=_SECONDS
)
GENERATE_SECONDS = Histogram(
    "heterorl_sampler_generate_seconds", "Duration of a generation batch.", registry=REGISTRY, buckets=_SECONDS
)
OUTBOX_GROUPS = Gauge("heterorl_sampler_outbox_groups", "Groups waiting in the outbox.", registry=REGISTRY)
OUTBOX_DROPPED = Counter(
    "heterorl_sampler_outbox_dropped", "Groups dropped by the outbox.", ["reason"], registry=REGISTRY
)
REWARD_ERRORS = Counter("heterorl_sampler_reward_errors", "Groups abandoned by a verifier failure.", registry=REGISTRY)
DIGEST_MISMATCHES = Counter(
    "heterorl_sampler_digest_mismatches", "Versions whose recomputed state was wrong.", registry=REGISTRY
)


def serve(port: int, *, address: str = "127.0.0.1") -> int:
    """Serve /metrics on a port of its own (0 picks a free one); returns the port.

    Raises:
        PortInUse: the address is taken.
    """
    try:
        server, _ = start_http_server(port, addr=address, registry=REGISTRY)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse("metrics_port", f"{address}:{port}") from error
        raise
    return int(server.server_port)
