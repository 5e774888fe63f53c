"""A checkpoint that all ranks write beside the next step: each copies its share, and a thread of it writes the copy.

    all ranks    make the files and agree that all see them; copy; go on with the next step
    a thread     writes its rank's copy and makes it durable; says so to rank 0
    rank 0's     hears all of them and, over several machines, compares what it reads with digests of what was written;
                 where that differs, it receives all copies and writes them alone

Memory: a copy of the rank's share, 12 bytes a parameter of it, in the host's memory (pinned where the share is on a
GPU). On one machine each run of it is given back as soon as it is written; what is pinned stays torch's, which keeps it
for the next checkpoint.

Guarantees: the files are those of `write`, byte for byte, of the moment at which the copies were taken. `wait` returns
on rank 0 when the pieces of all ranks are durable, so whoever names the checkpoint afterwards names a whole one.
Whatever goes wrong in a thread, `wait` raises it, and no other rank's thread waits for its word.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from heterorl.common.errors import HeterorlError
from heterorl.common.types.common import NO_LORA, LoraSettings
from heterorl.learner.backends.ranks.checkpoints.layout import CheckpointLayout, Run, write_runs, write_singles
from heterorl.learner.backends.ranks.checkpoints.write import make_files, raise_first, words_of, write_gathered
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.state import DividedState

_LOG = logging.getLogger(__name__)
_GOOD, _AGAIN, _OVER = b"good", b"again", b"over"


class Writing:
    """One checkpoint under way on this rank."""

    def __init__(
        self,
        directory: Path,
        state: DividedState,
        ranks: Collectives,
        *,
        applied_steps: int,
        lora: LoraSettings = NO_LORA,
    ) -> None:
        """Copy this rank's share and begin to write it; all ranks call, and none has another one under way.

        Where a rank does not see the directory, the checkpoint is written when this returns: sent to rank 0.

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
        self._copy.extend(_copied(self._layout, state, ranks.rank))
        self._thread = threading.Thread(target=self._run, daemon=True, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when this rank's thread is through: on rank 0, when all are.

        Raises:
            OSError: on rank 0: a rank could not write.
            HeterorlError: on rank 0: another rank met another error; on the others: any rank did.
        """
        if self._thread is not None:
            self._thread.join()
        self._is_heard = True
        if self._problem is not None:
            raise self._problem

    def end(self) -> None:
        """Wait; what went wrong is logged, unless `wait` has raised it."""
        is_heard = self._is_heard
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - of a thread that has ended
            if not is_heard:
                _LOG.warning("rank %d: a checkpoint was not written: %s", self._ranks.rank, error)

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
            # Of torch: a rank is gone, which ends this process too.
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
        if not self._ranks.are_on_one_machine:
            # It may have to be sent.
            yield from self._copy
            return
        while self._copy:
            yield self._copy.popleft()

    def _report(self, own: BaseException | None, digest: bytes) -> None:
        """Say how it went; the other side of `_collect`."""
        aside = self._ranks.aside
        aside.send_bytes(json.dumps([words_of(own).decode(), digest.hex()]).encode(), rank=0)
        if not self._ranks.are_on_one_machine and aside.receive_bytes(rank=0) == _AGAIN:
            for _, values in self._copy:
                aside.send(values, rank=0)
        if own is not None:
            raise own

    def _collect(self, own: BaseException | None, digest: bytes) -> None:
        aside, others = self._ranks.aside, range(1, self._ranks.world_size)
        answers = [
            [words_of(own).decode(), digest.hex()],
            *(json.loads(aside.receive_bytes(rank=rank)) for rank in others),
        ]
        verdict = _OVER
        try:
            raise_first([word.encode() for word, _ in answers], own=own, rank=0)
            if not self._ranks.are_on_one_machine:
                digests = [bytes.fromhex(text) for _, text in answers]
                is_equal = all(self._layout.digest(self._state, rank) == each for rank, each in enumerate(digests))
                verdict = _GOOD if is_equal else _AGAIN
        finally:
            if not self._ranks.are_on_one_machine:
                for rank in others:
                    aside.send_bytes(verdict, rank=rank)
        if verdict == _AGAIN:
            self._write_alone()

    def _write_alone(self) -> None:
        """Write this rank's copy and what the others send into files that nobody else has written to."""
        _LOG.warning("%s is not read as the ranks have written it: rank 0 writes all", self._layout.directory)
        problem: Exception | None = None
        for rank in range(self._ranks.world_size):
            runs = self._received(rank) if rank else iter(self._copy)
            try:
                if rank == 0:
                    self._layout.make()
                if problem is None:
                    write_runs(self._layout.directory, runs, with_digest=False)
            except Exception as error:  # noqa: BLE001 - raised below, when the others have sent
                problem = error
            # The others send, whatever became of it.
            for _ in runs:
                pass
        if problem is not None:
            raise problem
        write_singles(self._layout.directory, self._singles)

    def _received(self, rank: int) -> Iterator[tuple[Run, torch.Tensor]]:
        for run in self._layout.runs(self._state, rank):
            values = torch.empty(run.size, dtype=torch.float32)
            self._ranks.aside.receive(values, rank=rank)
            yield run, values


def _copied(layout: CheckpointLayout, state: DividedState, rank: int) -> Iterator[tuple[Run, torch.Tensor]]:
    """Copies of a rank's pieces in the host's memory, all of them there when this ends."""
    is_on_device = False
    for run in layout.runs(state, rank):
        values = state.read(run.name, run.key, start=run.start, size=run.size)
        copy = torch.empty(run.size, dtype=torch.float32, pin_memory=values.is_cuda)
        copy.copy_(values, non_blocking=values.is_cuda)
        is_on_device = is_on_device or values.is_cuda
        yield run, copy
    if is_on_device:
        torch.cuda.synchronize()
