"""The environment of this example: a number between 1 and 20 is found by halves, in turns."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from heterorl.common.tasks.environments.environment import Action

HIGHEST = 20


class Guess:
    """One episode; the fewer guesses, the higher the reward."""

    def reset(self, row: Mapping[str, Any], *, seed: int) -> str:  # noqa: ARG002 - random is seeded with it
        """Choose the number: `random` is seeded with the episode's seed."""
        self.number, self.tries, self.is_found, self.num_read = random.randint(1, HIGHEST), 0, False, 0
        return f"I have chosen a number from 1 to {HIGHEST}. Guess it. Answer with a number alone."

    def step(self, action: Action) -> str | None:
        """Say in which direction the number lies; None once it is found."""
        self.tries += 1
        read = re.fullmatch(r"\D{0,20}(\d{1,3})\D{0,3}", action.answer.strip())
        if read is None:
            return "That is no number alone. Guess again."
        self.num_read += 1
        guess = int(read[1])
        self.is_found = guess == self.number
        return None if self.is_found else f"My number is {'higher' if guess < self.number else 'lower'}. Guess again."

    def score(self) -> dict[str, float]:
        """1 for the number, up to 0.5 for few guesses, up to 0.1 for turns that were numbers."""
        return {
            "found": float(self.is_found),
            "few": 0.5 / self.tries if self.is_found else 0.0,
            "numbers": 0.1 * self.num_read / self.tries if self.tries else 0.0,
        }
