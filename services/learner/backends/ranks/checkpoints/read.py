"""A checkpoint read by all ranks: each its pieces, or rank 0 sends, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from heterorl.common.errors import CorruptStore
from heterorl.common.model.directory import first_line
from heterorl.learner.backends.loading.file_plan import name_of_type, type_of_name
from heterorl.learner.backends.loading.tensor_file import TensorFile
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.state import MOMENTS, DividedState, Key
from heterorl.learner.backends.state import (
    COUNTERS_FILE,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    check_random_state,
    check_state,
)


class RelayedFile:
    """The tensors of rank 0's file; all ranks ask for the same ones in the same order."""

    def __init__(self, own: TensorFile | None, ranks: Collectives) -> None:
        """Learn what there is.

        Args:
            own: the file, on rank 0.
            ranks: the others.
        """
        tensors = {} if own is None else own.tensors
        table = {name: [name_of_type(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
        stated = json.loads(ranks.broadcast_bytes(json.dumps(table).encode()))
        self.tensors = {
            name: torch.empty(shape, dtype=type_of_name(dtype), device="meta")
            for name, (dtype, shape) in stated.items()
        }
        self._own, self._ranks = own, ranks

    def flat(self, name: str) -> torch.Tensor:
        """See TensorFile; in this process's memory.

        Raises:
            CorruptStore: on rank 0, which cannot read it; the others have received something.
        """
        meta = self.tensors[name]
        values = torch.empty(meta.numel(), dtype=meta.dtype)
        problem: Exception | None = None
        if self._own is not None:
            try:
                values = self._own.flat(name).clone()
            except Exception as error:  # noqa: BLE001 - raised below, when the others have received
                problem = error
        if meta.numel():
            self._ranks.broadcast(values.view(torch.uint8))
        if problem is not None:
            raise problem
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """Checked files whose tensors are still on the disk."""

    weights: TensorFile | RelayedFile
    moments: TensorFile | RelayedFile
    applied_steps: int

    def restore(self, state: DividedState, ranks: Collectives) -> int:
        """Put this rank's pieces back, as all do; returns the applied steps.

        Raises:
            CorruptStore: on all ranks, where one could not; what is trained is then of this checkpoint in parts.
        """
        problem: Exception | None = None
        for part in self._parts(state):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - the others may receive the next part; raised below
                problem = problem or error
        if not ranks.all_agree(problem is None):
            raise CorruptStore(
                "a checkpoint cannot be read by another rank"
                if problem is None
                else f"a checkpoint cannot be read: {first_line(problem)}"
            ) from problem
        return self.applied_steps

    def _parts(self, state: DividedState) -> Iterator[Callable[[], None]]:
        """What there is to do, in an order that all ranks have: whatever becomes of one, the others are done."""
        names = sorted(state.shapes)
        steps: list[float] = []
        for name in names:
            if f"step/{name}" in self.moments.tensors:
                yield partial(_note, steps, self.moments, f"step/{name}")
        yield lambda: state.reset(steps=int(max(steps, default=0.0)))
        for name in names:
            yield partial(_put, state, name, "", self.weights, name)
            for key in MOMENTS:
                if f"{key}/{name}" in self.moments.tensors:
                    yield partial(_put, state, name, key, self.moments, f"{key}/{name}")
        yield lambda: torch.set_rng_state(self.moments.flat("random/cpu").clone())


def _note(steps: list[float], file: TensorFile | RelayedFile, entry: str) -> None:
    steps.append(float(file.flat(entry)))


def _put(state: DividedState, name: str, key: Key, file: TensorFile | RelayedFile, entry: str) -> None:
    state.put(name, key, file.flat(entry))


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
