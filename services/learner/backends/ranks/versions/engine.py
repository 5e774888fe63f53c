"""Versions that all ranks hold together, as rank 0 asks for them, and the other ranks do as it says.

A version has a number, and lives as long as rank 0 holds a `DividedArena` of it: each command names those that do, and
every rank forgets the others before it makes one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakValueDictionary

from heterorl.common.types.common import Digest
from heterorl.common.weights.arena import Arena, Layout, state_root
from heterorl.common.weights.payload import CodedChunk
from heterorl.learner.backends.ranks.commands import Command, Do
from heterorl.learner.backends.ranks.versions.divided import DividedVersions, Source


class DividedArena:
    """Rank 0's name for a version's weights, of which each rank has its chunks; never changed."""

    def __init__(self, engine: VersionEngine, *, number: int, digests: tuple[bytes, ...]) -> None:
        self.layout: Layout = engine.layout
        self.number = number
        self.digests = digests
        self._engine = engine

    def state_root(self, *, threads: int = 1) -> Digest:  # noqa: ARG002 - as an arena's
        """Identity of the state; of digests that are there already."""
        return state_root(self.layout.layout_id, self.digests)

    def whole(self) -> Arena:
        """All of it on this rank; while no step computes."""
        return self._engine.whole(self)

    def code(self, before: DividedArena | None, *, threads: int) -> Iterator[CodedChunk]:
        """Every chunk coded, in order; while no step computes. Whoever stops early must let it run to its end."""
        coded = self._engine.code(self, before, threads=threads)
        for (method, data, num_changed), digest in zip(coded, self.digests, strict=True):
            yield method, data, num_changed, digest


class VersionEngine:
    """One rank's versions. All but `obey` are for rank 0, while no step computes: every call is one of all ranks."""

    def __init__(self, held: DividedVersions, *, tell: Callable[[Command], Command]) -> None:
        """Begin without versions.

        Args:
            held: this rank's chunks.
            tell: sends a command to the other ranks.
        """
        self.layout = held.layout
        self._held = held
        self._tell = tell
        self._arenas: WeakValueDictionary[int, DividedArena] = WeakValueDictionary()
        self._newest = 0

    def stage(self, *, published: DividedArena | None) -> DividedArena:
        """See DividedBackend."""
        command = self._say(Do.STAGE, before=published)
        return self._named(command, self._held.stage(command.version, published=_number(command.before)))

    def divide(self, source: Source) -> DividedArena:
        """See DividedBackend."""
        command = self._say(Do.DIVIDE)
        return self._named(command, self._held.divide(command.version, source))

    def code(
        self, arena: DividedArena, before: DividedArena | None, *, threads: int
    ) -> Iterator[tuple[int, bytes, int]]:
        """See `DividedVersions.code`."""
        command = self._say(Do.CODE, arena, before=before, threads=threads)
        yield from self._held.code(command.version, before=_number(command.before), threads=threads)

    def whole(self, arena: DividedArena) -> Arena:
        """See `DividedVersions.whole`."""
        found = self._held.whole(self._say(Do.WHOLE, arena).version)
        assert found is not None, "rank 0 receives"
        return found

    def obey(self, command: Command) -> None:
        """Do the part of another rank than 0."""
        self._held.keep(command.kept)
        before = _number(command.before)
        if command.do is Do.STAGE:
            self._held.stage(command.version, published=before)
        elif command.do is Do.DIVIDE:
            self._held.divide(command.version, None)
        elif command.do is Do.CODE:
            for _ in self._held.code(command.version, before=before, threads=command.threads):
                pass
        else:
            assert command.do is Do.WHOLE, command.do
            self._held.whole(command.version)

    def _say(
        self, do: Do, arena: DividedArena | None = None, *, before: DividedArena | None = None, threads: int = 1
    ) -> Command:
        if arena is None:
            self._newest += 1
        command = Command(
            do=do,
            version=self._newest if arena is None else arena.number,
            before=-1 if before is None else before.number,
            kept=tuple(self._arenas),
            threads=threads,
        )
        self._held.keep(command.kept)
        return self._tell(command)

    def _named(self, command: Command, digests: tuple[bytes, ...]) -> DividedArena:
        arena = DividedArena(self, number=command.version, digests=digests)
        self._arenas[command.version] = arena
        return arena


def _number(stated: int) -> int | None:
    return None if stated < 0 else stated
