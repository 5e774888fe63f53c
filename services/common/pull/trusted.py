"""A puller that insists and that builds nothing but what a trusted key signed.

A link that breaks is waited for, and every frame that arrives makes the next failure the first of a row. What is
refused, damaged or no longer there is the caller's to judge.
"""

from __future__ import annotations

import functools
from pathlib import Path

from heterorl.common.api import WeightsApi
from heterorl.common.identity.trust import Trust
from heterorl.common.process.patience import Patience
from heterorl.common.pull.pull import PulledVersion, Puller
from heterorl.common.types.policy import PullPlan
from heterorl.common.weights.arena import Layout


class TrustedPuller:
    """Builds versions of one layout, in one flavour, in one spool directory, which is its own."""

    def __init__(
        self,
        *,
        api: WeightsApi,
        spool: Path,
        layout: Layout,
        patience: Patience,
        trust: Trust,
        threads: int = 1,
        flavour: str = "",
    ) -> None:
        self._patience = patience
        self._trust = trust
        self._puller = Puller(
            api=api,
            spool=spool,
            layout=layout,
            clock=patience.clock,
            threads=threads,
            flavour=flavour,
            on_frame=patience.reset,
        )

    async def pull(self, version: int, *, held: PulledVersion | None = None) -> PulledVersion:
        """Build a version from what is held, waiting for the coordinator as long as it takes.

        Raises:
            UntrustedVersion: no trusted key signed it; not a byte of it was fetched.
            UnknownVersion: no such version, or no payloads lead to it.
            UnknownPayload: the coordinator's payloads go as fast as plans are made.
            CorruptData: even the snapshot fails its checks.
        """
        pull = functools.partial(self._puller.pull, held=held, want_version=version, admit=self._admit)
        return await self._patience.insist(pull)

    async def _admit(self, plan: PullPlan) -> None:
        self._trust.check(plan.manifests[-1], plan.signature, version=plan.target_version)
