"""Two games of textarena (extra `games`), each with a way to play that a supervised warm start imitates.

The run plays the package's own game, by `textarena:NAME`. The classes here serve the warm start only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.curves.games import GAMES
from heterorl.common.tasks.environments.environment import Action, Observation
from heterorl.common.tasks.environments.textarena import TextArenaGame


class Played:
    """A game of textarena; `first` is its first message, and `answer` the newest one."""

    environment: ClassVar[str]
    words: ClassVar[tuple[str, ...]]

    def reset(self, row: Mapping[str, Any], *, seed: int) -> str:
        """Begin a game."""
        self._game = TextArenaGame(self.environment.partition(":")[2])
        self.first = self.answer = self._game.reset(row, seed=seed)
        self.begin()
        return self.first

    def begin(self) -> None:
        """Forget the last game."""

    def step(self, action: Action) -> Observation | None:
        """The game's answer; None once it has ended."""
        observation = self._game.step(action)
        self.answer = "\n".join(message.content for message in observation.messages)
        return None if observation.done else observation

    def score(self) -> float:
        """The game's reward."""
        return self._game.score()


class GuessTheNumber(Played):
    """A number from 1 to 20 in four turns; a number that is not found scores its nearness to the last guess."""

    environment: ClassVar[str] = "textarena:GuessTheNumber-v0"
    max_turns: ClassVar[int] = 4
    max_new_tokens: ClassVar[int] = 4
    highest: ClassVar[int] = 20
    skill: ClassVar[float] = 0.1
    """Share of the demonstrated turns that halve the interval; the others are random numbers."""
    words: ClassVar[tuple[str, ...]] = (
        *map(str, range(10, highest + 1)),
        "The target number is higher.",
        "The target number is lower.",
        "You attempted an invalid move. Reason: Invalid move",
        " Player 0 has already guessed the number. ",
        "Please resubmit a valid move and remember to follow the game rules to avoid penalties.",
    )

    def begin(self) -> None:
        self.low, self.high, self.guess = 1, self.highest, 0

    def demonstrate(self, chooser: random.Random) -> str:
        """The next turn of a demonstration."""
        if "higher." in self.answer and self.guess:
            self.low = max(self.low, self.guess + 1)
        elif "lower." in self.answer and self.guess:
            self.high = min(self.high, self.guess - 1)
        is_skilled = chooser.random() < self.skill
        self.guess = (self.low + self.high) // 2 if is_skilled else chooser.randint(1, self.highest)
        return f"[{self.guess}]"


class Secretary(Played):
    """Five values, one after another; reward 1 for accepting the largest, so most turns earn nothing."""

    environment: ClassVar[str] = "textarena:Secretary-v0"
    max_turns: ClassVar[int] = 5
    max_new_tokens: ClassVar[int] = 2
    skill: ClassVar[float] = 0.0
    """Share of the demonstrated turns that accept what is probably the largest; the others choose at random."""
    bounds: ClassVar[tuple[float, ...]] = (0.825, 0.776, 0.690, 0.5, 0.0)
    """Least value to accept at each turn, if no earlier one is larger: the best policy for uniform values."""
    words: ClassVar[tuple[str, ...]] = ("The current value is 0.", "[accept]", "[continue]")

    def begin(self) -> None:
        self.seen: list[float] = []

    def demonstrate(self, chooser: random.Random) -> str:
        """The next turn of a demonstration."""
        self.seen.append(float(re.findall(r"value is (\d\.\d+)\.", self.answer)[-1]))
        value, turn = self.seen[-1], len(self.seen) - 1
        is_skilled = chooser.random() < self.skill
        accepts = value == max(self.seen) and value >= self.bounds[turn] if is_skilled else chooser.random() < 0.4
        return "[accept]" if accepts else "[continue]"


ALL_GAMES: dict[str, Any] = {**GAMES, "textarena-guess": GuessTheNumber, "textarena-secretary": Secretary}
"""Environment by its name in results."""
