"""A checkpoint of divided state in the files of `heterorl.learner.backends.state`, which all ranks write together.

A piece of a tensor is a run of bytes of its file, so the ranks' pieces need no files of their own: the checkpoint is
that of one process, byte for byte, and whoever reads one reads all. Memory: a block of a piece.

Guarantees: any number of ranks, any stage and the torch backend read what any of them wrote. Weights and moments come
back bit for bit. The optimizer of a divided model counts steps once for all parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from heterorl.common.errors import CorruptStore, HeterorlError
from heterorl.common.types.common import NO_LORA, LoraSettings
from heterorl.learner.backends.loading.tensor_file import TensorFile
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.files import Entry, FilePlan, RelayedFile, write_tensors
from heterorl.learner.backends.ranks.state import MOMENTS, DividedState, Key
from heterorl.learner.backends.state import (
    COUNTERS_FILE,
    FORMAT,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    check_random_state,
    check_state,
)

_LOG = logging.getLogger(__name__)
BLOCK_ELEMENTS = 4 << 20
_TOKEN_FILE = "ranks.token"


def write_checkpoint_files(
    directory: Path, state: DividedState, ranks: Collectives, *, applied_steps: int, lora: LoraSettings = NO_LORA
) -> None:
    """Write the three files; all ranks call.

    Each rank writes its pieces to their places in files that rank 0 has made; where ranks are on several machines,
    rank 0 compares what it then reads with digests of what was written. Where a rank does not see the directory, or the
    comparison fails, everything is sent to rank 0, one tensor at a time.

    Raises:
        OSError: on rank 0: a rank could not write; all are through.
        HeterorlError: the same on the others.
    """
    steps = state.steps()
    names = sorted(state.shapes)
    table: list[Entry] = [("random/cpu", "U8", tuple(torch.get_rng_state().shape))]
    if steps:
        table += [(f"{key}/{name}", "F32", tuple(state.shapes[name])) for key in MOMENTS for name in names]
        table += [(f"step/{name}", "F32", ()) for name in names]
    weights = FilePlan([(name, "F32", tuple(state.shapes[name])) for name in names])
    moments = FilePlan(table)
    token = ranks.broadcast_bytes(os.urandom(16) if ranks.rank == 0 else b"")
    with _together(ranks):
        if ranks.rank == 0:
            _make(directory / WEIGHTS_FILE, weights)
            _make(directory / OPTIMIZER_FILE, moments)
            counters: dict[str, object] = {"format": FORMAT, "applied_steps": applied_steps}
            if lora.rank:
                counters["lora"] = dataclasses.asdict(lora)
            (directory / COUNTERS_FILE).write_text(json.dumps(counters), encoding="utf-8")
            (directory / _TOKEN_FILE).write_bytes(token)
    is_written = ranks.all_agree(_sees(directory, token))
    if ranks.rank == 0:
        (directory / _TOKEN_FILE).unlink(missing_ok=True)
    if is_written:
        is_written = _write_own(directory, weights, moments, state, ranks, steps=steps)
    if not is_written:
        if ranks.rank == 0:
            _LOG.warning("not all ranks can write into %s: rank 0 receives everything and writes it", directory)
        _write_gathered(directory, weights, moments, state, ranks, steps=steps)


def _write_own(
    directory: Path, weights: FilePlan, moments: FilePlan, state: DividedState, ranks: Collectives, *, steps: int
) -> bool:
    """Write this rank's pieces; returns whether rank 0 reads them as all have written them."""
    files: list[tuple[str, FilePlan, Sequence[Key]]] = [
        (WEIGHTS_FILE, weights, ("",)),
        (OPTIMIZER_FILE, moments, MOMENTS if steps else ()),
    ]
    own = xxhash.xxh3_128()
    with _together(ranks):
        for file_name, plan, keys in files:
            with (directory / file_name).open("r+b") as file:
                for place, block in _blocks(plan, state, ranks.rank, keys=keys):
                    data = block.numpy().data
                    file.seek(place)
                    file.write(data)
                    own.update(data)
                if ranks.rank == 0 and plan is moments:
                    _write_single(file, plan, steps=steps)
                file.flush()
                # Here, because the caller makes durable what its own machine has written.
                os.fsync(file.fileno())
    stated = ranks.all_gather_bytes(own.digest())
    if ranks.are_on_one_machine:
        return True
    with _together(ranks):
        is_equal = ranks.rank > 0 or all(
            _read_digest(directory, files, state, rank) == digest for rank, digest in enumerate(stated)
        )
    return ranks.all_agree(is_equal)


def _blocks(
    plan: FilePlan, state: DividedState, rank: int, *, keys: Sequence[Key]
) -> Iterator[tuple[int, torch.Tensor]]:
    """A rank's pieces as runs of elements with their places in the file."""
    for place, name, key, start, size in _runs(plan, state, rank, keys=keys):
        yield place, state.read(name, key, start=start, size=size).to("cpu", torch.float32).contiguous()


def _runs(
    plan: FilePlan, state: DividedState, rank: int, *, keys: Sequence[Key]
) -> Iterator[tuple[int, str, Key, int, int]]:
    for key in keys:
        for name in sorted(state.shapes):
            piece = state.pieces.tables[rank][name]
            begin = plan.place(f"{key}/{name}" if key else name) + 4 * piece.start
            for start in range(0, piece.size, BLOCK_ELEMENTS):
                yield begin + 4 * start, name, key, start, min(BLOCK_ELEMENTS, piece.size - start)


def _read_digest(
    directory: Path, files: Sequence[tuple[str, FilePlan, Sequence[Key]]], state: DividedState, rank: int
) -> bytes:
    found = xxhash.xxh3_128()
    for file_name, plan, keys in files:
        with (directory / file_name).open("rb") as file:
            for place, _, _, _, size in _runs(plan, state, rank, keys=keys):
                file.seek(place)
                found.update(file.read(4 * size))
    return found.digest()


def _make(path: Path, plan: FilePlan) -> None:
    with path.open("wb") as file:
        file.write(plan.header)
        file.truncate(plan.num_bytes)


def _write_single(file: BinaryIO, plan: FilePlan, *, steps: int) -> None:
    """What is not divided."""
    for name, _, shape in plan.table:
        values = torch.get_rng_state() if name == "random/cpu" else torch.tensor(float(steps))
        if name == "random/cpu" or name.startswith("step/"):
            assert tuple(values.shape) == shape, name
            file.seek(plan.place(name))
            file.write(values.numpy().tobytes())


def _sees(directory: Path, token: bytes) -> bool:
    try:
        return (directory / _TOKEN_FILE).read_bytes() == token
    except OSError:
        return False


@contextmanager
def _together(ranks: Collectives) -> Iterator[None]:
    """An error of the disk on one rank is raised on all, when all are through."""
    problem: OSError | None = None
    try:
        yield
    except OSError as error:
        problem = error
    words = ranks.all_gather_bytes(b"" if problem is None else json.dumps([problem.errno, str(problem)]).encode())
    for rank, word in enumerate(words):
        if word and ranks.rank:
            raise HeterorlError(f"no checkpoint: rank {rank} cannot write it")
        if word:
            number, text = json.loads(word)
            raise problem or OSError(number, f"rank {rank}: {text}")


def _write_gathered(
    directory: Path, weights: FilePlan, moments: FilePlan, state: DividedState, ranks: Collectives, *, steps: int
) -> None:
    """Write the tensors' files on rank 0, which receives them."""
    masters, rest = _masters(state), _moments(state, steps, sorted(state.shapes))
    with _together(ranks):
        try:
            if ranks.rank == 0:
                write_tensors(directory / WEIGHTS_FILE, weights.table, _present(masters))
                write_tensors(directory / OPTIMIZER_FILE, moments.table, _present(rest))
        finally:
            for _ in itertools.chain(masters, rest):
                pass


def _masters(state: DividedState) -> Iterator[torch.Tensor | None]:
    return (tensor for _, tensor in state.gather_all())


def _moments(state: DividedState, steps: int, names: list[str]) -> Iterator[torch.Tensor | None]:
    yield torch.get_rng_state()
    if not steps:
        return
    for key in MOMENTS:
        for _, tensor in state.gather_all(key):
            yield tensor
    for _ in names:
        yield torch.tensor(float(steps))


def _present(tensors: Iterator[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        assert tensor is not None, "rank 0 receives"
        yield tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """Checked files whose tensors are still on the disk."""

    weights: TensorFile | RelayedFile
    moments: TensorFile | RelayedFile
    applied_steps: int

    def restore(self, state: DividedState) -> int:
        """Put this rank's pieces back; returns the applied steps."""
        names = sorted(state.shapes)
        counts = [self.moments.flat(f"step/{name}") for name in names if f"step/{name}" in self.moments.tensors]
        state.reset(steps=int(max(counts)) if counts else 0)
        for name in names:
            state.put(name, "", self.weights.flat(name))
            for key in MOMENTS:
                if f"{key}/{name}" in self.moments.tensors:
                    state.put(name, key, self.moments.flat(f"{key}/{name}"))
        torch.set_rng_state(self.moments.flat("random/cpu").clone())
        return self.applied_steps


def open_together(directory: Path, shapes: Mapping[str, torch.Size], ranks: Collectives) -> CheckpointFiles:
    """A checkpoint for all ranks: each reads its pieces, or rank 0 sends where not all see the same files.

    Raises:
        CorruptStore: on all ranks: rank 0 cannot read it, or it is of another model.
    """
    problem: CorruptStore | None = None
    own: CheckpointFiles | None = None
    mark = b""
    try:
        own = read_checkpoint_files(directory, shapes)
        # Another machine's file of that name was not written in the same nanosecond.
        stats = [(directory / name).stat() for name in (WEIGHTS_FILE, OPTIMIZER_FILE, COUNTERS_FILE)]
        mark = json.dumps([[stat.st_size, stat.st_mtime_ns] for stat in stats]).encode()
    except CorruptStore as error:
        problem = error
    except OSError as error:
        problem = CorruptStore(f"checkpoint {directory} cannot be read: {error}")
    marks = ranks.all_gather_bytes(mark)
    if not marks[0]:
        raise problem or CorruptStore(f"checkpoint {directory} cannot be read by rank 0")
    if own is not None and len(set(marks)) == 1:
        return own
    mine = own if ranks.rank == 0 else None
    applied_steps = int(ranks.broadcast_bytes(b"" if mine is None else str(mine.applied_steps).encode()))
    weights = None if mine is None else mine.weights
    moments = None if mine is None else mine.moments
    assert not isinstance(weights, RelayedFile)
    assert not isinstance(moments, RelayedFile)
    return CheckpointFiles(
        weights=RelayedFile(weights, ranks), moments=RelayedFile(moments, ranks), applied_steps=applied_steps
    )


def read_checkpoint_files(directory: Path, shapes: Mapping[str, torch.Size]) -> CheckpointFiles:
    """Check a checkpoint against a model.

    Raises:
        CorruptStore: a file is missing, broken, or of another model.
    """
    weights, moments = TensorFile(directory / WEIGHTS_FILE), TensorFile(directory / OPTIMIZER_FILE)
    try:
        counters = json.loads((directory / COUNTERS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptStore(f"checkpoint {directory} cannot be read: {error}") from error
    expected = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    applied_steps = check_state(directory, expected, weights.tensors, moments.tensors, counters)
    check_random_state(directory, moments.flat("random/cpu").clone())
    return CheckpointFiles(weights=weights, moments=moments, applied_steps=applied_steps)
