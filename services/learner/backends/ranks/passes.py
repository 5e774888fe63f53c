"""One step's forward and backward passes on one rank.

A single process is the only rank. DeepSpeed and FSDP2 average gradients over ranks. Every loss is multiplied by their
number, so the result is the sum: the gradient of the whole step's loss.

Guarantees: every rank takes the same number of passes. A loss that is not finite on one rank makes the gradient not
finite on all, and weights and optimizer stay as they are.

Ranks that share each pass (`sequence_parallel`) have the same micro-batches and loss; the first of them reports.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import nn

from heterorl.common.model.logprobs import token_logprobs
from heterorl.common.model.router_replay import RouterReplay
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import LossSpec, loss_spec_of
from heterorl.learner.train.batch import (
    Batch,
    Batching,
    MicroBatch,
    Shares,
    TrainingSequence,
    collate,
    empty_pass,
    share_out,
)
from heterorl.learner.train.model import hidden_states
from heterorl.learner.train.step import micro_batch_loss, with_first_pass
from heterorl.learner.train.step_report import MicroBatchSample, SequenceSample


class PassEngine(Protocol):
    """An engine that may shard a `LogprobModel` among ranks."""

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`LogprobModel.forward`."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward pass is the step's last."""

    def backward(self, loss: torch.Tensor) -> object:
        """Add the gradient of a loss, averaged over the ranks."""


class LogprobModel(nn.Module):
    """A language model that gives log-probs and entropies [N] of completion tokens."""

    def __init__(self, model: nn.Module, *, temperature: float, autocast_dtype: torch.dtype | None) -> None:
        """Wrap a model; `autocast_dtype` is the type of matrix products.
        None is the type of the weights. Without DeepSpeed it is a PassEngine by itself."""
        super().__init__()
        self.model = model
        self.head = _Head(model, temperature=temperature)
        self._autocast_dtype = autocast_dtype

    def forward(
        self,
        input_ids_RS: torch.Tensor,
        position_ids_RS: torch.Tensor,
        sources_N: torch.Tensor,
        targets_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self._autocast_dtype
        # Here, because the engine turns off an autocast around the model.
        with torch.autocast(input_ids_RS.device.type, dtype) if dtype else contextlib.nullcontext():
            hidden_NH = hidden_states(self.model, input_ids_RS, position_ids_RS, sources_N)
            logprobs_N: torch.Tensor
            logprobs_N, entropies_N = self.head(hidden_NH, targets_N)
        # Clones: FSDP2 warns of views, from which an operation in place would take its hooks.
        return logprobs_N.clone(), entropies_N.clone()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Ignored: each backward pass adds its own gradient."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


class _Head(nn.Module):
    """The output embedding as a module, so that ZeRO 3 gathers it."""

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        super().__init__()
        network: Any = model
        # In a tuple: as an attribute the embedding would be registered a second time.
        self._embedding = (network.get_output_embeddings(),)
        self._temperature = temperature

    @property
    def weight(self) -> nn.Parameter:
        return self._embedding[0].weight  # type: ignore[no-any-return]

    def forward(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(hidden_NH, self.weight, targets_N, temperature=self._temperature)


class Alone:
    """The only rank, in place of `Collectives`."""

    rank, world_size = 0, 1

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """One rank's passes."""

    engine: PassEngine
    reference: PassEngine | None
    """The engine of a frozen model, for losses that compare with one."""
    device: torch.device
    ranks: Collectives | Alone
    loss_spec: LossSpec
    max_new_tokens: int
    micro_batch_tokens: int
    batching: Batching
    note_pass: Callable[[int, int], None]
    """Called with the passes of this rank that are done, and their total."""
    sharing: int = 1
    """Consecutive ranks that share each pass."""
    replay: RouterReplay | None = None
    """Routes tokens to the experts that the sequences recorded."""

    def accumulate(self, batch: Batch) -> list[MicroBatchSample]:
        """Leave the gradient of the whole step's loss in the engine.
        Returns all ranks' samples, on every rank."""
        try:
            return self._accumulate(batch)
        finally:
            if self.replay is not None:
                # The next caller of the model has other tokens.
                self.replay.use(None)

    def _accumulate(self, batch: Batch) -> list[MicroBatchSample]:
        shares = share_out(
            batch.sequences,
            num_ranks=self.ranks.world_size // self.sharing,
            max_tokens=self.micro_batch_tokens,
            batching=self.batching,
        )
        if not shares.num_passes:
            return []
        if self.loss_spec.needs_reference:
            shares = self._with_reference(shares)
        only_pass = None
        if self.loss_spec.needs_first_pass:
            shares, batch, only_pass = self._coupled(shares, batch)
        own = shares.parts[self.ranks.rank // self.sharing]
        samples: list[MicroBatchSample] = []
        everyone: list[MicroBatchSample] = []
        for number in range(shares.num_passes):
            self.note_pass(number, shares.num_passes)
            is_last = number == shares.num_passes - 1
            self.engine.set_gradient_accumulation_boundary(is_last)
            micro_batch = self._collated(own, number)
            logprobs_N, entropies_N = only_pass or self._forward(micro_batch, self.engine)
            if number < len(own):
                total, sample = micro_batch_loss(
                    self.loss_spec, micro_batch, logprobs_N, entropies_N, batch, max_new_tokens=self.max_new_tokens
                )
                samples.append(sample)
            else:
                total = 0.0 * logprobs_N.double().sum()
            if is_last:
                sent = _pack(samples if self.ranks.rank % self.sharing == 0 else [])
                everyone = [sample for data in self.ranks.all_gather_bytes(sent) for sample in _unpack(data)]
                # DeepSpeed looks at the gradient only, also on one rank.
                if not math.isfinite(sum(entry.loss for entry in everyone)):
                    total = total * math.nan
            self.engine.backward(total * self.ranks.world_size)
        self.note_pass(shares.num_passes, shares.num_passes)
        return everyone

    def _collated(self, own: Sequence[list[TrainingSequence]], number: int) -> MicroBatch:
        sequences = own[number] if number < len(own) else [empty_pass()]
        return collate(sequences, batching=self.batching).to(self.device)

    def _forward(self, micro_batch: MicroBatch, engine: PassEngine) -> tuple[torch.Tensor, torch.Tensor]:
        if self.replay is not None:
            self.replay.use(micro_batch.routed)
        return engine(
            micro_batch.input_ids_RS, micro_batch.position_ids_RS, micro_batch.sources_N, micro_batch.targets_N
        )

    def _coupled(self, shares: Shares, batch: Batch) -> tuple[Shares, Batch, tuple[torch.Tensor, torch.Tensor] | None]:
        """The step after a first pass.
        If one process has a single micro-batch, its pass has the gradient too, and is not repeated."""
        only_pass = None
        if self.ranks.world_size == shares.num_passes == 1:
            only_pass = self._forward(self._collated(shares.parts[0], 0), self.engine)
            logprobs = [only_pass[0].detach()]
        else:
            logprobs = self._logprobs(shares, self.engine)
        ordered = Batch(sequences=tuple(shares.ordered()))
        known = with_first_pass(self.loss_spec, ordered, logprobs, max_new_tokens=self.max_new_tokens)
        return shares.replaced(known.sequences), batch.with_whole(known, self.device), only_pass

    def _with_reference(self, shares: Shares) -> Shares:
        assert self.reference is not None, "the engine was built with one"
        sequences = shares.ordered()
        rows = torch.cat(self._logprobs(shares, self.reference, dividing=self.sharing)).split(
            [one.num_drawn for one in sequences]
        )
        return shares.replaced(
            [replace(one, reference_logprobs=row.numpy()) for one, row in zip(sequences, rows, strict=True)]
        )

    def _logprobs(self, shares: Shares, engine: PassEngine, *, dividing: int = 1) -> list[torch.Tensor]:
        """Log-probs of all tokens in order, without gradient, one tensor a share.

        Takes every pass once. `dividing` ranks of a share take its passes in turn; otherwise each takes part in all.
        """
        own = shares.parts[self.ranks.rank // self.sharing][self.ranks.rank % dividing :: dividing]
        num_turns = -(-shares.num_passes // dividing)
        with torch.no_grad():
            passes = [self._forward(self._collated(own, number), engine)[0] for number in range(num_turns)]
        values = {str(number): one.cpu().double().contiguous() for number, one in enumerate(passes)}
        answers = self.ranks.all_gather_bytes(save(values))
        logprobs = []
        for number, parts in enumerate(shares.parts):
            first = number * self.sharing
            taken = [load(answer) for answer in answers[first : first + dividing]]
            rows = (taken[place % dividing][str(place // dividing)] for place in range(len(parts)))
            logprobs.append(torch.cat([torch.zeros(0, dtype=torch.float64), *rows]))
        return logprobs


def alone(
    model: nn.Module,
    *,
    loss: LossConfig,
    temperature: float,
    max_new_tokens: int,
    micro_batch_tokens: int,
    batching: Batching,
    autocast_dtype: torch.dtype | None = None,
    reference: nn.Module | None = None,
    replay: RouterReplay | None = None,
    note_pass: Callable[[int, int], None] = lambda _done, _total: None,
) -> Passes:
    """The passes of one process with the whole model.

    `reference` is a frozen model that routes by itself.
    """
    engine = functools.partial(LogprobModel, temperature=temperature, autocast_dtype=autocast_dtype)
    return Passes(
        engine=engine(model),
        reference=None if reference is None else engine(reference),
        device=next(model.parameters()).device,
        ranks=Alone(),
        loss_spec=loss_spec_of(loss),
        max_new_tokens=max_new_tokens,
        micro_batch_tokens=micro_batch_tokens,
        batching=batching,
        note_pass=note_pass,
        replay=replay,
    )


_SAMPLE_TENSORS = ("weights_M", "is_clipped_M", "kl_B", "entropies_N", "log_ratios_N", "places_B")
_METRICS = "metrics/"
_SEQUENCE_TENSORS = tuple(field.name for field in fields(SequenceSample))


def _pack(samples: Sequence[MicroBatchSample]) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    for number, sample in enumerate(samples):
        read: Callable[[object, str], torch.Tensor] = getattr
        tensors |= {f"{number}/{name}": read(sample, name).contiguous() for name in _SAMPLE_TENSORS}
        # Clones: rows of one tensor share its storage, which the format refuses.
        tensors |= {f"{number}/{name}": read(sample.sequences, name).clone() for name in _SEQUENCE_TENSORS}
        tensors |= {f"{number}/{_METRICS}{name}": both for name, both in sample.metrics.items()}
    tensors["losses"] = torch.tensor([sample.loss for sample in samples], dtype=torch.float64)
    return save(tensors)


def _unpack(data: bytes) -> list[MicroBatchSample]:
    tensors = load(data)
    return [
        MicroBatchSample(
            loss=loss,
            **{name: tensors[f"{number}/{name}"] for name in _SAMPLE_TENSORS},
            sequences=SequenceSample(**{name: tensors[f"{number}/{name}"] for name in _SEQUENCE_TENSORS}),
            metrics={
                key.removeprefix(prefix): both
                for prefix in (f"{number}/{_METRICS}",)
                for key, both in tensors.items()
                if key.startswith(prefix)
            },
        )
        for number, loss in enumerate(tensors["losses"].tolist())
    ]
