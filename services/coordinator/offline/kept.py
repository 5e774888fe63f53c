"""Which payloads of a history are to be checked, when the coordinator deletes some and writes snapshots itself. Pure.

What is offered stands in the store; manifests name also what was deleted since. A version that nothing leads to any
more is stated by its manifest alone, and so is what only leads on from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from heterorl.common.types.policy import Manifest, PayloadKind
from heterorl.coordinator.offline.history import History


def with_offered(history: History, manifests: Mapping[int, Manifest]) -> dict[int, Manifest]:
    """Manifests that name what the store offers: without what was deleted, with the coordinator's own snapshots."""
    offered = {(payload.to_version, payload.kind): payload for payload in history.offered}
    digests = {payload.digest for payload in history.offered}
    kept: dict[int, Manifest] = {}
    for version, manifest in manifests.items():
        # A delta is nobody's but the learner's: one that the store offers under another name is a fault to be found.
        payloads = [
            payload
            for payload in manifest.payloads
            if payload.digest in digests or (payload.kind is PayloadKind.DELTA and (version, payload.kind) in offered)
        ]
        snapshot = offered.get((version, PayloadKind.SNAPSHOT))
        if snapshot is not None and all(snapshot.digest != payload.digest for payload in payloads):
            payloads.append(snapshot)
        kept[version] = dataclasses.replace(manifest, payloads=tuple(payloads))
    return kept


def rebuildable(manifests: Mapping[int, Manifest], kept: Mapping[int, Manifest]) -> dict[int, Manifest]:
    """Of `kept`, the manifests without deltas from versions that deletion left without a way."""
    lost: set[int] = set()
    found: dict[int, Manifest] = {}
    for version, manifest in sorted(kept.items()):
        payloads = tuple(p for p in manifest.payloads if p.kind is PayloadKind.SNAPSHOT or p.from_version not in lost)
        is_less = len(payloads) < len(manifest.payloads) or not set(manifests[version].payloads) <= set(payloads)
        if not payloads and is_less:
            lost.add(version)
        found[version] = dataclasses.replace(manifest, payloads=payloads)
    return found
