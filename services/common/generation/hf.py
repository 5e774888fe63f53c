"""The reference engine: transformers with a key-value cache, any causal language model, CPU or one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterorl.common.errors import ConfigError
from heterorl.common.generation.draw import draw, gumbel
from heterorl.common.generation.requests import Completion
from heterorl.common.generation.seeded import gumbel_noise
from heterorl.common.generation.turns import Turns, spans_of
from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach, base_digest
from heterorl.common.model.canary import ScoredText
from heterorl.common.model.directory import first_line
from heterorl.common.model.logprobs import logprobs_of, tempered
from heterorl.common.model.lora import ALL_WEIGHTS, LoraConfig
from heterorl.common.types.common import Digest, Float32Array, Int32Array, SamplingSemantics
from heterorl.common.types.rollout import FinishReason
from heterorl.common.weights.arena import Arena, Dtype, Layout

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class HfEngine:
    """Implements heterorl.common.generation.engine.Engine."""

    def __init__(
        self,
        *,
        model_dir: str,
        published_dtype: Dtype,
        compute_dtype: str,
        device: str,
        sampling: SamplingSemantics,
        batch_rows: int,
        eos_token_id: int,
        lora: LoraConfig = ALL_WEIGHTS,
        is_seeded: bool = False,
    ) -> None:
        """Load the model; with `is_seeded` the seeds of `generate` are keys of heterorl.common.generation.seeded.

        Raises:
            ConfigError: it cannot be loaded.
        """
        from transformers import AutoModelForCausalLM, __version__

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=_COMPUTE[compute_dtype])
        except (OSError, ValueError) as error:
            raise ConfigError("model_dir", f"cannot load {model_dir}: {first_line(error)}") from error
        try:
            self.model: Any = model.to(device).eval()
        except (AssertionError, RuntimeError) as error:
            # A torch without CUDA asserts, one without a GPU raises.
            raise ConfigError("engine.device", f"cannot use {device}: {error}", action="heterorl doctor") from error
        self.lora = lora.settings(base_digest(self.model) if lora.is_on else Digest(""))
        if self.lora.rank:
            attach(self.model, self.lora)
        self._layout = tensors.layout_of(self.model, published_dtype)
        self._sampling = sampling
        self._batch_rows = batch_rows
        self._eos = eos_token_id
        self._device = torch.device(device)
        self._version = -1
        self._turns = Turns()
        self._is_seeded = is_seeded
        self.name = f"hf-{__version__}"
        self.vocab_size = int(model.config.vocab_size)
        self.dtype = compute_dtype

    @property
    def layout(self) -> Layout:
        """Layout of the weights it takes."""
        return self._layout

    @property
    def version(self) -> int:
        """Version of the loaded weights; -1 before the first `load`."""
        return self._version

    def base(self) -> Arena | None:
        """Weights of model_dir in the published type; None once others were loaded."""
        if self.version >= 0:
            return None
        arena = Arena(self._layout)
        tensors.store(self.model, arena)
        return arena

    def load(self, arena: Arena, version: int) -> None:
        """Swap the weights; a `generate` in another thread goes on with them from its next token."""
        with self._turns.taken():
            tensors.load(arena, self.model)
            self._version = version

    @torch.inference_mode()
    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Score one text after another: few and short."""
        scores = []
        for text in texts:
            ids = torch.from_numpy(np.concatenate([text.prompt, text.completion]).astype(np.int64)).to(self._device)
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, text.prompt.size - 1 : -1].float()
            shown = tempered(logits, self._sampling.logprob_temperature)
            logprobs = logprobs_of(shown, ids[text.prompt.size :])
            scores.append(logprobs.cpu().numpy().astype(np.float32))
        return scores

    def close(self) -> None:
        """Nothing: it computes in this process."""

    def generate(
        self, prompts: Sequence[Int32Array], *, seeds: Sequence[int], num_per_prompt: int
    ) -> list[list[Completion]]:
        """Draw completions, as many whole prompts at once as fit into `batch_rows`."""
        per_batch = max(1, self._batch_rows // num_per_prompt)
        result: list[list[Completion]] = []
        for start in range(0, len(prompts), per_batch):
            part = slice(start, start + per_batch)
            rows = self._generate_batch(prompts[part], seeds[part], num_per_prompt)
            result += [rows[first : first + num_per_prompt] for first in range(0, len(rows), num_per_prompt)]
        return result

    @torch.inference_mode()
    def _generate_batch(
        self, prompts: Sequence[Int32Array], seeds: Sequence[int], num_per_prompt: int
    ) -> list[Completion]:
        input_ids, attention = _left_padded(prompts, num_per_prompt, self._device)
        generators = [] if self._is_seeded else [torch.Generator().manual_seed(seed) for seed in seeds]
        num_rows, limit = len(input_ids), self._sampling.max_new_tokens
        tokens = np.zeros((num_rows, limit), np.int32)
        logprobs = np.zeros((num_rows, limit), np.float32)
        lengths = np.full(num_rows, limit)
        is_done = np.zeros(num_rows, bool)
        versions = np.full(limit, -1, np.int32)
        # The rows that are still computed; those that ended leave when they are half of them.
        rows = np.arange(num_rows)
        position = attention.cumsum(1).clamp(min=1) - 1
        cache: Any = None
        for column in range(limit):
            output, versions[column] = self._step(
                input_ids=input_ids,
                attention_mask=attention,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            if self._is_seeded:
                noise = _named_noise(rows, seeds, num_per_prompt, column, self.vocab_size)
            else:
                noise = _noise(rows, generators, num_per_prompt, self.vocab_size)
            drawn, drawn_logprobs = draw(output.logits[:, -1], noise.to(self._device), self._sampling)
            tokens[rows, column] = drawn.cpu().numpy()
            logprobs[rows, column] = drawn_logprobs.cpu().numpy()
            ended = (tokens[:, column] == self._eos) & ~is_done
            lengths[ended] = column + 1
            is_done |= ended
            if is_done.all():
                break
            input_ids = drawn[:, None]
            attention = torch.cat([attention, attention.new_ones(len(rows), 1)], 1)
            position = position[:, -1:] + 1
            running = np.flatnonzero(~is_done[rows])
            if len(running) <= len(rows) // 2 and _can_drop_rows(cache):
                keep = torch.from_numpy(running).to(self._device)
                cache.batch_select_indices(keep)
                input_ids, attention, position = input_ids[keep], attention[keep], position[keep]
                rows = rows[running]
        return [
            self._completion(tokens[row, :end], logprobs[row, :end], versions[:end]) for row, end in enumerate(lengths)
        ]

    def _step(self, **inputs: Any) -> tuple[Any, int]:
        """One pass with one version: its output and the version."""
        with self._turns.taken():
            return self.model(**inputs), self._version

    def _completion(self, tokens: Int32Array, logprobs: Any, versions: Int32Array) -> Completion:
        is_ended = bool(tokens[-1] == self._eos)
        return Completion(
            token_ids=tokens.copy(),
            logprobs=logprobs.copy(),
            finish_reason=FinishReason.EOS if is_ended else FinishReason.LENGTH,
            spans=spans_of(versions.tolist()),
        )


def _left_padded(prompts: Sequence[Int32Array], repeat: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention, every prompt `repeat` times; padding on the left, so that all rows end together."""
    width = max(prompt.size for prompt in prompts)
    input_ids = np.zeros((len(prompts), width), np.int64)
    attention = np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - prompt.size :] = prompt
        attention[row, width - prompt.size :] = 1
    return (
        torch.from_numpy(input_ids).to(device).repeat_interleave(repeat, 0),
        torch.from_numpy(attention).to(device).repeat_interleave(repeat, 0),
    )


def _noise(
    rows: npt.NDArray[np.int64], generators: Sequence[torch.Generator], num_per_prompt: int, vocab_size: int
) -> Tensor:
    """Gumbel noise [rows, V]: a group draws for all of its members until its last one leaves, whoever has ended."""
    groups = rows // num_per_prompt
    parts = []
    for group in np.unique(groups):
        whole = gumbel((num_per_prompt, vocab_size), generators[group])
        members = rows[groups == group] - group * num_per_prompt
        parts.append(whole if len(members) == num_per_prompt else whole[torch.from_numpy(members)])
    return torch.cat(parts)


def _named_noise(
    rows: npt.NDArray[np.int64], keys: Sequence[int], num_per_prompt: int, position: int, vocab_size: int
) -> Tensor:
    """Gumbel noise [rows, V] by the names of the tokens."""
    noise = np.empty((len(rows), vocab_size), np.float32)
    for place, row in enumerate(rows.tolist()):
        group, sample = divmod(row, num_per_prompt)
        noise[place] = gumbel_noise(keys[group], sample=sample, position=position, vocab_size=vocab_size)
    return torch.from_numpy(noise)


def _can_drop_rows(cache: Any) -> bool:
    """Whether every layer of the cache is known to be nothing but keys and values: a recurrent state would stay."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in getattr(cache, "layers", [None]))
