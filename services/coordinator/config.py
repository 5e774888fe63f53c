"""Configuration of the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from heterorl.common.evaluation.evaluation_sets import PlannedSetConfig, check_unique_names
from heterorl.common.identity.tls import ServerTlsConfig
from heterorl.common.process.address import Listen, check_database, split_url
from heterorl.common.process.config import Config
from heterorl.common.process.tracing import TracingConfig


class BucketConfig(Config):
    """Where payloads are kept, beside what `store` keeps."""

    bucket: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])?$")
    """Name of an S3-compatible bucket, which exists; empty: payloads are files in data_dir. Chosen when a run begins.
    Its credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the machine's role, or credentials_file."""
    prefix: str = Field(default="", pattern=r"^([A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*)?$", max_length=256)
    """What the keys of this run begin with; empty: run_id. One run alone may use it."""
    endpoint: str = Field(default="", max_length=512)
    """`https://HOST[:PORT]` of a store that is not Amazon's; `http://` only within a network that is trusted."""
    region: str = Field(default="us-east-1", pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Region that requests are signed for."""
    credentials_file: Path | None = None
    """File in the form of ~/.aws/credentials, section `default`; readable by its owner alone (mode 0600)."""
    cache_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Bytes of data_dir for copies and for uploads under way. What one reader alone needs at once may exceed it; all
    others wait then. Give it room for the largest payload, and for a snapshot with its deltas, which are read to verify
    versions."""
    url_lifetime_s: float = Field(default=3600.0, ge=60.0, le=604800.0)
    """How long an address that a plan gives to a node can be read from, seconds."""
    put_bytes: int = Field(default=64 << 30, ge=0)
    """Largest payload that a learner puts into the bucket itself, in pieces of 64 MiB, instead of sending it through
    the coordinator, which verifies it before anybody sees it; 0: all come through the coordinator."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        parts = split_url(endpoint)
        if not endpoint:
            return endpoint
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise ValueError("must be https://HOST or https://HOST:PORT")
        if parts.username is not None or parts.query or parts.fragment:
            # Said without the value: whoever wrote a key into it may not want it in a log.
            raise ValueError("has credentials or parameters: they belong into credentials_file or the environment")
        return endpoint.rstrip("/")


GROUP_OVERHEAD_BYTES = 4096
"""Room in a message to the learner for what it states beside the group."""


class DifficultyConfig(Config):
    """A window of mean rewards: prompts outside it are handed out rarely."""

    explore: float = Field(default=1.0, ge=0, le=1)
    """Share of the assignments with prompts outside the window that are handed out all the same, so that a prompt that
    became easier comes back; 1 hands all out and keeps no means. 0.1 is usual."""
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
        """Whether there is a window."""
        return self.explore < 1.0


class StoreConfig(Config):
    """Where what is acknowledged is kept, beside the payloads."""

    url: str = Field(default="", max_length=2048)
    """`postgresql://USER@HOST:PORT/DATABASE` of a server of version 15 or newer, with any parameters of libpq but a
    password, which PGPASSFILE or PGPASSWORD has; never a pooler. Empty: SQLite, a file in data_dir."""

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
    """Directory that `heterorl backup` writes under; without one, `backups` in data_dir. Payloads are linked there, or
    copied where it is on another disk."""
    listen: Listen = "127.0.0.1:50051"
    """host:port to serve on; port 0 lets the system choose (see the file `address` in data_dir)."""
    tls: ServerTlsConfig = ServerTlsConfig()
    """Certificates of the link."""
    metrics_port: int = Field(default=9101, ge=0, le=65535)
    """Port of the Prometheus metrics; 0 lets the system choose. Left out, the next free one in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address that the metrics are served on; they carry no secret, and whoever can reach them can read them."""
    metrics_nodes: int = Field(default=256, ge=0, le=4096)
    """Learners, samplers and relays whose pushed metrics are kept, and served at /nodes of the same port; 0 is none."""
    tracing: TracingConfig = TracingConfig()
    """Traces of groups by OpenTelemetry; off unless it names an endpoint."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of the prompts and of all sampling seeds."""
    groups_per_version: int = Field(default=32, ge=1)
    """Groups that one version consumes; pacing counts in it."""
    difficulty: DifficultyConfig = DifficultyConfig()
    """Which prompts are handed out rarely, by the mean reward of their groups that were trained on or replaced."""
    max_versions: int = Field(default=0, ge=0)
    """The run ends when its head reaches this version; 0 is no end."""
    max_staleness_versions: int = Field(default=64, ge=0)
    """Bound on how many versions old the policy of a trained group may be."""
    mask_stale: bool = False
    """Tokens that are older than max_staleness_versions when they are trained on are read as context, and the others of
    their group are trained: a group is as old as its youngest drawn token, here and for max_policy_age_s. False drops
    the group with its oldest token."""
    max_policy_age_s: float = Field(default=7200.0, gt=0)
    """Bound on the age of that policy, seconds since a newer one was published; the newest is never too old. A sampler
    whose delay model takes longer there and back is refused."""
    max_outstanding_groups: int = Field(default=0, ge=0)
    """Bound on groups that are leased to samplers, queued or leased to the learner; 0 means 4 versions' worth."""
    site_pending_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes that one site may have in the queue."""
    site_groups_per_s: float = Field(default=0.0, ge=0)
    """Groups that one site may push per second, in the long run; 0 is no bound."""
    site_bytes_per_s: float = Field(default=0.0, ge=0)
    """Bytes of groups that one site may push per second, in the long run; 0 is no bound."""
    site_burst_s: float = Field(default=10.0, gt=0)
    """Seconds' worth of both that a site may push at once after a pause."""
    site_work_groups: int = Field(default=0, ge=0)
    """Assignments that one site may hold; 0 is an equal share of what all may hold, less what it left unanswered."""
    site_batch_share: float = Field(default=1.0, gt=0, le=1)
    """Largest part of a version's groups from one site while others have groups; 1 is no bound."""
    lease_order: Literal["oldest", "fair", "newest"] = "oldest"
    """Which groups the learner gets first: those of the oldest policies, one of each site in turn, or `newest`: of the
    newest version when it is newer than any before, else the first that came of those at most max_staleness_versions
    // 2 versions older than that one; of older ones every fourth, the oldest first, while there are any."""
    quarantine_failures: int = Field(default=3, ge=0)
    """Groups failing the learner's checks that put a site into quarantine until an operator releases it; 0: never. Ten
    that failed by the result of a completion's code alone count as one."""
    quarantine_window_groups: int = Field(default=1000, ge=1)
    """Newest groups of a site among which failures count."""
    max_lost_share: float = Field(default=0.2, ge=0, le=1)
    """Largest share of members that a site may lose, a mean over about its last 50 groups. Above it the coordinator
    drops the site's groups with lost members and takes its whole ones. 1 drops none."""
    store_bytes: int = Field(default=1 << 40, ge=1 << 20)
    """Bytes that payloads may occupy on disk; what no sampler needs is deleted before anything is refused."""
    keep_versions: int = Field(default=0, ge=0)
    """Newest versions whose deltas are all kept; 0 means four times max_staleness_versions, and at least 256."""
    snapshot_ratio: float = Field(default=0.25, gt=0)
    """A snapshot is due when the deltas after the newest one cost more than this share of its bytes."""
    canary_threshold: float = Field(default=0.2, ge=0)
    """Median |difference| of a site's canary log-probs from the learner's that puts it in quarantine, nats; 0: never.
    fp32 engines are 1e-5 off, bf16 ones 0.01 for small models and 0.03 to 0.1 for one of 135 M parameters, whose logits
    are rounded; wrong weights or a wrong temperature 0.3 and more."""
    pull_lease_s: float = Field(default=600.0, gt=0)
    """How long what was planned for a sampler stays although it fetches nothing, seconds."""
    merged_bytes: int = Field(default=64 << 30, ge=0)
    """Bytes that merged deltas may occupy on disk, beside store_bytes; 0 makes none. Safe to delete any time."""
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    """Free bytes on the disk of data_dir below which no group is taken; no payload below half of it. At most a 32nd of
    the disk counts, 0 takes everything that the disk does."""
    samples_bytes: int = Field(default=256 << 20, ge=0)
    """Bytes that groups and evaluations may occupy in the database after their end, for operators to read by `heterorl
    samples`: half for groups that were trained on, a quarter for those that failed a check, the rest for dropped ones
    and evaluations, and each part may use what the others leave; the oldest go first. 0 keeps none."""
    samples_every: int = Field(default=16, ge=1)
    """Every so many-th group that is trained on, or dropped for no fault, is kept; of those that fail a check, all."""
    max_payload_bytes: int = Field(default=64 << 30, ge=1 << 10)
    """Largest payload, bytes."""
    max_message_bytes: int = Field(default=16 << 20, ge=2 << 20, le=512 << 20)
    """Largest message, bytes; bounds a group. Stated to every node; a learner's own must not be smaller."""
    max_prompt_tokens: int = Field(default=1 << 18, ge=1)
    """Longest prompt of a group, tokens."""
    messages_in_flight_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Bytes of messages from all samplers in memory at once, a quarter of them for requests of some KiB; one sampler
    has at most four of the largest messages in each part, one site three quarters of it."""
    max_concurrent_rpcs: int = Field(default=4096, ge=8)
    """Rpcs under way at once; more are refused for a while. A sampler takes two to four, one of them all the time.
    An eighth of them is kept for the learner and operators."""
    site_concurrent_rpcs: int = Field(default=32, ge=1)
    """Rpcs that one sampler's certificate may have under way at once."""
    learner_lease_s: float = Field(default=10.0, gt=0)
    """How long a silent learner keeps its lease, seconds."""
    work_lease_s: float = Field(default=120.0, gt=0)
    """How long a silent sampler keeps a prompt group, seconds; choose above the longest generation and transit. The
    delay that its own model makes comes on top, and the longest time of a rollout of several turns while it lives."""
    max_work_ahead_s: float = Field(default=3600.0, ge=0, allow_inf_nan=False)
    """How far ahead a site may hold assignments, seconds; what a silent site holds waits so much longer for its
    return, and counts against nobody meanwhile. 0: what a silent sampler holds goes to others after work_lease_s."""
    evaluation: tuple[PlannedSetConfig, ...] = ()
    """Sets that samplers evaluate versions on; the learner and the publication of versions never wait for them. An
    evaluation that nobody has begun gives way to that of a newer version."""
    evaluation_sites: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], ...] = ()
    """Sites that may evaluate; empty: all that have the data. Nobody recomputes what a site says of an evaluation."""
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
        """Bound on outstanding groups."""
        return self.max_outstanding_groups or 4 * self.groups_per_version

    @property
    def most_groups_per_version(self) -> int:
        """Groups that pacing lets be under way while no version is published: none can be made of more."""
        return min(self.outstanding_limit, (self.max_staleness_versions + 1) * self.groups_per_version)
