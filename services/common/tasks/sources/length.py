"""Which prompts of a data set are short enough for `task.data.max_prompt_tokens`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.task import Measure, Prompt

_AT_ONCE = 4096
_LOG = logging.getLogger(__name__)


def short_ones(
    count: int, prompt_at: Callable[[int], Prompt], *, most: int, measure: Measure | None
) -> npt.NDArray[np.bool_]:
    """Which of so many prompts have at most `most` tokens; those that the template refuses have no length.

    Args:
        count: number of prompts.
        prompt_at: the prompt at a position.
        most: tokens.
        measure: counts them.

    Raises:
        ConfigError: there is nothing to count with.
    """
    if measure is None:
        raise ConfigError("task.data.max_prompt_tokens", "counts tokens, and no tokenizer is here", action="remove it")
    keep = np.zeros(count, np.bool_)
    num_refused = 0
    for first in range(0, count, _AT_ONCE):
        some = [prompt_at(position) for position in range(first, min(first + _AT_ONCE, count))]
        lengths = lengths_of(some, measure)
        num_refused += int((lengths < 0).sum())
        keep[first : first + len(some)] = (lengths >= 0) & (lengths <= most)
    if num_long := count - int(keep.sum()) - num_refused:
        _LOG.warning(
            "task.data.max_prompt_tokens: %d of %d prompts have more than %d tokens and are left out",
            num_long, count, most,
        )  # fmt: skip
    if num_refused:
        _LOG.warning("task.data: the template refuses %d of %d prompts, which are left out", num_refused, count)
    return keep


def lengths_of(prompts: Sequence[Prompt], measure: Measure) -> npt.NDArray[np.int64]:
    """Tokens of each, -1 where the template refuses it."""
    return np.array([-1 if length is None else length for length in measure(prompts)], np.int64)
