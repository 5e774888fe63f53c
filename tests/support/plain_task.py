"""A task of which a test says only what it asks about."""

from typing import Any

from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart


class PlainTask(Task):
    """Every completion is worth 1."""

    digest = Digest("00" * 32)
    num_prompts = num_evaluation_prompts = 100

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text=f"{index}+1=", answer="")

    def evaluation_prompt(self, index: int) -> Prompt:
        return self.prompt(index)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        return (RewardPart(name="correct", value=1.0),)


def plain_task(**members: Any) -> PlainTask:
    """The task with other members."""
    task = PlainTask()
    vars(task).update(members)
    return task
