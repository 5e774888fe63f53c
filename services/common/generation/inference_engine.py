"""Protocol of generation engines, their requests and completions, and canary texts.

    submit   never waits
    collect  waits for a finished completion; `cancel` and a failed load unblock it
    load     waits for the current token; running completions continue with the new weights

Every engine states float32 log-probs of the policy that drew a token, in the contract's semantics, also of the end
token. Up to rounding, a result depends on seed and weights only, not on other requests. No completion begins with keys
and values of another version. A completion that runs during a swap keeps its keys and values; its spans name the
version whose logits each token and log-prob come from.

The canary finds a sampler with other weights, temperature or kernels than it states. The text of such a sampler may
look plausible, so learner and samplers compare log-probs of the answers of the first held-out prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from heterorl.common.errors import EngineError, PromptRefused, ServiceUnreachable, ToolLost
from heterorl.common.tasks.environments.environment_task import environment_problem
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Float32Array, Int32Array, SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span
from heterorl.common.weights.arena import Arena, Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One completion: token_ids int32 [T], logprobs float32 [T], spans over [0, T).

    The tokens include the end token. `routed_experts` as in Rollout.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    routed_experts: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A prompt, int32 [T], to complete; `key` is unique among open requests.

    An evaluation sets `sampling` in place of the run's; log-probs of its completions are not used. With `may_continue`
    a later prompt may begin with this one and a completion, as the next turn of a trajectory does.
    """

    key: int
    prompt: Int32Array
    seed: int
    num_completions: int
    sampling: SamplingSemantics | None = None
    first_member: int = 0
    """Member of the group that the first completion is of; each member has its own draws."""
    may_continue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """Completion number `member` of the request `key`."""

    key: int
    member: int
    completion: Completion


def in_order(finished: Sequence[Finished], requests: Sequence[Request]) -> list[list[Completion]]:
    """Completions of each request, in the order of requests and members."""
    by_name = {(one.key, one.member): one.completion for one in finished}
    return [[by_name[request.key, member] for member in range(request.num_completions)] for request in requests]


_LOG = logging.getLogger(__name__)


class Engine(Protocol):
    """Weights and a token sampler, never called from the event loop.

    `collect` and `load` are called by one thread each.
    """

    @property
    def layout(self) -> Layout:
        """Layout of its weights."""

    @property
    def name(self) -> str:
        """Name and version, for the contract and for people."""

    @property
    def dtype(self) -> str:
        """Data type of the computation."""

    @property
    def version(self) -> int:
        """Version of loaded weights; -1 before a `load` or after its failure."""

    @property
    def max_running(self) -> int:
        """Completions computed at once; others wait inside."""

    def load(self, arena: Arena, version: int) -> None:
        """Swap the weights; running completions continue with them from their next token.

        Raises EngineError: the engine refuses requests until a `load` succeeds; an open `collect` raises too.
        """

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Log-probs [T] of each completion under loaded weights, as by `collect`.

        Empty where the engine cannot compute them.
        """

    def submit(self, request: Request) -> None:
        """Take a request; from any thread, also while another waits in `collect`.

        Raises:
            PromptTooLong: the prompt leaves no room for a completion.
            PromptRefused: it has a token that the model lacks.
            EngineError: no trusted version is loaded.
        """

    def collect(self) -> list[Finished]:
        """Wait for finished completions; all since the last call, in order.

        Returns an empty list where no request is open, and after `cancel`. Raises EngineError: all open requests are
        given up.
        """

    def cancel(self) -> None:
        """Give up all requests, from any thread; `collect` returns an empty list."""

    def stop(self) -> None:
        """Give up all requests, and a process that starts.

        From any thread. A `load` that starts a process fails, a swap goes on. No process starts afterwards.
        """


def generate_all(
    engine: Engine, prompts: Sequence[Int32Array], *, seeds: Sequence[int], num_per_prompt: int
) -> list[list[Completion]]:
    """Draw `num_per_prompt` completions of each prompt with an idle engine.

    A prompt that the engine refuses is logged and has no completions. Raises EngineError if not all of them ended.
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
            news = engine.collect()
            if not news:
                raise EngineError("the engine's requests were given up")
            finished += news
    except BaseException:
        engine.cancel()
        raise
    drawn = dict(zip((request.key for request in taken), in_order(finished, taken), strict=True))
    return [drawn.get(request.key, []) for request in requests]


NUM_SEQUENCES = 4
MAX_TRIED = 64
"""Held-out prompts that may be refused before the canary fails."""
MAX_ASKED = 4
"""Times that an environment is asked for an episode of a held-out prompt."""
MAX_TOKENS = 64
"""Longest answer; longer ones are cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredText:
    """A prompt and its completion, int32 ids; only the latter is scored."""

    prompt: Int32Array
    completion: Int32Array


def canary_texts(task: Task, prompter: Prompter) -> tuple[ScoredText, ...]:
    """Held-out prompts with answers and end token.

    Raises:
        PromptRefused: there are none.
        ConfigError: an environment does not answer.
    """
    texts: list[ScoredText] = []
    refused: PromptRefused | None = None
    for index in range(min(MAX_TRIED, task.num_evaluation_prompts)):
        prompt = _begun(task, index)
        try:
            ids = prompter.encode_prompt(prompt)
        except PromptRefused as error:
            # Every node refuses it, since all have one template.
            refused = error
            continue
        answer = prompter.tokenizer.encode(prompt.answer, add_special_tokens=False)[: MAX_TOKENS - 1]
        texts.append(ScoredText(prompt=ids, completion=np.array([*answer, prompter.eos_token_id], np.int32)))
        if len(texts) == NUM_SEQUENCES:
            break
    if refused is not None and not texts:
        raise refused
    return tuple(texts)


def _begun(task: Task, index: int) -> Prompt:
    """A held-out prompt, asked for again while its environment fails.
    Without it this node would compare other texts than all others."""
    num_asked = 1
    while (failure := (prompt := task.evaluation_prompt(index)).failure) is not None:
        if num_asked == MAX_ASKED:
            problem = environment_problem(f"an episode of held-out prompt {index}", failure)
            if isinstance(failure, ToolLost) or isinstance(problem, ServiceUnreachable):
                raise problem from failure
            # Every node leaves this row out: the environment's code fails with it.
            return prompt
        num_asked += 1
        _LOG.warning("held-out prompt %d is asked for again: %s", index, prompt.refusal)
    return prompt
