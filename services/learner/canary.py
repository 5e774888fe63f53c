"""The learner's side of the canary: its own log-probs of the agreed tokens, stated with every version."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from services.common.canary import ScoredText
from services.learner.batch import TrainingSequence
from services.learner.micro_batch import collate
from services.learner.model import learner_logprobs


class Canary:
    """Scores the canary with a model that is trained elsewhere, between its steps."""

    def __init__(self, model: nn.Module, texts: Sequence[ScoredText], *, temperature: float) -> None:
        self._model = model
        self._temperature = temperature
        self._batch = collate([_sequence(text) for text in texts], batching="padded")

    @torch.no_grad()
    def score(self) -> tuple[float, ...]:
        """Log-probs of all completions' tokens, one text after another."""
        batch = self._batch.to(next(self._model.parameters()).device)
        logprobs_N, _ = learner_logprobs(self._model, batch, temperature=self._temperature)
        return tuple(logprobs_N.float().cpu().tolist())


def _sequence(text: ScoredText) -> TrainingSequence:
    return TrainingSequence(
        prompt_token_ids=text.prompt,
        token_ids=text.completion,
        sampler_logprobs=np.zeros(text.completion.size, np.float32),
        advantage=0.0,
        log_denominator=0.0,
    )
