"""The configuration of a service, by the service's name: its schema, whose file one is, and `heterorl check-config`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import heterorl
from heterorl.cli.connection import console_of
from heterorl.common.errors import ConfigError, DependencyMissing, HeterorlError, OperatorError
from heterorl.common.identity.tls import check_tls
from heterorl.common.process.config import Config, InvalidConfig, all_keys, flatten, load, read_tables
from heterorl.common.types.run import facts_of

Service = Literal["coordinator", "learner", "sampler", "relay"]
_SCHEMAS: dict[Service, tuple[str, str]] = {
    "sampler": ("heterorl.sampler.config", "SamplerConfig"),
    "learner": ("heterorl.learner.config", "LearnerConfig"),
    "coordinator": ("heterorl.coordinator.config", "CoordinatorConfig"),
    "relay": ("heterorl.relay.config", "RelayConfig"),
}


def schema_of(service: Service) -> type[Config]:
    """The schema of a service's configuration; imported when it is asked for."""
    module, name = _SCHEMAS[service]
    schema: type[Config] = getattr(importlib.import_module(module), name)
    return schema


def load_service(service: Service, path: Path | None, overrides: Sequence[str] = ()) -> Any:
    """Read, merge and check a service's configuration.

    Raises:
        InvalidConfig: keys are unknown, or values out of bounds; names every one by its path.
        ConfigError: a file or an override cannot be read, or the file is another service's.
    """
    try:
        return load(schema_of(service), path, overrides)
    except InvalidConfig as error:
        table, _ = read_tables(path, ())
        other = owner(table)
        if path is None or other == service or 2 * num_unknown(other, table) >= num_unknown(service, table):
            raise
        action = f"name it to {other}, or give {service} its own"
        raise ConfigError("--config", f"{path} is the file of a {other}, not of a {service}", action=action) from error


def owner(table: dict[str, Any]) -> Service:
    """The service that knows most keys of a table; of several a sampler, then a learner, a coordinator, a relay."""
    return min(_SCHEMAS, key=lambda service: num_unknown(service, table))


def num_unknown(service: Service, table: dict[str, Any]) -> int:
    """How many keys of a table a service does not know."""
    known = set(all_keys(schema_of(service)))
    return sum(key not in known for key in flatten(table))


NUM_COUNTED = 5_000
"""Prompts whose tokens are counted, evenly spread over the task."""
NUM_RESET = 64
"""The same of a task with an environment, where each begins an episode."""


def check_config(
    service: Service,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the service.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key: `--set section.key=value`.")
    ] = None,
    keys_only: Annotated[
        bool, typer.Option("--keys-only", help="Check keys and values alone; for a file of another machine.")
    ] = False,
) -> None:
    """Check a configuration without starting anything: every key, and what the service would load.

    That is task, data, one reward, a step of each environment behind the model's template, a loss of your own,
    tokenizer, the model's configuration and the engine's package; it reads no weights. Over the network it asks the hub
    alone, for a model that is not here.

    Exit code 0: it is valid. 2: it is not; each problem is one line.
    """
    loaded = load_service(service, config, set_ or ())
    said: list[str] = []
    found = list(problems(service, loaded, is_loading=not keys_only, say=said.append))
    if len(found) == 1:
        raise found[0]
    if found:
        raise OperatorError("\n".join([f"{len(found)} problems:", *map(str, found)]))
    console = console_of()
    if missing := left_to_the_run(service, loaded):
        console.print(f"asked of the run at the start: {', '.join(missing)}", soft_wrap=True)
        console.print(f"accepted beside built-in tasks: {', '.join(loaded.join.accept) or 'nothing'}", soft_wrap=True)
    for line in [f"{service} configuration is valid", *said]:
        console.print(line, soft_wrap=True)
    if service == "learner":
        run = {"heterorl_version": heterorl.__version__, "config": loaded.model_dump(mode="json")}
        for name, value in facts_of(run).items():
            console.print(f"  {name}: {value}", soft_wrap=True)


def left_to_the_run(service: Service, config: Any) -> tuple[str, ...]:
    """The keys that a sampler with a [join] section takes from the run it joins."""
    if service != "sampler":
        return ()
    from heterorl.sampler.adoption import missing_keys

    return missing_keys(config)


def check_link(service: Service, config: Any) -> None:
    """Say at once, before a model is loaded, that a link would be refused.

    Raises:
        ConfigError: it would.
    """
    keys = {"coordinator": ("listen",), "relay": ("listen", "coordinator")}.get(service, ("coordinator",))
    for key in keys:
        check_tls(config.tls, key=key, address=getattr(config, key))


def problems(
    service: Service, config: Any, *, is_loading: bool = True, say: Callable[[str], object] = lambda _: None
) -> Iterator[HeterorlError]:
    """What would keep a service from starting, one after another; `say` is told of the prompts: how many, how long."""
    yield from _problem(check_link, service, config)
    if not is_loading:
        return
    if service in ("coordinator", "relay"):
        return
    for package, extra in _packages(service, config):
        if importlib.util.find_spec(package) is None:
            yield DependencyMissing(package.replace("_", "-"), extra)
    kind = (config.engine if service == "sampler" else config.backend).kind
    if kind in ("vllm", "deepspeed"):
        yield from _problem(_check_engine, kind)
    if service == "learner" and importlib.util.find_spec("torch") is not None:
        yield from _problem(_try_loss, config)
    prompter: list[Any] = []
    if importlib.util.find_spec("transformers") is not None:
        yield from _problem(lambda: prompter.append(_load_tokenizer(config)))
    if "task" in left_to_the_run(service, config):
        return
    task: list[Any] = []
    yield from _problem(lambda: task.append(_build_task(config, prompter[0] if prompter else None)))
    if task:
        if prompter:
            say(counted(task[0], prompter[0]))
        yield from _problem(_try_reward, service, config, task[0], prompter[0] if prompter else None)


def _problem(step: Callable[..., object], *arguments: object) -> Iterator[HeterorlError]:
    try:
        step(*arguments)
    except HeterorlError as error:
        yield error


def _packages(service: str, config: Any) -> Iterator[tuple[str, str]]:
    """The packages that the configuration asks for, and the extras that bring them."""
    yield from (("torch", service), ("transformers", service))
    if service == "learner" and config.backend.kind == "torch" and config.backend.liger:
        yield "liger_kernel", "gpu"
    if config.tracing.otlp_endpoint:
        yield "opentelemetry", "otel"


def _check_engine(kind: str) -> None:
    from heterorl.common.model.library_versions import check_package

    check_package(kind)


def _try_loss(config: Any) -> None:
    from heterorl.learner.train.custom_loss_check import check_custom_loss

    check_custom_loss(config.loss)


def _build_task(config: Any, prompter: Any) -> Any:
    from heterorl.common.tasks.task_config import build_task

    # Nothing is written: a branch of the hub is where it is today.
    return build_task(config.task, measure=None if prompter is None else prompter.num_tokens)


def counted(task: Any, prompter: Any) -> str:
    """How many prompts a task has, and the longest of some that are spread over it."""
    from heterorl.common.tasks.environments.environment_task import environments_of
    from heterorl.common.tasks.sources.cells import lengths_of

    num = NUM_RESET if environments_of(task) else NUM_COUNTED
    indices = sorted({number * task.num_prompts // num for number in range(num)})
    lengths = lengths_of([task.prompt(index) for index in indices], prompter.num_tokens)
    longest = int(lengths.argmax())
    of = f"the longest of {len(indices)}" if len(indices) < task.num_prompts else "the longest"
    return (
        f"{task.num_prompts} prompts to train on, {task.num_evaluation_prompts} held out; {of} has "
        f"{lengths[longest]} tokens with its template (prompt {indices[longest]})"
    )


def _load_tokenizer(config: Any) -> Any:
    from heterorl.common.text.prompter import Prompter

    return Prompter(
        config.model_dir,
        use_chat_template=config.use_chat_template,
        template_arguments=config.chat_template_arguments,
    )


def _try_reward(service: str, config: Any, task: Any, prompter: Any) -> None:
    from heterorl.common.model.model_loading import token_limits_at
    from heterorl.common.text.conversation import open_conversations, try_answers, try_prompts, try_reward
    from heterorl.learner.checks.reward_checks import check_trust, tried_here

    if service == "learner":
        if config.verification.recompute_rewards:
            check_trust(task, config.verification.trust_rewards_of)
        task = tried_here(task, asks_others=bool(config.evaluation.every_versions))
    if prompter is not None:
        try_prompts(
            task, prompter, room=token_limits_at(config.model_dir), max_new_tokens=config.sampling.max_new_tokens
        )
    try_answers(task)
    if prompter is not None:
        ends = config.sampling.end_token_ids or prompter.end_token_ids
        open_conversations(task, prompter, end_token_ids=ends, tool_parser=config.task.tool_parser)
    try_reward(task, prompter)
