"""The exception tree.

Each class carries fields, writes its own message and states what to do next.
`ValueError` and `assert` are for our own mistakes.
"""

from typing import ClassVar


class HeterorlError(Exception):
    """Base of all our errors; `action` says what to do.

    A process that ends by one exits with `exit_code`: 2 if only a person can help, 1 if another start may.
    """

    action: str = ""
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, action: str | None = None) -> None:
        super().__init__(message)
        if action is not None:
            self.action = action

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.action})" if self.action else message


class OperatorError(HeterorlError):
    """The operator must change something."""


class ConfigError(OperatorError):
    """A key, value or file is wrong; `key` is its dotted path."""

    def __init__(self, key: str, problem: str, *, action: str | None = None) -> None:
        self.key = key
        super().__init__(f"{key}: {problem}", action=action)

    def within(self, key: str, problem: str, *, action: str | None = None) -> "ConfigError":
        """The error under its section's key, with the same exit code."""
        kind = ServiceUnreachable if isinstance(self, ServiceUnreachable) else ConfigError
        return kind(key, problem, action=action)


class PromptRefused(ConfigError):
    """A prompt that the run's template does not accept."""


class PromptTooLong(PromptRefused):
    """A prompt that leaves no room for a completion."""


class AnswerUnreadable(PromptRefused):
    """A prompt whose right answer its reward cannot read."""


class ClockBehind(ConfigError):
    """A certificate begins later: this machine's clock is behind."""

    exit_code = 1


class ServiceUnreachable(ConfigError):
    """A server that the configuration names does not answer, or not yet."""

    exit_code = 1


class AddressUnusable(ConfigError):
    """The address to listen on cannot be used, or not yet."""

    exit_code = 1


class DiskFull(OperatorError):
    """The disk under `path` is full."""

    def __init__(self, path: str, *, needed_bytes: int = 0, free_bytes: int = 0) -> None:
        sizes = f": {needed_bytes} bytes are needed, {free_bytes} are free" if needed_bytes else ""
        super().__init__(
            f"no space left under {path}{sizes}", action="free space, then retry: nothing acknowledged is lost"
        )


def install_command(extra: str) -> str:
    """The command that installs an extra's packages; no package index has heterorl."""
    return f"in a clone of heterorl: pip install '.[{extra}]'"


class DependencyMissing(OperatorError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", action=install_command(extra))


class DependencyUnsupported(OperatorError):
    """An optional package has a version that this release does not support."""

    def __init__(self, package: str, extra: str, *, found: str, supported: str) -> None:
        super().__init__(
            f"{package} {found} is installed; this release works with {package} {supported}",
            action=f"{install_command(extra)}, or install the release of heterorl for {package} {found}",
        )


class RemoteError(HeterorlError):
    """A typed refusal by a peer.

    `retry_after_s` is the wait that the peer asks for; 0 states none. `is_transient` states whether the same call may
    succeed later without a change at its caller. `is_overload` marks refusals that pass within seconds, so that a call
    repeats itself within its budget.
    """

    retry_after_s: float = 0.0
    is_overload: ClassVar[bool] = False

    @property
    def is_transient(self) -> bool:
        """Whether a retry helps; True without a reason that this release knows."""
        return True

    def __init__(self, message: str, *, action: str | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message, action=action)
        self.retry_after_s = retry_after_s


class InvalidRequest(RemoteError):
    """A field of the request is outside its bounds."""

    action = "correct the named field; the same request will be refused again"
    is_transient = False


class ContractMismatch(RemoteError):
    """A node's settings differ from the run's contract."""

    action = "give this node the run's model, task, reward and sampling; others need a new run in empty directories"
    is_transient = False


class UnknownVersion(RemoteError):
    """The version does not exist in this run."""

    action = (
        "choose another version; if `heterorl rollback --list` shows this one, `heterorl rollback --to` publishes its"
        " weights again"
    )
    is_transient = False


class UnknownPayload(RemoteError):
    """No payload with that digest is stored."""

    action = "plan the pull again"
    is_transient = False


class UnknownSample(RemoteError):
    """No sample with that number is kept any more."""

    action = "list the kept samples: heterorl samples list; older ones made room"
    is_transient = False


class DigestMismatch(RemoteError):
    """Content does not match its stated digest."""

    action = "send the content again from its source"
    is_transient = False


class StaleEpoch(RemoteError):
    """A newer epoch replaced the caller's lease; its effects are refused."""

    action = "start this learner again: it waits for the other's lease"
    exit_code = 1
    is_transient = False


class LeaseHeld(RemoteError):
    """Another learner holds the lease."""

    action = "wait for the other learner to stop or for its lease to expire"
    is_transient = True


class ParentNotHead(RemoteError):
    """Compare-and-set failed: the stated parent is not the newest version."""

    action = "read the head and resume from its checkpoint"
    is_transient = False


class StepConflict(RemoteError):
    """The step id was already used with other content."""

    action = "use a new step id for new content"
    is_transient = False


class GroupNotAvailable(RemoteError):
    """A group is neither leased by this epoch nor pending, or stale."""

    action = "discard the step and take new groups"
    is_transient = False


class PayloadMissing(RemoteError):
    """A manifest names a payload that is not uploaded completely."""

    action = "upload the payload, then publish again with the same step id"
    is_transient = False


class QuotaExceeded(RemoteError):
    """A bound on bytes, credits or requests is reached."""

    action = "wait for the stated delay, then repeat"
    is_overload = True

    @property
    def is_transient(self) -> bool:
        """Whether the bound passes; one on a size states no delay."""
        return self.retry_after_s > 0


class MessageTooLarge(RemoteError):
    """A message, not read, is over its receiver's or sender's limit."""

    action = "raise max_message_bytes at the coordinator and at its peer, or send less in one message"
    is_transient = False


class Draining(RemoteError):
    """The service is shutting down or the run drains."""

    action = "finish what is held, then reconnect"
    # Another process takes over, or the run ends with RunFinished.
    is_transient = True


class NotRegistered(RemoteError):
    """The coordinator does not know this (site, incarnation)."""

    action = "register, then repeat"
    # The answer to a heartbeat orders to register, which other calls need not wait for.
    is_transient = True


class Quarantined(RemoteError):
    """The site's canary differs: weights, settings or kernels are not as stated."""

    action = "correct the engine's settings, or have an operator end it: heterorl sites release"
    # A version whose canary agrees ends it, or an operator.
    is_transient = True


class RunFinished(RemoteError):
    """The run has reached its configured end."""

    action = "stop"
    is_transient = False


class StoreFull(RemoteError):
    """The coordinator's disk, or its store's, is full."""

    action = "free space there; repeat after the stated delay"
    is_transient = True
    is_overload = True


class Unauthenticated(RemoteError):
    """The link proves no identity of this run."""

    action = "give this node a certificate of this run: heterorl certs issue or renew, or join by a new token"

    @property
    def is_transient(self) -> bool:
        """Whether new files are enough; a revoked certificate's refusal has no delay."""
        return self.retry_after_s > 0


class PermissionDenied(RemoteError):
    """A known identity whose role or site may not do this."""

    action = "use a certificate of the right role and site; the same request will be refused again"
    is_transient = False


class Unreachable(RemoteError):
    """The peer did not answer within the retry budget."""

    action = "check the address and the network; a service keeps its work and goes on trying, a command does not"
    is_transient = True


class Busy(Unreachable):
    """The coordinator cannot answer for now, and its state is unchanged."""

    action = "repeat after the stated delay; the coordinator's log names what is missing"
    exit_code = 1
    is_transient = True
    is_overload = True


class CorruptData(HeterorlError):
    """Bytes that fail their own checks: quarantined, never served or applied."""


class MalformedPayload(CorruptData):
    """A payload object or frame breaks its format."""

    action = "fetch it again; if it repeats, the publisher is broken"


class LimitExceeded(CorruptData):
    """A stated size over its limit, refused before any allocation."""

    action = "refuse the sender or raise the named limit"


class StateMismatch(CorruptData):
    """Recomputed weights differ from the manifest; they are not used."""

    action = "fall back to a snapshot"


class CorruptStore(CorruptData):
    """The durable store fails its integrity check."""

    action = "restore the data directory from a backup"


class StoreLost(HeterorlError):
    """The coordinator cannot reach its database; acknowledged groups are safe."""

    action = "acknowledged groups are safe: the coordinator restarts and waits; check PostgreSQL"
    exit_code = 1


class StoreHeld(HeterorlError):
    """Another session has the coordinator's database, perhaps of an ended process.

    Both cases look alike and the second one passes, so the coordinator starts again.
    """

    action = "stop that coordinator, or start this one with --standby to follow it"
    exit_code = 1


class UntrustedVersion(HeterorlError):
    """A version, never used, whose origin or place is not proven."""


class UnsignedManifest(UntrustedVersion):
    """`trusted_keys` is not empty and the manifest has no signature."""

    action = "set signing_key at the learner, or empty trusted_keys to accept runs that are not signed"


class WrongSignature(UntrustedVersion):
    """None of the trusted keys made the manifest's signature."""

    action = "compare `heterorl keys show` at the learner with trusted_keys; if they agree, distrust the coordinator"


class UnprovenDescent(UntrustedVersion):
    """The coordinator does not list the manifests since a version used before."""

    action = "asked for again; if it repeats, distrust the coordinator"


class NotReversible(HeterorlError):
    """A delta that cannot be undone without the state before it."""

    action = "rebuild the earlier version from its snapshot"


class RewardError(HeterorlError):
    """A verifier failed: its completion is lost, never a zero reward."""


class EngineError(HeterorlError):
    """An engine refuses requests until it loads a version again.

    Its results since the error are not used.
    """


class StaleWeights(EngineError):
    """After a swap the engine computes something else than the version's weights."""

    def __init__(self, version: int, *, difference: float, tolerance: float) -> None:
        self.version = version
        self.difference = difference
        super().__init__(
            f"version {version}: log-probs differ from the reference by {difference:.2g}, allowed are {tolerance:.2g}",
            action="the engine restarts with the whole version",
        )


class EngineDied(EngineError):
    """The engine's process ended or does not answer."""

    action = "the engine restarts with the whole version"


class EpisodeError(HeterorlError):
    """An episode ended without a reward; its group's other members go on."""


class EnvironmentFailed(EpisodeError):
    """An environment's code raised, or returned neither observation nor reward."""


class ToolLost(EpisodeError):
    """An episode's process died, or was killed in a long call."""
