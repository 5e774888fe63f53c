"""Published versions as samplers have them, for checks: the newest few in memory, any other pulled again.

Guarantees: what is returned has exactly the manifest's state, pulled and verified like at a sampler, or is what a
flavour's state stands for; at most `kept_versions` states are held beside the one being built. A site cannot choose a
version that is not checked: whatever it may be trained on can still be rebuilt.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import UnknownVersion
from heterorl.common.identity.signing import Trust
from heterorl.common.model.quantise import LIMIT, Flavour, dequantise, flavour_layout
from heterorl.common.process.patience import Patience
from heterorl.common.process.threads import in_thread
from heterorl.common.pull.pull import PulledVersion, TrustedPuller
from heterorl.common.weights.arena import Arena, Layout

_LOG = logging.getLogger(__name__)


class RecentVersions:
    """A few pulled states, by flavour and version."""

    def __init__(
        self,
        api: LearnerApi,
        *,
        spool: Path,
        layout: Layout,
        patience: Patience,
        trust: Trust,
        num_kept: int,
        threads: int = 1,
    ) -> None:
        self._api = api
        self._spool = spool
        self._layout = layout
        self._threads = threads
        self._pullers: dict[str, TrustedPuller] = {}
        self._patience = patience
        self._trust = trust
        self._num_kept = num_kept
        self._kept: OrderedDict[tuple[str, int], PulledVersion] = OrderedDict()
        self._whole: tuple[tuple[str, int], Arena] | None = None
        """What the flavour's version that was asked for last stands for."""

    async def get(self, version: int, flavour: str = "") -> Arena:
        """The weights that a sampler of a flavour ("": those that are trained) computes with at a version.

        Raises:
            UnknownVersion: it does not exist in the lineage, or its payloads were deleted, or nobody knows the flavour.
            UnknownPayload: the coordinator's payloads go as fast as plans are made.
            CorruptData: even the snapshot fails its checks.
            UntrustedVersion: it is signed by nobody this learner trusts.
        """
        key = (flavour, version)
        pulled = self._kept.get(key)
        if pulled is None:
            earlier = [number for form, number in self._kept if form == flavour and number < version]
            held = self._kept[flavour, max(earlier)] if earlier else None
            puller = self._pullers.get(flavour) or self._add_puller(flavour)
            pulled = await puller.pull(version, held=held)
            self._kept[key] = pulled
            _LOG.debug("version %d%s is here for checks", version, f" in flavour {flavour}" if flavour else "")
        self._kept.move_to_end(key)
        while len(self._kept) > self._num_kept:
            self._kept.popitem(last=False)
        if not flavour:
            return pulled.arena
        if self._whole is None or self._whole[0] != key:
            whole = Arena(self._layout)
            await in_thread(dequantise, pulled.arena, whole, _known(flavour))
            self._whole = (key, whole)
        return self._whole[1]

    def _add_puller(self, flavour: str) -> TrustedPuller:
        layout = flavour_layout(self._layout, _known(flavour)) if flavour else self._layout
        puller = TrustedPuller(
            api=self._api,
            spool=self._spool / (flavour or "trained"),
            layout=layout,
            patience=self._patience,
            trust=self._trust,
            threads=self._threads,
            flavour=flavour,
        )
        self._pullers[flavour] = puller
        return puller


def _known(flavour: str) -> Flavour:
    for name in LIMIT:
        if name == flavour:
            return name
    raise UnknownVersion(f"this program knows no flavour {flavour!r}")
