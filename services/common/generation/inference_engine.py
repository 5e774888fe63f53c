"""What a run asks of an engine that generates: one Protocol, its requests and completions, and the canary's texts.

    submit  waits for nothing
    collect waits for a completion that ends, or a request that is lost; unblocked by the engine, cancel, a failed load
    load    waits for the token under way; what is under way goes on with the new weights

Guarantees of every engine: log-probs are those of the policy that drew the token, in the semantics of the contract,
float32, the end-of-sequence token included; the result of a request depends on its seed and the weights alone, not on
what else is under way; no completion begins with keys and values of another version. A completion that was under way
when the weights were swapped goes on with the keys and values that it has: its spans say which version's logits each
token was drawn from, and its log-probs are of those logits.

The canary: a sampler whose weights, temperature or kernels differ from what it states still draws plausible text; only
its log-probs give it away. So learner and samplers score the answers of the first held-out prompts, which the contract
makes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from heterorl.common.errors import EngineError, PromptRefused
from heterorl.common.tasks.task import Task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Float32Array, Int32Array, SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span
from heterorl.common.weights.arena import Arena, Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One completion: token_ids int32 [T] (end-of-sequence included), logprobs float32 [T], spans over [0, T).

    `routed_experts` as in a Rollout.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    routed_experts: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A prompt (int32 [T]) and how many completions to draw of it; `key` is one that no request under way has.

    `sampling` is another way to draw than the run's, for evaluation; the log-probs of such completions mean nothing.
    """

    key: int
    prompt: Int32Array
    seed: int
    num_completions: int
    sampling: SamplingSemantics | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """A completion that ended: number `member` of the request `key`."""

    key: int
    member: int
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A request that was given up while others go on: nothing more of it comes."""

    key: int


def in_order(finished: Sequence[Finished], requests: Sequence[Request]) -> list[list[Completion]]:
    """The completions of each request, in the order of the requests and of their members."""
    by_name = {(one.key, one.member): one.completion for one in finished}
    return [[by_name[request.key, member] for member in range(request.num_completions)] for request in requests]


_LOG = logging.getLogger(__name__)


class Engine(Protocol):
    """Weights and a sampler of tokens. Never called from the event loop; `collect` and `load` by one thread each."""

    @property
    def layout(self) -> Layout:
        """Layout of the weights it takes."""
        ...

    @property
    def name(self) -> str:
        """Name and version, for the contract and for people."""
        ...

    @property
    def dtype(self) -> str:
        """Data type of the computation."""
        ...

    @property
    def version(self) -> int:
        """Version of the loaded weights; -1 before the first `load` and after one that failed."""
        ...

    @property
    def max_running(self) -> int:
        """Completions computed at once; what is submitted beyond waits inside."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all that computes behind it has the version; if not, `load` of the same version starts it again."""
        ...

    def load(self, arena: Arena, version: int) -> None:
        """Swap the weights; what is under way goes on with them from its next token.

        Raises:
            EngineError: nothing is taken before a `load` succeeds; a `collect` raises too if something was under way.
        """
        ...

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Log-probs [T] of each text's completion under the loaded weights, as `collect` would state them.

        Empty when the engine cannot tell those of tokens that it did not draw.
        """
        ...

    def submit(self, request: Request) -> None:
        """Take a request; from any thread, also while another one waits in `collect`.

        Raises:
            PromptTooLong: the prompt leaves no room for a completion.
            PromptRefused: it has a token that is none of the model's.
            EngineError: no trusted version is loaded.
        """
        ...

    def collect(self) -> list[Finished | Lost]:
        """Wait until a completion ended; all that ended since the last call, in the order in which they did.

        A `Lost` takes the place of what was still under way of a request: the engines behind this one that are left go
        on. Nothing is returned at once where nothing is under way, and after `cancel`.

        Raises:
            EngineError: everything under way is given up.
        """
        ...

    def cancel(self) -> None:
        """Give up everything under way: a `collect` that waits returns nothing. From any thread."""
        ...


def generate_all(
    engine: Engine, prompts: Sequence[Int32Array], *, seeds: Sequence[int], num_per_prompt: int
) -> list[list[Completion]]:
    """Draw `num_per_prompt` completions of each prompt with an engine that has nothing else under way.

    Returns:
        The completions of each prompt; none of a prompt that the engine refuses, with a line in the log.

    Raises:
        EngineError: not all of them ended.
    """
    requests = [
        Request(key=key, prompt=prompt, seed=seed, num_completions=num_per_prompt)
        for key, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    finished: list[Finished] = []
    taken: list[Request] = []
    try:
        for request in requests:
            try:
                engine.submit(request)
            except PromptRefused as error:
                _LOG.warning("prompt %d of %d is left out: %s", request.key, len(requests), error)
            else:
                taken.append(request)
        while len(finished) < len(taken) * num_per_prompt:
            news = [one for one in engine.collect() if isinstance(one, Finished)]
            if not news:
                raise EngineError("what was being generated was given up")
            finished += news
    except BaseException:
        engine.cancel()
        raise
    drawn = dict(zip((request.key for request in taken), in_order(finished, taken), strict=True))
    return [drawn.get(request.key, []) for request in requests]


NUM_SEQUENCES = 4
MAX_TRIED = 64
"""Held-out prompts that may be refused before there is no canary."""
MAX_TOKENS = 64
"""Of one answer; longer ones are cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredText:
    """A prompt and what follows it, int32 token ids; only the completion is scored."""

    prompt: Int32Array
    completion: Int32Array


def canary_texts(task: Task, prompter: Prompter) -> tuple[ScoredText, ...]:
    """The run's canary: held-out prompts with their answers and the end of the sequence.

    Raises:
        PromptRefused: of the first prompts, all.
    """
    texts: list[ScoredText] = []
    refused: PromptRefused | None = None
    for index in range(min(MAX_TRIED, task.num_evaluation_prompts)):
        prompt = task.evaluation_prompt(index)
        try:
            ids = prompter.encode_prompt(prompt)
        except PromptRefused as error:
            # By every node of the run, which has the same template.
            refused = error
            continue
        answer = prompter.tokenizer.encode(prompt.answer, add_special_tokens=False)[: MAX_TOKENS - 1]
        texts.append(ScoredText(prompt=ids, completion=np.array([*answer, prompter.eos_token_id], np.int32)))
        if len(texts) == NUM_SEQUENCES:
            break
    if refused is not None and not texts:
        raise refused
    return tuple(texts)
