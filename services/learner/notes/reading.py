"""Tokens as text for people: a prompt, and each rollout's.

A prompt is shown as the task has it, its messages under their roles. One whose tokens are others than the task and the
template give is shown as the model read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np

from heterorl.common.errors import PromptRefused
from heterorl.common.tasks.task import Task
from heterorl.common.text.prompts import Prompter
from heterorl.common.text.texts import Texts
from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.types.rollout import Group
from heterorl.common.types.sample import RolloutNote, SampleNote, shown_answer

_NONE = np.zeros(0, np.float32)


class Reader:
    """Reads groups with the run's tokenizer, and their answers in its task."""

    def __init__(self, prompter: Prompter, task: Task) -> None:
        self._prompter = prompter
        self._task = task
        self._texts = Texts(decode=prompter.decode, decode_given=self._decode_raw)

    def note(self, group: Group, ratios: Mapping[int, Float32Array], *, limit_bytes: int) -> SampleNote:
        """What is said of a group.

        Args:
            group: its prompt and its tokens are read.
            ratios: by number of the rollout, log p - log q of each drawn token; of those that were trained on.
            limit_bytes: about the largest message; beyond it the numbers of tokens are left out.
        """
        prompt, answer = self._asked(group)
        rollouts = []
        for number, rollout in enumerate(group.rollouts):
            text, ends = self._texts.read(rollout.token_ids, rollout.spans)
            ratios_N = ratios.get(number, _NONE)
            rollouts.append(RolloutNote(completion=text, reward_parts=(), log_ratios=ratios_N, token_ends=ends))
        if _num_bytes(prompt, rollouts) > limit_bytes:
            rollouts = [RolloutNote(completion=rollout.completion, reward_parts=()) for rollout in rollouts]
        return SampleNote(group=group.id, prompt=prompt, answer=answer, rollouts=tuple(rollouts))

    def _asked(self, group: Group) -> tuple[str, str]:
        """A group's prompt and expected answer."""
        answer = ""
        # A prompt that the task does not have was rejected, and its group is kept to be read.
        with contextlib.suppress(LookupError, PromptRefused):
            asked = self._task.prompt(group.prompt_index)
            answer = shown_answer(asked.answer)
            if np.array_equal(self._prompter.encode_prompt(asked), group.prompt_token_ids):
                return asked.shown, answer
        return self._decode_raw(group.prompt_token_ids), answer

    def _decode_raw(self, token_ids: Int32Array) -> str:
        return self._prompter.decode(token_ids, keeps_special=True)


def _num_bytes(prompt: str, rollouts: Sequence[RolloutNote]) -> int:
    texts = len(prompt.encode()) + sum(len(rollout.completion.encode()) for rollout in rollouts)
    return texts + sum(4 * len(rollout.log_ratios) + 3 * len(rollout.token_ends) for rollout in rollouts)
