"""Configuration of the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from heterorl.common.evaluation.evaluation_sets import PlannedSetConfig, check_unique_names
from heterorl.common.identity.tls import ServerTlsConfig
from heterorl.common.process.address import Listen, check_database, split_url
from heterorl.common.process.config_file import Config
from heterorl.common.process.tracing import TracingConfig


class BucketConfig(Config):
    """Payloads in an S3-compatible bucket instead of data_dir."""

    bucket: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])?$")
    """Existing S3-compatible bucket; empty: data_dir. A run that has begun needs its payloads copied. Credentials:
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the machine's role, or credentials_file."""
    prefix: str = Field(default="", pattern=r"^([A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*)?$", max_length=256)
    """Prefix of this run's objects only; empty: run_id."""
    endpoint: str = Field(default="", max_length=512)
    """`https://HOST[:PORT]` of a store other than Amazon's; `http://` only within a trusted network."""
    region: str = Field(default="us-east-1", pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Region that requests are signed for."""
    credentials_file: Path | None = None
    """Like ~/.aws/credentials, section `default`, mode 0600; read again when changed."""
    cache_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Cache in data_dir; larger than a snapshot with its deltas."""
    url_lifetime_s: float = Field(default=3600.0, ge=60.0, le=604800.0)
    """How long a node can use the address of a payload."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        parts = split_url(endpoint)
        if not endpoint:
            return endpoint
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise ValueError("must be https://HOST or https://HOST:PORT")
        if parts.username is not None or parts.query or parts.fragment:
            # Without the value: it may contain a secret.
            raise ValueError("has credentials or parameters: they belong into credentials_file or the environment")
        return endpoint.rstrip("/")


GROUP_OVERHEAD_BYTES = 4096
"""Bytes that a message to the learner needs besides the group."""


class DifficultyConfig(Config):
    """A window of mean rewards: prompts outside it are handed out rarely."""

    outside_share: float = Field(default=1.0, ge=0, le=1)
    """Share of prompts outside the window of mean rewards that are handed out anyway, as is one after 16 skipped; 0.1
    is usual; 1, all of them: off."""
    low: float = Field(default=0.05, allow_inf_nan=False)
    """Smallest mean reward inside the window."""
    high: float = Field(default=0.95, allow_inf_nan=False)
    """Largest mean reward inside the window."""

    @model_validator(mode="after")
    def _check_order(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError("low is above high: no prompt would be inside")
        return self

    @property
    def is_on(self) -> bool:
        return self.outside_share < 1.0


class StoreConfig(Config):
    """The database of the run's state."""

    url: str = Field(default="", max_length=2048)
    """`postgresql://USER@HOST:PORT/DATABASE`, version 15 or newer, no pooler; password in PGPASSFILE or PGPASSWORD.
    Empty: SQLite in data_dir."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return check_database(url) if url else url


class CoordinatorConfig(Config):
    """One coordinator serves one run."""

    run_id: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run, equal at coordinator and learner."""
    data_dir: Path = Path("runs/coordinator")
    """Database and payloads; `heterorl backup` copies them during the run."""
    store: StoreConfig = StoreConfig()
    """Another database than SQLite in data_dir."""
    payloads: BucketConfig = BucketConfig()
    """A bucket for payloads instead of data_dir."""
    backup_dir: Path | None = None
    """Directory of backups; none: `backups` in data_dir. Payloads are hard links on the same disk, else copies."""
    listen: Listen = "127.0.0.1:50051"
    """host:port to serve on; port 0: any free one, in the file `address` of data_dir or cache_dir."""
    tls: ServerTlsConfig = ServerTlsConfig()
    """Certificates of this node; changed files are read again."""
    metrics_port: int = Field(default=9101, ge=0, le=65535)
    """Port of the Prometheus metrics; 0: any free one. Left out: the default or the next free one in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address of the metrics, which hold no secret and need no login."""
    metrics_nodes: int = Field(default=256, ge=0, le=4096)
    """Nodes whose metrics are kept and served at /nodes of the metrics port; 0: none."""
    tracing: TracingConfig = TracingConfig()
    """Traces of groups by OpenTelemetry."""
    seed: int = Field(default=0, ge=0)
    """Seed of the prompts' order and of all sampling."""
    groups_per_version: int = Field(default=32, ge=1)
    """Groups of one version: the learner's groups_per_step times steps_per_version."""
    difficulty: DifficultyConfig = DifficultyConfig()
    """Prompts whose groups have a mean reward outside a window are handed out rarely."""
    max_versions: int = Field(default=0, ge=0)
    """Version that ends the run; 0: no end."""
    max_staleness_versions: int = Field(default=64, ge=0)
    """Largest off-policy lag of a group that is trained on."""
    mask_stale: bool = False
    """False: a group is as old as its oldest token. True: tokens beyond max_staleness_versions become context, and the
    youngest drawn token counts."""
    max_superseded_s: float = Field(default=7200.0, gt=0, allow_inf_nan=False)
    """Longest time since a newer version than the group's was published, when the group arrives and when the learner
    gets it. Samplers whose `[delay]` is longer there and back are refused."""
    max_outstanding_groups: int = Field(default=0, ge=0)
    """Groups leased to samplers, queued or leased to the learner; 0: 4 versions' worth."""
    site_pending_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes of one site's queued groups, besides those that the learner has taken; at least max_message_bytes."""
    site_groups_per_s: float = Field(default=0.0, ge=0)
    """Average rate of one site's groups; 0: no bound."""
    site_bytes_per_s: float = Field(default=0.0, ge=0)
    """Average rate of one site's bytes; 0: no bound."""
    site_burst_s: float = Field(default=10.0, gt=0)
    """Seconds of both rates that a site may send at once after a pause."""
    site_work_groups: int = Field(default=0, ge=0)
    """Assignments that one site may hold; 0: an equal share, less those it left unanswered."""
    site_batch_share: float = Field(default=1.0, gt=0, le=1)
    """Largest share of a version's groups from one site while others have groups; 1: no bound."""
    lease_order: Literal["oldest", "newest"] = "oldest"
    """Order of groups to the learner: `oldest` policy first, or `newest`: newest policy first, then by arrival within
    half of max_staleness_versions; every fourth group is older."""
    quarantine_failures: int = Field(default=3, ge=0)
    """Failed checks that quarantine a site until an operator releases it; 0: never. Ten failures of code rewards count
    as one."""
    quarantine_window_groups: int = Field(default=1000, ge=1)
    """Newest groups of a site whose failures count."""
    max_lost_share: float = Field(default=0.2, ge=0, le=1)
    """Largest share of lost members, averaged over about 50 groups of a site; above it groups with lost members are
    dropped. 1: never."""
    payload_space_bytes: int = Field(default=1 << 40, ge=1 << 20)
    """Space for payloads, on disk or in the bucket; unneeded ones are deleted before anything is refused."""
    keep_versions: int = Field(default=0, ge=0)
    """Newest versions whose deltas are all kept; 0: four times max_staleness_versions, at least 256."""
    snapshot_ratio: float = Field(default=0.25, gt=0)
    """A snapshot is due when the deltas since the last one exceed this share of its bytes."""
    canary_threshold: float = Field(default=0.2, ge=0)
    """Median |difference| from the learner's canary log-probs that quarantines a site, nats; 0: never. Usual: 1e-5
    (fp32), 0.01 to 0.1 (bf16); wrong weights or temperature 0.3 and more."""
    pull_lease_s: float = Field(default=600.0, gt=0)
    """How long payloads stay for a sampler that planned them but fetches nothing; with a bucket at least
    payloads.url_lifetime_s."""
    merged_bytes: int = Field(default=64 << 30, ge=0)
    """Disk space for merged deltas, besides payload_space_bytes; 0: none. Delete them at any time."""
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    """Free disk space below which groups are refused, and below half of it payloads; at most 1/32 of the disk. 0: no
    check."""
    samples_bytes: int = Field(default=256 << 20, ge=0)
    """Bytes in the store for `heterorl samples`: 1/2 trained groups, 1/4 failed checks, 1/8 dropped groups, 1/8
    evaluations; the oldest go first. 0: none."""
    samples_every: int = Field(default=16, ge=1)
    """One of so many groups, trained or dropped without fault, is kept as a sample; of failed checks all."""
    max_payload_bytes: int = Field(default=64 << 30, ge=1 << 10)
    """Largest payload."""
    max_message_bytes: int = Field(default=16 << 20, ge=2 << 20, le=512 << 20)
    """Largest message, which bounds a group. Learner and relay: at least the coordinator's."""
    max_prompt_tokens: int = Field(default=1 << 18, ge=1)
    """Longest prompt."""
    messages_in_flight_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Memory for samplers' messages, a quarter of it for short requests; one site gets at most three quarters."""
    max_concurrent_rpcs: int = Field(default=4096, ge=8)
    """Concurrent calls, two to four a sampler; more are retried later. An eighth is reserved for learner and
    operators."""
    site_concurrent_rpcs: int = Field(default=32, ge=1)
    """Concurrent calls of one certificate."""
    learner_lease_s: float = Field(default=10.0, ge=0.3, allow_inf_nan=False)
    """How long a silent learner keeps its lease."""
    work_lease_s: float = Field(default=120.0, ge=1, allow_inf_nan=False)
    """Time that a site has for an assignment, besides its work_ahead_s, its delay and task.trajectory_s. Set it above
    generation plus transfer."""
    max_work_ahead_s: float = Field(default=3600.0, ge=0, allow_inf_nan=False)
    """Bound on a site's work_ahead_s. 0: one fill of its engine, for work_lease_s."""
    evaluation: tuple[PlannedSetConfig, ...] = ()
    """Sets that samplers evaluate; a newer version replaces an evaluation not yet begun."""
    evaluation_sites: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], ...] = ()
    """Sites that may evaluate; empty: all with the data. Never sites with a variant. Scores are not recomputed."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    """How long running calls may take after SIGTERM."""

    @model_validator(mode="after")
    def _check_pairs(self) -> CoordinatorConfig:
        if self.site_pending_bytes < self.max_message_bytes:
            raise ValueError("site_pending_bytes is below max_message_bytes: the largest group would wait for ever")
        if 0 < self.keep_versions < self.max_staleness_versions:
            raise ValueError("keep_versions is below max_staleness_versions: what samplers may still pull would go")
        check_unique_names(self.evaluation)
        return self

    def is_finished(self, head: int | None) -> bool:
        """Whether the run has reached its end with this head."""
        return head is not None and 0 < self.max_versions <= head

    @property
    def merge_window_versions(self) -> int:
        """How far behind the head deltas are kept, and merged ones ready."""
        return self.keep_versions or max(256, 4 * self.max_staleness_versions)

    @property
    def max_group_bytes(self) -> int:
        """Largest group.
        The message to the learner, which states more than the sampler's, has room for it."""
        return self.max_message_bytes - GROUP_OVERHEAD_BYTES

    @property
    def outstanding_limit(self) -> int:
        return self.max_outstanding_groups or 4 * self.groups_per_version

    @property
    def most_groups_per_version(self) -> int:
        """Most groups of a version: pacing allows no more without a publication."""
        return min(self.outstanding_limit, (self.max_staleness_versions + 1) * self.groups_per_version)
