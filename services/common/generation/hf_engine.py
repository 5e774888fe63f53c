"""Engine `hf`: generation with transformers and a key-value cache.

    submit -> waiting -> a pass over their prompts -> rows -> a pass for a token of every row -> collect

Requests join between two tokens where the cache holds only keys and values of all columns. With a recurrent state they
wait until all rows have ended. Keys, values and positions of a row do not depend on the other rows. Rows that began
together form one batch and give the same bits at any time, unless a turn is kept: a later turn reads only what came
since, and may differ by rounding from a whole read. The members of a group begin together and draw from one stream of
noise.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from heterorl.common.errors import ConfigError, EngineError
from heterorl.common.generation.hf_batch import KEPT_A_ROW, Group, KeptTurns, Rows
from heterorl.common.generation.inference_engine import Finished, Request, ScoredText
from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach, base_digest
from heterorl.common.model.contract import ALL_WEIGHTS, LoraConfig
from heterorl.common.model.logprobs import logprobs_of, tempered
from heterorl.common.model.model_directory import first_line
from heterorl.common.model.model_loading import load_pretrained, token_limits_of
from heterorl.common.model.router_replay import RouterRecorder
from heterorl.common.types.common import Digest, Float32Array, SamplingSemantics
from heterorl.common.weights.arena import Arena, Dtype, Layout

_LOG = logging.getLogger(__name__)


class FairLock:
    """A lock for two threads that alternate.

    Example: `with lock.held(): output = model(ids)` in a loop, `with lock.held(): load(weights)` in another thread.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._turn = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._next:
            self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()


_CHECKED_PROMPTS = (5, 24)
"""Tokens of two prompts, of which one is padded by an odd number."""
_CHECKED_TOKENS = 8
_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}
"""Mean difference of log-probs, nats. Rounding is below it, in bf16 also with routers."""
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
        device_key: str = "engine.device",
    ) -> None:
        """Load the model; raises ConfigError for a failure or missing routers.

        `published_dtype` is the data type of the weights, `compute_dtype` fp32 or bf16. Each of `end_token_ids` ends a
        completion and stays its last token. With `is_seeded`, seeds are keys of `logprobs.gumbel_noise`. `device_key`
        names the device in the configuration's file.
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
            raise ConfigError(device_key, f"cannot use {device}: {error}", action="heterorl doctor") from error
        self.lora = lora.settings(base_digest(self.model) if lora.is_on else Digest(""))
        if self.lora.rank:
            tensors.round_base(self.model, published_dtype)
            attach(self.model, self.lora)
        self.recorder = RouterRecorder(self.model) if records_routing else None
        self.routed_token_bytes = self.recorder.shape.token_bytes if self.recorder else 0
        self.layout: Layout = tensors.layout_of(self.model, published_dtype)
        self._sampling = sampling
        self.max_running = batch_rows
        self._most_kept = KEPT_A_ROW * batch_rows
        self._forget_turns()
        self.end_token_ids: list[int] = []
        self.device = torch.device(device)
        self.version = -1
        self._is_torn = False
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
        self._check_draws()
        # The checked draws do not end early.
        self.end_token_ids = list(end_token_ids)

    def _check_draws(self) -> None:
        """Compare log-probs of two short prompts' draws with `score`.

        Draws read padding, cached keys and recurrent states, which a score does not. Raises ConfigError.
        """
        sampling = replace(self._sampling, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=_CHECKED_TOKENS)
        most = (self._room.positions or 2 * max(_CHECKED_PROMPTS)) - _CHECKED_TOKENS
        prompts = [np.arange(min(size, most), dtype=np.int32) * 7 % self.vocab_size for size in _CHECKED_PROMPTS]
        for key, prompt in enumerate(prompts):
            self.submit(Request(key=key, prompt=prompt, seed=key, num_completions=1, sampling=sampling))
        differences: list[float] = []
        while ended := self.collect():
            texts = [ScoredText(prompt=prompts[one.key], completion=one.completion.token_ids) for one in ended]
            for one, scored in zip(ended, self._scores(texts, temperature=1.0), strict=True):
                differences.append(float(np.abs(one.completion.logprobs - scored).mean()))
        # Not `max`, which passes over a NaN.
        if not (difference := float(np.max(differences))) <= _TOLERANCE[self.dtype]:
            problem = f"draws with other log-probs than a pass without cache and padding, by {difference:.2g} nats"
            action = 'set it to "vllm", or train another model'
            raise ConfigError("engine.kind", f"{type(self.model).__name__} {problem}", action=action)

    def base(self) -> Arena | None:
        """Weights of model_dir in the published type; None after a `load`."""
        if self.version >= 0 or self._is_torn:
            return None
        arena = Arena(self.layout)
        tensors.store(self.model, arena)
        return arena

    def load(self, arena: Arena, version: int) -> None:
        with self._weights_lock.held():
            self._forget_turns()
            try:
                tensors.load(arena, self.model)
            except (RuntimeError, MemoryError) as error:
                # The weights may be of two versions.
                self.version, self._is_torn = -1, True
                raise _failure(error) from error
            self.version, self._is_torn = version, False

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        return self._scores(texts, temperature=self._sampling.logprob_temperature)

    @torch.inference_mode()
    def _scores(self, texts: Sequence[ScoredText], *, temperature: float) -> list[Float32Array]:
        try:
            return [self._scored(text, temperature) for text in texts]
        except Exception as error:
            raise _failure(error) from error

    def _scored(self, text: ScoredText, temperature: float) -> Float32Array:
        ids = torch.from_numpy(np.concatenate([text.prompt, text.completion]).astype(np.int64)).to(self.device)
        # Logits of a long prompt could take more memory than its weights.
        output = self.model(input_ids=ids[None], use_cache=False, logits_to_keep=text.completion.size + 1)
        logits = output.logits[0, -text.completion.size - 1 : -1].float()
        shown = tempered(logits, temperature)
        return logprobs_of(shown, ids[text.prompt.size :]).cpu().numpy().astype(np.float32)

    def close(self) -> None:
        """Do nothing: no other process computes."""

    def submit(self, request: Request) -> None:
        sampling = request.sampling or self._sampling
        self._room.check(request.prompt, sampling.max_new_tokens)
        with self._guard:
            self._waiting.append(request)

    @torch.inference_mode()
    def collect(self) -> list[Finished]:
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
            if self._most_kept and _is_out_of_memory(error):
                # Their memory may be what the pass lacked.
                self._most_kept = 0
                _LOG.warning("the engine keeps no more turns of trajectories: the device was out of memory")
            self._forget_turns()
            raise _failure(error) from error
        except BaseException:
            self.cancel()
            raise

    def _forget_turns(self) -> None:
        self.kept_turns = KeptTurns(self._most_kept)

    def cancel(self) -> None:
        with self._guard:
            self._waiting.clear()
            self._rows = None
            self._num_cancels += 1

    def stop(self) -> None:
        self.cancel()

    def _admitted(self) -> list[Group]:
        """Whole requests, in their order, that fit next to running rows."""
        if self._rows and not self._rows.is_joinable:
            return []
        room = self.max_running - (self._rows.num_running if self._rows else 0)
        admitted: list[Group] = []
        while self._waiting:
            num = self._waiting[0].num_completions
            # A group larger than the batch waits until all other rows have ended.
            if num > room and (self._rows or admitted):
                break
            room -= num
            request = self._waiting.popleft()
            admitted.append(Group(request, sampling=self._sampling, is_seeded=self._is_seeded, device=self.device))
        return admitted

    def _advance(self, rows: Rows | None, joining: Sequence[Group]) -> tuple[Rows | None, list[Finished]]:
        """A token for joining groups, or all rows; rows left, ended completions."""
        if not joining:
            assert rows is not None
            ended = rows.step()
            return (rows if rows.num_running else None), ended
        ended = []
        # Rows whose earlier turns are kept read a few tokens: they do not wait for whole prompts.
        continued = [self.kept_turns.has(group.request.prompt) for group in joining]
        for is_continued in (True, False):
            groups = [group for group, one in zip(joining, continued, strict=True) if one is is_continued]
            if not groups:
                continue
            new = Rows(groups, self)
            ended += new.step()
            if rows is None:
                rows = new if new.num_running else None
            elif new.num_running:
                rows.join(new)
        return rows, ended

    def run(self, inputs: Callable[[], dict[str, Any]]) -> tuple[Any, int]:
        with self._weights_lock.held():
            if self._is_torn:
                raise EngineError("no whole version is loaded")
            return self.model(**inputs()), self.version


def _is_out_of_memory(error: Exception) -> bool:
    # The CPU allocator raises RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "alloc_cpu" in str(error)


def _failure(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    if _is_out_of_memory(error):
        return EngineError(f"the device is out of memory: {first_line(error)}", action="lower engine.batch_rows")
    return EngineError(f"the model failed: {type(error).__name__}: {first_line(error)}")
