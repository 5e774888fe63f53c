"""The manifests that lead to a version: the target's comes with the plan, the others are listed in pages.

Guarantees: only manifests that the plan names are kept, at most MAX_BYTES of them; each call brings at least the
manifest that it was made for, or the pull fails. The target's manifest is the plan's last one, which was judged; a
listed manifest never replaces one that the plan carries.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.api import WeightsApi
from heterorl.common.errors import LimitExceeded, MalformedPayload, StateMismatch
from heterorl.common.types.policy import PullPlan
from heterorl.common.wire.policy_messages import manifest_from_bytes

PAGE = 256
"""Manifests of one request; the coordinator sends as many as fit one answer."""
MAX_BYTES = 256 << 20
"""Bytes of manifests held at once: 850 manifests of a model of 70e9 elements."""


class ManifestChain:
    """The manifests of one plan at a time, of one variant."""

    def __init__(self, *, api: WeightsApi, variant: str) -> None:
        self._api = api
        self._variant = variant
        self._wanted: frozenset[int] = frozenset()
        self._found: dict[int, bytes] = {}

    def begin(self, plan: PullPlan) -> None:
        """Start with the manifests that a plan carries; forget those of the plan before.

        Raises StateMismatch for another version's manifest, LimitExceeded if together they are too large.
        """
        numbers = [payload.to_version for payload in plan.payloads]
        self._wanted, self._found = frozenset(numbers), {}
        # Matched from the end: the plan's last manifest is the one that was judged.
        for number, data in zip(reversed(numbers), reversed(plan.manifests), strict=False):
            if manifest_from_bytes(data).version != number:
                raise StateMismatch(f"the plan carries another version's manifest for version {number}")
            self._found[number] = data
        self._check_size()

    def end(self) -> None:
        self._wanted, self._found = frozenset(), {}

    async def list(self, first: int, last: int) -> Sequence[bytes]:
        """Manifests of [first, last], newest first, as many as fit one answer; those of the plan are kept."""
        found = await self._api.list_manifests(first_version=first, last_version=last, variant=self._variant)
        self._keep(found)
        return found

    async def manifests(self, plan: PullPlan) -> tuple[bytes, ...]:
        """The manifest of each payload's version, in the plan's order.

        Raises UnknownVersion or StateMismatch if the coordinator does not list one, LimitExceeded if they are too
        large.
        """
        numbers = [payload.to_version for payload in plan.payloads]
        for number in sorted(set(numbers), reverse=True):
            if number in self._found:
                continue
            first = number
            while first - 1 in self._wanted and first - 1 not in self._found and number - first + 1 < PAGE:
                first -= 1
            await self.list(first, number)
            if number not in self._found:
                raise StateMismatch(f"the coordinator does not list the manifest of version {number}")
        return tuple(self._found[number] for number in numbers)

    def _keep(self, manifests: Sequence[bytes]) -> None:
        if not self._wanted:
            return
        for data in manifests:
            try:
                version = manifest_from_bytes(data).version
            except MalformedPayload:
                # `manifests` reports it as missing.
                continue
            if version in self._wanted:
                self._found.setdefault(version, data)
        self._check_size()

    def _check_size(self) -> None:
        if sum(map(len, self._found.values())) > MAX_BYTES:
            raise LimitExceeded(f"the manifests of {len(self._wanted)} payloads are over {MAX_BYTES} bytes")
