"""The exception tree. Each class carries fields, writes its own message and says what to do next.

    HeterorlError
      OperatorError           the person running us must change something
        ConfigError             a key, value or file
          PromptRefused  PromptTooLong  AnswerUnreadable  a row of the data: its group alone is given up
        PortInUse  DiskFull  DependencyMissing  DependencyUnsupported
      RemoteError             an answer of a peer, one per ErrorReason (services/common/rpc maps it to a status);
                              each says itself whether waiting helps (`is_transient`)
        InvalidRequest  ContractMismatch  UnknownVersion  UnknownPayload  UnknownSample  DigestMismatch  StaleEpoch
        LeaseHeld  ParentNotHead  StepConflict  GroupNotAvailable  PayloadMissing  QuotaExceeded  Draining
        NotRegistered  Quarantined  RunFinished  StoreFull  Unauthenticated  PermissionDenied  MessageTooLarge
        Unreachable
          Busy                    it is out of something, or its disk does not answer, for now
      CorruptData             bytes that fail their own checks: quarantined, never served, never applied
        MalformedPayload  LimitExceeded  StateMismatch  CorruptStore
      UntrustedVersion        a version whose origin or place in the history is not proven; never used
        UnsignedManifest  WrongSignature  UnprovenDescent
      NotReversible           a delta that cannot be undone without the state before it
      EngineError             the engine generates nothing until a version is loaded anew
        StaleWeights  EngineDied
      RewardError             a verifier failed; never a zero reward
      EpisodeError            an environment's episode ends without a reward; its siblings go on
        EnvironmentFailed  ToolLost
      StoreLost               the coordinator's database is away: it starts again, and nothing acknowledged is lost
      StoreHeld               another session has the coordinator's database: it starts again, until that one has ended

`ValueError` and `assert` are for our own mistakes.
"""

from __future__ import annotations

from typing import ClassVar


class HeterorlError(Exception):
    """Base of all errors of this project; `action` tells the reader's next move.

    `exit_code` is that of a process that ends by it: 2 where only a person can help, 1 where another try may.
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
    """Something that the person running this process must change."""


class ConfigError(OperatorError):
    """A configuration key, value or file is wrong; `key` is its dotted path."""

    def __init__(self, key: str, problem: str, *, action: str | None = None) -> None:
        self.key = key
        super().__init__(f"{key}: {problem}", action=action)


class PromptRefused(ConfigError):
    """A prompt of which nothing can be generated: no template of this run writes its messages."""


class PromptTooLong(PromptRefused):
    """A prompt that leaves no room for a completion."""


class AnswerUnreadable(PromptRefused):
    """A prompt whose right answer its reward cannot read, so that no completion of it can be scored."""


class PortInUse(OperatorError):
    """The address to listen on is taken."""

    def __init__(self, key: str, address: str) -> None:
        self.key = key
        super().__init__(f"{key}: {address} is already in use", action="stop the other process or choose another port")


class DiskFull(OperatorError):
    """The disk under `path` is full."""

    def __init__(self, path: str, *, needed_bytes: int = 0, free_bytes: int = 0) -> None:
        sizes = f": {needed_bytes} bytes are needed, {free_bytes} are free" if needed_bytes else ""
        super().__init__(
            f"no space left under {path}{sizes}", action="free space, then retry: nothing acknowledged is lost"
        )


class DependencyMissing(OperatorError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", action=f"pip install 'heterorl[{extra}]'")


class DependencyUnsupported(OperatorError):
    """An optional package is installed in a version that this release was not made for."""

    def __init__(self, package: str, extra: str, *, found: str, supported: str) -> None:
        self.found = found
        super().__init__(
            f"{package} {found} is installed; this release works with {package} {supported}",
            action=f"pip install 'heterorl[{extra}]', or install the release of heterorl for {package} {found}",
        )


class RemoteError(HeterorlError):
    """A typed refusal by a peer.

    `retry_after_s` is how long the peer asks to wait; 0 where it names no time. `is_transient` says whether the same
    call may succeed later although its caller changes nothing; each class states it for itself. `is_overload` marks
    those that pass within seconds, so that a call repeats itself within its budget.
    """

    retry_after_s: float = 0.0
    is_overload: ClassVar[bool] = False

    @property
    def is_transient(self) -> bool:
        """Whether waiting helps; of this class itself, an answer without a reason that this release knows, it may."""
        return True

    def __init__(self, message: str, *, action: str | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message, action=action)
        self.retry_after_s = retry_after_s


class InvalidRequest(RemoteError):
    """A field of the request is outside its bounds."""

    action = "correct the named field; the same request will be refused again"
    is_transient = False


class ContractMismatch(RemoteError):
    """A node disagrees with the run's contract (tokenizer, template, layout, task, sampling semantics)."""

    action = "give this node the run's model, tokenizer, task and sampling settings"
    is_transient = False


class UnknownVersion(RemoteError):
    """The version does not exist in this run."""

    action = "ask for the head and pull that"
    is_transient = False


class UnknownPayload(RemoteError):
    """No payload with that digest is stored."""

    action = "plan the pull again"
    is_transient = False


class UnknownSample(RemoteError):
    """No sample with that number is kept, or no more."""

    action = "list the samples that are kept: older ones made room"
    is_transient = False


class DigestMismatch(RemoteError):
    """Content does not hash to the digest stated for it."""

    action = "send the content again from its source"
    is_transient = False


class StaleEpoch(RemoteError):
    """The caller's learner lease was superseded: none of its effects is accepted."""

    action = "stop, discard unpublished work, and acquire a new lease"
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
    """A group to be consumed is not leased by this epoch nor pending, or became too stale."""

    action = "discard the step and take new groups"
    is_transient = False


class PayloadMissing(RemoteError):
    """A manifest names a payload that was not uploaded completely."""

    action = "upload the payload, then publish again with the same step id"
    is_transient = False


class QuotaExceeded(RemoteError):
    """A bound on bytes, credits or requests is reached."""

    action = "wait for the stated delay, then repeat"
    is_overload = True

    @property
    def is_transient(self) -> bool:
        """Whether the bound passes; one on a size names no delay and never does."""
        return self.retry_after_s > 0


class MessageTooLarge(RemoteError):
    """One message is larger than its receiver takes or its sender may send; nobody read it."""

    action = "raise max_message_bytes at the coordinator and at its peer, or send less in one message"
    is_transient = False


class Draining(RemoteError):
    """The service is shutting down or the run drains."""

    action = "finish what is held, then reconnect"
    # Another process takes over, or the run ends and says so.
    is_transient = True


class NotRegistered(RemoteError):
    """The coordinator does not know this (site, incarnation)."""

    action = "register, then repeat"
    # A heartbeat is answered by the order to register, which is obeyed beside every other call.
    is_transient = True


class Quarantined(RemoteError):
    """The site's canary contradicts the learner's: its weights, settings or kernels are not what it states."""

    action = "correct the engine's settings, or have an operator end it: heterorl sites release"
    # A version that scores right ends it, or an operator.
    is_transient = True


class RunFinished(RemoteError):
    """The run has reached its configured end."""

    action = "stop"
    is_transient = False


class StoreFull(RemoteError):
    """The coordinator's disk is full."""

    action = "free space on the coordinator; repeat after the stated delay"
    is_transient = True
    is_overload = True


class Unauthenticated(RemoteError):
    """The link proves no identity that this run knows; with a delay, a new certificate in the same files is enough."""

    action = "give this node a certificate of this run: heterorl certs issue or renew, or join by a new token"

    @property
    def is_transient(self) -> bool:
        """Whether new files are enough; a revoked certificate names no delay."""
        return self.retry_after_s > 0


class PermissionDenied(RemoteError):
    """The identity is known, and its role or site may not do this."""

    action = "use a certificate of the right role and site; the same request will be refused again"
    is_transient = False


class Unreachable(RemoteError):
    """The peer did not answer within the retry budget."""

    action = "check the address and the network; the caller keeps its work and goes on trying"
    is_transient = True


class Busy(Unreachable):
    """The coordinator cannot now: no descriptors, a silent disk, a damaged frame; nothing was changed or lost."""

    action = "repeat after the stated delay; the coordinator's log names what is missing"
    exit_code = 1
    is_transient = True
    is_overload = True


class CorruptData(HeterorlError):
    """Bytes that fail their own checks."""


class MalformedPayload(CorruptData):
    """A payload object or frame breaks its format."""

    action = "fetch it again; if it repeats, the publisher is broken"


class LimitExceeded(CorruptData):
    """A stated size is over its limit; nothing was allocated for it."""

    action = "refuse the sender or raise the named limit"


class StateMismatch(CorruptData):
    """Recomputed weights differ from the manifest; they are not used."""

    action = "fall back to a snapshot"


class CorruptStore(CorruptData):
    """The durable store fails its integrity check."""

    action = "restore the data directory from a backup"


class StoreLost(HeterorlError):
    """The coordinator cannot reach its database, or has lost it; what it acknowledged is there."""

    action = "nothing acknowledged is lost: the coordinator starts again and waits for it; if it stays, see PostgreSQL"
    exit_code = 1


class StoreHeld(HeterorlError):
    """Another session has the coordinator's database; it may be that of a process that is gone.

    Which of the two it is, nobody can tell from here, and the second one passes: so a start is tried again.
    """

    action = "stop that coordinator, or start this one with --standby to follow it"
    exit_code = 1


class UntrustedVersion(HeterorlError):
    """A version of which nothing proves that this run's learner published it at this place; it is not used."""


class UnsignedManifest(UntrustedVersion):
    """`trusted_keys` is not empty and the manifest has no signature."""

    action = "set signing_key at the learner, or empty trusted_keys to accept runs that are not signed"


class WrongSignature(UntrustedVersion):
    """The manifest's signature is of none of the trusted keys."""

    action = "compare `heterorl keys show` at the learner with trusted_keys; if they agree, distrust the coordinator"


class UnprovenDescent(UntrustedVersion):
    """The coordinator does not show the manifests that lead from a version used before to this one."""

    action = "asked for again; if it repeats, distrust the coordinator"


class NotReversible(HeterorlError):
    """A delta holds a state, or steps that need one: the way back is not in it."""

    action = "rebuild the earlier version from its snapshot"


class RewardError(HeterorlError):
    """A verifier crashed or timed out: the completion is a lost member of its group, never one of reward zero."""


class EngineError(HeterorlError):
    """An engine that generates nothing until it has loaded a version anew; nothing it computed since is used."""


class StaleWeights(EngineError):
    """After a swap the engine computes something else than the version's weights do."""

    def __init__(self, version: int, *, difference: float, tolerance: float) -> None:
        self.version = version
        self.difference = difference
        super().__init__(
            f"version {version}: log-probs differ from the reference by {difference:.2g}, allowed are {tolerance:.2g}",
            action="the engine is started again with the whole version",
        )


class EngineDied(EngineError):
    """The engine's process ended or answers no more."""

    action = "the engine is started again with the whole version"


class EpisodeError(HeterorlError):
    """An episode of an environment has ended without a reward; the other members of its group go on."""


class EnvironmentFailed(EpisodeError):
    """The environment's own code raised, or returned what is no observation or reward."""


class ToolLost(EpisodeError):
    """The process of an episode took too long for one call and was killed, or it died."""
