"""What a run asks of an engine that generates: one Protocol, whatever stands behind it.

Guarantees of every engine: log-probs are those of the policy that drew the token, in the semantics of the contract,
float32, the end-of-sequence token included; the result of a prompt depends on its seed and the weights alone, not on
what else is in the batch; no completion begins with keys and values of another version. A completion that was under way
when the weights were swapped goes on with the keys and values that it has: its spans say which version's logits each
token was drawn from, and its log-probs are of those logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from heterorl.common.generation.requests import Completion
from heterorl.common.model.canary import ScoredText
from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.weights.arena import Arena, Layout


class Engine(Protocol):
    """Weights and a sampler of tokens. Never called from the event loop, and from one thread at a time but for `load`
    and `score`, which another thread may call while `generate` runs."""

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

    def load(self, arena: Arena, version: int) -> None:
        """Swap the weights; a `generate` under way in another thread goes on with them from its next token.

        Raises:
            EngineError: nothing is generated before a `load` succeeds; a `generate` under way raises too.
        """
        ...

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Log-probs [T] of each text's completion under the loaded weights, as `generate` would state them.

        Empty when the engine cannot tell those of tokens that it did not draw.
        """
        ...

    def generate(
        self, prompts: Sequence[Int32Array], *, seeds: Sequence[int], num_per_prompt: int
    ) -> list[list[Completion]]:
        """Draw `num_per_prompt` completions of each prompt.

        Raises:
            EngineError: nothing is generated before a `load` succeeds, nor returned after one that failed meanwhile.
        """
        ...
