"""Who may be the run's learner: pure decisions about the lease. Safety is the epoch's; time only decides liveness."""

from __future__ import annotations

from dataclasses import dataclass, fields

from heterorl.common.types.common import Contract, LearnerProgress, LoraSettings, SamplingSemantics

_KEYS = {
    "lora.base_digest": "model_dir (the base model under the adapters)",
    "end_token_ids": "sampling.end_token_ids (of model_dir where it is not set)",
    "min_members": "sampling.min_members (half of group_size where it is 0)",
    "max_turns": "task.max_turns (1 without an environment)",
    "max_trajectory_tokens": "sampling.max_trajectory_tokens",
}
"""Settings that a node's configuration knows by another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The newest lease. `expires` is an instant of the monotonic clock; `is_released` ends it early.

    `incarnation` is of the holder's state directory; empty for holders of earlier programs, which have none.
    """

    epoch: int
    holder: str
    request_id: str
    expires: float
    is_released: bool
    incarnation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """Outcome: the same epoch again, a new one, or a refusal with the time left."""

    epoch: int | None
    is_new: bool
    wait_s: float


def decide_acquire(
    now: float, lease: Lease, *, holder: str, request_id: str, incarnation: str = ""
) -> tuple[Acquire, str]:
    """Decide on a request for the lease; a holder may always come back from its own state directory, to a new epoch.

    A name alone proves nothing: a configuration that was copied, or started twice, has the same.
    """
    if lease.request_id == request_id and not lease.is_released:
        return Acquire(epoch=lease.epoch, is_new=False, wait_s=0.0), f"epoch {lease.epoch} was granted to this request"
    wait_s = lease.expires - now
    is_own = (lease.holder, lease.incarnation) == (holder, incarnation)
    if lease.epoch and not lease.is_released and not is_own and wait_s > 0:
        who = lease.holder if lease.holder != holder else f"another learner whose holder is {holder} too"
        return Acquire(epoch=None, is_new=False, wait_s=wait_s), f"{who} holds the lease for {wait_s:.1f} s"
    return Acquire(epoch=lease.epoch + 1, is_new=True, wait_s=0.0), f"epoch {lease.epoch + 1} begins for {holder}"


def contract_difference(stated: Contract, offered: Contract) -> str:
    """Name the first setting in which two contracts differ, with both values; empty when they agree."""
    for entry in fields(Contract):
        mine, theirs = getattr(stated, entry.name), getattr(offered, entry.name)
        if mine == theirs:
            continue
        name = entry.name
        if name == "end_token_ids" and () in (mine, theirs):
            # Stated by one side only: the other is an earlier program, whose tokenizer has the right digest anyway.
            continue
        if isinstance(mine, SamplingSemantics | LoraSettings):
            part = next(part.name for part in fields(mine) if getattr(mine, part.name) != getattr(theirs, part.name))
            name, mine, theirs = f"{name}.{part}", getattr(mine, part), getattr(theirs, part)
        return f"{_KEYS.get(name, name)}: the run has {mine}, this node {theirs}"
    return ""


@dataclass(slots=True)
class Standing:
    """The newest word of a learner; used by store operations only."""

    _epoch: int = 0
    _progress: LearnerProgress | None = None
    _heard: float = 0.0

    def note(self, progress: LearnerProgress | None, *, epoch: int, now: float) -> None:
        """Keep what the holder of an epoch said at an instant of the monotonic clock."""
        self._epoch, self._progress, self._heard = epoch, progress, now

    def of(self, epoch: int, now: float) -> tuple[LearnerProgress | None, float]:
        """What the holder of this epoch said last, and seconds since then; of another epoch nothing is known."""
        if epoch != self._epoch or self._progress is None:
            return None, 0.0
        return self._progress, max(0.0, now - self._heard)
