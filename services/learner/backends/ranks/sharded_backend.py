"""The ranks of a learner behind one `TrainBackend`, with sharded fp32 masters.

Rank 0 has the interface; the other ranks `follow` its commands. Every rank reads all groups of a step and computes
advantages, denominators, averaging constants and step size for itself. Only the passes through the model are divided,
group by group.

An error of only rank 0 is raised after the others are through, so that no rank leaves a collective operation early.
"""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from heterorl.common.errors import HeterorlError, StateMismatch
from heterorl.common.model import tensors
from heterorl.common.model.router_replay import RouterReplay
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.common import SamplingSemantics, StepReport
from heterorl.common.types.rollout import Group, QueuedGroup
from heterorl.common.weights.arena import Arena
from heterorl.learner import step_metrics
from heterorl.learner.backends.ranks.checkpoint_reader import open_together
from heterorl.learner.backends.ranks.checkpoint_writer import Writing
from heterorl.learner.backends.ranks.collectives import Collectives, MetByAll, make_together
from heterorl.learner.backends.ranks.commands import AGREED, Command, Do, command_from_bytes, command_to_bytes
from heterorl.learner.backends.ranks.passes import Passes
from heterorl.learner.backends.ranks.sharded_weights import ShardedVersions, VersionEngine
from heterorl.learner.backends.ranks.sharding import Sharding, settle_untrained
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.train.backend_config import RanksConfig
from heterorl.learner.train.batch import build_batch
from heterorl.learner.train.step import StepRecorder
from heterorl.learner.train.step_report import StepEnd, wanted_log_ratios

_LOG = logging.getLogger(__name__)


class ShardedBackend(StepRecorder):
    """One rank's backend; made on every rank with equal arguments but `ranks`."""

    def __init__(
        self,
        *,
        sharding: Sharding,
        config: RanksConfig,
        loss: LossConfig,
        sampling: SamplingSemantics,
        ranks: Collectives,
        passes: step_metrics.PassCount | None = None,
        replays_routing: bool = False,
    ) -> None:
        super().__init__(config, loss)
        self._sharding = sharding
        self.layout = sharding.layout
        self.torch_model = sharding.model
        self._state = sharding.state
        self._buffers = dict(sharding.buffers)
        settle_untrained(sharding, is_rounded=config.forward_weights == "published")
        self._config = config
        self.lora = sharding.lora
        self._ranks = ranks
        self._clock = SystemClock()
        self._passes = Passes(
            engine=sharding.engine,
            reference=sharding.reference,
            device=sharding.device,
            ranks=ranks,
            loss_spec=self._loss_spec,
            max_new_tokens=sampling.max_new_tokens,
            micro_batch_tokens=config.micro_batch_tokens,
            batching=config.batching,
            note_pass=(passes or step_metrics.PassCount()).note,
            sharing=config.sequence_parallel,
            replay=RouterReplay(sharding.model) if replays_routing else None,
        )
        sharding.settle()
        held = ShardedVersions(state=sharding.state, layout=sharding.layout, buffers=self._buffers, ranks=ranks)
        self.versions = VersionEngine(held, tell=self._tell)
        """Versions that several ranks make together; `store` is for one rank."""
        self._writing: Writing | None = None
        self._failed: Exception | None = None
        """Why a step stopped in its passes: the engine then keeps a part of a gradient, and gathered weights."""

    def train_step(self, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        started = self._clock.monotonic()
        command = self._tell(
            Command(do=Do.TRAIN, groups=tuple(queued.group for queued in groups), head_version=head_version, step=step)
        )
        end = self._train(command.groups, head_version, step)
        self.last_log_ratios = wanted_log_ratios(end.samples, groups)
        step_s = self._clock.monotonic() - started
        return end.report(groups, step=step, head_version=head_version, step_s=step_s)

    def store(self, arena: Arena) -> None:
        """Store the masters; rank 0 holds one whole tensor at a time.
        Rank 0 also has the arena, the others only their pieces."""
        self._tell(Command(do=Do.STORE))
        problem: HeterorlError | None = None
        for name, tensor in self._state.gather_all():
            assert tensor is not None, "rank 0 receives"
            try:
                # A name may be an alias in the layout: ties are sorted by the name in the state dict.
                tensors.store_tensors([(self.layout.spec(name), tensor)], arena)
            except HeterorlError as error:
                problem = problem or error
        buffers = [(self.layout.spec(name), buffer) for name, buffer in self._buffers.items()]
        tensors.store_tensors(buffers, arena)
        if problem is not None:
            raise problem

    @property
    def is_divided(self) -> bool:
        """Whether several ranks make versions together."""
        return self._ranks.world_size > 1

    def load_published(self, arena: Arena, *, keep_optimizer: bool = False) -> None:
        if arena.layout.layout_id != self.layout.layout_id:
            raise StateMismatch("the model has other tensors than the weights", action="check model_dir")
        self._tell(Command(do=Do.LOAD_PUBLISHED, keep_optimizer=keep_optimizer))
        self._load_published(arena, keep_optimizer=keep_optimizer)

    def freeze(self, directory: Path) -> Callable[[], None]:
        """Copy each rank's share, which a thread writes.
        Without `overlap_checkpoint` it is written at once."""
        writing = self._freeze(self._tell(Command(do=Do.FREEZE, directory=directory.absolute())).directory)
        if not self._config.overlap_checkpoint:
            writing.wait()
        return writing.wait

    def restore(self, directory: Path) -> None:
        """Read files of `freeze`, of this or the torch backend.
        The number of ranks may differ.

        Raises CorruptStore: a file is missing, broken or of another model, and the state is unchanged; or a rank could
        not read its pieces, and the state is partly of this checkpoint.
        """
        self._tell(Command(do=Do.RESTORE, directory=directory.absolute()))
        self._restore(directory)

    def stop(self) -> None:
        """Let the other ranks leave `follow`, once the open checkpoint is written."""
        self._end_writing()
        self._tell(Command(do=Do.STOP))

    def follow(self) -> None:
        while True:
            command = command_from_bytes(self._ranks.broadcast_bytes())
            try:
                if command.do is Do.STOP:
                    self._end_writing()
                    return
                self._obey(command)
            except HeterorlError as error:
                if command.do not in AGREED and not isinstance(error, MetByAll):
                    # Rank 0 may be inside an operation that waits for this rank.
                    raise
                # Rank 0 has met the same and has raised it to its caller.
                _LOG.warning("rank %d goes on, rank 0 has the same error and decides: %s", self._ranks.rank, error)

    def _tell(self, command: Command) -> Command:
        if self._failed is not None and command.do in (Do.TRAIN, Do.LOAD_PUBLISHED, Do.RESTORE):
            # No undo helps: a start does.
            raise self._failed
        data = command_to_bytes(command)
        self._ranks.broadcast_bytes(data)
        # Read back, so that all ranks train on the same bits.
        return command_from_bytes(data)

    def _obey(self, command: Command) -> None:
        if command.do is Do.TRAIN:
            self._train(command.groups, command.head_version, command.step)
        elif command.do is Do.STORE:
            for _ in self._state.gather_all():
                pass
        elif command.do is Do.LOAD_PUBLISHED:
            self._load_published(None, keep_optimizer=command.keep_optimizer)
        elif command.do is Do.FREEZE:
            self._freeze(command.directory)
            if not self._config.overlap_checkpoint:
                self._end_writing()
        elif command.do is Do.RESTORE:
            self._restore(command.directory)
        else:
            self.versions.obey(command)

    def _train(self, groups: Sequence[Group], head_version: int, step: int) -> StepEnd:
        batch = make_together(lambda: build_batch(groups, loss=self._loss, head_version=head_version), self._ranks)
        try:
            with self._sharding.computing():
                samples = self._passes.accumulate(batch)
            return self._end_step(samples, step=step, update=self._sharding.update)
        except Exception as error:
            self._failed = error
            raise

    def _load_published(self, arena: Arena | None, *, keep_optimizer: bool) -> None:
        for name in (*sorted(self._state.shapes), *self._buffers):
            spec = self.layout.spec(name)
            if arena is None:
                whole = torch.empty(math.prod(spec.shape), dtype=tensors.TORCH_DTYPE[spec.dtype])
            else:
                # The arena's own memory, from which the broadcast reads.
                whole = tensors.read_tensor(arena, name).reshape(-1)
            self._ranks.broadcast(whole.view(torch.uint8))
            if name in self._buffers:
                self._buffers[name].copy_(whole.view(spec.shape))
            else:
                self._state.put(name, "", whole)
        self._sharding.settle()
        if not keep_optimizer:
            self._state.reset(steps=0)
            self._applied_steps = 0

    def _freeze(self, directory: Path) -> Writing:
        self._end_writing()
        self._writing = Writing(
            directory,
            self._state,
            self._ranks,
            applied_steps=self._applied_steps,
            lora=self.lora,
            overlaps=self._config.overlap_checkpoint,
        )
        return self._writing

    def _end_writing(self) -> None:
        """Wait for the open checkpoint, so that one copy exists at most."""
        if self._writing is not None:
            self._writing.end()
        self._writing = None

    def _restore(self, directory: Path) -> None:
        files = open_together(directory, self._state.shapes, self._ranks)
        self._applied_steps = files.restore(self._state, self._ranks)
        self._sharding.settle()
