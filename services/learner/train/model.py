"""A Hugging Face causal language model as the learner sees it: hidden states, then log-probs of given tokens.

Guarantees: masters in fp32, no dropout, log-probs equal to those of the model's own logits (`check_forward`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model.building import load_pretrained
from heterorl.common.model.logprobs import token_logprobs
from heterorl.learner.train.batch import TrainingSequence
from heterorl.learner.train.micro_batch import Batching, MicroBatch, collate

CHECK_TOLERANCE = 1e-3


def load_model(model_dir: str | Path, *, gradient_checkpointing: bool = False) -> nn.Module:
    """Load fp32 masters from a local directory or hub id.

    Raises:
        ConfigError: it is not a causal language model, or cannot be read.
    """
    model: nn.Module = load_pretrained(str(model_dir), dtype=torch.float32, attention="sdpa")
    prepare(model, gradient_checkpointing=gradient_checkpointing)
    return model


def prepare(model: nn.Module, *, gradient_checkpointing: bool) -> None:
    """Turn dropout off for good, since it would make the learner's log-probs another policy's."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
    network: Any = model
    if gradient_checkpointing:
        # The second name is that of transformers 4.
        enable = getattr(network, "activation_checkpointing_enable", None) or network.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    # transformers checkpoints in training mode only.
    network.train(gradient_checkpointing)


def learner_logprobs(
    model: nn.Module, micro_batch: MicroBatch, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [N] of the micro-batch's completion tokens under the current weights."""
    hidden_NH = hidden_states(model, micro_batch.input_ids_RS, micro_batch.position_ids_RS, micro_batch.sources_N)
    return token_logprobs(hidden_NH, output_embedding(model), micro_batch.targets_N, temperature=temperature)


def hidden_states(
    model: nn.Module, input_ids_RS: torch.Tensor, position_ids_RS: torch.Tensor, sources_N: torch.Tensor
) -> torch.Tensor:
    """Last hidden states [N, H] at the positions that predict a completion token; see MicroBatch."""
    network: Any = model
    hidden_RSH: torch.Tensor = network.base_model(
        input_ids=input_ids_RS, position_ids=position_ids_RS, use_cache=False
    ).last_hidden_state
    # index_select, not indexing: the gradient of indexing adds in an undefined order on several threads.
    return hidden_RSH.flatten(0, 1).index_select(0, sources_N)


def output_embedding(model: nn.Module) -> torch.Tensor:
    """The weight [V, H] that makes logits of hidden states."""
    network: Any = model
    head: nn.Linear = network.get_output_embeddings()
    return head.weight


def check_micro_batch(model: nn.Module, *, batching: Batching) -> MicroBatch:
    """Three short sequences of a model's tokens, laid out together, by which its layout is checked."""
    sequences = [TrainingSequence.scored(tokens[:2], tokens[2:]) for tokens in _check_ids(model)]
    return collate(sequences, batching=batching)


@torch.no_grad()
def check_forward(model: nn.Module, *, batching: Batching) -> None:
    """Compare our log-probs of three short sequences, laid out together, with the model's own logits of each alone.

    Raises:
        ConfigError: they differ: the model changes its logits after the output embedding, has a bias there, or does
            not keep packed sequences apart.
    """
    network: Any = model
    device = next(model.parameters()).device
    ids = _check_ids(model)
    together, _ = learner_logprobs(model, check_micro_batch(model, batching=batching).to(device), temperature=1.0)
    alone = []
    for tokens in ids:
        ids_1S = torch.from_numpy(tokens.astype(np.int64))[None].to(device)
        logits_SV = network(input_ids=ids_1S, use_cache=False).logits[0]
        logprobs_SV = torch.log_softmax(logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32)), -1)
        alone.append(logprobs_SV[1:-1].gather(1, ids_1S[0, 2:, None])[:, 0])
    difference = float((together - torch.cat(alone)).abs().max())
    if not difference <= CHECK_TOLERANCE:
        raise ConfigError(
            "model_dir",
            f"log-probs of the {batching} layout differ from the model's own by {difference:.2g}",
            action="choose another batching or a model whose logits are hidden states times output embedding",
        )


def _check_ids(model: nn.Module) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    network: Any = model
    vocab_size = network.get_output_embeddings().weight.shape[0]
    return [np.arange(1, 1 + length, dtype=np.int32) * 7 % vocab_size for length in (6, 4, 9)]
