"""An engine that takes a flavour of the weights: each version is made whole again before the engine behind it loads it.

Guarantees: what the engine computes with is exactly what the flavour stands for, in the published type and on every
machine the same bits; generation, log-probs and canary are those of the engine behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heterorl.common.generation.canary import ScoredText
from heterorl.common.generation.engine import Engine
from heterorl.common.generation.requests import Finished, Lost, Request
from heterorl.common.model.quantise import Flavour, dequantise, flavour_layout, quantise
from heterorl.common.types.common import Float32Array
from heterorl.common.weights.arena import Arena, Layout


class FlavouredEngine:
    """Implements heterorl.common.generation.engine.Engine around another engine."""

    def __init__(self, engine: Engine, flavour: Flavour) -> None:
        self._engine = engine
        self._flavour: Flavour = flavour
        self._layout = flavour_layout(engine.layout, flavour)

    @property
    def layout(self) -> Layout:
        """Layout of the flavour."""
        return self._layout

    @property
    def name(self) -> str:
        """Name of the engine behind."""
        return self._engine.name

    @property
    def dtype(self) -> str:
        """Data type of the computation."""
        return self._engine.dtype

    @property
    def version(self) -> int:
        """Version of the loaded weights."""
        return self._engine.version

    def load(self, arena: Arena, version: int) -> None:
        """Swap the weights for what a state of the flavour stands for."""
        # Made anew each time: between two swaps it would be memory for nothing.
        whole = Arena(self._engine.layout)
        dequantise(arena, whole, self._flavour)
        self._engine.load(whole, version)

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """Log-probs under the loaded weights."""
        return self._engine.score(texts)

    @property
    def is_whole(self) -> bool:
        """Whether all of it computes."""
        return self._engine.is_whole

    @property
    def max_running(self) -> int:
        """Completions computed at once."""
        return self._engine.max_running

    def submit(self, request: Request) -> None:
        """Take a request."""
        self._engine.submit(request)

    def collect(self) -> list[Finished | Lost]:
        """Completions that ended."""
        return self._engine.collect()

    def cancel(self) -> None:
        """Give up everything under way."""
        self._engine.cancel()

    def base_of(self, base: Callable[[], Arena | None]) -> Callable[[], Arena | None]:
        """The flavour of the weights that a node has without the run, with the scales that a run begins with."""

        def flavoured() -> Arena | None:
            whole = base()
            if whole is None:
                return None
            arena = Arena(self._layout)
            quantise(whole, arena, self._flavour)
            return arena

        return flavoured
