"""Entries of a data set of reasoning-gym, each on its side of the split between training and held out.

Imports nothing of heterorl: prompts are made from it outside the sandbox, and completions are scored by it inside.
"""

import functools
import hashlib
import threading
from typing import Any

_SEED_STRIDE = 1_000_003
"""Item i of a data set is made from seed + i; data sets so far apart share no item."""
_HELD_OUT_SHARE = 4
"""One text in so many is held out."""
_MAX_TRIES = 200
"""(3/4)**200 = 1e-25: without a held-out text by then, the data set has too few texts."""
_CACHED_ENTRIES = 4096


class NoEntries(Exception):
    """The data set is unknown, or too small to be split."""


class Entries:
    """Entries on the wrong side of the split are drawn again."""

    def __init__(self, gym: Any, *, name: str, size: int, seed: int) -> None:
        """Nothing is made before it is asked for.

        Args:
            gym: the package reasoning_gym.
            name: of the data set.
            size: of it; part of what its entries are.
            seed: of its first entry.
        """
        self._gym, self._name, self._size, self._seed = gym, name, size, seed
        self._datasets: list[Any] = []
        # A learner evaluates and checks rewards in two threads: made twice, a data set would take the next one's place.
        self._making = threading.Lock()
        self.find = functools.lru_cache(maxsize=_CACHED_ENTRIES)(self._find)

    def score(self, entry: Any, completion: str) -> float:
        """The data set's own score. It may run the completion as Python: inside the sandbox only."""
        return float(self.dataset(0).score_answer(answer=completion.strip(), entry=entry))

    def dataset(self, attempt: int) -> Any:
        """The data set that the entries of an attempt are drawn from.

        Raises:
            NoEntries: there is none of that name.
        """
        with self._making:
            while attempt >= len(self._datasets):
                seed = self._seed + len(self._datasets) * _SEED_STRIDE
                try:
                    self._datasets.append(self._gym.create_dataset(self._name, size=self._size, seed=seed))
                except (ValueError, KeyError, TypeError, AssertionError) as error:
                    raise NoEntries(f"reasoning_gym:{self._name}: {error}") from error
            return self._datasets[attempt]

    def _find(self, index: int, held_out: bool) -> Any:
        for attempt in range(_MAX_TRIES):
            entry = self.dataset(attempt)[index]
            if is_held_out(entry["question"]) is held_out:
                return entry
        raise NoEntries(f"reasoning_gym:{self._name} has too few different prompts to hold some out")


def is_held_out(text: str) -> bool:
    """Which side of the split a prompt is on: a function of its text alone."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % _HELD_OUT_SHARE == 0
