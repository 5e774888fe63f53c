"""Prompts over all pairs of N-digit numbers in a fixed order, every 19th of them held out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from heterorl.common.tasks.task import Prompt

_STRIDE = 7919
_SEED_STRIDE = 104_729
_EVALUATION_SHARE = 19
"""Without a common factor with 10, so that the held-out numbers end in every digit."""


class NumberPairs(ABC):
    """The part of a task that says which pair of numbers a position stands for; `_prompt` says what is asked of it."""

    def __init__(self, *, digits: int, seed: int) -> None:
        self.digits = digits
        self._base: int = 10**digits
        self._total = self._base * self._base
        self.shift = seed * _SEED_STRIDE % self._total
        self.num_evaluation_prompts = self._total // _EVALUATION_SHARE
        self.num_prompts = self.num_evaluation_prompts * (_EVALUATION_SHARE - 1)

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        skip = _EVALUATION_SHARE - 1
        return self._prompt(index, *self._pair(index // skip * _EVALUATION_SHARE + index % skip + 1))

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._prompt(index, *self._pair(index * _EVALUATION_SHARE))

    def _pair(self, position: int) -> tuple[int, int]:
        # A stride without a common factor with 10 visits every pair once, far from its neighbours, from any start.
        number = (position * _STRIDE + self.shift) % self._total
        return number // self._base, number % self._base

    @abstractmethod
    def _prompt(self, index: int, left: int, right: int) -> Prompt: ...
