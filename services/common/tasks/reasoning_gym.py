"""Any data set of the reasoning-gym package by name; its own verifier gives the score.

A text is held out or trained on by its own digest, so that no seed and no size can show a held-out prompt in training.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from typing import Any

from heterorl.common.errors import ConfigError, DependencyMissing, RewardError
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.types.words import peer_words
from heterorl.common.wire.common import bytes_digest

_SEED_STRIDE = 1_000_003
"""Item i of a data set is made from seed + i; data sets so far apart share no item."""
_HELD_OUT_SHARE = 4
"""One text in so many is held out."""
_MAX_TRIES = 200
"""(3/4)**200 = 1e-25: without a held-out text by then, the data set has too few texts."""
_CACHED_ENTRIES = 4096


class ReasoningGymTask:
    """Implements heterorl.common.tasks.task.Task; entries on the wrong side of the split are drawn again."""

    def __init__(self, *, name: str, size: int, evaluation_size: int, seed: int) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise DependencyMissing("reasoning-gym", "gym") from error
        self._gym: Any = reasoning_gym
        self._name = name
        self._size = max(size, evaluation_size)
        self._seed = seed
        self._datasets: list[Any] = []
        # A learner evaluates and checks rewards in two threads: made twice, a data set would take the next one's place.
        self._making = threading.Lock()
        self._entry = functools.lru_cache(maxsize=_CACHED_ENTRIES)(self._find)
        self.num_prompts = size
        self.num_evaluation_prompts = evaluation_size
        version = getattr(reasoning_gym, "__version__", "")
        self.digest: Digest = bytes_digest(f"reasoning_gym 2 {version} {name} {size} {evaluation_size} {seed}".encode())
        # A wrong name and a data set too small to be split are told at the start, not in the middle of a run.
        self._entry(0, False)
        self._entry(0, True)

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return _prompt(index, self._entry(index, False))

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return _prompt(index, self._entry(index, True))

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The data set's own score in [0, 1].

        Raises:
            RewardError: the verifier raised, or gave what is no number.
        """
        entry = self._entry(prompt.index, is_held_out(prompt.text))
        if entry["question"] != prompt.text:
            raise RewardError(f"prompt {prompt.index} is not of this data set")
        try:
            value = float(self._dataset(0).score_answer(answer=completion.strip(), entry=entry))
        except Exception as error:
            raise RewardError(f"reasoning_gym failed on prompt {prompt.index}: {peer_words(repr(error))}") from error
        if not math.isfinite(value):
            raise RewardError(f"reasoning_gym scored prompt {prompt.index} with {value}")
        return (RewardPart(name="score", value=value),)

    def _find(self, index: int, held_out: bool) -> Any:
        for attempt in range(_MAX_TRIES):
            entry = self._dataset(attempt)[index]
            if is_held_out(entry["question"]) is held_out:
                return entry
        raise ConfigError("task.name", f"reasoning_gym:{self._name} has too few different prompts to hold some out")

    def _dataset(self, attempt: int) -> Any:
        with self._making:
            while attempt >= len(self._datasets):
                seed = self._seed + len(self._datasets) * _SEED_STRIDE
                try:
                    self._datasets.append(self._gym.create_dataset(self._name, size=self._size, seed=seed))
                except (ValueError, KeyError, TypeError, AssertionError) as error:
                    raise ConfigError("task.name", f"reasoning_gym:{self._name}: {error}") from error
            return self._datasets[attempt]


def is_held_out(text: str) -> bool:
    """Which side of the split a prompt is on: a function of its text alone."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % _HELD_OUT_SHARE == 0


def _prompt(index: int, entry: Any) -> Prompt:
    return Prompt(index=index, text=entry["question"], answer=str(entry["answer"]))
