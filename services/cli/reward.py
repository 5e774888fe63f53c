"""The command `heterorl reward try`: the reward of one completion."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterorl.cli.check_config import SetOption, load_service
from heterorl.cli.connection import console_of
from heterorl.common.errors import ConfigError

if TYPE_CHECKING:
    from heterorl.common.tasks.task import Prompt

reward = typer.Typer(help="Try rewards before a run uses them.", no_args_is_help=True)


@reward.command("try")
def reward_try(
    completion: Annotated[str, typer.Option(help="Text of the completion.")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the learner.")] = None,
    set_: SetOption = None,
    prompt: Annotated[int, typer.Option(help="Index of the prompt.", min=0)] = 0,
    answer: Annotated[str | None, typer.Option(help="Right answer in place of the prompt's.")] = None,
) -> None:
    """Print the reward of a completion that you write, and its parts.

    It needs the data of the task, and no model. Rewards of kind `http` or `judge` are asked.

    Exit code 0: there is a reward. 2: there is none; a line says why.

    Example: `heterorl reward try --config learner.toml --answer 72 --completion "It is 71 or 72."`
    """
    loaded = load_service("learner", config, set_ or ())
    from heterorl.common.errors import RewardError
    from heterorl.common.tasks.task import check_answer
    from heterorl.common.tasks.task_config import build_task
    from heterorl.common.text.prompter import Prompter
    from heterorl.common.types.rollout import total_reward

    task = build_task(loaded.task, measure=lambda prompts: Prompter.of(loaded).num_tokens(prompts))
    try:
        if prompt >= task.num_prompts:
            raise ConfigError("--prompt", f"must be from 0 to {task.num_prompts - 1}; got {prompt}")
        asked = task.prompt(prompt)
        if task.environment_of(asked) is not None:
            raise ConfigError("task.environment", "it gives the reward", action="play it by `heterorl env try`")
        if answer is not None:
            asked = _answered(asked, answer)
        check_answer(task, asked)
        parts = task.score(asked, completion)
    except RewardError as error:
        raise ConfigError("task", f"no reward: {error}", action="correct the reward, or what it needs") from error
    finally:
        task.close()
    console = console_of()
    console.print(f"{asked.text[:60]!r}, answer {asked.answer[:60]!r}: reward {total_reward(parts):g}", soft_wrap=True)
    for part in parts:
        console.print(f"  {part.name}: {part.value:g}, weight {part.weight:g}", soft_wrap=True)


def _answered(prompt: Prompt, answer: str) -> Prompt:
    """The prompt with another right answer, also within a mixture."""
    inner: Prompt | None = getattr(prompt, "inner", None)
    changes: dict[str, Any] = {} if inner is None else {"inner": _answered(inner, answer)}
    return dataclasses.replace(prompt, answer=answer, **changes)
