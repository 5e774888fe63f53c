"""Whether a version may follow what a site used last: it descends from that, or names it as abandoned.

A manifest names its parent by digest, so the way from the new version back to the remembered one is a chain of
manifests that the first vouches for. Numbers are dense and never reused: a manifest of version v with parent p < v - 1
is itself the record that versions p + 1 to v - 1 are abandoned, and the new version's signature covers that record too.

    remembered h, new v, chain v -> ... -> m, m the oldest manifest above h
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from heterorl.common.errors import UnknownVersion, UnprovenDescent
from heterorl.common.types.policy import Manifest
from heterorl.common.wire.policy import manifest_digest, manifest_from_bytes
from heterorl.sampler.policy.record import RunReplaced, SeenVersion

Fetch = Callable[[int, int], Awaitable[Sequence[bytes]]]
"""From the oldest and the newest of a range of versions to their manifests, newest first, as many as fit one answer."""
MAX_AT_ONCE = 256
"""Manifests asked for at once, so that a long way back costs few round trips."""
NOTHING_ABANDONED = range(0)


async def check_descent(data: bytes, *, newest: SeenVersion | None, known: Mapping[int, bytes], fetch: Fetch) -> range:
    """Check the manifest of a new version against the newest one used; returns the versions that were abandoned.

    Args:
        data: exact bytes of the new version's manifest.
        newest: the highest version used; None accepts whatever comes first.
        known: manifests at hand by version, exact bytes; trusted no more than fetched ones.
        fetch: gets the exact bytes of other manifests.

    Raises:
        RunReplaced: the version is older, of another run, or descends from a sibling of `newest`.
        UnprovenDescent: the coordinator does not show the manifests between.
    """
    child = manifest_from_bytes(data)
    if newest is None:
        return NOTHING_ABANDONED
    if newest.run_id and child.run_id != newest.run_id:
        raise RunReplaced(
            f"version {child.version} is of run {child.run_id}, this site works for {newest.run_id}",
            action="name the coordinator of that run, or choose another state_dir",
        )
    if child.version < newest.version:
        raise RunReplaced(f"version {child.version} is older than version {newest.version}, used before")
    if child.version == newest.version:
        _same(newest, manifest_digest(data), f"version {child.version} is another than the one used before")
        return NOTHING_ABANDONED
    manifests = dict(known)
    while child.parent_version > newest.version:
        child = await _parent(child, manifests, oldest=newest.version + 1, fetch=fetch)
    if child.parent_version == newest.version:
        problem = f"version {child.version} does not descend from the version {newest.version} that was used before"
        _same(newest, child.parent_digest, problem)
        return NOTHING_ABANDONED
    return child.abandoned


def _same(newest: SeenVersion, digest: str, problem: str) -> None:
    if newest.manifest_digest and digest != newest.manifest_digest:
        raise RunReplaced(problem)


async def _parent(child: Manifest, manifests: dict[int, bytes], *, oldest: int, fetch: Fetch) -> Manifest:
    number = child.parent_version
    if number not in manifests:
        first = max(oldest, number - MAX_AT_ONCE + 1)
        try:
            found = await fetch(first, number)
        except UnknownVersion as error:
            raise UnprovenDescent(f"the coordinator does not show the way to version {child.version}") from error
        if not found:
            raise UnprovenDescent(f"the coordinator does not show the way to version {child.version}")
        # What is held already is kept; what is beyond the range was not asked for.
        manifests.update(
            (version, data)
            for version, data in zip(range(number, first - 1, -1), found, strict=False)
            if version not in manifests
        )
    # Taken, not read: a long way back must not be in memory as a whole.
    data = manifests.pop(number)
    if manifest_digest(data) != child.parent_digest:
        raise UnprovenDescent(f"version {child.version} names another version {number} than the coordinator shows")
    return manifest_from_bytes(data)
