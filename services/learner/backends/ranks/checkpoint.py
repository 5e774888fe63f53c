"""A checkpoint of divided state in the files of `heterorl.learner.backends.state`, one tensor at a time.

Guarantees: any number of ranks, any stage and the torch backend read what any of them wrote. Weights and moments come
back bit for bit. The optimizer of a divided model counts steps once for all parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from heterorl.common.errors import CorruptStore
from heterorl.common.types.common import NO_LORA, LoraSettings
from heterorl.learner.backends.loading.tensor_file import TensorFile
from heterorl.learner.backends.ranks.files import write_tensors
from heterorl.learner.backends.ranks.state import MOMENTS, DividedState
from heterorl.learner.backends.state import (
    COUNTERS_FILE,
    FORMAT,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    check_random_state,
    check_state,
)


def write_checkpoint_files(
    directory: Path | None, state: DividedState, *, applied_steps: int, lora: LoraSettings = NO_LORA
) -> None:
    """Write the three files; all ranks call, and all but rank 0 with no directory.

    Raises:
        OSError: on rank 0, after the other ranks are through.
    """
    steps = state.steps()
    names = sorted(state.shapes)
    shapes = {name: tuple(state.shapes[name]) for name in names}
    weights = _masters(state)
    moments = _moments(state, steps, names)
    if directory is None:
        for _ in itertools.chain(weights, moments):
            pass
        return
    random = torch.get_rng_state()
    # The order is that of `_moments`: all ranks gather in the same one.
    table = [("random/cpu", "U8", tuple(random.shape))]
    if steps:
        table += [(f"{key}/{name}", "F32", shapes[name]) for key in MOMENTS for name in names]
        table += [(f"step/{name}", "F32", ()) for name in names]
    try:
        write_tensors(directory / WEIGHTS_FILE, [(name, "F32", shapes[name]) for name in names], _present(weights))
        write_tensors(directory / OPTIMIZER_FILE, table, _present(moments))
        counters: dict[str, object] = {"format": FORMAT, "applied_steps": applied_steps}
        if lora.rank:
            counters["lora"] = dataclasses.asdict(lora)
        (directory / COUNTERS_FILE).write_text(json.dumps(counters), encoding="utf-8")
    finally:
        for _ in itertools.chain(weights, moments):
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

    weights: TensorFile
    moments: TensorFile
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
