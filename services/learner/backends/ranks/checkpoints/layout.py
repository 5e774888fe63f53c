"""Where each rank's pieces lie in the files of a checkpoint, and what rank 0 does to make these files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from heterorl.common.types.common import LoraSettings
from heterorl.common.weights.file_plan import Entry, FilePlan
from heterorl.learner.backends.ranks.state import MOMENTS, DividedState, Key
from heterorl.learner.backends.state import COUNTERS_FILE, FORMAT, OPTIMIZER_FILE, WEIGHTS_FILE

BLOCK_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements [start, start + size) of a rank's piece, and their first byte in a file."""

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
    weights: FilePlan
    moments: FilePlan
    steps: int
    """That the moments have seen; there are none at 0."""
    counters: str

    @classmethod
    def of(cls, directory: Path, state: DividedState, *, applied_steps: int, lora: LoraSettings) -> CheckpointLayout:
        """Lay out the state as it is now."""
        steps = state.steps()
        names = sorted(state.shapes)
        table: list[Entry] = [("random/cpu", "U8", tuple(torch.get_rng_state().shape))]
        if steps:
            table += [(f"{key}/{name}", "F32", tuple(state.shapes[name])) for key in MOMENTS for name in names]
            table += [(f"step/{name}", "F32", ()) for name in names]
        counters: dict[str, object] = {"format": FORMAT, "applied_steps": applied_steps}
        if lora.rank:
            counters["lora"] = dataclasses.asdict(lora)
        return cls(
            directory=directory,
            weights=FilePlan([(name, "F32", tuple(state.shapes[name])) for name in names]),
            moments=FilePlan(table),
            steps=steps,
            counters=json.dumps(counters),
        )

    @property
    def files(self) -> list[tuple[str, FilePlan, Sequence[Key]]]:
        """Each file of tensors: its name, its plan, and what of the state is in it."""
        return [
            (WEIGHTS_FILE, self.weights, ("",)),
            (OPTIMIZER_FILE, self.moments, MOMENTS if self.steps else ()),
        ]

    def make(self) -> None:
        """Make the files at their full size, without content."""
        for file_name, plan, _ in self.files:
            with (self.directory / file_name).open("wb") as file:
                file.write(plan.header)
                file.truncate(plan.num_bytes)
        (self.directory / COUNTERS_FILE).write_text(self.counters, encoding="utf-8")

    def runs(self, state: DividedState, rank: int) -> Iterator[Run]:
        """What a rank has, in the order in which it is written and digested; nothing of the values is read."""
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
        """What is not divided: bytes of the file of moments, with their places."""
        random, step = (values.numpy().tobytes() for values in (torch.get_rng_state(), torch.tensor(float(self.steps))))
        return [
            (self.moments.place(name), random if name == "random/cpu" else step)
            for name, _, _ in self.moments.table
            if name == "random/cpu" or name.startswith("step/")
        ]

    def digest(self, state: DividedState, rank: int) -> bytes:
        """Of what this process reads in the places of a rank."""
        found = xxhash.xxh3_128()
        for file_name, _, _ in self.files:
            with (self.directory / file_name).open("rb") as file:
                for run in self.runs(state, rank):
                    if run.file_name == file_name:
                        file.seek(run.place)
                        found.update(file.read(4 * run.size))
        return found.digest()


def write_runs(directory: Path, runs: Iterator[tuple[Run, torch.Tensor]], *, with_digest: bool) -> bytes:
    """Write values to their places and make them durable; returns their digest, or nothing.

    Raises:
        OSError: they cannot be written.
    """
    digest = xxhash.xxh3_128()
    file: BinaryIO | None = None
    name = ""
    try:
        for run, values in runs:
            if file is None or run.file_name != name:
                _close(file)
                file, name = (directory / run.file_name).open("r+b"), run.file_name
            data = values.numpy().data
            file.seek(run.place)
            file.write(data)
            if with_digest:
                digest.update(data)
    except BaseException:
        if file is not None:
            file.close()
        raise
    _close(file)
    return digest.digest() if with_digest else b""


def write_singles(directory: Path, singles: Sequence[tuple[int, bytes]]) -> None:
    """Write `CheckpointLayout.singles`; durable when it returns."""
    with (directory / OPTIMIZER_FILE).open("r+b") as file:
        for place, data in singles:
            file.seek(place)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _close(file: BinaryIO | None) -> None:
    if file is not None:
        with file:
            file.flush()
            # Here, because rank 0 makes durable what its own machine has written.
            os.fsync(file.fileno())
