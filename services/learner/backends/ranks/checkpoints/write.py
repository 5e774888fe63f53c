"""A checkpoint of divided state in the files of `heterorl.learner.backends.state`, which all ranks write together.

A piece of a tensor is a run of bytes of its file, so the ranks' pieces need no files of their own: the checkpoint is
that of one process, byte for byte, and whoever reads one reads all. Memory: a block of a piece.

Guarantees: any number of ranks, any stage and the torch backend read what any of them wrote. Weights and moments come
back bit for bit. The optimizer of a divided model counts steps once for all parameters.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from heterorl.common.errors import HeterorlError
from heterorl.common.types.common import NO_LORA, LoraSettings
from heterorl.common.weights.file_plan import FilePlan
from heterorl.learner.backends.ranks.checkpoints.layout import CheckpointLayout, Run, write_runs, write_singles
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.state import MOMENTS, DividedState
from heterorl.learner.backends.state import OPTIMIZER_FILE, WEIGHTS_FILE

_LOG = logging.getLogger(__name__)
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
    layout = CheckpointLayout.of(directory, state, applied_steps=applied_steps, lora=lora)
    if not (make_files(layout, ranks) and _write_own(layout, state, ranks)):
        write_gathered(layout, state, ranks)


def make_files(layout: CheckpointLayout, ranks: Collectives) -> bool:
    """Let rank 0 make the files; all ranks call. Returns whether all of them see the directory.

    Raises:
        OSError, HeterorlError: as `write_checkpoint_files`.
    """
    token = ranks.broadcast_bytes(os.urandom(16) if ranks.rank == 0 else b"")
    with _together(ranks):
        if ranks.rank == 0:
            layout.make()
            (layout.directory / _TOKEN_FILE).write_bytes(token)
    is_seen = ranks.all_agree(_sees(layout.directory, token))
    if ranks.rank == 0:
        (layout.directory / _TOKEN_FILE).unlink(missing_ok=True)
    return is_seen


def _write_own(layout: CheckpointLayout, state: DividedState, ranks: Collectives) -> bool:
    """Write this rank's pieces; returns whether rank 0 reads them as all have written them."""
    is_compared = not ranks.are_on_one_machine
    own = b""
    with _together(ranks):
        own = write_runs(layout.directory, _blocks(layout, state, ranks.rank), with_digest=is_compared)
        if ranks.rank == 0:
            write_singles(layout.directory, layout.singles())
    if not is_compared:
        return True
    stated = ranks.all_gather_bytes(own)
    is_equal = True
    with _together(ranks):
        if ranks.rank == 0:
            is_equal = all(layout.digest(state, rank) == digest for rank, digest in enumerate(stated))
    return ranks.all_agree(is_equal)


def _blocks(layout: CheckpointLayout, state: DividedState, rank: int) -> Iterator[tuple[Run, torch.Tensor]]:
    for run in layout.runs(state, rank):
        yield run, state.read(run.name, run.key, start=run.start, size=run.size).to("cpu", torch.float32).contiguous()


def _sees(directory: Path, token: bytes) -> bool:
    try:
        return (directory / _TOKEN_FILE).read_bytes() == token
    except OSError:
        return False


@contextmanager
def _together(ranks: Collectives) -> Iterator[None]:
    """An error of one rank, of the disk or any other, is raised on all, when all are through.

    Not around a collective operation: a rank that leaves one would go into another than the ranks that wait for it.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - told below, when the other ranks know of it
        problem = error
    raise_first(ranks.all_gather_bytes(words_of(problem)), own=problem, rank=ranks.rank)


def words_of(problem: BaseException | None) -> bytes:
    """An error for the other ranks; nothing where there is none."""
    if problem is None:
        return b""
    code = problem.errno if isinstance(problem, OSError) else None
    return json.dumps([code, str(problem) or repr(problem)]).encode()


def raise_first(words: list[bytes], *, own: BaseException | None, rank: int) -> None:
    """Raise what the first rank that has an error says of it.

    Raises:
        OSError: on rank 0: a disk's.
        HeterorlError: on the others; and on rank 0, of any other error of another rank.
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


def write_gathered(layout: CheckpointLayout, state: DividedState, ranks: Collectives) -> None:
    """Write the tensors' files on rank 0, which receives them; all ranks call.

    Raises:
        OSError, HeterorlError: as `write_checkpoint_files`.
    """
    if ranks.rank == 0:
        _LOG.warning("not all ranks can write into %s: rank 0 receives everything and writes it", layout.directory)
    masters, rest = _masters(state), _moments(state, layout.steps, sorted(state.shapes))
    problem: OSError | None = None
    try:
        if ranks.rank == 0:
            _write_all(layout.directory / WEIGHTS_FILE, layout.weights, masters)
            _write_all(layout.directory / OPTIMIZER_FILE, layout.moments, rest)
    except OSError as error:
        # Of the disk, told below. Whatever else fails may leave a tensor unsent that rank 0 waits for: it ends this
        # rank, and by that the others.
        problem = error
    for _ in itertools.chain(masters, rest):
        pass
    raise_first(ranks.all_gather_bytes(words_of(problem)), own=problem, rank=ranks.rank)


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


def _write_all(path: Path, plan: FilePlan, tensors: Iterator[torch.Tensor | None]) -> None:
    with path.open("wb") as file:
        file.write(plan.header)
        for (name, _, shape), tensor in zip(plan.table, tensors, strict=True):
            assert tensor is not None, "rank 0 receives"
            assert tuple(tensor.shape) == shape, name
            file.write(tensor.contiguous().numpy().data)
