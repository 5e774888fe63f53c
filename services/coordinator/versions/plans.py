"""Plans of pulls, as a store operation: what the caller holds is believed only with its state root."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.errors import UnknownVersion
from heterorl.common.types.policy import PayloadRef, PlanKind, PullPlan, stated_version
from heterorl.coordinator.versions import lineage
from heterorl.coordinator.versions.chain import Chain, MergedInto
from heterorl.coordinator.versions.path import plan_pull

MAX_MANIFEST_BYTES = 1 << 20
"""Bytes of the manifests in a plan, beyond which only its target's goes; half of the smallest max_message_bytes."""


def no_merged(_version: int) -> tuple[PayloadRef, ...]:
    """No merged delta leads anywhere."""
    return ()


def plan(
    chain: Chain,
    *,
    have_version: int | None,
    have_root: str,
    want_version: int | None,
    merged_into: MergedInto,
    base_root: str = "",
    object_bytes: int = 0,
) -> PullPlan:
    """Plan a pull, to the head where none is wanted; what the caller claims to hold counts by its state root alone.

    `merged_into` names the merged deltas that lead to a version; `base_root` is the state of the caller's base model.

    Raises:
        UnknownVersion: the wanted version does not exist or was abandoned.
    """
    want = lineage.head_version(chain.connection) if want_version is None else want_version
    if want is None or not chain.is_in_lineage(want):
        where = f" in flavour {chain.flavour}" if chain.flavour else ""
        raise UnknownVersion(f"version {stated_version(want)} does not exist{where} in the lineage")
    start, note = have_version, ""
    if have_version is not None and chain.state_root(have_version) != have_root:
        start, note = None, f"; version {have_version} of the caller is not the run's"

    def into(version: int) -> list[PayloadRef]:
        return [*chain.into(version), *merged_into(version)]

    kind, payloads, reason = plan_pull(
        into,
        have_version=start,
        want_version=want,
        base_version=_version_of_root(chain, base_root),
        object_bytes=object_bytes,
    )
    return PullPlan(
        kind=PlanKind(kind),
        target_version=want,
        payloads=payloads,
        manifests=_manifests(chain, [payload.to_version for payload in payloads]),
        reason=reason + note,
        signature=chain.signature(want) if payloads else b"",
    )


def _manifests(chain: Chain, versions: Sequence[int]) -> tuple[bytes, ...]:
    """Those of a whole way where they are small together, else the target's alone: others are listed by who needs them.

    A large model's manifest is hundreds of kilobytes, and a way may have hundreds of payloads.
    """
    # Before the bytes are read: an operation of the store must stay short.
    sizes = [chain.manifest_bytes(version) for version in versions]
    stated = versions if sum(sizes) <= MAX_MANIFEST_BYTES else versions[-1:]
    return tuple(chain.manifest(version) for version in stated)


def _version_of_root(chain: Chain, root: str) -> int | None:
    """The first version if it has this state: the one that anybody may hold without the run."""
    return 0 if chain.state_root(0) == root and chain.is_in_lineage(0) else None
