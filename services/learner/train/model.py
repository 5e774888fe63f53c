"""A Hugging Face causal language model to train, and a frozen reference.

Guarantees: fp32 masters, no dropout, log-probs equal to the model's own logits' (`check_forward`). A reference
is never trained or published; from the learner's own directory it computes exactly what the learner computed before its
first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from heterorl.common.errors import ConfigError, HeterorlError
from heterorl.common.model.logprobs import token_logprobs
from heterorl.common.model.model_directory import check_model_dir, first_line
from heterorl.common.model.model_loading import load_pretrained
from heterorl.common.model.tensors import TORCH_DTYPE, published_tensors
from heterorl.common.weights.arena import Layout
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.batch import TrainingSequence
from heterorl.learner.train.micro_batch import Batching, MicroBatch, collate

CHECK_TOLERANCE = 1e-3
_ANOTHER = "train another model"
REFERENCE_KEY = "backend.reference_model_dir"


def load_model(model_dir: str | Path, *, gradient_checkpointing: bool = False) -> nn.Module:
    """Load fp32 masters from a local directory or hub id.

    Raises:
        ConfigError: it is not a causal language model, or cannot be read.
    """
    model: nn.Module = load_pretrained(str(model_dir), dtype=torch.float32)
    prepare(model, gradient_checkpointing=gradient_checkpointing)
    return model


def prepare(model: nn.Module, *, gradient_checkpointing: bool) -> None:
    """Turn dropout off for good, since it would change the learner's log-probs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
    network: Any = model
    if gradient_checkpointing:
        # transformers 5.0 has the second name.
        enable = getattr(network, "activation_checkpointing_enable", None) or network.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            key = "backend.gradient_checkpointing"
            raise ConfigError(key, first_line(error), action="set it to false") from error
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
    hidden_RSH: torch.Tensor = inner_model(model)(
        input_ids=input_ids_RS, position_ids=position_ids_RS, use_cache=False
    ).last_hidden_state
    # index_select, not indexing: the gradient of indexing adds in an undefined order on several threads.
    return hidden_RSH.flatten(0, 1).index_select(0, sources_N)


def inner_model(model: nn.Module) -> Any:
    """The model without its output embedding, which gives hidden states."""
    network: Any = model
    # For an unexpected attribute name transformers answers the whole model.
    return network.model if network.base_model is network and hasattr(network, "model") else network.base_model


def output_embedding(model: nn.Module) -> torch.Tensor:
    """The weight [V, H] that turns hidden states into logits."""
    network: Any = model
    head: nn.Linear = network.get_output_embeddings()
    return head.weight


def check_micro_batch(model: nn.Module, *, batching: Batching) -> MicroBatch:
    """Three short sequences laid out together, for checks of a model's layout."""
    return collate(_check_sequences(model), batching=batching)


@torch.no_grad()
def check_forward(model: nn.Module, *, batching: Batching) -> None:
    """Compare log-probs of three short sequences, laid out together, with the model's own logits of each.

    Raises:
        ConfigError: they differ, are not finite, or cannot be computed; names the cause.
    """
    try:
        together = _ours(model, _check_sequences(model), batching=batching)
        alone = _its_own(model)
        difference = float((together - alone).abs().max())
        if not difference <= CHECK_TOLERANCE:
            raise _problem(model, alone, batching=batching, difference=difference)
    except HeterorlError:
        raise
    except Exception as error:
        problem = f"{type(model).__name__} gives no log-probs: {type(error).__name__}: {first_line(error)}"
        raise ConfigError("model_dir", problem, action=_ANOTHER) from error


def _ours(model: nn.Module, sequences: Sequence[TrainingSequence], *, batching: Batching) -> torch.Tensor:
    batch = collate(sequences, batching=batching).to(next(model.parameters()).device)
    return learner_logprobs(model, batch, temperature=1.0)[0]


def _its_own(model: nn.Module) -> torch.Tensor:
    """Log-probs from the model's own logits, one sequence after another."""
    network: Any = model
    device = next(model.parameters()).device
    found = []
    for tokens in _check_ids(model):
        ids_1S = torch.from_numpy(tokens.astype(np.int64))[None].to(device)
        logits_SV = network(input_ids=ids_1S, use_cache=False).logits[0]
        logprobs_SV = torch.log_softmax(logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32)), -1)
        found.append(logprobs_SV[1:-1].gather(1, ids_1S[0, 2:, None])[:, 0])
    return torch.cat(found)


def _problem(model: nn.Module, alone: torch.Tensor, *, batching: Batching, difference: float) -> ConfigError:
    """Why log-probs of sequences laid out together differ from those of each by itself."""
    name = type(model).__name__
    if not alone.isfinite().all():
        # Only tensors in memory: streamed blocks have none.
        broken = [one for one, weights in model.named_parameters() if not (weights.is_meta or weights.isfinite().all())]
        where = f"{broken[0]} is not finite" if broken else f"{name} gives log-probs that are not finite"
        return ConfigError("model_dir", where, action="copy the directory again: its weights are damaged")
    if float((_its_own(model) - alone).abs().max()) > CHECK_TOLERANCE:
        problem = f"{name} gives other log-probs each time: it has dropout that is not a module"
        if model.training:
            return ConfigError("backend.gradient_checkpointing", problem, action="set it to false")
        return ConfigError("model_dir", problem, action=_ANOTHER)
    each = torch.cat([_ours(model, [sequence], batching="padded") for sequence in _check_sequences(model)])
    if not float((each - alone).abs().max()) <= CHECK_TOLERANCE:
        changes = "softcapping, a scale or a bias"
        problem = f"{name} changes its logits after the output embedding ({changes}), by up to {difference:.2g} nats"
        return ConfigError("model_dir", problem, action=_ANOTHER)
    problem = f"log-probs of {name} in the {batching} layout differ from those of each text alone by {difference:.2g}"
    if batching == "packed":
        return ConfigError("backend.batching", f"{problem}: it does not keep texts apart", action='set it to "padded"')
    return ConfigError("model_dir", problem, action=_ANOTHER)


def _check_sequences(model: nn.Module) -> list[TrainingSequence]:
    return [TrainingSequence.scored(tokens[:2], tokens[2:]) for tokens in _check_ids(model)]


def _check_ids(model: nn.Module) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    network: Any = model
    vocab_size = network.get_output_embeddings().weight.shape[0]
    return [np.arange(1, 1 + length, dtype=np.int32) * 7 % vocab_size for length in (6, 4, 9)]


def load_reference(model_dir: str, config: TorchBackendConfig, *, learner: nn.Module, layout: Layout) -> nn.Module:
    """Load the reference model, rounded as the learner's passes round theirs.

    Under the learner's adapters lie the weights that it would have without them.

    Raises:
        ConfigError: it cannot be loaded, or has other shapes than the learner's model.
    """
    try:
        check_model_dir(model_dir)
        model = load_model(model_dir).requires_grad_(False)
    except ConfigError as error:
        raise ConfigError(REFERENCE_KEY, str(error), action=error.action) from error
    tensors = published_tensors(model)
    shapes = {name: tensor.shape for name, tensor in learner.state_dict(keep_vars=True).items()}
    if any(tensor.shape != shapes.get(name, tensor.shape) for name, tensor in tensors.items()):
        raise ConfigError(REFERENCE_KEY, f"{model_dir} has other shapes than the learner's model")
    if config.forward_weights == "published":
        dtypes = {spec.name: TORCH_DTYPE[spec.dtype] for spec in layout.specs}
        with torch.no_grad():
            for name in tensors.keys() & dtypes.keys():
                tensors[name].copy_(tensors[name].to(dtypes[name]))
    return model.to(config.device)
