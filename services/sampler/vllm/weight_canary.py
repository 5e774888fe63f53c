"""The check of a swap: engine log-probs against a float32 forward.

A partial swap raises no error in an engine; it shows in its log-probs. The reference is the Hugging Face model in
float32. It takes one module's weights at a time from the arena. So it needs no copy of the model and reads each weight
once a swap.

Agreement proves that every weight took part in the log-probs of some 50 tokens, given and drawn. It does not show
changes smaller than rounding, nor embedding rows and experts that these tokens do not use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from heterorl.common.errors import StaleWeights
from heterorl.common.model.logprobs import logprobs_of, tempered
from heterorl.common.model.tensors import TORCH_DTYPE
from heterorl.common.types.common import Float32Array, Int32Array, SamplingSemantics
from heterorl.common.weights.arena import Arena, Layout

PROMPT_LENGTHS = (3, 9, 17)
NUM_NEW_TOKENS = 8
SEED = 20_011


def check_prompts(vocab_size: int, *, max_length: int) -> list[Int32Array]:
    """Random token ids, the same at every call."""
    rng = np.random.default_rng(SEED)
    return [rng.integers(0, vocab_size, min(length, max_length)).astype(np.int32) for length in PROMPT_LENGTHS]


class Reference:
    """A Hugging Face causal model that reads weights from an arena.

    Weights that the arena lacks (the base model under adapters) are the model's own.
    """

    def __init__(self, model: nn.Module, layout: Layout, *, device: str = "cpu") -> None:
        """Take a CPU model, free the layout's weights; `device` holds one module."""
        self._model: Any = model.eval()
        self._device = torch.device(device)
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.requires_grad_(False)
                if _full(path, name) in layout.by_name:
                    # The arena's weights are used instead.
                    parameter.data = parameter.data.new_empty(0)
            for name, buffer in module.named_buffers(recurse=False):
                if _full(path, name) not in layout.by_name:
                    buffer.data = buffer.data.to(self._device)

    @torch.inference_mode()
    def logprobs(
        self, arena: Arena, sequences: Sequence[Int32Array], starts: Sequence[int], sampling: SamplingSemantics
    ) -> list[Float32Array]:
        """Log-probs, float32 [T - 1], of each sequence's tokens after the first.

        Tokens before a sequence's start use raw logits, tokens from it on the meaning of `sampling`.
        """
        # Padded on the right, which a causal model does not read.
        ids = torch.zeros((len(sequences), max(sequence.size for sequence in sequences)), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : sequence.size] = torch.from_numpy(sequence.astype(np.int64))
        ids = ids.to(self._device)
        with self._bound(arena):
            whole = self._model(input_ids=ids, use_cache=False).logits
        result = []
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            logits = whole[row, : sequence.size - 1].float()
            tempered(logits[start - 1 :], sampling.logprob_temperature, in_place=True)
            chosen = logprobs_of(logits, ids[row, 1 : sequence.size])
            result.append(chosen.cpu().numpy().astype(np.float32))
        return result

    @contextmanager
    def _bound(self, arena: Arena) -> Iterator[None]:
        handles = []
        for path, module in self._model.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            buffers = [name for name, _ in module.named_buffers(recurse=False)]
            names = [*parameters, *(name for name in buffers if _full(path, name) in arena.layout.by_name)]
            if names:
                widen, drop = _hooks(arena, path, names, self._device)
                handles += [module.register_forward_pre_hook(widen), module.register_forward_hook(drop)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _hooks(
    arena: Arena, path: str, names: Sequence[str], device: torch.device
) -> tuple[Callable[..., None], Callable[..., Any]]:
    own: dict[str, torch.Tensor] = {}

    def widen(module: nn.Module, _: object) -> None:
        for name in names:
            tensor = getattr(module, name)
            own[name] = tensor.data
            full = _full(path, name)
            if full in arena.layout.by_name:
                bits = torch.from_numpy(arena.view(full)).view(TORCH_DTYPE[arena.layout.spec(full).dtype])
            else:
                bits = tensor.data
            # An embedding reads few rows: its output is widened instead.
            tensor.data = bits.to(device) if type(module) is nn.Embedding else bits.to(device).float()

    def drop(module: nn.Module, _: object, output: Any) -> Any:
        for name in names:
            getattr(module, name).data = own.pop(name)
        return output.float() if type(module) is nn.Embedding else output

    return widen, drop


def check(
    engine: Sequence[Float32Array], reference: Sequence[Float32Array], *, version: int, tolerance: float
) -> float:
    """Largest mean absolute difference of a sequence's log-probs, nats.

    Both are float32 [T - 1] for each sequence. Raises StaleWeights: a sequence differs by more than `tolerance`, or is
    not finite.
    """
    worst = max(float(np.abs(one - other).mean()) for one, other in zip(engine, reference, strict=True))
    # `not <=` also refuses NaN.
    if not worst <= tolerance:
        raise StaleWeights(version, difference=worst, tolerance=tolerance)
    return worst
