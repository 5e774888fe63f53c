"""What a run asks of an engine that generates: one Protocol, whatever stands behind it.

    submit  waits for nothing
    collect waits for a completion that ends, or a request that is lost; unblocked by the engine, cancel, a failed load
    load    waits for the token under way; what is under way goes on with the new weights

Guarantees of every engine: log-probs are those of the policy that drew the token, in the semantics of the contract,
float32, the end-of-sequence token included; the result of a request depends on its seed and the weights alone, not on
what else is under way; no completion begins with keys and values of another version. A completion that was under way
when the weights were swapped goes on with the keys and values that it has: its spans say which version's logits each
token was drawn from, and its log-probs are of those logits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from heterorl.common.errors import EngineError, PromptRefused
from heterorl.common.generation.canary import ScoredText
from heterorl.common.generation.requests import Completion, Finished, Lost, Request, in_order
from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.weights.arena import Arena, Layout

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
