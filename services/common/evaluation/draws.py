"""From a set to requests: which prompt is drawn how often with which seeds, whatever the engine's size.

Guarantees: the requests of a prompt depend on the set's draws and the prompt's index alone, so that versions compare,
and so that whoever is handed a part of a set draws what anybody else would have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from heterorl.common.generation.engine import Request
from heterorl.common.types.common import Int32Array
from heterorl.common.types.evaluation import EvaluationDraws

BLOCK = 8
"""Completions of one request: a small engine need not hold all of a prompt at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some completions of one prompt: `count` from number `first` on."""

    first: int
    count: int


def blocks_of(draws: EvaluationDraws) -> Iterator[Block]:
    """The requests that one prompt is made of."""
    for first in range(0, draws.num_samples, BLOCK):
        yield Block(first=first, count=min(BLOCK, draws.num_samples - first))


def request_of(draws: EvaluationDraws, block: Block, *, key: int, prompt_index: int, prompt: Int32Array) -> Request:
    """What an engine is asked for one block of a prompt."""
    return Request(
        key=key,
        prompt=prompt,
        seed=seed_of(draws, prompt_index=prompt_index, first=block.first),
        num_completions=block.count,
        sampling=draws.sampling,
    )


def seed_of(draws: EvaluationDraws, *, prompt_index: int, first: int) -> int:
    """Seed of a block, 63 bits: close seeds of two sets share no stream."""
    name = f"evaluation/{draws.seed}/{prompt_index}/{first}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
