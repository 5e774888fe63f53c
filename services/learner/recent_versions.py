"""Published versions as samplers have them, for checks: the newest few in memory, any other pulled again.

Guarantees: what is returned has exactly the manifest's state, pulled and verified like at a sampler; at most
`kept_versions` states are held beside the one being built. A site cannot choose a version that is not checked: whatever
it may be trained on can still be rebuilt.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from pathlib import Path

from services.common.api import CoordinatorApi, PullPlan
from services.common.pull import PulledVersion, Puller
from services.common.trust import Trust
from services.common.weights.arena import Arena, Layout
from services.learner.patience import Patience

_LOG = logging.getLogger(__name__)


class RecentVersions:
    """A few pulled states, by version."""

    def __init__(
        self,
        api: CoordinatorApi,
        *,
        spool: Path,
        layout: Layout,
        patience: Patience,
        trust: Trust,
        num_kept: int,
        threads: int = 1,
    ) -> None:
        self._puller = Puller(api=api, spool=spool, layout=layout, clock=patience.clock, threads=threads)
        self._puller.fetcher.on_frame = patience.reset
        self._patience = patience
        self._trust = trust
        self._num_kept = num_kept
        self._kept: OrderedDict[int, PulledVersion] = OrderedDict()

    async def get(self, version: int) -> Arena:
        """The weights of a version.

        Raises:
            UnknownVersion: it does not exist in the lineage, or its payloads were deleted.
            CorruptData: even the snapshot fails its checks.
            UntrustedVersion: it is signed by nobody this learner trusts.
        """
        pulled = self._kept.get(version)
        if pulled is None:
            earlier = [number for number in self._kept if number < version]
            held = self._kept[max(earlier)] if earlier else None
            pull = functools.partial(self._puller.pull, held=held, want_version=version, admit=self._admit)
            pulled = await self._patience.insist(pull)
            self._kept[version] = pulled
            _LOG.debug("version %d is here for checks", version)
        self._kept.move_to_end(version)
        while len(self._kept) > self._num_kept:
            self._kept.popitem(last=False)
        return pulled.arena

    async def _admit(self, plan: PullPlan) -> None:
        self._trust.check(plan.manifests[-1], plan.signature, version=plan.target_version)
