"""Published weights sharded among the ranks: rounded, compared and coded by chunk.

    tensors     cut by the engine: by rows, or wherever its flat buffers end
    chunks      cut by the layout, regardless of tensors; chunk c belongs to rank c mod (number of ranks)

All ranks know the pieces of all, so senders are computed, not negotiated. All ranks call together.

    stage     round the masters and send them to the owners of their chunks, one chunk each at a time
    code      each rank codes its chunks; rank 0 receives coded bytes in the order of the payload
    divide    rank 0 sends the chunks of an arena
    whole     all chunks on rank 0, for work that cannot be divided

Guarantees: bits, coded bytes and digests are as in one process with an arena. In addition to its chunks a rank holds
one chunk that it receives, its pieces of one chunk of each rank, and one coded chunk. An error on one rank is raised
on all, when all are through.

A version has a number, and lives as long as rank 0 holds a `ShardedArena` of it: each command names the live ones, and
every rank forgets the others before it makes a new one.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.process.threads import in_order
from heterorl.common.types.common import Digest
from heterorl.common.weights.arena import WIDTH, Arena, IntArray, Layout, digest_integers, state_root, zeros
from heterorl.common.weights.codec import encode_chunk
from heterorl.common.weights.payload import CodedChunk
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.commands import Command, Do
from heterorl.learner.backends.ranks.sharded_state import Piece, ShardedState

_CODED = struct.Struct("<qq")
"""Method and changed elements, before the bytes of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One rank's elements of one tensor that lie in one chunk.

    Example: Segment(name="lm_head.weight", start=128, size=64, place=0): elements 128 to 191 of the rank's piece are
    the first 64 of the chunk.
    """

    name: str
    start: int
    size: int
    place: int


class Exchange:
    """The origin of every chunk's elements."""

    def __init__(self, layout: Layout, tables: Sequence[Mapping[str, Piece]]) -> None:
        """Sort tensors by their places.
        `tables` are each rank's pieces by the model's names, tied ones once."""
        self._chunks = layout.chunks
        self._tables = tables
        self._places: dict[int, list[tuple[int, str]]] = {width: [] for width in layout.lengths}
        for name in tables[0]:
            spec = layout.spec(name)
            if spec.num_elements:
                self._places[WIDTH[spec.dtype]].append((layout.offsets[spec.name], name))
        for places in self._places.values():
            places.sort()

    def segments(self, chunk_number: int, *, rank: int) -> list[Segment]:
        """A rank's segments of a chunk, by place; none past the last."""
        if chunk_number >= len(self._chunks):
            return []
        chunk = self._chunks[chunk_number]
        places = self._places[chunk.width]
        found = []
        # From the tensor that the chunk begins in.
        for offset, name in places[max(0, bisect.bisect_right(places, (chunk.start, "\U0010ffff")) - 1) :]:
            if offset >= chunk.stop:
                break
            piece = self._tables[rank][name]
            begin = max(chunk.start, offset + piece.start)
            end = min(chunk.stop, offset + piece.start + piece.size)
            if begin < end:
                start = begin - offset - piece.start
                found.append(Segment(name=name, start=start, size=end - begin, place=begin - chunk.start))
        return found


@dataclass(kw_only=True, eq=False, repr=False)
class ShardedVersions:
    """One rank's chunks of a few versions, numbered by rank 0."""

    state: ShardedState
    layout: Layout
    buffers: Mapping[str, torch.Tensor]
    ranks: Collectives

    def __post_init__(self) -> None:
        """Take over the tables of pieces.
        Rank 0 sends `buffers`, which are published and never trained."""
        tables = [
            {**table, **{name: Piece(start=0, size=0 if rank else part.numel()) for name, part in self.buffers.items()}}
            for rank, table in enumerate(self.state.pieces.tables)
        ]
        self._exchange = Exchange(self.layout, tables)
        self._chunks: dict[int, dict[int, IntArray]] = {}

    def keep(self, versions: Sequence[int]) -> None:
        self._chunks = {version: chunks for version, chunks in self._chunks.items() if version in versions}

    def stage(self, version: int) -> tuple[bytes, ...]:
        """Round the masters; returns the digest of every chunk, on every rank.

        Raises ConfigError: on all ranks: a weight is not finite in the published type.
        """
        found: dict[int, IntArray] = {}
        broken: list[str] = []
        for first in range(0, len(self.layout.chunks), self.ranks.world_size):
            number = first + self.ranks.rank
            # Also without an own chunk among the last ones: this rank sends.
            received = self._exchanged(first)
            if number < len(self.layout.chunks):
                found[number] = zeros(self.layout.chunks[number])
                for segment, rounded in received:
                    part = slice(segment.place, segment.place + segment.size)
                    if not rounded.to(torch.float32).isfinite().all():
                        broken.append(segment.name)
                    found[number][part] = rounded.view(tensors.INTEGER[rounded.element_size()]).numpy()
        names = b"\n".join(self.ranks.all_gather_bytes("\n".join(broken).encode())).decode().split()
        if names:
            spec = self.layout.spec(min(names))
            raise ConfigError(
                "published_dtype", f"{spec.name} is not finite as {spec.dtype}", action="publish a wider type"
            )
        self._chunks[version] = found
        return self._digests(version)

    def code(self, version: int, *, before: int | None, threads: int) -> Iterator[tuple[int, bytes, int]]:
        """Method, bytes and changed elements of every chunk, on rank 0.

        They come in order; the others only send. A caller that stops early must exhaust it.
        """
        new, old = self._chunks[version], None if before is None else self._chunks[before]

        def encode(number: int) -> tuple[int, bytes, int]:
            return encode_chunk(None if old is None else old[number], new[number])

        own = in_order(encode, sorted(new), threads=threads)
        if self.ranks.rank:
            for coded in own:
                self._send(*coded, rank=0)
            return
        for number in range(len(self.layout.chunks)):
            owner = number % self.ranks.world_size
            yield next(own) if owner == 0 else self._receive(rank=owner)

    def divide(self, version: int, arena: Arena | None) -> tuple[bytes, ...]:
        """Take the chunks of rank 0's arena.
        Returns the digest of every chunk, on every rank."""
        found: dict[int, IntArray] = {}
        for number, chunk in enumerate(self.layout.chunks):
            owner = number % self.ranks.world_size
            if owner and arena is not None:
                self.ranks.send(_bytes_of(arena.chunk(number)), rank=owner)
            elif self.ranks.rank == owner:
                found[number] = zeros(chunk) if arena is None else arena.chunk(number).copy()
                if arena is None:
                    self.ranks.receive(_bytes_of(found[number]), rank=0)
        self._chunks[version] = found
        return self._digests(version)

    def whole(self, version: int) -> Arena | None:
        own = self._chunks[version]
        if self.ranks.rank:
            for number in sorted(own):
                self.ranks.send(_bytes_of(own[number]), rank=0)
            return None
        arena = Arena(self.layout)
        for number in range(arena.num_chunks):
            owner = number % self.ranks.world_size
            if owner:
                self.ranks.receive(_bytes_of(arena.chunk(number)), rank=owner)
            else:
                arena.chunk(number)[:] = own[number]
        return arena

    def _digests(self, version: int) -> tuple[bytes, ...]:
        own = self._chunks[version]
        digests = b"".join(digest_integers(own[number]) for number in sorted(own))
        everyone = self.ranks.all_gather_bytes(digests)
        size, found = 16, []
        for number in range(len(self.layout.chunks)):
            place, owner = divmod(number, self.ranks.world_size)
            found.append(everyone[owner][place * size : (place + 1) * size])
        return tuple(found)

    def _exchanged(self, first: int) -> list[tuple[Segment, torch.Tensor]]:
        """This rank's chunk among those from `first` on, as segments."""
        ranks = range(self.ranks.world_size)
        sent = [self._exchange.segments(first + rank, rank=self.ranks.rank) for rank in ranks]
        coming = [self._exchange.segments(first + self.ranks.rank, rank=rank) for rank in ranks]
        values = [self._outgoing(segment) for segments in sent for segment in segments]
        received = self.ranks.exchange(
            torch.cat(values) if values else torch.empty(0, dtype=torch.uint8),
            [sum(map(self._num_bytes, segments)) for segments in sent],
            [sum(map(self._num_bytes, segments)) for segments in coming],
        )
        del values
        found, start = [], 0
        for segment in (segment for segments in coming for segment in segments):
            size = self._num_bytes(segment)
            found.append((segment, received[start : start + size].view(self._sent_dtype(segment.name))))
            start += size
        return found

    @torch.no_grad()
    def _outgoing(self, segment: Segment) -> torch.Tensor:
        if segment.name in self.buffers:
            values = self.buffers[segment.name].detach().reshape(-1)[segment.start : segment.start + segment.size]
        else:
            values = self.state.read(segment.name, "", start=segment.start, size=segment.size)
        return values.to(self._sent_dtype(segment.name)).cpu().contiguous().view(torch.uint8)

    def _sent_dtype(self, name: str) -> torch.dtype:
        return tensors.TORCH_DTYPE[self.layout.spec(name).dtype]

    def _num_bytes(self, segment: Segment) -> int:
        return segment.size * self._sent_dtype(segment.name).itemsize

    def _send(self, method: int, data: bytes, num_changed: int, *, rank: int) -> None:
        self.ranks.send_bytes(_CODED.pack(method, num_changed) + data, rank=rank)

    def _receive(self, *, rank: int) -> tuple[int, bytes, int]:
        received = self.ranks.receive_bytes(rank=rank)
        method, num_changed = _CODED.unpack_from(received)
        return method, received[_CODED.size :], num_changed


def _bytes_of(values: IntArray) -> torch.Tensor:
    return torch.from_numpy(values).view(torch.uint8)


class ShardedArena:
    """Rank 0's handle of a version's weights; immutable.
    The chunks are on all ranks."""

    def __init__(self, engine: VersionEngine, *, number: int, digests: tuple[bytes, ...]) -> None:
        self.layout: Layout = engine.layout
        self.number = number
        self.digests = digests
        self._engine = engine

    def state_root(self, *, threads: int = 1) -> Digest:  # noqa: ARG002 - as an arena's
        return state_root(self.layout.layout_id, self.digests)

    def whole(self) -> Arena:
        """All weights on this rank; only while no step computes."""
        found = self._engine.held.whole(self._engine.say(Do.WHOLE, self).version)
        assert found is not None, "rank 0 receives"
        return found

    def code(self, before: ShardedArena | None, *, threads: int) -> Iterator[CodedChunk]:
        """Every chunk coded, in order; only while no step computes.
        A caller that stops early must exhaust it."""
        command = self._engine.say(Do.CODE, self, before=before, threads=threads)
        coded = self._engine.held.code(command.version, before=command.before, threads=threads)
        for (method, data, num_changed), digest in zip(coded, self.digests, strict=True):
            yield method, data, num_changed, digest


class VersionEngine:
    """One rank's versions.
    Rank 0 calls, except `obey`; every call is one of all ranks, while no step computes."""

    def __init__(self, held: ShardedVersions, *, tell: Callable[[Command], Command]) -> None:
        self.layout = held.layout
        self.held = held
        self._tell = tell
        self._arenas: WeakValueDictionary[int, ShardedArena] = WeakValueDictionary()
        self._newest = 0

    def stage(self) -> ShardedArena:
        """`store` into weights that all ranks hold together."""
        command = self.say(Do.STAGE)
        return self._named(command, self.held.stage(command.version))

    def divide(self, arena: Arena) -> ShardedArena:
        """Shard published weights among the ranks."""
        command = self.say(Do.DIVIDE)
        return self._named(command, self.held.divide(command.version, arena))

    def obey(self, command: Command) -> None:
        """Do the part of another rank than 0."""
        self.held.keep(command.kept)
        if command.do is Do.STAGE:
            self.held.stage(command.version)
        elif command.do is Do.DIVIDE:
            self.held.divide(command.version, None)
        elif command.do is Do.CODE:
            for _ in self.held.code(command.version, before=command.before, threads=command.threads):
                pass
        else:
            assert command.do is Do.WHOLE, command.do
            self.held.whole(command.version)

    def say(
        self, do: Do, arena: ShardedArena | None = None, *, before: ShardedArena | None = None, threads: int = 1
    ) -> Command:
        """Send the command for a version; a new one without `arena`."""
        if arena is None:
            self._newest += 1
        command = Command(
            do=do,
            version=self._newest if arena is None else arena.number,
            before=None if before is None else before.number,
            kept=tuple(self._arenas),
            threads=threads,
        )
        self.held.keep(command.kept)
        return self._tell(command)

    def _named(self, command: Command, digests: tuple[bytes, ...]) -> ShardedArena:
        arena = ShardedArena(self, number=command.version, digests=digests)
        self._arenas[command.version] = arena
        return arena
