"""A Hugging Face model to train: kernels, swapped weights, canary, frozen reference.

Guarantees: fp32 masters, no dropout, log-probs equal to the model's own logits' (`check_forward`). A reference is never
trained or published; from the learner's own directory it computes exactly what the learner computed before its first
step. A missing kernel is refused, never left out silently.

Samplers draw from the published rounding, which is another policy than the fp32 masters. After a few steps log-probs of
the two differ by a tenth of a nat per token. Gradients of a pass with other weights arrive at the parameters (straight
through); afterwards the model has its own tensors, bit for bit, also after an error.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from heterorl.common.errors import ConfigError, DependencyMissing, HeterorlError
from heterorl.common.generation.inference_engine import ScoredText
from heterorl.common.model.adapters import PARTS, has_adapters
from heterorl.common.model.logprobs import token_logprobs
from heterorl.common.model.model_directory import check_model_dir, first_line
from heterorl.common.model.model_loading import load_pretrained
from heterorl.common.model.tensors import TORCH_DTYPE, published_tensors, read_tensor, round_base, types_of
from heterorl.common.weights.arena import Arena, Layout
from heterorl.learner.train.backend_config import BackendConfig, TorchBackendConfig
from heterorl.learner.train.batch import Batching, MicroBatch, TrainingSequence, collate

_LOG = logging.getLogger(__name__)
CHECK_TOLERANCE = 1e-3
_WIDE = 32.0
"""Largest logit of a check, as large models have."""
_ANOTHER = "train another model"
REFERENCE_KEY = "backend.reference_model_dir"


def load_model(model_dir: str | Path) -> nn.Module:
    """Load fp32 masters from a local directory or hub id.
    Raises ConfigError if it is not a causal language model, or cannot be read."""
    model: nn.Module = load_pretrained(str(model_dir), dtype=torch.float32)
    prepare(model, gradient_checkpointing=False)
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
    """Log-probs and entropies [N] of completion tokens under the current weights."""
    hidden_NH = hidden_states(model, micro_batch.input_ids_RS, micro_batch.position_ids_RS, micro_batch.sources_N)
    return token_logprobs(hidden_NH, output_embedding(model), micro_batch.targets_N, temperature=temperature)


def hidden_states(
    model: nn.Module, input_ids_RS: torch.Tensor, position_ids_RS: torch.Tensor, sources_N: torch.Tensor
) -> torch.Tensor:
    """Last hidden states [N, H] that predict completion tokens; see MicroBatch."""
    # Triton launches kernels on the current device, which each thread has for itself.
    with torch.cuda.device_of(input_ids_RS):
        outputs = _inner(model)(input_ids=input_ids_RS, position_ids=position_ids_RS, use_cache=False)
    hidden_RSH: torch.Tensor = outputs.last_hidden_state
    # index_select, not indexing: the gradient of indexing adds in an undefined order on several threads.
    return hidden_RSH.flatten(0, 1).index_select(0, sources_N)


def _inner(model: nn.Module) -> Any:
    """The model without its output embedding."""
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
    """Compare log-probs of sequences laid out together with the model's logits.

    Three short sequences are used; the logits are of each by itself. Raises ConfigError, which names the cause, if they
    differ, are not finite, or cannot be computed.
    """
    try:
        together = _ours(model, _check_sequences(model), batching=batching)
        alone = _its_own(model)
        difference = float((together - alone).abs().max())
        if not difference <= CHECK_TOLERANCE:
            raise _problem(model, alone, batching=batching, difference=difference)
        if not (difference := _difference_of_wide_logits(model)) <= CHECK_TOLERANCE:
            raise _changed_logits(model, difference)
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
    found = []
    for tokens in _check_ids(model):
        ids_S, logprobs_SV = _all_logprobs(model, tokens)
        found.append(logprobs_SV[1:-1].gather(1, ids_S[2:, None])[:, 0])
    return torch.cat(found)


def _all_logprobs(
    model: nn.Module, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and, from the model's own logits, log-probs of the vocabulary."""
    network: Any = model
    ids_S = torch.from_numpy(tokens.astype(np.int64)).to(next(model.parameters()).device)
    with torch.cuda.device_of(ids_S):
        logits_SV = network(input_ids=ids_S[None], use_cache=False).logits[0]
    return ids_S, torch.log_softmax(logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32)), -1)


def _problem(model: nn.Module, alone: torch.Tensor, *, batching: Batching, difference: float) -> ConfigError:
    """Why log-probs of sequences laid out together differ from single ones."""
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
        return _changed_logits(model, difference)
    problem = f"log-probs of {name} in the {batching} layout differ by {difference:.2g} from each text by itself"
    if batching == "packed":
        return ConfigError("backend.batching", f"{problem}: it does not keep texts apart", action='set it to "padded"')
    return ConfigError("model_dir", problem, action=_ANOTHER)


def _changed_logits(model: nn.Module, difference: float) -> ConfigError:
    changes = "softcapping, a scale or a bias"
    problem = f"changes its logits after the output embedding ({changes}), by up to {difference:.2g} nats"
    return ConfigError("model_dir", f"{type(model).__name__} {problem}", action=_ANOTHER)


def _difference_of_wide_logits(model: nn.Module) -> float:
    """How much the model changes its logits where they reach 32.

    In nats, largest. Softcapping at 30 changes an untrained model's small logits by less than the tolerance.
    """
    states_SH = torch.empty(0)

    def widen(_module: nn.Module, _inputs: object, outputs: Any) -> Any:
        nonlocal states_SH
        states_1SH = outputs.last_hidden_state
        largest = (states_1SH @ output_embedding(model).T).abs().max()
        outputs.last_hidden_state = states_1SH * (_WIDE / largest.clamp(min=1e-6))
        states_SH = outputs.last_hidden_state[0]
        return outputs

    handle = _inner(model).register_forward_hook(widen)
    try:
        _, logprobs_SV = _all_logprobs(model, _check_ids(model)[0])
    finally:
        handle.remove()
    own_SV = states_SH @ output_embedding(model).T
    return float((logprobs_SV - own_SV.log_softmax(-1)).abs().max())


def _check_sequences(model: nn.Module) -> list[TrainingSequence]:
    return [TrainingSequence.scored(tokens[:2], tokens[2:]) for tokens in _check_ids(model)]


def _check_ids(model: nn.Module) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    network: Any = model
    vocab_size = network.get_output_embeddings().weight.shape[0]
    return [np.arange(1, 1 + length, dtype=np.int32) * 7 % vocab_size for length in (6, 4, 9)]


def load_reference(model_dir: str, config: TorchBackendConfig, *, learner: nn.Module, layout: Layout) -> nn.Module:
    """Load the reference model, rounded as the learner's passes round theirs.

    Under the learner's adapters lie the weights that it would have without them. Raises ConfigError if it cannot be
    loaded, or has other shapes than the learner's model.
    """
    try:
        check_model_dir(model_dir)
        model = load_model(model_dir).requires_grad_(False)
    except ConfigError as error:
        raise ConfigError(REFERENCE_KEY, str(error), action=error.action) from error
    choose_attention(model, config)
    tensors = published_tensors(model)
    check_reference(model_dir, tensors, learner=learner)
    if has_adapters(learner):
        round_base(model, config.published_dtype)
    elif config.forward_weights == "published":
        dtypes = {spec.name: TORCH_DTYPE[spec.dtype] for spec in layout.specs}
        with torch.no_grad():
            for name in tensors.keys() & dtypes.keys():
                tensors[name].copy_(tensors[name].to(dtypes[name]))
    return model.to(config.device)


def check_reference(model_dir: str, reference: Mapping[str, torch.Tensor], *, learner: nn.Module) -> None:
    """Refuse a reference whose tensors have other names or shapes."""
    own, other = (
        {name: tensor.shape for name, tensor in state.items() if tensor.is_floating_point()}
        for state in (learner.state_dict(keep_vars=True), reference)
    )
    missing = {name for name in own.keys() - other.keys() if name.rpartition(".")[2] not in PARTS}
    wrong = sorted(missing | {name for name, shape in other.items() if own.get(name) != shape})
    if wrong:
        raise ConfigError(
            REFERENCE_KEY,
            f"{model_dir} has other shapes than the learner's model: tensor {wrong[0]} differs",
            action="name a copy of the model in model_dir, or one of the same configuration",
        )


@contextmanager
def arena_weights(model: nn.Module, weights: Arena) -> Iterator[None]:
    """Give the model an arena's weights, in memory of their own.
    Tensors that the arena lacks stay."""
    tensors = published_tensors(model)
    values = {
        spec.name: read_tensor(weights, spec.name).to(tensors[spec.name].device, tensors[spec.name].dtype)
        for spec in weights.layout.specs
        if not spec.alias_of
    }
    with _swapped(tensors, values):
        yield


@contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Let the model compute in bf16; costs a copy."""
    tensors = model.state_dict(keep_vars=True)
    values = {name: tensors[name].detach().to(TORCH_DTYPE[dtype]) for name, dtype in types_of(model, "bf16").items()}
    with _swapped(tensors, values):
        yield


class Rounding:
    """A model's masters rounded as published, for the passes of a step."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """For a model whose tensors stay the same objects."""
        self._tensors = published_tensors(model)
        self._specs = [
            spec
            for spec in layout.specs
            if not spec.alias_of and self._tensors[spec.name].dtype != TORCH_DTYPE[spec.dtype]
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model compute with rounded weights; costs one copy of them."""
        with torch.no_grad():
            values = {
                spec.name: self._tensors[spec.name].to(TORCH_DTYPE[spec.dtype]).to(self._tensors[spec.name].dtype)
                for spec in self._specs
            }
        with _swapped(self._tensors, values):
            yield


@contextmanager
def _swapped(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put other data into the same tensors; gradients and optimizer stay."""
    own = [(tensors[name], tensors[name].data) for name in values]
    try:
        for name, value in values.items():
            tensors[name].data = value
        yield
    finally:
        for tensor, data in own:
            tensor.data = data


def apply_liger(model: nn.Module, config: BackendConfig) -> None:
    """Put Liger's kernels into a loaded model, if configured.

    They are for norms, rotary positions and gated layers. Its losses stay out, since log-probs are computed in chunks
    of the vocabulary. Liger replaces the classes in transformers, so models of the same kind that this process loads
    later have its kernels too.

    Raises:
        ConfigError: the device is the CPU, or Liger does not know the architecture.
        DependencyMissing: liger-kernel is not installed.
    """
    if not config.liger:
        return
    if config.device == "cpu":
        raise ConfigError("backend.liger", "Liger's kernels run on a GPU only", action="set backend.liger to false")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise DependencyMissing("liger-kernel", "gpu") from error
    kind = str(getattr(model.config, "model_type", ""))
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError("backend.liger", f"Liger has no kernels for {kind}", action="set backend.liger to false")
    apply: Any = MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    losses = {"cross_entropy", "fused_linear_cross_entropy"} & set(inspect.signature(apply).parameters)
    apply(model=model, **dict.fromkeys(losses, False))


def choose_attention(model: nn.Module, config: BackendConfig) -> None:
    """Set the configured attention of a model opened with sdpa or eager."""
    wanted = config.attn_implementation
    network: Any = model
    if wanted == network.config._attn_implementation:
        return
    try:
        network.set_attn_implementation(wanted)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            "backend.attn_implementation",
            f"{wanted} cannot be had: {first_line(error)}",
            action='set it to "eager"' if wanted == "sdpa" else "install its package (flash-attn), or set it to sdpa",
        ) from error
    if network.config._attn_implementation != wanted:
        kind = str(getattr(network.config, "model_type", ""))
        action = f'set it to "{"eager" if wanted == "sdpa" else "sdpa"}"'
        raise ConfigError("backend.attn_implementation", f"{kind} has no {wanted}", action=action)


def compile_block(block: nn.Module, config: BackendConfig) -> None:
    """Let torch compile one block at its first pass, if configured.

    Blocks of one class share the compiled code. The whole model is not compiled: an operation on the CPU makes torch
    build C++ programs. On an H100 a model of two layers took 89 s whole and 17 s by block.

    Only the forward method is compiled: hooks around the call gather the block's weights.
    """
    if config.compile:
        # For any length: micro-batches differ in length.
        setattr(block, "forward", torch.compile(block.forward, dynamic=True))  # noqa: B010 - mypy refuses a method


class Canary:
    """Scores the canary with the trained model, between steps.
    The weights are the published ones, as samplers have them."""

    def __init__(self, model: nn.Module, texts: Sequence[ScoredText], *, temperature: float) -> None:
        self._model: Any = model
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
        # Flash attention refuses fp32, the masters' type.
        is_flash = "flash" in self._model.config._attn_implementation
        autocast = torch.autocast(batch.input_ids_RS.device.type, torch.bfloat16, enabled=is_flash)
        try:
            with arena_weights(self._model, weights), autocast:
                logprobs_N = learner_logprobs(self._model, batch, temperature=self._temperature)[0]
        except torch.OutOfMemoryError:
            _LOG.warning(
                "the canary is skipped: published weights and model do not fit into memory; this version judges no site"
            )
            return ()
        return tuple(logprobs_N.float().cpu().tolist())
