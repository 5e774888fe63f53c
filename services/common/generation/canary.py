"""A canary: tokens that learner and samplers score with the same weights, so that a wrong policy is seen at once.

A sampler whose weights, temperature or kernels differ from what it states still draws plausible text; only its
log-probs give it away. Both sides score the answers of the first held-out prompts, which the contract makes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterorl.common.errors import PromptRefused
from heterorl.common.tasks.task import Task
from heterorl.common.text.prompts import Prompter
from heterorl.common.types.common import Int32Array

NUM_SEQUENCES = 4
MAX_TRIED = 64
"""Held-out prompts that may be refused before there is no canary."""
MAX_TOKENS = 64
"""Of one answer; longer ones are cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredText:
    """A prompt and what follows it, int32 token ids; only the completion is scored."""

    prompt: Int32Array
    completion: Int32Array


def canary_texts(task: Task, prompter: Prompter) -> tuple[ScoredText, ...]:
    """The run's canary: held-out prompts with their answers and the end of the sequence.

    Raises:
        PromptRefused: of the first prompts, all.
    """
    texts: list[ScoredText] = []
    refused: PromptRefused | None = None
    for index in range(min(MAX_TRIED, task.num_evaluation_prompts)):
        prompt = task.evaluation_prompt(index)
        try:
            ids = prompter.encode_prompt(prompt)
        except PromptRefused as error:
            # By every node of the run, which has the same template.
            refused = error
            continue
        answer = prompter.tokenizer.encode(prompt.answer, add_special_tokens=False)[: MAX_TOKENS - 1]
        texts.append(ScoredText(prompt=ids, completion=np.array([*answer, prompter.eos_token_id], np.int32)))
        if len(texts) == NUM_SEQUENCES:
            break
    if refused is not None and not texts:
        raise refused
    return tuple(texts)
