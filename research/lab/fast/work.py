"""Prompts, answers and noise of a run by step: those that a coordinator would assign and an engine would draw with.

Step s takes the assignments s G to s G + G - 1; prompt and sampling seed follow from the run's seed. All runs of a seed
have the same, so they are made once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from heterorl.common.errors import ConfigError
from heterorl.common.model.logprobs import gumbel
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.text.prompter import Prompter
from heterorl.coordinator.groups.schedule import prompt_of, seed_of
from heterorl_research.lab.fast.layout import Ints, Sizes

_MOST_KEPT = 128
"""Steps whose work is kept: as many as runs of one batch may be about at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Prompts of a step with their token ids [G, P] and the noise [G, M, T, V] of their completions."""

    prompts: list[Prompt]
    tokens_GP: Ints
    noise_GMTV: Tensor


class Texts:
    """Text to ids and back by a table of single tokens, where that is what the tokenizer does; else by the tokenizer.

    The tokenizer itself needs a tenth of a millisecond a text, which would be the longest part of a step.
    """

    def __init__(self, model_dir: Path) -> None:
        self.prompter = Prompter(str(model_dir), use_chat_template=False)
        count = len(self.prompter.tokenizer)
        self._pieces = [self.prompter.decode(np.array([number], np.int32)) for number in range(count)]
        self._ids = {piece: number for number, piece in enumerate(self._pieces) if len(piece) == 1}
        rng = np.random.default_rng(0)
        trials = [rng.integers(0, count, 12) for _ in range(64)]
        self._is_table = all(
            self._joined(ids.tolist()) == self.prompter.decode(ids.astype(np.int32)) for ids in trials
        ) and all(
            self._looked_up(text) == self.prompter.encode(text).tolist()
            for text in (self._joined(ids.tolist()) for ids in trials)
        )

    @property
    def eos_token_id(self) -> int:
        """Id that ends a completion."""
        return self.prompter.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        if self._is_table and all(letter in self._ids for letter in text):
            return self._looked_up(text)
        return [int(number) for number in self.prompter.encode(text)]

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, special tokens left out."""
        if self._is_table:
            return self._joined(token_ids)
        return self.prompter.decode(np.array(token_ids, np.int32))

    def _joined(self, token_ids: list[int]) -> str:
        return "".join([self._pieces[number] for number in token_ids])

    def _looked_up(self, text: str) -> list[int]:
        return [self._ids[letter] for letter in text]


class Assignments:
    """The work of every seed and step."""

    def __init__(self, *, task: Task, texts: Texts, sizes: Sizes) -> None:
        self._task, self._texts, self._sizes = task, texts, sizes
        self._kept: OrderedDict[tuple[int, int], Work] = OrderedDict()

    def of_step(self, seed: int, step: int) -> Work:
        """What step `step`, from 0, trains on."""
        key = (seed, step)
        if key not in self._kept:
            first = step * self._sizes.num_prompts
            numbers = range(first, first + self._sizes.num_prompts)
            prompts = [
                self._task.prompt(prompt_of(number, num_prompts=self._task.num_prompts, seed=seed))
                for number in numbers
            ]
            self._kept[key] = make_work(
                prompts, [seed_of(number, seed=seed) for number in numbers], texts=self._texts, sizes=self._sizes
            )
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]


def make_work(prompts: list[Prompt], seeds: Sequence[int], *, texts: Texts, sizes: Sizes) -> Work:
    """Encode prompts and draw the noise of their groups from the groups' seeds.

    Raises:
        ConfigError: a prompt has another length than the others.
    """
    ids = [texts.encode(prompt.text) for prompt in prompts]
    if {len(row) for row in ids} != {sizes.prompt_length}:
        raise ConfigError("tasks.task", "its prompts differ in length", action="choose the engine services")
    # One draw for all tokens of a group is the engine's draws one after another.
    rows = sizes.max_new_tokens * sizes.group_size
    noise = torch.stack([gumbel((rows, sizes.vocab_size), torch.Generator().manual_seed(seed)) for seed in seeds])
    by_token = noise.view(len(seeds), sizes.max_new_tokens, sizes.group_size, sizes.vocab_size)
    return Work(prompts=prompts, tokens_GP=np.array(ids, np.int64), noise_GMTV=by_token.transpose(1, 2).contiguous())
