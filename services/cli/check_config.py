"""The command `heterorl check-config`, and the configuration schema of each service."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import heterorl
from heterorl.cli.connection import console_of
from heterorl.common.errors import ConfigError, DependencyMissing, HeterorlError, OperatorError
from heterorl.common.identity.tls import ServerTlsConfig, check_tls
from heterorl.common.process.address import addresses
from heterorl.common.process.config_file import Config, InvalidConfig, all_keys, flatten, load, read_tables
from heterorl.common.types.common import amount
from heterorl.common.types.run import facts_of

Service = Literal["coordinator", "learner", "sampler", "relay"]
_SCHEMAS: dict[Service, tuple[str, str]] = {
    "sampler": ("heterorl.sampler.sampler_config", "SamplerConfig"),
    "learner": ("heterorl.learner.learner_config", "LearnerConfig"),
    "coordinator": ("heterorl.coordinator.coordinator_config", "CoordinatorConfig"),
    "relay": ("heterorl.relay.relay_config", "RelayConfig"),
}


def schema_of(service: Service) -> type[Config]:
    """The configuration class of a service, imported on demand."""
    module, name = _SCHEMAS[service]
    schema: type[Config] = getattr(importlib.import_module(module), name)
    return schema


def load_service(service: Service, path: Path | None, overrides: Sequence[str] = ()) -> Any:
    """Read, merge and check a service's configuration.

    Raises InvalidConfig for unknown keys and bad values, ConfigError for a file that cannot be read or is another
    service's.
    """
    try:
        return load(schema_of(service), path, overrides)
    except InvalidConfig as error:
        table, _ = read_tables(path, ())
        other = owner(table)
        if path is None or other == service or 2 * num_unknown(other, table) >= num_unknown(service, table):
            raise
        action = f"pass it to `{other}`, or pass the {service}'s own file"
        raise ConfigError("--config", f"{path} has the keys of a {other}, not of a {service}", action=action) from error


def owner(table: dict[str, Any]) -> Service:
    """The service that knows most keys of a table; `_SCHEMAS` breaks ties."""
    return min(_SCHEMAS, key=lambda service: num_unknown(service, table))


def num_unknown(service: Service, table: dict[str, Any]) -> int:
    """Number of keys of a table that a service does not know."""
    known = set(all_keys(schema_of(service)))
    return sum(key not in known for key in flatten(table))


ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the service.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one key: `--set section.key=value`.")]
NUM_COUNTED = 5_000
"""Prompts whose tokens are counted, spread evenly over the task."""
NUM_RESET = 64
"""The same for a task with an environment, where each prompt starts an episode."""


def check_config(
    service: Service,
    config: ConfigOption = None,
    set_: SetOption = None,
    keys_only: Annotated[
        bool, typer.Option("--keys-only", help="Check only keys and values; for a file of systemd or another machine.")
    ] = False,
    prompt: Annotated[int | None, typer.Option(help="Show the prompt that a log line numbers.", min=0)] = None,
) -> None:
    """Check a configuration without starting the service.

    It checks every key and the certificates. It loads the task, its data, the tokenizer and the model's configuration.
    It computes rewards of each source, and takes a step in each environment. It tries a custom loss and the engine's
    package. It reads no weights. It may ask the network for a model or data set of the hub, for a reward service, and
    for an environment elsewhere.

    Exit code 0: valid. 2: not valid; each problem is one line.

    Example: `heterorl check-config learner --config learner.toml`
    """
    loaded = load_service(service, config, set_ or ())
    said: list[str] = []
    found = list(problems(service, loaded, is_loading=not keys_only, say=said.append, shown=prompt))
    if len(found) == 1:
        raise found[0]
    if found:
        raise OperatorError("\n".join([f"{len(found)} problems:", *map(str, found)]))
    console = console_of()
    if missing := left_to_the_run(service, loaded):
        console.print(f"taken from the run at the start: {', '.join(missing)}", soft_wrap=True)
        console.print(f"accepted besides built-in tasks: {', '.join(loaded.join.accept) or 'nothing'}", soft_wrap=True)
    for line in [f"{service} configuration is valid", *said]:
        console.print(line, soft_wrap=True)
    if service == "learner":
        run = {"heterorl_version": heterorl.__version__, "config": loaded.model_dump(mode="json")}
        for name, value in facts_of(run).items():
            console.print(f"  {name}: {value}", soft_wrap=True)


def left_to_the_run(service: Service, config: Any) -> tuple[str, ...]:
    """Keys that a sampler with [join] takes from the run."""
    if service != "sampler":
        return ()
    from heterorl.sampler.adoption import missing_keys

    return missing_keys(config)


def check_link(service: Service, config: Any) -> None:
    """Refuse a link without the certificates it needs; raises ConfigError."""
    keys = {"coordinator": ("listen",), "relay": ("listen", "coordinator")}.get(service, ("coordinator",))
    for key in keys:
        for each in addresses(getattr(config, key)):
            check_tls(config.tls, key=key, address=each)


def check_files(service: Service, config: Any) -> None:
    """Refuse unusable files, and another node's; raises ConfigError."""
    from heterorl.common.identity.credentials import MaterialFiles

    if not config.tls.insecure:
        found = MaterialFiles(config.tls).current().identity
        site = getattr(config, "site", found.site)
        if (found.role, found.site) != (service, site):
            problem = f"names {found.uri}; this is a {service}" + (f" of site {site}" if site != found.site else "")
            raise ConfigError("tls.cert", problem, action=f"name files of `heterorl certs issue {service} SITE`")


_STATE: dict[Service, str] = {"coordinator": "data_dir", "relay": "cache_dir"}
"""Keys of the directory of state; `state_dir` for the others."""


def check_state(service: Service, config: Any) -> None:
    """Refuse a file in place of the state's directory; raises ConfigError."""
    key = _STATE.get(service, "state_dir")
    path = getattr(config, key).absolute()
    # The service may run as another user.
    with suppress(PermissionError):
        if file := next((each for each in (path, *path.parents) if each.is_file()), None):
            raise ConfigError(key, f"{file} is a file, not a directory", action="name a directory")


def problems(
    service: Service, config: Any, *, is_loading: bool = True, say: Callable[[str], object] = lambda _: None,
    shown: int | None = None,
) -> Iterator[HeterorlError]:  # fmt: skip
    """Yield problems that prevent a start; `say` gets lines about the task."""
    link = [*_problem(check_link, service, config)]
    yield from link
    if is_loading and not link:
        yield from _problem(check_files, service, config)
        if isinstance(config.tls, ServerTlsConfig) and config.tls.revoked:
            from heterorl.common.identity.credentials import Revocations

            yield from _problem(Revocations, Path(config.tls.revoked))
    if is_loading:
        yield from _problem(check_state, service, config)
    if is_loading and service == "learner" and config.signing_key is not None:
        from heterorl.common.identity.signing import load_signer

        yield from _problem(load_signer, config.signing_key)
    if service == "sampler":
        from heterorl.common.evaluation.evaluation_sets import ignored_draws

        if ignored := ignored_draws(config.evaluation):
            say(ignored)
    if not is_loading or service in ("coordinator", "relay"):
        return
    missing = [(name, extra) for name, extra in _packages(service, config) if importlib.util.find_spec(name) is None]
    yield from (DependencyMissing(name.replace("_", "-"), extra) for name, extra in missing)
    if ("torch", service) in missing or ("transformers", service) in missing:
        return
    kind = (config.engine if service == "sampler" else config.backend).kind
    if kind in ("vllm", "deepspeed"):
        from heterorl.common.model.library_versions import check_package

        yield from _problem(check_package, kind)
    if service == "learner":
        from heterorl.learner.train.custom_loss_check import check_custom_loss

        yield from _problem(lambda: check_custom_loss(config.loss))
    from heterorl.common.text.prompter import Prompter

    prompter: list[Any] = []
    yield from _problem(lambda: prompter.append(Prompter.of(config)))
    if "task" in left_to_the_run(service, config):
        return
    from heterorl.common.tasks.task_config import build_task

    task: list[Any] = []
    measure = prompter[0].num_tokens if prompter else None
    # Without notes of commits, a branch of the hub is read at its newest commit.
    yield from _problem(lambda: task.append(build_task(config.task, measure=measure)))
    if task:
        if shown is not None:
            yield from _problem(lambda: say(text_of(task[0], shown)))
        if prompter:
            say(counted(task[0], prompter[0], config))
        yield from _problem(_try_reward, service, config, task[0], prompter[0] if prompter else None, say)
    if service == "sampler" and prompter:
        for each in config.evaluation:
            yield from _problem(_try_set, each, prompter[0])


def _problem(step: Callable[..., object], *arguments: object) -> Iterator[HeterorlError]:
    try:
        step(*arguments)
    except HeterorlError as error:
        yield error


def _packages(service: str, config: Any) -> Iterator[tuple[str, str]]:
    """Packages that the configuration needs, with the extra that installs each."""
    yield from (("torch", service), ("transformers", service))
    if service == "learner" and config.backend.kind == "torch" and config.backend.liger:
        yield "liger_kernel", "gpu"
    if config.tracing.otlp_endpoint:
        yield "opentelemetry", "otel"


def counted(task: Any, prompter: Any, config: Any) -> str:
    """Number of prompts, the longest of a sample, and those too long."""
    from heterorl.common.tasks.sources.row_reader import lengths_of

    num = NUM_RESET if task.environments else NUM_COUNTED
    indices = sorted({number * task.num_prompts // num for number in range(num)})
    lengths = lengths_of([task.prompt(index) for index in indices], functools.partial(_num_tokens, task, prompter))
    longest = int(lengths.argmax())
    of = f"the longest of {len(indices)}" if len(indices) < task.num_prompts else "the longest"
    new, room = config.sampling.max_new_tokens, _positions(config)
    num_long = int((lengths + new > room).sum()) if room else 0
    too_long = f"; {num_long} of {len(indices)} are too long for {room} tokens with {new} new ones: they make no group"
    held_out = getattr(task, "held_out_words", f"{task.num_evaluation_prompts} held out")
    return (
        f"{amount(task.num_prompts, 'prompt')} to train on, {held_out}; {of} has "
        f"{amount(int(lengths[longest]), 'token')} with its template (prompt {indices[longest]})"
        f"{too_long if num_long else ''}"
    )


def text_of(task: Any, index: int) -> str:
    """A training prompt with its source; raises ConfigError without such a prompt."""

    if index >= task.num_prompts:
        raise ConfigError("--prompt", f"must be from 0 to {task.num_prompts - 1}; got {index}")
    label, prompt = task.source_of(index), task.prompt(index)
    refusal = f" (refused: {prompt.refusal})" if prompt.refusal else ""
    return f"prompt {index}{label and f' of {label}'}: {prompt.shown}{refusal}"


def _positions(config: Any) -> int:
    """Tokens of the model's context; 0 if unbounded or unreadable."""
    from heterorl.common.model.model_loading import token_limits_at

    with suppress(ConfigError):
        return token_limits_at(config.model_dir).positions
    return 0


def _num_tokens(task: Any, prompter: Any, prompts: Sequence[Any]) -> list[int | None]:
    """Tokens of each prompt with the tools of its environment."""

    tools = [getattr(task.environment_of(prompt), "tools", ()) for prompt in prompts]
    if not any(tools):
        return list(prompter.num_tokens(prompts))
    return [prompter.num_tokens([prompt], tools=each)[0] for prompt, each in zip(prompts, tools, strict=True)]


def _try_set(config: Any, prompter: Any) -> None:
    """Open a set of [[evaluation]] as the sampler's start does."""
    from heterorl.common.text.conversation import try_reward
    from heterorl.sampler.prompt_evaluator import naming_set, open_set

    with naming_set(config.name):
        opened = open_set(config, measure=prompter.num_tokens)
        try:
            opened.played(prompter)
            try_reward(opened.task, prompter)
        finally:
            opened.task.close()


def _try_reward(service: str, config: Any, task: Any, prompter: Any, say: Callable[[str], object]) -> None:
    from heterorl.common.text.conversation import try_answers, try_reward, try_task
    from heterorl.learner.checks.reward_checks import check_trust, tried_here

    if service == "learner":
        if config.verification.recompute_rewards:
            check_trust(task, config.verification.trust_rewards_of)
        task = tried_here(task, asks_others=bool(config.evaluation.every_versions))
    if prompter is not None:
        try_task(config, task, prompter, say=say)
    else:
        try_answers(task)
        try_reward(task, None, say=say)
