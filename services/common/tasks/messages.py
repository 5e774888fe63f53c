"""Messages of a prompt, and a system prompt for any task."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.task import (
    Message,
    Prompt,
    Task,
    TaskWrapper,
    answer_problem_of,
    close_task,
    doubts_of,
)
from heterorl.common.wire.common import bytes_digest

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
BETWEEN = "\x1e"
"""Separates messages in one text."""


def read_messages(key: str, place: str, value: Any) -> tuple[Message, ...]:
    """Messages of parsed JSON: objects with `role` and `content`, the user's last; else ConfigError with the place."""
    if not isinstance(value, list) or not value:
        raise ConfigError(key, f"{place}: messages must be a list of objects with role and content")
    messages = []
    for entry in value:
        role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise ConfigError(key, f"{place}: each message needs a role ({', '.join(ROLES)}) and a text as content")
        messages.append(Message(role=role, content=content))
    if messages[-1].role != "user":
        raise ConfigError(key, f"{place}: the last message is not the user's", action="remove the answer")
    return tuple(messages)


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """Messages that the model reads."""
    return prompt.messages or (Message(role="user", content=prompt.text),)


def question_of(prompt: Prompt) -> str:
    """Roles and contents of all messages except system messages, as one text."""
    turns = (turn for turn in messages_of(prompt) if turn.role not in SYSTEM_ROLES)
    return BETWEEN.join(f"{turn.role}\x1f{turn.content}" for turn in turns)


class SystemPromptTask(TaskWrapper):
    """A task whose prompts get a system message unless they have one; implements Task."""

    def __init__(self, task: Task, text: str) -> None:
        digest = bytes_digest(f"system prompt 1\n{task.digest}\n{text}".encode())
        # 0: the task computes rewards in this process.
        super().__init__(task, digest=digest, num_workers=int(getattr(task, "num_workers", 0)))
        self._first = Message(role="system", content=text)
        self.score = task.score
        self.doubts, self.answer_problem = partial(doubts_of, task), partial(answer_problem_of, task)
        self.close = partial(close_task, task)

    def prompt(self, index: int) -> Prompt:
        return self._with_system(self.inner.prompt(index))

    def evaluation_prompt(self, index: int) -> Prompt:
        return self._with_system(self.inner.evaluation_prompt(index))

    def _with_system(self, prompt: Prompt) -> Prompt:
        messages = messages_of(prompt)
        if messages[0].role in SYSTEM_ROLES:
            return prompt
        return dataclasses.replace(prompt, messages=(self._first, *messages))
