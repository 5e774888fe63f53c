"""Pull of a version: plan, fetch, apply to a staging copy, verify.

Guarantees: the result has exactly the state of the manifest that was judged; the held version never changes; a fetch
continues from the bytes on disk, also after a restart; a stalled link fails in bounded time. While a fetch is
unfinished, the file `begun` names its version. A failed check discards what was fetched, and the version is built
another way:

    merged deltas -> single deltas from the held version -> from the base model -> from a snapshot

`Fallback` has the table. A first version that is the caller's base model is not fetched. A plan whose payloads vanished
is repeated a few times; the caller repeats all other calls.

The target's manifest comes with the plan; the others are listed in pages.
"""

import asyncio
import contextlib
import dataclasses
import enum
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heterorl.common.api import WeightsApi
from heterorl.common.errors import (
    CorruptData,
    LimitExceeded,
    MalformedPayload,
    StateMismatch,
    UnknownPayload,
    UnknownVersion,
)
from heterorl.common.identity.signing import Trust
from heterorl.common.process import metrics
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import room
from heterorl.common.pull.fetcher import Fetcher
from heterorl.common.types.common import Digest, peer_words
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind, PlanKind, PullPlan
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.weights.manifest import verify_child, verify_merged, verify_snapshot, verify_state
from heterorl.common.weights.payload import apply_payload, max_file_bytes
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes

_LOG = logging.getLogger(__name__)
Admit = Callable[[PullPlan], Awaitable[None]]
"""Judges the target's manifest of a plan and raises to refuse it; not called for the version that is held."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PulledVersion:
    """A verified state with its manifest."""

    arena: Arena
    manifest: Manifest
    manifest_digest: Digest

    @property
    def version(self) -> int:
        return self.manifest.version


class PlanBasis(enum.Enum):
    """The base of a plan's deltas."""

    MERGED = "merged deltas"
    SINGLES = "the held version"
    BASE = "the base model"
    SNAPSHOT = "a snapshot"


MAX_REPLANS = 3
"""Plans of one call that may fail because the coordinator no longer has a payload."""
BELOW = {
    PlanBasis.MERGED: "from single deltas",
    PlanBasis.SINGLES: "from a snapshot",
    PlanBasis.BASE: "from a snapshot",
}
"""How a version is built once a basis is closed, for logs."""


class Fallback:
    """From failures to the next plan: which bases are open.

        basis     the plan starts from                         damaged    gone
        MERGED    a merged delta                               STRIKE     STRIKE
        SINGLES   the held version, with single deltas         STRIKE     AGAIN
        BASE      the caller's base model and single deltas    STRIKE     AGAIN
        SNAPSHOT  a snapshot                                   END        AGAIN

        damaged   a payload, a manifest, the plan or the resulting state failed its check
        gone      the coordinator no longer has a payload of its plan
        STRIKE    the basis is closed until a version is built; the next plan is the cheapest one without it
        AGAIN     the same bases stay open, for at most MAX_REPLANS plans of one call
        END       no basis is left: the caller gets the failure

    The coordinator chooses the plan, so its basis is read off the plan; the highest one counts. A plan on a closed
    basis is itself damaged, and counts as a failure of the basis that was asked for. So every failure closes a basis,
    uses up a replan or ends the call. Closed bases outlive a call, because one version may take several calls. A built
    version opens all bases but BASE, which a caller that holds a version does not need.
    """

    def __init__(self) -> None:
        self.basis = PlanBasis.SNAPSHOT
        self._struck: set[PlanBasis] = set()
        self._num_gone = 0

    def is_open(self, basis: PlanBasis) -> bool:
        return basis not in self._struck

    def begin_call(self) -> None:
        """Start a call: replans are counted per call."""
        self._num_gone = 0

    def begin(self, *, is_held: bool) -> None:
        """Start a plan, from the held version or from a snapshot."""
        self.basis = PlanBasis.SINGLES if is_held else PlanBasis.SNAPSHOT

    def rest_on(self, basis: PlanBasis) -> None:
        """Note the higher basis of a plan; raises StateMismatch if closed."""
        if not self.is_open(basis):
            raise StateMismatch(f"the plan rests on {basis.value}, which failed before")
        self.basis = basis

    def damaged(self) -> bool:
        """Note a failed check; returns whether to ask for another plan."""
        if self.basis is PlanBasis.SNAPSHOT:
            return False
        self._struck.add(self.basis)
        return True

    def gone(self) -> bool:
        """Note a missing payload; returns whether to ask for another plan."""
        self._num_gone += 1
        if self.basis is PlanBasis.MERGED:
            self._struck.add(self.basis)
        return self._num_gone <= MAX_REPLANS

    def built(self) -> None:
        self._struck = {PlanBasis.BASE}


@dataclass(kw_only=True, eq=False, repr=False)
class Puller:
    """Builds versions of one layout and variant; owns its directory `spool`.

    `base` returns the caller's base model, if any; it is asked until a version was built. `on_frame` is called whenever
    bytes arrive.
    """

    api: WeightsApi
    spool: Path
    layout: Layout
    clock: Clock
    base: Callable[[], Arena | None] = lambda: None
    num_streams: int = 1
    threads: int = 1
    variant: str = ""
    on_frame: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._fetcher = Fetcher(
            api=self.api,
            spool=self.spool,
            clock=self.clock,
            num_streams=self.num_streams,
            max_bytes=max_file_bytes(self.layout.chunks),
            on_frame=self.on_frame,
        )
        self.chain = ManifestChain(api=self.api, variant=self.variant)
        self.apply_s = 0.0
        """Seconds of the last apply and verify; 0 before the first."""
        self.fetch_s = 0.0
        """Seconds of the last fetch."""
        self.fetched_bytes = 0
        """Payload bytes of the last fetch."""
        self._fallback = Fallback()
        self._base: Arena | None = None
        self._begun = self.spool / "begun"

    def begun(self) -> int:
        """The version of an unfinished fetch; NO_VERSION if none.

        It may be of an earlier process. The next plan deletes bytes that it does not name. A line that breaks within
        each snapshot brings none to a caller who asks for the head each time.
        """
        with contextlib.suppress(OSError, ValueError):
            return int(self._begun.read_text())
        return NO_VERSION

    async def pull(self, *, held: PulledVersion | None, want_version: int, admit: Admit | None = None) -> PulledVersion:
        """Build `want_version` (-1: the head) from `held`.

        `admit` may refuse a plan before a byte is fetched.

        Raises:
            UntrustedVersion: `admit` refused it; the puller is unchanged.
            UnknownVersion: no such version, or no payloads lead to it.
            UnknownPayload: payloads vanish as fast as plans are made.
            Unreachable: the link broke or stalled; the next call continues behind the bytes received.
            CorruptData: even the snapshot failed its checks.
        """
        self._fallback.begin_call()
        while True:
            try:
                pulled = await self._pull(held, want_version, admit)
                break
            except UnknownPayload as error:
                if not self._fallback.gone():
                    raise
                _LOG.info("version %d is planned again: %s", want_version, error)
            except CorruptData as error:
                metrics.DIGEST_MISMATCHES.inc()
                _LOG.debug("fetched payloads are discarded: %s", error)
                self._fetcher.keep_only(())
                if not self._fallback.damaged():
                    raise
                way = BELOW[self._fallback.basis]
                _LOG.error("version %d failed its checks and is built again %s: %s", want_version, way, error)
        self._fallback.built()
        # Free the memory of a whole state.
        self._base = None
        return pulled

    async def _pull(self, held: PulledVersion | None, want_version: int, admit: Admit | None) -> PulledVersion:
        if not self._fallback.is_open(PlanBasis.SINGLES):
            held = None
        self._fallback.begin(is_held=held is not None)
        base_root = "" if held is not None else await self._base_root()
        plan = await self.api.plan_pull(
            have_version=NO_VERSION if held is None else held.version,
            have_root="" if held is None else held.manifest.state_root,
            want_version=want_version,
            accept_merged=self._fallback.is_open(PlanBasis.MERGED),
            base_root=base_root,
            variant=self.variant,
        )
        if base_root:
            held, plan = await self._from_base(plan, base_root)
        # Before the plan is judged: merged deltas are unsigned, so a wrong plan is repeated without them.
        is_from_base = self._fallback.basis is PlanBasis.BASE
        if any(payload.kind is PayloadKind.MERGED for payload in plan.payloads):
            self._fallback.rest_on(PlanBasis.MERGED)
        _check_plan(plan, held=held, want_version=want_version)
        if plan.kind is not PlanKind.SAME:
            _check_target(plan, self.layout)
            self._fetcher.check_sizes(plan.payloads)
        self.chain.begin(plan)
        if plan.kind is PlanKind.SAME and held is not None:
            if is_from_base:
                if admit is not None:
                    await admit(plan)
                _confirm(held, plan.manifests[-1])
            return held
        _LOG.debug("version %d is pulled by this plan: %s", plan.target_version, peer_words(plan.reason))
        if admit is not None:
            await admit(plan)
        judged = plan.manifests[-1]
        # Only after `admit`: refused versions need no manifests.
        plan = dataclasses.replace(plan, manifests=await self.chain.manifests(plan))
        self._fetcher.keep_only(plan.payloads)
        with room(self.spool):
            self._begun.write_text(str(plan.target_version))
        started = self.clock.monotonic()
        paths = [await self._fetcher.fetch(payload) for payload in plan.payloads]
        fetched = self.clock.monotonic()
        self.fetch_s, self.fetched_bytes = fetched - started, sum(payload.num_bytes for payload in plan.payloads)
        metrics.PULL_SECONDS.observe(self.fetch_s)
        pulled = await asyncio.to_thread(self._apply, plan, paths, held)
        _confirm(pulled, judged)
        self.apply_s = self.clock.monotonic() - fetched
        metrics.APPLY_SECONDS.observe(self.apply_s)
        self._fetcher.keep_only(())
        self.chain.end()
        return pulled

    async def _base_root(self) -> Digest | str:
        if not self._fallback.is_open(PlanBasis.BASE):
            self._base = None
            return ""
        if self._base is None:
            self._base = await asyncio.to_thread(self.base)
        return "" if self._base is None else await asyncio.to_thread(self._base.state_root, threads=self.threads)

    async def _from_base(self, plan: PullPlan, base_root: str) -> tuple[PulledVersion | None, PullPlan]:
        """The base model as a plan's first version, and the plan.

        None: the plan starts from a snapshot. A plan without payloads gets the base's own manifest, since that version
        was not judged before.
        """
        if plan.payloads and plan.payloads[0].kind is PayloadKind.SNAPSHOT:
            return None, plan
        self._fallback.rest_on(PlanBasis.BASE)
        start = plan.payloads[0].from_version if plan.payloads else plan.target_version
        signed = await self.api.get_signed_manifest(version=start, variant=self.variant)
        manifest = manifest_from_bytes(signed.data)
        if (manifest.version, manifest.state_root) != (start, base_root) or self._base is None:
            raise StateMismatch(f"version {start} is not the base model")
        if not plan.payloads:
            plan = dataclasses.replace(plan, manifests=(signed.data,), signature=signed.signature)
        return PulledVersion(arena=self._base, manifest=manifest, manifest_digest=manifest_digest(signed.data)), plan

    def _apply(self, plan: PullPlan, paths: list[Path], held: PulledVersion | None) -> PulledVersion:
        from_snapshot = plan.payloads[0].kind is PayloadKind.SNAPSHOT
        before = None if from_snapshot or held is None else held
        staging = Arena(self.layout) if before is None else before.arena.copy()
        parent = None if before is None else before.manifest
        parent_digest = "" if before is None else before.manifest_digest
        for payload, data, path in zip(plan.payloads, plan.manifests, paths, strict=True):
            manifest = manifest_from_bytes(data)
            if manifest.layout_id != self.layout.layout_id:
                raise StateMismatch(f"version {manifest.version} has another layout", action="check model_dir")
            if payload.kind is PayloadKind.MERGED:
                verify_merged(payload, parent, manifest)
            elif payload.kind is PayloadKind.SNAPSHOT:
                # No manifest names the coordinator's own snapshots; `verify_state` checks the result.
                verify_snapshot(payload, manifest)
            elif payload not in manifest.payloads:
                raise StateMismatch(f"the manifest of version {manifest.version} does not name this payload")
            elif parent is not None:
                verify_child(parent=parent, parent_digest=parent_digest, child=manifest)
            from_root = None if parent is None else parent.state_root
            apply_payload(path, staging, expected_from_root=from_root, threads=self.threads)
            parent, parent_digest = manifest, manifest_digest(data)
        assert parent is not None, "the plan was checked"
        verify_state(parent, staging, threads=self.threads)
        return PulledVersion(arena=staging, manifest=parent, manifest_digest=Digest(parent_digest))


def _confirm(pulled: PulledVersion, judged: bytes) -> None:
    """Check last that the state's manifest is the one that `admit` saw."""
    if pulled.manifest_digest != manifest_digest(judged):
        raise StateMismatch(f"version {pulled.version} does not have the manifest that was judged")


def _check_plan(plan: PullPlan, *, held: PulledVersion | None, want_version: int) -> None:
    if want_version >= 0 and plan.target_version != want_version:
        raise StateMismatch(f"the plan leads to version {plan.target_version}, not {want_version}")
    if plan.kind is PlanKind.SAME:
        if held is None or held.version != plan.target_version:
            raise StateMismatch(f"the plan states that version {plan.target_version} is held")
        if plan.payloads:
            # The base's manifest and the judged one would come from two places.
            raise StateMismatch(f"the plan states that version {plan.target_version} is held, and has payloads")
    elif not plan.payloads or len(plan.manifests) not in (1, len(plan.payloads)):
        raise StateMismatch(f"the plan has {len(plan.payloads)} payloads and {len(plan.manifests)} manifests")


def _check_target(plan: PullPlan, layout: Layout) -> None:
    """Check the plan's last manifest and payload order before any fetch."""
    manifest = manifest_from_bytes(plan.manifests[-1])
    if manifest.version != plan.target_version:
        raise StateMismatch(f"the plan leads to version {manifest.version}, not {plan.target_version}")
    if manifest.layout_id != layout.layout_id:
        raise StateMismatch(f"version {manifest.version} has another layout", action="check model_dir")
    numbers = [payload.to_version for payload in plan.payloads]
    if numbers != sorted(set(numbers)) or numbers[-1] != plan.target_version:
        raise StateMismatch(f"the payloads of the plan do not lead to version {plan.target_version} in order")


@dataclass(kw_only=True, eq=False, repr=False)
class TrustedPuller(Puller):
    """Retries pulls, and builds only versions that a trusted key signed.

    It waits while a link is broken; each frame that arrives resets the backoff. Refusals, damage and missing payloads
    are raised.
    """

    clock: Clock = field(init=False)
    on_frame: Callable[[], None] = field(init=False)
    backoff: Backoff
    trust: Trust

    def __post_init__(self) -> None:
        self.clock, self.on_frame = self.backoff.clock, self.backoff.reset
        super().__post_init__()

    async def build(self, version: int, *, held: PulledVersion | None = None) -> PulledVersion:
        """Build a version (-1: the head) from `held`.

        It waits for the coordinator as `backoff` does.

        Raises:
            UntrustedVersion: no trusted key signed it; not a byte of it was fetched.
            UnknownVersion, UnknownPayload, CorruptData: as `pull`.
        """

        async def attempt() -> PulledVersion:
            begun = self.begun() if version == NO_VERSION else NO_VERSION
            if begun != NO_VERSION:
                # Abandoned or deleted meanwhile: the head takes its place.
                with contextlib.suppress(UnknownVersion):
                    return await self.pull(held=held, want_version=begun, admit=self._admit)
            return await self.pull(held=held, want_version=version, admit=self._admit)

        return await self.backoff.retry(attempt)

    async def _admit(self, plan: PullPlan) -> None:
        self.trust.check(plan.manifests[-1], plan.signature, version=plan.target_version)


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
        """Take a plan's manifests; forget the earlier plan's.

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
        """Manifests of [first, last], newest first, as many as one answer holds.

        Keeps the manifests that the plan wants.
        """
        found = await self._api.list_manifests(first_version=first, last_version=last, variant=self._variant)
        for data in found if self._wanted else ():
            # `manifests` reports a malformed one as missing.
            with contextlib.suppress(MalformedPayload):
                version = manifest_from_bytes(data).version
                if version in self._wanted:
                    self._found.setdefault(version, data)
        self._check_size()
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

    def _check_size(self) -> None:
        if sum(map(len, self._found.values())) > MAX_BYTES:
            raise LimitExceeded(f"the manifests of {len(self._wanted)} payloads are over {MAX_BYTES} bytes")
