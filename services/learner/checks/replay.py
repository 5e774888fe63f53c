"""Replay of a group: log-probs, margins of draws.

Guarantees: the logits of all tokens are never held at once. No truncation is applied, because top_p and top_k flip
under rounding and would call honest tokens impossible.

Suffixes: N tokens, H hidden width, V vocabulary, C tokens of one chunk.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach
from heterorl.common.model.logprobs import CHUNK_LOGITS, gumbel_noise, logprobs_of, project, tempered, turn_seed
from heterorl.common.types.common import LoraSettings, SamplingSemantics
from heterorl.common.types.rollout import Group, drawn_turns, strips_of
from heterorl.common.weights.arena import Arena, Dtype
from heterorl.learner.checks.findings import Replay
from heterorl.learner.train.batch import TrainingSequence, collate, split
from heterorl.learner.train.model import hidden_states, in_bf16, load_model, output_embedding

MAX_PASS_TOKENS = 32_768
"""Model inputs of one pass."""


class Replayer:
    """A model of its own that takes any published version."""

    def __init__(
        self, *, model_dir: str, device: str, sampling: SamplingSemantics, lora: LoraSettings, published_dtype: Dtype
    ) -> None:
        model = load_model(model_dir)
        if lora.rank:
            tensors.round_base(model, published_dtype)
            attach(model, lora)
        self._model: Any = model.to(device)
        self._device = torch.device(device)
        self._sampling = sampling
        self._loaded = ("", -1)

    @property
    def can_repeat_draws(self) -> bool:
        """Whether draws are of all tokens, so the Gumbel-max trick decides."""
        return not self._sampling.is_truncated

    def load(self, arena: Arena, version: int, variant: str = "") -> None:
        if (variant, version) != self._loaded:
            tensors.load(arena, self._model)
            self._loaded = (variant, version)

    @torch.no_grad()
    def replay(self, group: Group, *, key: int | None, is_rounded: bool = False) -> list[Replay]:
        """Compute a group's trainable rollouts again under the loaded weights.

        In fp32, or in bf16 if `is_rounded`. A lost member has an empty replay. Reads the group's tokens only. Without
        `key` draws are not repeated.
        """
        result = [Replay(logprobs=np.zeros(0, np.float32), margins=None)] * len(group.rollouts)
        with in_bf16(self._model) if is_rounded else contextlib.nullcontext():
            for part in _parts(group):
                for sequence, replay in zip(part, self._pass(part, key=key), strict=True):
                    result[sequence.number] = replay
        return result

    def _pass(self, part: Sequence[TrainingSequence], *, key: int | None) -> list[Replay]:
        batch = collate(part, batching="padded").to(self._device)
        hidden_NH = hidden_states(self._model, batch.input_ids_RS, batch.position_ids_RS, batch.sources_N)
        weight_VH = output_embedding(self._model)
        places = [place for one in part for place in _places(one)] if key is not None else []
        logprobs_N, margins_N = [], []
        step = max(1, CHUNK_LOGITS // weight_VH.shape[0])
        for start in range(0, hidden_NH.shape[0], step):
            chunk = slice(start, start + step)
            logits_CV, targets_C = project(hidden_NH[chunk], weight_VH), batch.targets_N[chunk]
            logprobs_N.append(logprobs_of(tempered(logits_CV, self._sampling.logprob_temperature), targets_C).cpu())
            if key is not None:
                noise = np.stack(
                    [
                        gumbel_noise(
                            turn_seed(key, turn), sample=number, position=position, vocab_size=weight_VH.shape[0]
                        )
                        for number, turn, position in places[chunk]
                    ]
                )
                drawn_CV = tempered(logits_CV, self._sampling.temperature) + torch.from_numpy(noise).to(self._device)
                margins_N.append((drawn_CV.max(1).values - drawn_CV.gather(1, targets_C[:, None])[:, 0]).cpu())
        logprobs = torch.cat(logprobs_N).numpy()
        margins = torch.cat(margins_N).numpy() if key is not None else None
        ends = np.cumsum([sequence.num_drawn for sequence in part])[:-1]
        margin_parts = [None] * len(part) if margins is None else np.split(margins, ends)
        return [
            Replay(logprobs=entry, margins=margin)
            for entry, margin in zip(np.split(logprobs, ends), margin_parts, strict=True)
        ]


def _places(sequence: TrainingSequence) -> list[tuple[int, int, int]]:
    """Member, turn and position in the turn of each drawn token."""
    assert sequence.turns is not None, "`_parts` gives them"
    starts = np.flatnonzero(np.diff(sequence.turns, prepend=-1))
    positions = np.arange(sequence.num_drawn) - np.repeat(starts, np.diff(starts, append=sequence.num_drawn))
    turns = sequence.turns.tolist()
    return [(sequence.number, turn, position) for turn, position in zip(turns, positions.tolist(), strict=True)]


def _parts(group: Group) -> list[list[TrainingSequence]]:
    """The trainable rollouts, by pass."""
    sequences = [
        TrainingSequence(
            strips=strips_of(group.prompt_token_ids, rollout),
            sampler_logprobs=rollout.sampler_logprobs,
            advantage=0.0,
            log_denominator=0.0,
            number=number,
            turns=drawn_turns(rollout),
        )
        for number, rollout in enumerate(group.rollouts)
        if rollout.is_trainable
    ]
    return split(sequences, max_tokens=MAX_PASS_TOKENS, batching="padded")
