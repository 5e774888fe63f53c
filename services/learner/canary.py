"""The learner's side of the canary: its own log-probs of the agreed tokens, stated with every version."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from services.common.canary import ScoredText
from services.common.weights.arena import Arena
from services.common.weights.tensors import TORCH_DTYPE, published_tensors
from services.learner.batch import TrainingSequence
from services.learner.micro_batch import collate
from services.learner.model import learner_logprobs

_LOG = logging.getLogger(__name__)


class Canary:
    """Scores the canary with a model that is trained elsewhere, between its steps."""

    def __init__(self, model: nn.Module, texts: Sequence[ScoredText], *, temperature: float) -> None:
        self._model = model
        self._temperature = temperature
        self._batch = collate([_sequence(text) for text in texts], batching="padded")

    @torch.no_grad()
    def score(self, weights: Arena | None = None) -> tuple[float, ...]:
        """Log-probs of all completions' tokens, one text after another.

        Args:
            weights: a state of the model to score with instead of its own, in memory of its own meanwhile; where the
                device has none left, nothing is scored.
        """
        batch = self._batch.to(next(self._model.parameters()).device)
        try:
            with _holding(self._model, weights):
                logprobs_N, _ = learner_logprobs(self._model, batch, temperature=self._temperature)
        except torch.OutOfMemoryError:
            if weights is None:
                raise
            _LOG.warning("no canary of a flavour: its weights do not fit beside the model")
            return ()
        return tuple(logprobs_N.float().cpu().tolist())


@contextmanager
def _holding(model: nn.Module, weights: Arena | None) -> Iterator[None]:
    """Give the model other weights for a while; its own are not written to."""
    own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        if weights is not None:
            tensors = published_tensors(model)
            for spec in weights.layout.specs:
                tensor = tensors[spec.name]
                if id(tensor) not in own:
                    own[id(tensor)] = (tensor, tensor.data)
                    values = torch.from_numpy(weights.view(spec.name)).view(TORCH_DTYPE[spec.dtype])
                    tensor.data = values.to(device=tensor.device, dtype=tensor.dtype)
        yield
    finally:
        for tensor, data in own.values():
            tensor.data = data


def _sequence(text: ScoredText) -> TrainingSequence:
    return TrainingSequence(
        prompt_token_ids=text.prompt,
        token_ids=text.completion,
        sampler_logprobs=np.zeros(text.completion.size, np.float32),
        advantage=0.0,
        log_denominator=0.0,
    )
