"""Reference engine: transformers with a key-value cache, any causal language model, CPU or one GPU.

    submit -> waiting -> a pass over their prompts -> rows -> a pass for a token of every row -> collect

Requests join between two tokens where the cache holds only keys and values of all columns. With a recurrent state they
wait until all rows have ended.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from heterorl.common.errors import ConfigError, EngineError
from heterorl.common.generation.hf_batch import FairLock, Group, Rows
from heterorl.common.generation.inference_engine import Completion, Finished, Lost, Request, ScoredText, generate_all
from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach, base_digest
from heterorl.common.model.contract import ALL_WEIGHTS, LoraConfig
from heterorl.common.model.logprobs import logprobs_of, tempered
from heterorl.common.model.model_directory import first_line
from heterorl.common.model.model_loading import load_pretrained, token_limits_of
from heterorl.common.model.router_replay import RouterRecorder
from heterorl.common.types.common import Digest, Float32Array, Int32Array, SamplingSemantics
from heterorl.common.weights.arena import Arena, Dtype, Layout

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class HfEngine:
    """Engine of transformers; implements inference_engine.Engine."""

    def __init__(
        self,
        *,
        model_dir: str,
        published_dtype: Dtype,
        compute_dtype: str,
        device: str,
        sampling: SamplingSemantics,
        batch_rows: int,
        end_token_ids: Sequence[int],
        lora: LoraConfig = ALL_WEIGHTS,
        is_seeded: bool = False,
        records_routing: bool = False,
    ) -> None:
        """Load the model; raises ConfigError if that fails or it has no routers to record.

        `published_dtype` is the data type of the weights, `compute_dtype` fp32 or bf16. Each of `end_token_ids` ends a
        completion and stays its last token. With `is_seeded`, seeds are keys of `token_sampling.gumbel_noise`.
        """
        from transformers import __version__

        model = load_pretrained(model_dir, dtype=_COMPUTE[compute_dtype])
        if "past_key_values" not in inspect.signature(model.forward).parameters:
            problem = f"{type(model).__name__} has no cache of keys and values"
            raise ConfigError("engine.kind", problem, action='set it to "vllm", or train another model')
        try:
            self.model: Any = model.to(device).eval()
        except (AssertionError, RuntimeError) as error:
            # A torch without CUDA asserts, one without a GPU raises.
            raise ConfigError("engine.device", f"cannot use {device}: {error}", action="heterorl doctor") from error
        self.lora = lora.settings(base_digest(self.model) if lora.is_on else Digest(""))
        if self.lora.rank:
            attach(self.model, self.lora)
        self._recorder = RouterRecorder(self.model) if records_routing else None
        self.routed_token_bytes = self._recorder.shape.token_bytes if self._recorder else 0
        self.layout: Layout = tensors.layout_of(self.model, published_dtype)
        self._sampling = sampling
        self.max_running = batch_rows
        self.is_whole = True
        self._ends = tuple(end_token_ids)
        self._device = torch.device(device)
        self.version = -1
        self._weights_lock = FairLock()
        self._is_seeded = is_seeded
        # Guards the three below; never held during a pass.
        self._guard = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._rows: Rows | None = None
        self._num_cancels = 0
        self.name = f"hf-{__version__}"
        self._room = token_limits_of(model.config)
        self.vocab_size = self._room.vocab_size
        self.dtype = compute_dtype

    def base(self) -> Arena | None:
        """Weights of model_dir in the published type; None after a `load`."""
        if self.version >= 0:
            return None
        arena = Arena(self.layout)
        tensors.store(self.model, arena)
        return arena

    def load(self, arena: Arena, version: int) -> None:
        with self._weights_lock.held():
            tensors.load(arena, self.model)
            self.version = version

    @torch.inference_mode()
    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        try:
            return self._scores(texts)
        except Exception as error:
            raise _failure(error) from error

    def _scores(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        scores = []
        for text in texts:
            ids = torch.from_numpy(np.concatenate([text.prompt, text.completion]).astype(np.int64)).to(self._device)
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, text.prompt.size - 1 : -1].float()
            shown = tempered(logits, self._sampling.logprob_temperature)
            logprobs = logprobs_of(shown, ids[text.prompt.size :])
            scores.append(logprobs.cpu().numpy().astype(np.float32))
        return scores

    def close(self) -> None:
        """Do nothing: it computes in this process."""

    def submit(self, request: Request) -> None:
        sampling = request.sampling or self._sampling
        self._room.check(request.prompt, sampling.max_new_tokens)
        with self._guard:
            self._waiting.append(request)

    @torch.inference_mode()
    def collect(self) -> list[Finished | Lost]:
        num_cancels = self._num_cancels
        try:
            while True:
                with self._guard:
                    rows = self._rows
                    joining = self._admitted()
                    if self._num_cancels != num_cancels or not (rows or joining):
                        return []
                rows, ended = self._advance(rows, joining)
                with self._guard:
                    if self._num_cancels != num_cancels:
                        return []
                    self._rows = rows
                if ended:
                    return list(ended)
        except Exception as error:
            self.cancel()
            raise _failure(error) from error
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        with self._guard:
            self._waiting.clear()
            self._rows = None
            self._num_cancels += 1

    def generate(
        self, prompts: Sequence[Int32Array], *, seeds: Sequence[int], num_per_prompt: int
    ) -> list[list[Completion]]:
        return generate_all(self, prompts, seeds=seeds, num_per_prompt=num_per_prompt)

    def _admitted(self) -> list[Group]:
        """Whole requests that fit next to running rows, in the order of submission."""
        if self._rows and not self._rows.is_joinable:
            return []
        room = self.max_running - (self._rows.num_running if self._rows else 0)
        admitted: list[Group] = []
        while self._waiting:
            num = self._waiting[0].num_completions
            # A group larger than the batch runs alone.
            if num > room and (self._rows or admitted):
                break
            room -= num
            request = self._waiting.popleft()
            admitted.append(Group(request, sampling=self._sampling, is_seeded=self._is_seeded, device=self._device))
        return admitted

    def _advance(self, rows: Rows | None, joining: Sequence[Group]) -> tuple[Rows | None, list[Finished]]:
        """A token for joining groups, or for all rows; the rows left, and ended completions."""
        if joining:
            new = Rows(
                joining,
                run=self._run,
                end_token_ids=self._ends,
                vocab_size=self.vocab_size,
                device=self._device,
                recorder=self._recorder,
            )
            ended = new.step()
            if rows is None:
                rows = new
            elif new.num_running:
                rows.join(new)
        else:
            assert rows is not None
            ended = rows.step()
        return (rows if rows.num_running else None), ended

    def _run(self, **inputs: Any) -> tuple[Any, int]:
        """One pass: its output and the version of its weights."""
        with self._weights_lock.held():
            return self.model(**inputs), self.version


def _failure(error: Exception) -> EngineError:
    # The CPU allocator raises RuntimeError.
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "alloc_cpu" in str(error):
        return EngineError(f"the device is out of memory: {first_line(error)}", action="lower engine.batch_rows")
    return EngineError(f"the model failed: {type(error).__name__}: {first_line(error)}")
