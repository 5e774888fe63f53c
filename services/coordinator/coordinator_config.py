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
    """Name of an existing S3-compatible bucket; empty: payloads are files in data_dir. Fixed when a run begins.
    Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the machine's role, or credentials_file."""
    prefix: str = Field(default="", pattern=r"^([A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*)?$", max_length=256)
    """Prefix of this run's keys, for one run only; empty: run_id."""
    endpoint: str = Field(default="", max_length=512)
    """`https://HOST[:PORT]` of a store that is not Amazon's; `http://` only within a network that is trusted."""
    region: str = Field(default="us-east-1", pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Region that requests are signed for."""
    credentials_file: Path | None = None
    """Credentials in the form of ~/.aws/credentials, section `default`; mode 0600."""
    cache_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Cache of the bucket in data_dir, bytes. Make it larger than the largest payload, and than a snapshot with its
    deltas."""
    url_lifetime_s: float = Field(default=3600.0, ge=60.0, le=604800.0)
    """How long an address that a plan gives to a node can be read from, seconds."""
    put_bytes: int = Field(default=64 << 30, ge=0)
    """Largest payload, bytes, that a learner uploads directly to the bucket; 0: all pass through the coordinator."""

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

    explore: float = Field(default=1.0, ge=0, le=1)
    """Share of assignments outside the window that are handed out anyway, so that easier prompts return; 0.1 is usual.
    1 turns the window off."""
    low: float = Field(default=0.05, allow_inf_nan=False)
    """Smallest mean reward of a prompt that is not too hard, in the unit of the reward."""
    high: float = Field(default=0.95, allow_inf_nan=False)
    """Largest mean reward of a prompt that is not too easy."""

    @model_validator(mode="after")
    def _check_order(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError("low is above high: no prompt would be inside")
        return self

    @property
    def is_on(self) -> bool:
        return self.explore < 1.0


class StoreConfig(Config):
    """The database of the run's state."""

    url: str = Field(default="", max_length=2048)
    """`postgresql://USER@HOST:PORT/DATABASE` (version 15 or newer, no pooler); the password comes from PGPASSFILE or
    PGPASSWORD. Empty: SQLite in data_dir."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return check_database(url) if url else url


class CoordinatorConfig(Config):
    """One coordinator serves one run."""

    run_id: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run; part of every manifest."""
    data_dir: Path = Path("runs/coordinator")
    """Directory of database and payloads; the one thing to back up, by `heterorl backup` while it runs."""
    store: StoreConfig = StoreConfig()
    """Another database than the file in data_dir."""
    payloads: BucketConfig = BucketConfig()
    """Another place for payloads than data_dir."""
    backup_dir: Path | None = None
    """Directory of `heterorl backup`; default `backups` in data_dir. On the same disk payloads are linked, else
    copied."""
    listen: Listen = "127.0.0.1:50051"
    """host:port to serve on; port 0 lets the system choose (see the file `address` in data_dir)."""
    tls: ServerTlsConfig = ServerTlsConfig()
    """Certificates of the link."""
    metrics_port: int = Field(default=9101, ge=0, le=65535)
    """Port of the Prometheus metrics; 0 lets the system choose. Left out, the next free one in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address of the metrics server. Every client that reaches it can read the metrics; they hold no secret."""
    metrics_nodes: int = Field(default=256, ge=0, le=4096)
    """Nodes whose pushed metrics are kept and served at /nodes of the metrics port; 0: none."""
    tracing: TracingConfig = TracingConfig()
    """Traces of groups by OpenTelemetry; off unless it names an endpoint."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of the prompts and of all sampling seeds."""
    groups_per_version: int = Field(default=32, ge=1)
    """Groups that one version consumes; pacing counts in it."""
    difficulty: DifficultyConfig = DifficultyConfig()
    """Which prompts are handed out rarely, by the mean reward of their groups that were trained on or replaced."""
    max_versions: int = Field(default=0, ge=0)
    """The run ends when its head reaches this version; 0: no end."""
    max_staleness_versions: int = Field(default=64, ge=0)
    """Bound on how many versions old the policy of a trained group may be."""
    mask_stale: bool = False
    """True: tokens older than max_staleness_versions become context, and a group is as old as its youngest drawn token.
    False: a group is as old as its oldest token."""
    max_policy_age_s: float = Field(default=7200.0, gt=0)
    """Largest age of a trained group's policy, seconds since a newer version was published. A sampler with a longer
    delay there and back is refused."""
    max_outstanding_groups: int = Field(default=0, ge=0)
    """Bound on groups that are leased to samplers, queued or leased to the learner; 0 means 4 versions' worth."""
    site_pending_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes that one site may have in the queue."""
    site_groups_per_s: float = Field(default=0.0, ge=0)
    """Groups a site may push per second on average; 0: no bound."""
    site_bytes_per_s: float = Field(default=0.0, ge=0)
    """Bytes of groups a site may push per second on average; 0: no bound."""
    site_burst_s: float = Field(default=10.0, gt=0)
    """Seconds' worth of both that a site may push at once after a pause."""
    site_work_groups: int = Field(default=0, ge=0)
    """Assignments that one site may hold; 0 is an equal share of what all may hold, less what it left unanswered."""
    site_batch_share: float = Field(default=1.0, gt=0, le=1)
    """Largest share of a version's groups from one site while others have groups; 1: no bound."""
    lease_order: Literal["oldest", "fair", "newest"] = "oldest"
    """Order of groups to the learner: `oldest` policy first; `fair`: one of each site in turn; `newest`: a newer
    version than any before first, else by arrival within max_staleness_versions // 2 versions, and every fourth group
    from older ones."""
    quarantine_failures: int = Field(default=3, ge=0)
    """Failed checks that quarantine a site until an operator releases it; 0: never. Ten failures by code results count
    as one."""
    quarantine_window_groups: int = Field(default=1000, ge=1)
    """Newest groups of a site among which failures count."""
    max_lost_share: float = Field(default=0.2, ge=0, le=1)
    """Largest share of lost members of a site, averaged over about 50 groups. Above it the site's groups with lost
    members are dropped. 1 drops none."""
    store_bytes: int = Field(default=1 << 40, ge=1 << 20)
    """Bytes that payloads may occupy on disk; what no sampler needs is deleted before anything is refused."""
    keep_versions: int = Field(default=0, ge=0)
    """Newest versions whose deltas are all kept; 0 means four times max_staleness_versions, and at least 256."""
    snapshot_ratio: float = Field(default=0.25, gt=0)
    """A snapshot is due when the deltas after the newest one cost more than this share of its bytes."""
    canary_threshold: float = Field(default=0.2, ge=0)
    """Median |difference| of canary log-probs from the learner's that quarantines a site, nats; 0: never. fp32 engines
    differ by 1e-5, bf16 ones by 0.01 to 0.1, wrong weights or temperatures by 0.3 and more."""
    pull_lease_s: float = Field(default=600.0, gt=0)
    """How long what was planned for a sampler stays although it fetches nothing, seconds."""
    merged_bytes: int = Field(default=64 << 30, ge=0)
    """Bytes of merged deltas on disk, in addition to store_bytes; 0 makes none. Safe to delete at any time."""
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    """Free disk bytes below which no group is taken, and below half of it no payload; at most a 32nd of the disk. 0: no
    check."""
    samples_bytes: int = Field(default=256 << 20, ge=0)
    """Bytes of kept samples for `heterorl samples`: half for trained groups, a quarter for failed checks, an eighth
    each for dropped groups and evaluations; the oldest go first. 0 keeps none."""
    samples_every: int = Field(default=16, ge=1)
    """Every so many-th group that is trained on, or dropped for no fault, is kept; of those that fail a check, all."""
    max_payload_bytes: int = Field(default=64 << 30, ge=1 << 10)
    """Largest payload, bytes."""
    max_message_bytes: int = Field(default=16 << 20, ge=2 << 20, le=512 << 20)
    """Largest message, bytes; bounds a group. Stated to every node; a learner's own must not be smaller."""
    max_prompt_tokens: int = Field(default=1 << 18, ge=1)
    """Longest prompt of a group, tokens."""
    messages_in_flight_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Bytes of all samplers' messages in memory, a quarter reserved for short requests. One sampler gets at most four
    of the largest messages in each part, one site three quarters."""
    max_concurrent_rpcs: int = Field(default=4096, ge=8)
    """Concurrent rpcs; more are refused with a delay. A sampler uses two to four. An eighth is reserved for learner and
    operators."""
    site_concurrent_rpcs: int = Field(default=32, ge=1)
    """Concurrent rpcs of one sampler's certificate."""
    learner_lease_s: float = Field(default=10.0, gt=0)
    """How long a silent learner keeps its lease, seconds."""
    work_lease_s: float = Field(default=120.0, gt=0)
    """How long a silent sampler keeps an assignment, seconds; choose more than the longest generation and transit. Its
    declared delay and the contract's trajectory time are added."""
    max_work_ahead_s: float = Field(default=3600.0, ge=0, allow_inf_nan=False)
    """How far ahead a site may hold assignments, seconds; the assignments of a silent site wait this much longer. 0:
    they go to other sites after work_lease_s."""
    evaluation: tuple[PlannedSetConfig, ...] = ()
    """Sets that samplers evaluate versions on, without blocking training. An evaluation that no site has begun gives
    way to a newer version's."""
    evaluation_sites: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], ...] = ()
    """Sites that may evaluate; empty: all that have the data. The scores of a site are not recomputed."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    """How long running calls may take after SIGTERM, seconds."""

    @model_validator(mode="after")
    def _one_group_fits(self) -> CoordinatorConfig:
        if self.site_pending_bytes < self.max_message_bytes:
            raise ValueError("site_pending_bytes is below max_message_bytes: the largest group would wait for ever")
        if 0 < self.keep_versions < self.max_staleness_versions:
            raise ValueError("keep_versions is below max_staleness_versions: what samplers may still pull would go")
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> CoordinatorConfig:
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
        """Largest group: the message to the learner, which states more than the sampler's, must have room for it."""
        return self.max_message_bytes - GROUP_OVERHEAD_BYTES

    @property
    def outstanding_limit(self) -> int:
        return self.max_outstanding_groups or 4 * self.groups_per_version

    @property
    def most_groups_per_version(self) -> int:
        """Groups that pacing allows while no version is published: no version can have more."""
        return min(self.outstanding_limit, (self.max_staleness_versions + 1) * self.groups_per_version)
