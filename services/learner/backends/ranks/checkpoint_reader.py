"""Checkpoint reader of ranks: each reads its pieces, or rank 0 sends."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from heterorl.common.errors import CorruptStore
from heterorl.common.model.model_directory import first_line
from heterorl.learner.backends.optimizer_state import COUNTERS_FILE, OPTIMIZER_FILE, WEIGHTS_FILE, open_state
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.sharded_state import MOMENTS, Key, ShardedState
from heterorl.learner.backends.tensor_file import TYPE_NAMES, TYPES, TensorFile


class RelayedFile:
    """The tensors of rank 0's file, which it sends to all ranks.
    All ask for the same ones in the same order."""

    def __init__(self, own: TensorFile | None, ranks: Collectives) -> None:
        """Broadcast the table of tensors."""
        tensors = {} if own is None else own.tensors
        table = {name: [TYPE_NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}
        stated = json.loads(ranks.broadcast_bytes(json.dumps(table).encode()))
        self.tensors = {
            name: torch.empty(shape, dtype=TYPES[dtype], device="meta") for name, (dtype, shape) in stated.items()
        }
        self._own, self._ranks = own, ranks

    def flat(self, name: str) -> torch.Tensor:
        """A flattened tensor, in this process's memory.

        Raises CorruptStore: on all ranks: rank 0 cannot read it. Any other error is of this rank only, which must then
        end: the others are inside the broadcast, or past it.
        """
        meta = self.tensors[name]
        size = meta.numel() * meta.dtype.itemsize
        # The last byte is 1 where the others are of the file.
        data = torch.zeros(size + 1, dtype=torch.uint8)
        problem: Exception | None = None
        if self._own is not None:
            try:
                data[:size] = self._own.flat(name).view(torch.uint8)
                data[size] = 1
            except Exception as error:  # noqa: BLE001 - told by the last byte
                problem = error
        self._ranks.broadcast(data)
        if not data[size]:
            text = "" if problem is None else f": {first_line(problem)}"
            raise CorruptStore(f"rank 0 cannot read {name}{text}") from problem
        return data[:size].view(meta.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """Checked files whose tensors are still on the disk."""

    weights: TensorFile | RelayedFile
    moments: TensorFile | RelayedFile
    applied_steps: int

    def restore(self, state: ShardedState, ranks: Collectives) -> int:
        """Put this rank's pieces back; returns the applied steps.
        All ranks call.

        Raises CorruptStore: on all ranks, where one could not; the state is then partly of this checkpoint.
        """
        names = sorted(state.shapes)
        keys: tuple[Key, ...] = ("", *MOMENTS)
        problems: list[Exception] = []
        counts = [self._read(f"step/{name}", problems) for name in names if f"step/{name}" in self.moments.tensors]
        with _noted(problems):
            state.reset(steps=int(max((float(count) for count in counts if count is not None), default=0.0)))
        for name in names:
            for key in keys:
                entry = f"{key}/{name}" if key else name
                if key and entry not in self.moments.tensors:
                    continue
                values = self._read(entry, problems, is_master=not key)
                if values is not None:
                    with _noted(problems):
                        state.put(name, key, values)
        random = self._read("random/cpu", problems)
        if random is not None:
            with _noted(problems):
                torch.set_rng_state(random.clone())
        if not ranks.all_agree(not problems):
            raise CorruptStore(
                f"a checkpoint cannot be read: {first_line(problems[0])}"
                if problems
                else "a checkpoint cannot be read by another rank"
            ) from next(iter(problems), None)
        return self.applied_steps

    def _read(self, entry: str, problems: list[Exception], *, is_master: bool = False) -> torch.Tensor | None:
        """A tensor; None where the disk fails.

        This rank then goes on, as the others may receive the next one. Any other error may have left a broadcast that
        the others are in, and ends this rank.
        """
        try:
            return (self.weights if is_master else self.moments).flat(entry)
        except (CorruptStore, OSError) as error:
            problems.append(error)
            return None


@contextmanager
def _noted(problems: list[Exception]) -> Iterator[None]:
    """Collect an error of work that no other rank takes part in."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised when all are through
        problems.append(error)


def open_together(directory: Path, shapes: Mapping[str, torch.Size], ranks: Collectives) -> CheckpointFiles:
    """Open a checkpoint on all ranks; each reads its pieces.
    If ranks see different files, rank 0 sends.

    Raises CorruptStore: on all ranks: rank 0 cannot read it, or it is of another model.
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
    """Open a checkpoint and check it against a model.
    Raises CorruptStore: a file is missing, broken, or of another model."""
    expected = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    weights, moments, applied_steps = open_state(directory, expected)
    return CheckpointFiles(weights=weights, moments=moments, applied_steps=applied_steps)
