"""A prompt as messages: what each may be, and a system prompt before those of any task."""

from __future__ import annotations

import dataclasses
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.task import (
    Doubts,
    Message,
    Prompt,
    Task,
    TaskWrapper,
    answer_problem_of,
    close_task,
    doubts_of,
)
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
BETWEEN = "\x1e"
"""Between two turns of a text that stands for messages."""


def read_messages(key: str, place: str, value: Any) -> tuple[Message, ...]:
    """Messages of parsed JSON: a list of objects with `role` and `content`, the user's last.

    Raises:
        ConfigError: it is something else; says where it stands.
    """
    if not isinstance(value, list) or not value:
        raise ConfigError(key, f"{place}: messages must be a list of objects with role and content")
    messages = []
    for entry in value:
        role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise ConfigError(key, f"{place}: each message needs a role ({', '.join(ROLES)}) and a text as content")
        messages.append(Message(role=role, content=content))
    if messages[-1].role != "user":
        raise ConfigError(key, f"{place}: the last message is not the user's", action="leave the answer out")
    return tuple(messages)


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """What the model is asked, as messages."""
    return prompt.messages or (Message(role="user", content=prompt.text),)


def question_of(prompt: Prompt) -> str:
    """What is asked, whatever the model was told to be: roles and contents but for those of the system."""
    turns = (turn for turn in messages_of(prompt) if turn.role not in SYSTEM_ROLES)
    return BETWEEN.join(f"{turn.role}\x1f{turn.content}" for turn in turns)


class SystemPromptTask(TaskWrapper):
    """A task with a system prompt before each of its prompts that has none; implements Task."""

    def __init__(self, task: Task, text: str) -> None:
        digest = bytes_digest(f"system prompt 1\n{task.digest}\n{text}".encode())
        # 0 where the task computes rewards in this process.
        super().__init__(task, digest=digest, num_workers=int(getattr(task, "num_workers", 0)))
        self._first = Message(role="system", content=text)

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self._with_system(self.inner.prompt(index))

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._with_system(self.inner.evaluation_prompt(index))

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The task's own parts."""
        return self.inner.score(prompt, completion)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        """What is in doubt of the task's own parts."""
        return doubts_of(self.inner, prompt, completion)

    def answer_problem(self, prompt: Prompt) -> str:
        """Why no completion of a prompt can be scored; empty where they can."""
        return answer_problem_of(self.inner, prompt)

    def close(self) -> None:
        """End what the task runs."""
        close_task(self.inner)

    def _with_system(self, prompt: Prompt) -> Prompt:
        messages = messages_of(prompt)
        if messages[0].role in SYSTEM_ROLES:
            return prompt
        return dataclasses.replace(prompt, messages=(self._first, *messages))
