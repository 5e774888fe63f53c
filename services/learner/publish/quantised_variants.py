"""Quantised variants of versions, with frozen scales and deltas of their own.

    align    bring each variant to the version that the next one follows: from memory; quantised again with the scales
             of the checkpoint and compared with the variant's manifest; or pulled from the coordinator
    quantise quantise the version's published weights, and score the canary with the dequantised weights
    encode   code the difference, write a manifest
    state    sign it
    advance  after the durable answer

Guarantees: a variant's version depends only on the version's published weights and the scales before; a restart goes on
with the same scales. Masters are never quantised: the run publishes their rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import CorruptData, StateMismatch, UnknownPayload, UnknownVersion
from heterorl.common.identity.signing import Signer, Trust
from heterorl.common.model.quantise import Variant, dequantise, quantise, scales_of, variant_layout
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.files import make_directory
from heterorl.common.process.threads import in_thread
from heterorl.common.pull.puller import TrustedPuller
from heterorl.common.types.policy import NO_VERSION, VariantVersion
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes
from heterorl.learner.backends.train_backend import whole_of
from heterorl.learner.checks.replay import Canary
from heterorl.learner.publish.version_payloads import Encoded, Position, encode_version

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """A variant at the version that the next one follows.

    `version` is -1 before its first. `shadow` is its state as samplers have it, None where no delta may start from it;
    `scales` has the frozen scales, None where there are none yet.
    """

    version: int
    digest: str
    shadow: Arena | None
    scales: Arena | None


_NEW = Form(version=NO_VERSION, digest="", shadow=None, scales=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisedVariant:
    """A variant's state at a version to come, with canary log-probs."""

    variant: Variant
    arena: Arena
    canary: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedVariant(QuantisedVariant):
    """A variant of a version ready to be published, and its state."""

    encoded: Encoded


@dataclass(eq=False, repr=False)
class Variants:
    """The variants that a learner publishes; without versions until the first one."""

    api: LearnerApi
    _: KW_ONLY
    names: Sequence[Variant]
    layout: Layout
    run_id: str
    epoch: int
    directory: Path
    backoff: Backoff
    trust: Trust
    threads: int

    def __post_init__(self) -> None:
        self.layouts = {name: variant_layout(self.layout, name) for name in self.names}
        self._forms: dict[Variant, Form] = {}
        self._spares: dict[Variant, Arena] = {}
        self._offered: Mapping[str, Arena] = {}
        for name in self.names:
            make_directory(self.directory / name)

    @property
    def are_to_begin(self) -> bool:
        """Whether a variant has no version yet where the others have one."""
        return any(self._forms.get(name, _NEW).version == NO_VERSION for name in self.layouts)

    def offer_scales(self, scales: Mapping[str, Arena]) -> None:
        """Take the scales of a checkpoint, by variant."""
        self._offered = scales

    def remove_leftovers(self) -> None:
        """Remove payloads of an earlier process."""
        for name in self.layouts:
            for path in (self.directory / name).glob("v[0-9]*"):
                path.unlink()

    async def align(self, position: Position) -> None:
        """Bring each variant to the version that the next one follows.

        Raises:
            UntrustedVersion: no trusted key signed the variant's version.
        """
        for name in self.layouts:
            form = self._forms.get(name, _NEW)
            is_there = form.version == position.lineage_version and form.version != NO_VERSION
            if not is_there or (form.shadow is None) != (position.shadow is None):
                self._forms[name] = await self._restore(name, position)

    def quantise(self, arena: Arena, *, canary: Canary | None) -> tuple[QuantisedVariant, ...]:
        """Quantise `arena` in each variant; in a thread, as the canary computes."""
        found = []
        for name, layout in self.layouts.items():
            form = self._forms.get(name, _NEW)
            target = self._spares.pop(name, None) or Arena(layout)
            num_rescaled = quantise(arena, target, name, frozen=form.scales)
            if num_rescaled:
                _LOG.info("variant %s: %d rows outgrew their scales and have new ones", name, num_rescaled)
            logprobs = () if canary is None else canary.score(self._whole(name, target))
            found.append(QuantisedVariant(variant=name, arena=target, canary=logprobs))
        return tuple(found)

    def encode(
        self, position: Position, quantised: Sequence[QuantisedVariant], *, step: int, with_snapshot: bool
    ) -> tuple[EncodedVariant, ...]:
        """Encode each variant; runs in a thread."""
        found = []
        for entry in quantised:
            form = self._forms.get(entry.variant, _NEW)
            encoded = encode_version(
                replace(position, lineage_version=form.version, lineage_digest=form.digest, shadow=form.shadow),
                entry.arena,
                directory=self.directory / entry.variant,
                run_id=self.run_id,
                epoch=self.epoch,
                step=step,
                with_snapshot=with_snapshot,
                threads=self.threads,
            )
            found.append(EncodedVariant(variant=entry.variant, arena=entry.arena, canary=entry.canary, encoded=encoded))
        return tuple(found)

    def state(self, encoded: Sequence[EncodedVariant], *, signer: Signer | None) -> tuple[VariantVersion, ...]:
        """The published statement of each variant."""
        return tuple(
            VariantVersion(
                variant=entry.variant,
                manifest=entry.encoded.manifest_bytes,
                signature=b"" if signer is None else signer.sign(entry.encoded.manifest_bytes),
                canary=entry.canary,
            )
            for entry in encoded
        )

    def advance(self, encoded: Sequence[EncodedVariant]) -> None:
        """Make the published state the one that the next version follows."""
        for entry in encoded:
            old = self._forms.get(entry.variant, _NEW).shadow
            if old is not None:
                self._spares[entry.variant] = old
            manifest = entry.encoded.manifest
            self._forms[entry.variant] = Form(
                version=manifest.version,
                digest=manifest_digest(entry.encoded.manifest_bytes),
                shadow=entry.arena,
                scales=entry.arena,
            )
            _LOG.info(
                "version %d in variant %s is published: %d of %d values changed, %d bytes",
                manifest.version,
                entry.variant,
                manifest.num_changed,
                manifest.num_elements,
                sum(payload.num_bytes for payload in manifest.payloads),
            )

    def _whole(self, name: Variant, arena: Arena) -> Arena:
        whole = Arena(self.layout)
        dequantise(arena, whole, name)
        return whole

    async def _restore(self, name: Variant, position: Position) -> Form:
        version = position.lineage_version
        if version == NO_VERSION:
            return _NEW
        try:
            signed = await self.backoff.retry(lambda: self.api.get_signed_manifest(version=version, variant=name))
        except UnknownVersion:
            _LOG.info("variant %s begins after version %d", name, version)
            return _NEW
        self.trust.check(signed.data, signed.signature, version=version)
        manifest = manifest_from_bytes(signed.data)
        if (manifest.version, manifest.layout_id) != (version, self.layouts[name].layout_id):
            raise StateMismatch(f"version {version} of variant {name} is of another version or layout")
        digest, scales = manifest_digest(signed.data), self._offered.get(name)
        if position.shadow is None:
            # Versions are abandoned: no delta may start from the state, but the scales stay.
            scales = scales or await self._pulled_scales(name, version, digest)
            return Form(version=version, digest=digest, shadow=None, scales=scales)
        if scales is not None:
            arena = Arena(self.layouts[name])
            await in_thread(quantise, whole_of(position.shadow), arena, name, frozen=scales)
            if await in_thread(arena.state_root, threads=self.threads) == manifest.state_root:
                return Form(version=version, digest=digest, shadow=arena, scales=arena)
        try:
            arena = await self._pull(name, version, digest)
        except (UnknownVersion, UnknownPayload, CorruptData) as error:
            _LOG.error("variant %s: version %d is gone, the next one is a snapshot: %s", name, version, error)
            return Form(version=version, digest=digest, shadow=None, scales=scales)
        return Form(version=version, digest=digest, shadow=arena, scales=arena)

    async def _pulled_scales(self, name: Variant, version: int, digest: str) -> Arena | None:
        try:
            return scales_of(await self._pull(name, version, digest))
        except (UnknownVersion, UnknownPayload, CorruptData) as error:
            _LOG.warning("variant %s gets new scales: the scales of version %d are gone: %s", name, version, error)
            return None

    async def _pull(self, name: Variant, version: int, digest: str) -> Arena:
        _LOG.info("variant %s is pulled at version %d", name, version)
        puller = TrustedPuller(
            api=self.api,
            spool=self.directory / name / "incoming",
            layout=self.layouts[name],
            backoff=self.backoff,
            trust=self.trust,
            threads=self.threads,
            variant=name,
        )
        pulled = await puller.pull(version)
        if pulled.manifest_digest != digest:
            raise StateMismatch(f"version {version} of variant {name} was rebuilt with another manifest than was shown")
        return pulled.arena
