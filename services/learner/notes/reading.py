"""Tokens as text for people: a prompt, a completion, and where each token ends in it.

A prompt is shown as the task has it, its messages under their roles. One whose tokens are others than the task and the
template give is shown as the model read it.

A token is text of its own, but for two things: a character of several bytes may lie in several tokens, and some
tokenizers leave a space out that stands before a word. What does not come out even has no ends: nothing is guessed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np

from heterorl.common.errors import PromptRefused
from heterorl.common.tasks.task import Task
from heterorl.common.text.prompts import Prompter
from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.types.rollout import Group
from heterorl.common.types.sample import RolloutNote, SampleNote, shown_answer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character, as of half of one."""
MAX_JOINED = 16
"""Tokens in a row that may be one piece of text."""
_NONE = np.zeros(0, np.float32)


class Reader:
    """Reads groups with the run's tokenizer, and their answers in its task; remembers the text of each token."""

    def __init__(self, prompter: Prompter, task: Task) -> None:
        self._prompter = prompter
        self._task = task
        self._pieces: dict[int, str] = {}

    def note(self, group: Group, ratios: Mapping[int, Float32Array], *, limit_bytes: int) -> SampleNote:
        """What is said of a group.

        Args:
            group: its prompt and its tokens are read.
            ratios: by number of the rollout, log p - log q of each token; of those that were trained on.
            limit_bytes: about the largest message; beyond it the numbers of tokens are left out.
        """
        prompt, answer = self._asked(group)
        rollouts = []
        for number, rollout in enumerate(group.rollouts):
            text = self._prompter.decode(rollout.token_ids)
            rollouts.append(
                RolloutNote(
                    completion=text,
                    reward_parts=(),
                    log_ratios=ratios.get(number, _NONE),
                    token_ends=self.ends(rollout.token_ids, text),
                )
            )
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
        raw: str = self._prompter.tokenizer.decode(group.prompt_token_ids.tolist(), skip_special_tokens=False)
        return raw, answer

    def ends(self, token_ids: Int32Array, text: str) -> Int32Array:
        """The character of `text` behind each token; empty where tokens and text do not come out even."""
        ends: list[int] = []
        position = 0
        joined: list[int] = []
        for token_id in token_ids.tolist():
            joined.append(token_id)
            piece = self._piece(token_id) if len(joined) == 1 else self._decode(joined)
            length = _length_at(text, position, piece)
            if length is None:
                if len(joined) > MAX_JOINED:
                    return _no_ends()
                continue
            # Tokens that are one character together end where it ends; those before its last, where it begins.
            ends += [position] * (len(joined) - 1)
            position += length
            ends.append(position)
            joined.clear()
        if joined and position < len(text):
            # The end of a text may be half a character.
            rest = text[position:]
            if rest.strip(UNKNOWN):
                return _no_ends()
            ends += [position] * (len(joined) - 1) + [len(text)]
            joined.clear()
            position = len(text)
        if joined or position != len(text):
            return _no_ends()
        return np.array(ends, np.int32)

    def _piece(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._decode([token_id])
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._prompter.decode(np.array(token_ids, np.int32))


def _length_at(text: str, position: int, piece: str) -> int | None:
    """Characters of `text` that a piece is at a position; None where it is not there, or not whole."""
    if UNKNOWN in piece:
        return None
    for candidate in (piece, f" {piece}"):
        if text.startswith(candidate, position):
            return len(candidate)
    return None


def _no_ends() -> Int32Array:
    return np.zeros(0, np.int32)


def _num_bytes(prompt: str, rollouts: Sequence[RolloutNote]) -> int:
    texts = len(prompt.encode()) + sum(len(rollout.completion.encode()) for rollout in rollouts)
    return texts + sum(4 * len(rollout.log_ratios) + 3 * len(rollout.token_ends) for rollout in rollouts)
