"""A checkpoint of sharded state, written by all ranks together.

A piece of a tensor is a run of bytes of its file. So all ranks write into the files of one process
(`backends.optimizer_state`), byte for byte.
Memory: a block of a piece.

`Writing` writes a copy of the rank's share during the next step: 12 bytes a parameter in the host's memory, pinned
where the share is on a GPU. On one machine each block is freed once it is written; torch keeps pinned memory for the
next checkpoint.

    all ranks       make the files, agree that all see them, copy, go on with the next step
    a thread        writes its rank's copy, makes it durable, reports to rank 0
    rank 0's        waits for all reports. Over several machines it compares what it reads with digests of what was
                    written; where they differ, the checkpoint before stays

Guarantees: any number of ranks, any stage and the torch backend read the files; weights and moments come back bit for
bit. The optimizer counts its steps once for all parameters. On rank 0 `wait` returns when the pieces of all ranks are
durable. `wait` raises any error of a thread, and no other rank's thread waits for it.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from heterorl.common.errors import HeterorlError
from heterorl.common.types.common import NO_LORA, LoraSettings
from heterorl.common.weights.safetensors_layout import Entry, SafetensorsLayout
from heterorl.learner.backends.optimizer_state import COUNTERS_FILE, OPTIMIZER_FILE, WEIGHTS_FILE, counters_of
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.sharded_state import MOMENTS, Key, ShardedState

_LOG = logging.getLogger(__name__)
BLOCK_ELEMENTS = 4 << 20
_TOKEN_FILE = "ranks.token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements [start, start + size) of a piece, from byte `place` on."""

    file_name: str
    place: int
    name: str
    key: Key
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointLayout:
    """The files of one checkpoint."""

    directory: Path
    weights: SafetensorsLayout
    moments: SafetensorsLayout
    steps: int
    """Steps that the moments have seen; at 0 there are no moments."""
    counters: str

    @classmethod
    def of(cls, directory: Path, state: ShardedState, *, applied_steps: int, lora: LoraSettings) -> CheckpointLayout:
        steps = state.steps()
        names = sorted(state.shapes)
        table: list[Entry] = [("random/cpu", "U8", tuple(torch.get_rng_state().shape))]
        if steps:
            table += [(f"{key}/{name}", "F32", tuple(state.shapes[name])) for key in MOMENTS for name in names]
            table += [(f"step/{name}", "F32", ()) for name in names]
        return cls(
            directory=directory,
            weights=SafetensorsLayout([(name, "F32", tuple(state.shapes[name])) for name in names]),
            moments=SafetensorsLayout(table),
            steps=steps,
            counters=json.dumps(counters_of(applied_steps, lora=lora)),
        )

    @property
    def files(self) -> list[tuple[str, SafetensorsLayout, Sequence[Key]]]:
        return [(WEIGHTS_FILE, self.weights, ("",)), (OPTIMIZER_FILE, self.moments, MOMENTS if self.steps else ())]

    def make(self) -> None:
        for file_name, plan, _ in self.files:
            with (self.directory / file_name).open("wb") as file:
                file.write(plan.header)
                file.truncate(plan.num_bytes)
        (self.directory / COUNTERS_FILE).write_text(self.counters, encoding="utf-8")

    def runs(self, state: ShardedState, rank: int) -> Iterator[Run]:
        """A rank's runs in the order of writing and digesting."""
        for file_name, plan, keys in self.files:
            for key in keys:
                for name in sorted(state.shapes):
                    piece = state.pieces.tables[rank][name]
                    begin = plan.place(f"{key}/{name}" if key else name) + 4 * piece.start
                    for start in range(0, piece.size, BLOCK_ELEMENTS):
                        size = min(BLOCK_ELEMENTS, piece.size - start)
                        yield Run(
                            file_name=file_name, place=begin + 4 * start, name=name, key=key, start=start, size=size
                        )

    def singles(self) -> list[tuple[int, bytes]]:
        """The moments file's bytes that are not sharded, with their places."""
        random, step = (values.numpy().tobytes() for values in (torch.get_rng_state(), torch.tensor(float(self.steps))))
        return [
            (self.moments.place(name), random if name == "random/cpu" else step)
            for name, _, _ in self.moments.table
            if name == "random/cpu" or name.startswith("step/")
        ]

    def digest(self, state: ShardedState, rank: int) -> bytes:
        """Digest of what this process reads in the places of a rank."""
        found = xxhash.xxh3_128()
        for file_name, _, _ in self.files:
            with (self.directory / file_name).open("rb") as file:
                for run in self.runs(state, rank):
                    if run.file_name == file_name:
                        file.seek(run.place)
                        found.update(file.read(4 * run.size))
        return found.digest()


def write_runs(directory: Path, runs: Iterator[tuple[Run, torch.Tensor]], *, with_digest: bool) -> bytes:
    """Write values to their places and make them durable; returns their digest.
    It is empty without `with_digest`."""
    digest = xxhash.xxh3_128()
    for name, part in itertools.groupby(runs, key=lambda entry: entry[0].file_name):
        with (directory / name).open("r+b") as file:
            for run, values in part:
                data = values.numpy().data
                file.seek(run.place)
                file.write(data)
                if with_digest:
                    digest.update(data)
            _sync(file)
    return digest.digest() if with_digest else b""


def write_singles(directory: Path, singles: Sequence[tuple[int, bytes]]) -> None:
    """Write `CheckpointLayout.singles`, durably."""
    with (directory / OPTIMIZER_FILE).open("r+b") as file:
        for place, data in singles:
            file.seek(place)
            file.write(data)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    # Here, because rank 0 syncs only files of its own machine.
    os.fsync(file.fileno())


def make_files(layout: CheckpointLayout, ranks: Collectives) -> bool:
    """Let rank 0 make the files; returns whether all see the directory.
    All ranks call."""
    token = ranks.broadcast_bytes(os.urandom(16) if ranks.rank == 0 else b"")
    problem: Exception | None = None
    if ranks.rank == 0:
        try:
            layout.make()
            (layout.directory / _TOKEN_FILE).write_bytes(token)
        except Exception as error:  # noqa: BLE001 - told below, when the other ranks know of it
            problem = error
    raise_first(ranks.all_gather_bytes(words_of(problem)), own=problem, rank=ranks.rank)
    is_seen = ranks.all_agree(_sees(layout.directory, token))
    if ranks.rank == 0:
        (layout.directory / _TOKEN_FILE).unlink(missing_ok=True)
    return is_seen


def _blocks(layout: CheckpointLayout, state: ShardedState, rank: int) -> Iterator[tuple[Run, torch.Tensor]]:
    for run in layout.runs(state, rank):
        yield run, state.read(run.name, run.key, start=run.start, size=run.size).to("cpu", torch.float32).contiguous()


def _sees(directory: Path, token: bytes) -> bool:
    try:
        return (directory / _TOKEN_FILE).read_bytes() == token
    except OSError:
        return False


def words_of(problem: BaseException | None) -> bytes:
    """An error as bytes for the other ranks; empty for none."""
    if problem is None:
        return b""
    code = problem.errno if isinstance(problem, OSError) else None
    return json.dumps([code, str(problem) or repr(problem)]).encode()


def raise_first(words: list[bytes], *, own: BaseException | None, rank: int) -> None:
    """Raise the error of the first rank that has one.

    Raises:
        OSError: on rank 0: an error of a disk.
        HeterorlError: on the others; and on rank 0 for any other error of another rank.
    """
    for number, word in enumerate(words):
        if word and rank:
            raise HeterorlError(f"no checkpoint: rank {number} cannot write it")
        if word:
            code, text = json.loads(word)
            if own is not None and number == rank:
                raise own
            if code is None:
                raise HeterorlError(f"no checkpoint: rank {number}: {text}")
            raise OSError(code, f"rank {number}: {text}")


def write_gathered(layout: CheckpointLayout, state: ShardedState, ranks: Collectives) -> None:
    """Write the tensors' files on rank 0, which receives them.
    All ranks call. Raises as `Writing`."""
    own = _blocks(layout, state, ranks.rank)
    problem: OSError | None = None
    if ranks.rank:
        for _, values in own:
            ranks.send(values)
    else:
        _LOG.warning("rank 0 writes the whole checkpoint: not all ranks can write into %s", layout.directory)
        try:
            _write_alone(layout, state, own, ranks)
        except OSError as error:
            # A disk error is raised below, on all. Any other error ends this rank, and by that the others.
            problem = error
    raise_first(ranks.all_gather_bytes(words_of(problem)), own=problem, rank=ranks.rank)


def _write_alone(
    layout: CheckpointLayout, state: ShardedState, own: Iterator[tuple[Run, torch.Tensor]], ranks: Collectives
) -> None:
    """Write all ranks' values on rank 0.
    The others send theirs in the order of `runs`. Raises its first error when they are through."""
    problem: Exception | None = None
    for rank in range(ranks.world_size):
        runs = _received(layout, state, rank, ranks) if rank else own
        try:
            if rank == 0:
                layout.make()
            if problem is None:
                write_runs(layout.directory, runs, with_digest=False)
        except Exception as error:  # noqa: BLE001 - raised below, when the others have sent
            problem = error
        # The others send in any case.
        for _ in runs:
            pass
    if problem is not None:
        raise problem
    write_singles(layout.directory, layout.singles())


def _received(
    layout: CheckpointLayout, state: ShardedState, rank: int, ranks: Collectives
) -> Iterator[tuple[Run, torch.Tensor]]:
    for run in layout.runs(state, rank):
        values = torch.empty(run.size, dtype=torch.float32)
        ranks.receive(values, rank=rank)
        yield run, values


class Writing:
    """One checkpoint that this rank writes."""

    def __init__(
        self,
        directory: Path,
        state: ShardedState,
        ranks: Collectives,
        *,
        applied_steps: int,
        lora: LoraSettings = NO_LORA,
        overlaps: bool = True,
    ) -> None:
        """Copy this rank's share and start to write it.

        All ranks call, none while it writes another checkpoint. Without `overlaps` the share is written when this
        returns, and never copied. If a rank does not see the directory, rank 0 receives all tensors and has written
        them when this returns.

        Raises:
            OSError: on rank 0: the files cannot be made; all are through.
            HeterorlError: the same on the others.
        """
        self._layout = CheckpointLayout.of(directory, state, applied_steps=applied_steps, lora=lora)
        self._state = state
        self._ranks = ranks
        self._problem: BaseException | None = None
        self._is_heard = False
        self._copy: deque[tuple[Run, torch.Tensor]] = deque()
        self._thread: threading.Thread | None = None
        if not make_files(self._layout, ranks):
            write_gathered(self._layout, state, ranks)
            return
        self._singles = self._layout.singles()
        self._overlaps = overlaps
        if not overlaps:
            self._run()
            return
        self._copy.extend(_copied(self._layout, state, ranks.rank))
        self._thread = threading.Thread(target=self._run, daemon=True, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for this rank's thread; on rank 0, for all ranks.

        Raises:
            OSError: on rank 0: a rank could not write.
            HeterorlError: on rank 0: another error of another rank; on the others: an error of any rank.
        """
        if self._thread is not None:
            self._thread.join()
        self._is_heard = True
        if self._problem is not None:
            raise self._problem

    def end(self) -> None:
        """Wait; log an error that `wait` has not raised."""
        is_heard = self._is_heard
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - of a thread that has ended
            if not is_heard:
                _LOG.warning("rank %d did not write its checkpoint, the one before stays: %s", self._ranks.rank, error)

    def _run(self) -> None:
        try:
            own, digest = self._write()
            if self._ranks.rank:
                self._report(own, digest)
            else:
                self._collect(own, digest)
        except (OSError, HeterorlError) as error:
            self._problem = error
        except RuntimeError as error:
            # torch raises it: a rank is gone, which will end this process too.
            self._problem = HeterorlError(f"no checkpoint: {(str(error).splitlines() or ['?'])[0]}")
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._problem = error
        finally:
            self._copy.clear()

    def _write(self) -> tuple[BaseException | None, bytes]:
        try:
            digest = write_runs(self._layout.directory, self._values(), with_digest=not self._ranks.are_on_one_machine)
            if self._ranks.rank == 0:
                write_singles(self._layout.directory, self._singles)
        except BaseException as error:  # noqa: BLE001 - rank 0 waits to hear of it
            return error, b""
        return None, digest

    def _values(self) -> Iterator[tuple[Run, torch.Tensor]]:
        if not self._overlaps:
            yield from _blocks(self._layout, self._state, self._ranks.rank)
        while self._copy:
            yield self._copy.popleft()

    def _report(self, own: BaseException | None, digest: bytes) -> None:
        self._ranks.aside.send_bytes(json.dumps([words_of(own).decode(), digest.hex()]).encode(), rank=0)
        if own is not None:
            raise own

    def _collect(self, own: BaseException | None, digest: bytes) -> None:
        others = range(1, self._ranks.world_size)
        answers = [
            [words_of(own).decode(), digest.hex()],
            *(json.loads(self._ranks.aside.receive_bytes(rank=rank)) for rank in others),
        ]
        raise_first([word.encode() for word, _ in answers], own=own, rank=0)
        if self._ranks.are_on_one_machine:
            return
        for rank, (_, text) in enumerate(answers):
            if self._layout.digest(self._state, rank).hex() != text:
                raise OSError(
                    errno.EIO,
                    f"rank 0 reads other bytes than rank {rank} wrote in {self._layout.directory}: mount it so that a"
                    " machine reads what others have closed (NFS without nocto), or put state_dir on machine 0's disk",
                )


def _copied(layout: CheckpointLayout, state: ShardedState, rank: int) -> Iterator[tuple[Run, torch.Tensor]]:
    """Copies of a rank's pieces in the host's memory.
    They are complete when the iterator ends."""
    device: torch.device | None = None
    for run in layout.runs(state, rank):
        values = state.read(run.name, run.key, start=run.start, size=run.size)
        copy = torch.empty(run.size, dtype=torch.float32, pin_memory=values.is_cuda)
        copy.copy_(values, non_blocking=values.is_cuda)
        device = values.device if values.is_cuda else device
        yield run, copy
    if device is not None:
        torch.cuda.synchronize(device)
