"""The reference engine: transformers with a key-value cache, any causal language model, CPU or one GPU.

    submit -> waiting -> a pass over their prompts -> rows -> a pass for a token of every row -> collect

Where the cache is nothing but keys and values of all columns, requests join between two tokens; elsewhere, where a
recurrent state would have to be moved, they wait until all rows have ended.
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
    """Implements heterorl.common.generation.inference_engine.Engine."""

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
        """Load the model.

        `published_dtype` is that of the weights that it takes, `compute_dtype` fp32 or bf16. Each of `end_token_ids`
        ends a completion, and stays its last token; nothing else does. With `is_seeded` seeds are keys of
        `token_sampling.gumbel_noise`.

        Raises:
            ConfigError: it cannot be loaded, or has no routers that can be recorded.
        """
        from transformers import __version__

        model = load_pretrained(model_dir, dtype=_COMPUTE[compute_dtype])
        if "past_key_values" not in inspect.signature(model.forward).parameters:
            problem = f"{type(model).__name__} keeps something else of a text than a cache of keys and values"
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
        self._layout = tensors.layout_of(self.model, published_dtype)
        self._sampling = sampling
        self.max_running = batch_rows
        self.is_whole = True
        self._ends = tuple(end_token_ids)
        self._device = torch.device(device)
        self._version = -1
        self._weights_lock = FairLock()
        self._is_seeded = is_seeded
        # Of the three below; never held while tokens are computed.
        self._guard = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._rows: Rows | None = None
        self._num_cancels = 0
        self.name = f"hf-{__version__}"
        self._room = token_limits_of(model.config)
        self.vocab_size = self._room.vocab_size
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
        """Swap the weights; what is under way goes on with them from its next token."""
        with self._weights_lock.held():
            tensors.load(arena, self.model)
            self._version = version

    @torch.inference_mode()
    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Score one text after another: few and short."""
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
        """Nothing: it computes in this process."""

    def submit(self, request: Request) -> None:
        """Take a request: its completions join what is computed, all together, as soon as there is room for them."""
        sampling = request.sampling or self._sampling
        self._room.check(request.prompt, sampling.max_new_tokens)
        with self._guard:
            self._waiting.append(request)

    @torch.inference_mode()
    def collect(self) -> list[Finished | Lost]:
        """Compute, in this thread, until a completion ends."""
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
        """Give up everything under way; a `collect` in another thread returns nothing after its token."""
        with self._guard:
            self._waiting.clear()
            self._rows = None
            self._num_cancels += 1

    def generate(
        self, prompts: Sequence[Int32Array], *, seeds: Sequence[int], num_per_prompt: int
    ) -> list[list[Completion]]:
        """Draw `num_per_prompt` completions of each prompt."""
        return generate_all(self, prompts, seeds=seeds, num_per_prompt=num_per_prompt)

    def _admitted(self) -> list[Group]:
        """What begins now, in the order of submission: whole requests that find room beside what is under way."""
        if self._rows and not self._rows.is_joinable:
            return []
        room = self.max_running - (self._rows.num_running if self._rows else 0)
        admitted: list[Group] = []
        while self._waiting:
            num = self._waiting[0].num_completions
            # A group larger than the batch is computed alone.
            if num > room and (self._rows or admitted):
                break
            room -= num
            request = self._waiting.popleft()
            admitted.append(Group(request, sampling=self._sampling, is_seeded=self._is_seeded, device=self._device))
        return admitted

    def _advance(self, rows: Rows | None, joining: Sequence[Group]) -> tuple[Rows | None, list[Finished]]:
        """A token for those that join, or for all rows; the rows that are left, and what ended."""
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
        """One pass with one version: its output and the version."""
        with self._weights_lock.held():
            return self.model(**inputs), self._version


def _failure(error: Exception) -> EngineError:
    # The CPU's allocator raises no error of its own class.
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "alloc_cpu" in str(error):
        return EngineError(f"the device is out of memory: {first_line(error)}", action="lower engine.batch_rows")
    return EngineError(f"the model cannot compute what is under way: {type(error).__name__}: {first_line(error)}")
