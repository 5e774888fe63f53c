"""Engine `vllm`: a process whose weights are swapped in place.

    load   weights file -> pause -> every worker's `load_arena_file` -> version label, new salt of the prefix cache
           -> resume -> check against the reference

Generation needs a swap check that agrees. Without it `version` is -1, `submit` refuses, requests in flight are dropped,
and the next `load` starts a new process from a whole model directory, unless `restart` has started one. No request
begins with keys and values of another version; requests in flight during a swap keep theirs. Weights travel as a
safetensors file in a directory that only this user can read. A completion's random stream depends only on the
assignment's seed and the member.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import blake3
import numpy as np

from heterorl.common.errors import EngineDied, EngineError
from heterorl.common.generation.inference_engine import Completion, Finished, Request, ScoredText
from heterorl.common.model.model_directory import TYPE_NAMES
from heterorl.common.types.common import Float32Array, Int32Array, SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span
from heterorl.common.weights.arena import Arena
from heterorl.sampler.sampler_config import VllmEngineConfig, logprobs_mode
from heterorl.sampler.vllm import weight_canary
from heterorl.sampler.vllm.shared_model import SharedModel
from heterorl.sampler.vllm.vllm_process import NO_VERSION, VllmProcess, import_vllm

_LOG = logging.getLogger(__name__)
ComputeDtype = Literal["fp32", "bf16", "fp16"]
TOLERANCE: dict[ComputeDtype, float] = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.1}
"""Mean log-prob difference from the reference that rounding explains, nats."""
NUM_URGENT = 8
"""Swap check requests that run in addition to a full batch."""


class VllmEngine:
    """Implements heterorl.common.generation.inference_engine.Engine."""

    def __init__(
        self,
        source: SharedModel,
        *,
        end_token_ids: Sequence[int],
        settings: VllmEngineConfig,
        is_stopped: threading.Event | None = None,
    ) -> None:
        """Start vLLM with a source's model; `close` keeps the source open.

        Only `end_token_ids` end a completion; the end token is its last token. `is_stopped` does what `stop` does,
        also before this returns.

        Raises DependencyMissing: vLLM is not installed; ConfigError: vLLM cannot draw as the source's sampling says;
        EngineDied: vLLM does not start.
        """
        package = import_vllm()
        self.source = source
        self._sampling, self._ends = source.sampling, tuple(end_token_ids)
        self._tolerance = tolerance(settings)
        self.layout = source.layout
        self.version = -1
        """Version of the loaded weights; -1 before the first `load` and after a failure."""
        self.is_whole = True
        """Whether the process runs and has a version."""
        # Guards all fields below, and the version.
        self._news = threading.Condition()
        self._is_loading = False
        self._is_left_out = False
        self._is_stopped = is_stopped or threading.Event()
        self._epoch = 0
        self._num_open = 0
        self._ended: list[Finished] = []
        self._failure: EngineError | None = None
        self.name = f"vllm-{package.__version__}"
        self.dtype: str = settings.compute_dtype
        self.swap_check_difference = 0.0
        self.max_running = settings.batch_rows
        self.max_model_len = source.longest(settings.max_model_len)
        self._room = replace(source.room, positions=self.max_model_len, key="engine.max_model_len")
        self._arguments = {
            **engine_arguments(
                settings, max_model_len=self.max_model_len, logprobs_mode=logprobs_mode(source.sampling)
            ),
            **source.weights.arguments(),
        }
        self._process: VllmProcess | None = self._start(source.model_dir)

    def load(self, arena: Arena, version: int) -> None:
        """Swap the weights; requests in flight use them from their next token.

        `collect` returns completions of the meantime only if the swap check agrees; else StaleWeights.
        """
        # A full disk leaves the engine with its weights.
        with self.source.written(arena):
            with self._news:
                self._is_loading = True
            try:
                self._load(arena, version)
            except BaseException as error:
                self._fail(EngineError(f"what was generated is dropped: a swap failed: {error}"))
                if self._process is not None:
                    self._process.give_up()
                raise
            else:
                with self._news:
                    self.version, self.is_whole = version, True
            finally:
                with self._news:
                    self._is_loading = False
                    self._news.notify_all()

    def _load(self, arena: Arena, version: int) -> None:
        label = str(version)
        is_running = self.is_whole and self._process is not None
        if not is_running:
            self._end_process()
            with self.source.weights.whole_model() as model_dir:
                self._process = self._start(model_dir)
            self._alive().set_version(label)
        if is_running or self.source.lora.rank:
            self.source.weights.swap(self._alive(), label)
        self._check(arena, version)

    def submit(self, request: Request) -> None:
        sampling = request.sampling or self._sampling
        limit = sampling.max_new_tokens
        self._room.check(request.prompt, limit)
        ids = request.prompt.tolist()
        with self._news:
            if not self.is_whole:
                raise EngineError("the engine generates nothing: no version is loaded")
            process, epoch = self._alive(), self._epoch
            for member in range(request.num_completions):
                seed = seed_of(request.seed, request.first_member + member)
                asked = drawing(sampling, seed=seed, max_tokens=limit, stop_token_ids=list(self._ends))
                process.submit(ids, asked, partial(self._take, epoch, request.key, member))
                self._num_open += 1

    def collect(self) -> list[Finished]:
        """Wait until a completion ended and no swap runs; returns all ended."""
        with self._news:
            epoch = self._epoch
            self._news.wait_for(
                lambda: (
                    self._epoch != epoch
                    or self._failure
                    or not self._num_open
                    # Completions of a swap are returned only after its check agreed.
                    or (self._ended and not self._is_loading)
                )
            )
            if self._failure:
                failure = self._failure
                self._drop()
                raise failure
            ended, self._ended = self._ended, []
            self._num_open -= len(ended)
            return ended

    def cancel(self) -> None:
        with self._news:
            self._drop()

    def stop(self) -> None:
        self._is_stopped.set()
        self.cancel()

    def _take(self, epoch: int, key: int, member: int, answer: Any) -> None:
        with self._news:
            if epoch != self._epoch:
                return
            if isinstance(answer, EngineDied):
                self._fail(answer)
                return
            try:
                row = completion(answer.outputs[0], end_token_ids=self._ends)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                # An error on this thread reaches no one, and `collect` would wait for ever.
                self._fail(EngineError(f"vLLM gave an answer that is no completion: {error!r}"))
                return
            self._ended.append(Finished(key=key, member=member, completion=row))
            self._news.notify_all()

    def _fail(self, error: EngineError) -> None:
        """Stop until `load` succeeds; requests in flight fail at `collect`."""
        with self._news:
            # A death is reported several times; requests in flight at the first report must still fail.
            is_heard = self._num_open > 0 or self._failure is not None
            self.version, self.is_whole = -1, False
            self._drop()
            self._failure = error if is_heard else None

    def _drop(self) -> None:
        self._epoch += 1
        self._ended, self._num_open, self._failure = [], 0, None
        if self._process is not None:
            self._process.cancel()
        self._news.notify_all()

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Score texts in one batch; empty at a temperature or without room.

        vLLM does not apply a temperature to given tokens. The scores of a part would count as a report of other texts.
        """
        if self._sampling.logprob_temperature != 1.0:
            return []
        forced = drawing(self._sampling, seed=0, max_tokens=1, prompt_logprobs=0)
        sequences = [np.concatenate([text.prompt, text.completion]) for text in texts]
        longest = max((ids.size for ids in sequences), default=0)
        if longest >= self.max_model_len:
            if not self._is_left_out:
                _LOG.warning(
                    "no version is compared with the learner: a held-out prompt with its answer has %d tokens,"
                    " engine.max_model_len is %d",
                    longest, self.max_model_len,
                )  # fmt: skip
            self._is_left_out = True
            return []
        try:
            outputs = self._alive().ask([(ids.tolist(), forced) for ids in sequences])
        except EngineDied as error:
            self._fail(error)
            raise
        return [
            chosen(text.completion, output.prompt_logprobs[text.prompt.size :])
            for text, output in zip(texts, outputs, strict=True)
        ]

    def close(self) -> None:
        self._is_stopped.set()
        with self._news:
            self.is_whole = False
            self._drop()
        self._end_process()

    def _end_process(self) -> None:
        with self._news:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _start(self, model_dir: str) -> VllmProcess:
        arguments = {**self._arguments, "model": model_dir}
        return VllmProcess(arguments, max_running=self.max_running, is_stopped=self._is_stopped)

    def _check(self, arena: Arena, version: int) -> None:
        room = self.max_model_len - weight_canary.NUM_NEW_TOKENS
        prompts = weight_canary.check_prompts(self.source.room.vocab_size, max_length=room)
        forced = drawing(
            self._sampling, seed=weight_canary.SEED, max_tokens=weight_canary.NUM_NEW_TOKENS, prompt_logprobs=0
        )
        outputs = self._alive().ask([(prompt.tolist(), forced) for prompt in prompts])
        drawn = [output.outputs[0] for output in outputs]
        sequences = [
            np.concatenate([prompt, np.array(one.token_ids, np.int32)])
            for prompt, one in zip(prompts, drawn, strict=True)
        ]
        computed = [
            chosen(sequence[1:], [*output.prompt_logprobs[1:], *one.logprobs])
            for sequence, output, one in zip(sequences, outputs, drawn, strict=True)
        ]
        expected = self.source.expected(arena, sequences, [prompt.size for prompt in prompts])
        self.swap_check_difference = weight_canary.check(computed, expected, version=version, tolerance=self._tolerance)
        _LOG.debug("the swap check of version %d differs by %.2g", version, self.swap_check_difference)

    def _alive(self) -> VllmProcess:
        if self._process is None:
            raise EngineDied("vLLM is not running")
        return self._process


def tolerance(settings: VllmEngineConfig) -> float:
    """Largest mean difference of a sequence from the reference, nats."""
    return settings.swap_check_tolerance or TOLERANCE[settings.compute_dtype]


def engine_arguments(settings: VllmEngineConfig, *, max_model_len: int, logprobs_mode: str) -> dict[str, Any]:
    """Arguments of vLLM's engine, without model and weights."""
    return {
        **settings.extra,
        **({"device_ids": list(settings.devices)} if settings.devices else {}),
        **({} if settings.enforce_eager is None else {"enforce_eager": settings.enforce_eager}),
        "dtype": TYPE_NAMES[settings.compute_dtype],
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": settings.prefix_cache,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.batch_rows + NUM_URGENT,
        "scheduling_policy": "priority",
        "kv_cache_memory_bytes": settings.kv_cache_bytes or None,
        "gpu_memory_utilization": settings.memory_share,
        "logprobs_mode": logprobs_mode,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "worker_extension_cls": "heterorl.sampler.vllm.arena_worker.ArenaWorker",
    }


def drawing(sampling: SamplingSemantics, *, seed: int, max_tokens: int, **changes: Any) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for one completion."""
    return {
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs": 0,
        "detokenize": False,
        # The contract's end tokens end a completion, not the model's.
        "ignore_eos": True,
        **changes,
    }


def seed_of(seed: int, member: int) -> int:
    """63-bit seed of a completion: neither members nor groups share a stream."""
    return int.from_bytes(blake3.blake3(f"{seed}/{member}".encode()).digest(8), "little") >> 1


def chosen(tokens: Int32Array, entries: Sequence[Any]) -> Float32Array:
    """Log-prob of each token from vLLM's dictionaries."""
    return np.array([entry[int(token)].logprob for token, entry in zip(tokens, entries, strict=True)], np.float32)


def completion(output: Any, *, end_token_ids: Sequence[int]) -> Completion:
    """The Completion of a CompletionOutput of vLLM.

    Raises ValueError: vLLM gave it up.
    """
    if output.finish_reason not in ("stop", "length"):
        raise ValueError(f"it ended by {output.finish_reason}")
    tokens = np.array(output.token_ids, np.int32)
    return Completion(
        token_ids=tokens,
        # Rounding may give a certain token +1e-8; a log-prob is never positive.
        logprobs=np.minimum(chosen(tokens, output.logprobs), np.float32(0.0)),
        finish_reason=FinishReason.EOS if tokens[-1] in end_token_ids else FinishReason.LENGTH,
        spans=tuple(
            Span(version=-1 if span.version == NO_VERSION else int(span.version), start=span.start, end=span.end)
            for span in output.weight_versions
        ),
    )
