"""The learner's log-probs of the canary texts, stated with every version."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from heterorl.common.generation.inference_engine import ScoredText
from heterorl.common.weights.arena import Arena
from heterorl.learner.train.batch import TrainingSequence
from heterorl.learner.train.micro_batch import collate
from heterorl.learner.train.model import learner_logprobs
from heterorl.learner.train.swapped_weights import arena_weights

_LOG = logging.getLogger(__name__)


class Canary:
    """Scores the canary with the trained model between steps, always with published weights, as samplers do."""

    def __init__(self, model: nn.Module, texts: Sequence[ScoredText], *, temperature: float) -> None:
        self._model = model
        self._temperature = temperature
        self.batch = collate(
            [TrainingSequence.scored(text.prompt, text.completion) for text in texts], batching="padded"
        )

    @torch.no_grad()
    def score(self, weights: Arena) -> tuple[float, ...]:
        """Log-probs of all completions' tokens, one text after another, under `weights`.

        Empty where the device has no room for them; no site is then judged by this version.
        """
        batch = self.batch.to(next(self._model.parameters()).device)
        try:
            with arena_weights(self._model, weights):
                logprobs_N, _ = learner_logprobs(self._model, batch, temperature=self._temperature)
        except torch.OutOfMemoryError:
            _LOG.warning("skipped the canary: the published weights do not fit into memory with the model")
            return ()
        return tuple(logprobs_N.float().cpu().tolist())
