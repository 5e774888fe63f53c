"""The command `heterorl env try`: one episode of a task's environment."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterorl.cli.check_config import SetOption, load_service
from heterorl.cli.connection import console_of
from heterorl.common.errors import ConfigError, PromptRefused
from heterorl.common.process.config_file import quoted
from heterorl.common.types.common import Int32Array, strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from heterorl.cli.env_episode import Played, Screen
    from heterorl.common.tasks.environments.environment_task import EnvironmentSpec
    from heterorl.common.tasks.task import Prompt, Task
    from heterorl.common.text.prompter import Prompter

env = typer.Typer(help="Try environments before a run uses them.", no_args_is_help=True)


@env.command("try")
def env_try(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the learner.")] = None,
    set_: SetOption = None,
    prompt: Annotated[int, typer.Option(help="Index of the prompt.", min=0)] = 0,
    source: Annotated[str, typer.Option(metavar="LABEL", help="Count prompts in this source of a mixture.")] = "",
    held_out: Annotated[bool, typer.Option("--held-out", help="Take a held-out prompt.")] = False,
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Model that samples the turns; default: model_dir of the file.")
    ] = "",
    by_hand: Annotated[
        bool, typer.Option("--by-hand", help="Type the turns; default on a terminal without --model.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the trajectory as JSON.")] = False,
) -> None:
    """Play one episode of task.environment, by hand or with a model.

    By hand, each line is a turn. A tool call is a line of JSON such as {"name": "add", "arguments": {"a": 1}}. Ctrl-D
    ends the episode. This needs no model. A model samples with the file's [sampling] and tests its chat template too.

    Exit code 0: the episode ended with a reward. 2: it did not; a line says why.

    Example: `heterorl env try --config learner.toml --by-hand`
    """
    if model and by_hand:
        raise ConfigError("--model", "--by-hand is given too", action="remove one of them")
    chosen = [f"model_dir={quoted(model)}"] if model else []
    loaded = load_service("learner", config, [*(set_ or ()), *chosen])
    if not loaded.task.has_environment:
        raise ConfigError("task.environment", "is not set", action="docs/environments.md says how to write one")
    is_typed = by_hand or (not model and sys.stdin.isatty())
    from heterorl.cli.env_episode import Screen, as_json
    from heterorl.common.tasks.task_config import build_task
    from heterorl.common.text.prompter import Prompter

    prompter = cache(lambda: Prompter.of(loaded))
    if not is_typed:
        prompter()
    task = build_task(loaded.task, measure=lambda prompts: prompter().num_tokens(prompts))
    # Text goes to standard error if standard output is JSON.
    console = console_of(stderr=json_)
    try:
        asked, spec = _asked(task, prompt, source=source, is_held_out=held_out)
        if is_typed:
            ids, played = None, _type(asked, spec, console)
        else:
            ids, played = _draw(loaded, task, asked, prompter(), Screen(console))
    finally:
        task.close()
    if json_:
        typer.echo(strict_json(as_json(asked, spec, played, ids=ids), indent=2))


def _asked(task: Task, index: int, *, source: str, is_held_out: bool) -> tuple[Prompt, EnvironmentSpec]:

    spans = dict(task.spans)
    if source and (is_held_out or source not in spans):
        known = ", ".join(filter(None, spans)) or "none"
        raise ConfigError("--source", f"{source} is not a source of training prompts; there are: {known}")
    count = task.num_evaluation_prompts if is_held_out else len(spans[source]) if source else task.num_prompts
    if index >= count:
        raise ConfigError("--prompt", f"must be from 0 to {count - 1}; got {index}")
    index = spans[source][index] if source else index
    asked = task.evaluation_prompt(index) if is_held_out else task.prompt(index)
    if asked.refusal:
        raise PromptRefused("task.environment", asked.refusal, action="correct the environment, or the row")
    spec = task.environment_of(asked)
    if spec is None:
        labels = ", ".join(label for label, span in spans.items() if label and task.environment_at(span[0]))
        problem = f"the source of prompt {index} has no task.environment"
        raise ConfigError("--prompt", problem, action=f"set --source to one of these: {labels}")
    return asked, spec


def _type(asked: Prompt, spec: EnvironmentSpec, console: Console) -> Played:
    from heterorl.cli.env_episode import PersonPlayer, Screen, play

    def ask() -> str | None:
        try:
            return console.input("\nyou> ", markup=False)
        except EOFError:
            return None

    screen = Screen(console)
    screen.begin(asked, spec, num_tokens=None)
    played = play(spec, PersonPlayer(ask, has_tools=bool(spec.tools)), screen)
    screen.end(played)
    return played


def _draw(config: Any, task: Task, asked: Prompt, prompter: Prompter, screen: Screen) -> tuple[Int32Array, Played]:
    from heterorl.cli.env_episode import ModelPlayer, play
    from heterorl.common.generation.hf_engine import HfEngine
    from heterorl.common.model.model_loading import token_limits_at
    from heterorl.common.text.conversation import Conversations

    conversation = Conversations(task, prompter).of(asked)
    assert conversation is not None, "the prompt has an environment"
    ids, room = conversation.encode(asked), token_limits_at(config.model_dir)
    room.check(ids, config.sampling.max_new_tokens)
    engine = HfEngine(
        model_dir=config.model_dir, published_dtype=config.backend.published_dtype,
        compute_dtype=config.backend.compute_dtype, device=config.backend.device,
        sampling=config.sampling.semantics(), batch_rows=1, end_token_ids=prompter.end_token_ids,
        device_key="backend.device",
    )  # fmt: skip
    screen.begin(asked, conversation.spec, num_tokens=ids.size)
    player = ModelPlayer(engine, conversation, ids, room=room, config=config)
    played = play(conversation.spec, player, screen)
    screen.end(played)
    return ids, played
