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

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from heterorl.common.errors import CorruptData, StateMismatch, UnknownPayload, UnknownVersion
from heterorl.common.identity.signing import Signer
from heterorl.common.model.quantise import Variant, dequantise, quantise, scales_of, variant_layout
from heterorl.common.process.files import make_directory
from heterorl.common.process.threads import in_thread
from heterorl.common.types.policy import NO_VERSION, VariantVersion
from heterorl.common.weights.arena import Arena
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes
from heterorl.learner.publish.version_payloads import Encoded, PublishedHead, PublishedVersions, encode_version
from heterorl.learner.train.model import Canary

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

    published: PublishedVersions
    """Versions of the trained weights."""
    _: KW_ONLY
    names: Sequence[Variant]
    run_id: str
    epoch: int
    directory: Path

    def __post_init__(self) -> None:
        self.layouts = {name: variant_layout(self.published.layout, name) for name in self.names}
        self._forms: dict[Variant, Form] = {}
        self._spares: dict[Variant, Arena] = {}
        self._offered: Mapping[str, Arena] = {}
        for name in self.names:
            make_directory(self.directory / name)

    @property
    def are_to_begin(self) -> bool:
        """Whether a variant has no version yet where the others have one."""
        return len(self.begun) < len(self.layouts)

    @property
    def begun(self) -> list[Variant]:
        """The variants that have a version."""
        return [name for name in self.layouts if self._forms.get(name, _NEW).version != NO_VERSION]

    def offer_scales(self, scales: Mapping[str, Arena]) -> None:
        """Take the scales of a checkpoint, by variant."""
        self._offered = scales

    def remove_leftovers(self) -> None:
        for name in self.layouts:
            for path in (self.directory / name).glob("v[0-9]*"):
                path.unlink()

    async def align(self, position: PublishedHead) -> None:
        """Bring each variant to the version that the next one follows.
        Raises UntrustedVersion if no trusted key signed the variant's version."""
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
        self, position: PublishedHead, quantised: Sequence[QuantisedVariant], *, step: int, with_snapshot: bool
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
                threads=self.published.threads,
            )
            found.append(EncodedVariant(variant=entry.variant, arena=entry.arena, canary=entry.canary, encoded=encoded))
        return tuple(found)

    def state(self, encoded: Sequence[EncodedVariant], *, signer: Signer | None) -> tuple[VariantVersion, ...]:
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
        whole = Arena(self.published.layout)
        dequantise(arena, whole, name)
        return whole

    async def _restore(self, name: Variant, position: PublishedHead) -> Form:
        version = position.lineage_version
        if version == NO_VERSION:
            return _NEW
        published = replace(
            self.published, layout=self.layouts[name], spool=self.directory / name / "incoming", variant=name
        )
        try:
            data = await published.manifest(version)
        except UnknownVersion:
            _LOG.info("variant %s begins after version %d", name, version)
            return _NEW
        manifest = manifest_from_bytes(data)
        if manifest.layout_id != published.layout.layout_id:
            raise StateMismatch(f"version {version} of variant {name} is of another layout")
        digest, scales, shadow = manifest_digest(data), self._offered.get(name), position.shadow
        if scales is not None and shadow is not None:
            arena = Arena(published.layout)
            await in_thread(quantise, shadow.whole(), arena, name, frozen=scales)
            if await in_thread(arena.state_root, threads=published.threads) == manifest.state_root:
                return Form(version=version, digest=digest, shadow=arena, scales=arena)
        pulled: Arena | None = None
        if scales is None or shadow is not None:
            try:
                pulled = await published.rebuild(data)
                scales = scales_of(pulled)
            except (UnknownVersion, UnknownPayload, CorruptData) as error:
                new = "" if scales is not None else " with new scales"
                _LOG.error(
                    "variant %s: version %d is gone, the next one is a snapshot%s: %s", name, version, new, error
                )
        # If versions are abandoned, no delta may start from the state, but the scales stay.
        return Form(version=version, digest=digest, shadow=None if shadow is None else pulled, scales=scales)
