"""Prompts of which nothing can be generated: counted, logged once a row, and loudly where no other is left."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from heterorl.common.errors import AnswerUnreadable, PromptRefused, PromptTooLong
from heterorl.common.process import metrics
from heterorl.common.tasks.scoring import FailureRow
from heterorl.common.types.rollout import ReturnReason, WorkAssignment

_LOG = logging.getLogger(__name__)
MAX_LINES = 100
"""Rows that are named in the log; all others are counted in the metric alone."""
CURE = "correct the data, task.system_prompt or use_chat_template, or raise engine.max_model_len"

_REASONS = {PromptTooLong: ReturnReason.PROMPT_TOO_LONG, AnswerUnreadable: ReturnReason.REWARD_FAILED}


@dataclass(slots=True)
class Refusals:
    """What became of prompts, in the order in which they were to begin."""

    _row: FailureRow = field(default_factory=lambda: FailureRow(missing="PROMPT", cure=CURE))
    _named: set[int] = field(default_factory=set)

    def note(self, assignment: WorkAssignment, error: PromptRefused) -> ReturnReason:
        """Count a prompt that was refused; the reason for its return."""
        reason = _REASONS.get(type(error), ReturnReason.PROMPT_REFUSED)
        metrics.REFUSED_PROMPTS.labels(reason.value).inc()
        self._row.failed(error)
        index = assignment.prompt_index
        if index not in self._named and len(self._named) < MAX_LINES:
            self._named.add(index)
            _LOG.warning("prompt %d gives no group (assignment %d): %s", index, assignment.id, error)
            if len(self._named) == MAX_LINES:
                _LOG.warning("%d prompts are refused; further ones are not named", MAX_LINES)
        return reason

    def passed(self) -> None:
        """Note that a prompt was taken."""
        self._row.passed()

    @property
    def problem(self) -> str:
        """Why nothing is generated; empty while prompts are taken."""
        return self._row.problem
