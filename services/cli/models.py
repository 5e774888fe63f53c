"""The commands `heterorl evaluate` and `heterorl export`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from heterorl.cli.check_config import load_service
from heterorl.cli.connection import ADDRESS_VARIABLE, console_of, silence_grpc
from heterorl.common.errors import ConfigError
from heterorl.common.model.model_directory import check_model_dir
from heterorl.common.process import logs
from heterorl.common.process.config_file import quoted
from heterorl.common.types.common import Digest, amount, strict_json
from heterorl.common.types.evaluation import PromptResult

if TYPE_CHECKING:
    from heterorl.common.evaluation.evaluation_sets import EvaluationSetConfig
    from heterorl.common.tasks.task import Prompt
    from heterorl.common.weights.arena import Arena, Layout
    from heterorl.evaluation.evaluate_sets import Row
    from heterorl.evaluation.subject import Subject
    from heterorl.learner.export import VersionSource
    from heterorl.sampler.prompt_evaluator import SiteSet
    from heterorl.sampler.sampler_config import SamplerConfig

_ADDRESS = re.compile(r"^.+:[0-9]{1,5}$")


def evaluate(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|HOST:PORT",
            envvar=ADDRESS_VARIABLE,
            help="A Hugging Face directory or hub id, or the coordinator of a run to pull versions from.",
        ),
    ],
    version: Annotated[
        list[int] | None, typer.Option(help="Version of the run to pull; repeatable. Default: the newest.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A sampler's TOML file: its engine, sets and certificates.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one of its keys: `--set engine.device=cuda`.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Evaluate only this [[evaluation]] set; repeatable.")] = None,
    task: Annotated[
        str, typer.Option(help="Evaluate this task instead, every row of a file such as `jsonl:test.jsonl`.")
    ] = "",
    prompts: Annotated[
        int | None,
        typer.Option(help="Prompts of each set, the first ones; default: as configured, all of --task's file.", min=1),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Completions of each prompt; default: as configured.", min=1)
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Softmax temperature; 0 is greedy.", min=0)] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling: probability mass.", min=0.0, max=1.0)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum length of a completion, tokens.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results with every completion.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Evaluate a model or versions of a run on held-out prompts.

    It prints avg@n and pass@k, with intervals over prompts, also for each source of a mixture. It samples and scores as
    the run's own evaluations do, by the file's [[evaluation]] tables. Without them the set is the first 64 held-out
    prompts of its task, with the temperature, top_p and max_new_tokens that [sampling] states; temperature is else 0.

    Example: `heterorl evaluate run.example:50051 --version 0 --version 120 --config sampler.toml`
    """

    silence_grpc()
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        # Before hours of drawing.
        raise ConfigError("--out", f"cannot write {out}", action="name a file that this user can write")
    logs.configure(style="console", fields={"role": "evaluate"})
    overrides = [*(_in_place_of_the_files(task) if task else ()), *(set_ or ())]
    loaded: SamplerConfig = load_service("sampler", config, overrides)
    is_run = not Path(subject).exists() and _ADDRESS.match(subject) is not None
    if version and not is_run:
        raise ConfigError("--version", f"{subject} is a model, which has no versions", action="give host:port of a run")
    changes = {
        "num_prompts": prompts,
        "samples_per_prompt": samples,
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
    }
    from heterorl.evaluation.subject import configured, joined

    # The sets are the run's, also for another model.
    loaded = joined(loaded, subject if is_run else loaded.coordinator)
    sets = configured(loaded, names=only or (), every_row=bool(task), **changes)
    rows: list[Row] = []
    try:
        for row in _evaluate(
            subject, list(version or (-1,)), is_run=is_run, config=loaded, sets=sets, every_row=bool(task)
        ):
            rows.append(row)  # noqa: PERF402 - those before an error stay
    finally:
        # A later version may have been deleted after hours of drawing.
        if rows:
            _show(rows, out=out, is_json=json_)


def _show(rows: list[Row], *, out: Path | None, is_json: bool) -> None:
    from heterorl.evaluation.evaluate_sets import as_json, tables

    # Hours of drawing must be lost neither to a full disk nor to a closed terminal.
    try:
        if is_json:
            typer.echo(strict_json(as_json(rows, with_texts=False), indent=2))
        else:
            console = console_of()
            console.print(*tables(rows, width=console.width))
    finally:
        if out is not None:
            try:
                out.write_text(strict_json(as_json(rows, with_texts=True), indent=1), encoding="utf-8")
            except OSError as error:
                action = "name a directory with room that this user can write"
                raise ConfigError("--out", f"cannot write: {error}", action=action) from error


def _in_place_of_the_files(task: str) -> list[str]:
    """Overrides for a named task in place of a sampler file's own."""
    rows = [f"task.data.{key}" for key in ("where={}", "at_least={}", "at_most={}", "max_prompt_tokens=0", "files=[]")]
    keys = [f"task.name={quoted(task)}", 'task.evaluation_path=""', 'task.data.evaluation_split=""', *rows]
    return keys if task == "mixture" else [*keys, "task.sources=[]"]


def _evaluate(
    subject: str,
    versions: list[int],
    *,
    is_run: bool,
    config: SamplerConfig,
    sets: tuple[EvaluationSetConfig, ...],
    every_row: bool,
) -> Iterator[Row]:
    from heterorl.common.text.prompter import Prompter
    from heterorl.evaluation.evaluate_sets import evaluate_all
    from heterorl.evaluation.subject import open_model, open_versions
    from heterorl.sampler.prompt_evaluator import open_set

    # The set belongs to the run: the run's tokenizer counts its prompts, also for another model.
    by_subject = not config.model_dir and not is_run
    prompter = cache(lambda: Prompter.of(config.model_copy(update={"model_dir": subject}) if by_subject else config))

    def measure(of: Sequence[Prompt]) -> list[int | None]:
        return prompter().num_tokens(of)

    with ExitStack() as stack:
        opened = []
        for one in sets:
            _say(f"reading the set {one.name}")
            opened.append(open_set(one, measure=measure, every_row=every_row))
            stack.callback(opened[-1].task.close)
        if is_run:
            subjects = _announced(stack.enter_context(open_versions(subject, versions, config)), subject, versions)
        else:
            _say(f"loading {subject}")
            subjects = iter([stack.enter_context(open_model(subject, config))])
        # On standard error: standard output holds only JSON or tables.
        begin, advance = _progress()
        yield from evaluate_all(subjects, opened, on_begin=begin, on_prompt=advance)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _announced(subjects: Iterator[Subject], address: str, versions: Sequence[int]) -> Iterator[Subject]:
    for version in versions:
        _say(f"pulling {'the newest version' if version < 0 else f'version {version}'} from {address}")
        yield next(subjects)


def _progress() -> tuple[Callable[[str, SiteSet], None], Callable[[PromptResult], None]]:
    """Progress of sets: a line for each tenth of one."""
    name, done, total = "", 0, 1

    def begin(subject: str, of: SiteSet) -> None:
        nonlocal name, done, total
        name, done, total = f"{subject}, {of.name}", 0, of.draws.num_prompts
        _say(f"{name}: {amount(total, 'prompt')}, {amount(of.draws.num_samples, 'completion')} of each")

    def advance(_: PromptResult) -> None:
        nonlocal done
        done += 1
        if 10 * done // total > 10 * (done - 1) // total:
            _say(f"{name}: {done} of {total} prompts")

    return begin, advance


ExportDtype = Literal["bf16", "fp16", "fp32"]


def export(
    out: Annotated[Path, typer.Option(help="New directory to write.")],
    checkpoint: Annotated[Path | None, typer.Option(help="A learner's checkpoint or state_dir.")] = None,
    version: Annotated[
        int | None,
        typer.Option(help="Instead of a checkpoint: a version to pull from the run; -1 is the newest.", min=-1),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="With --version, a sampler's TOML file: coordinator, certificates, model_dir."
        ),
    ] = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            help="The model the run started from: its config and tokenizer are copied. Default: model_dir of --config."
        ),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the adapters, in peft's format.")] = False,
    dtype: Annotated[ExportDtype | None, typer.Option(help="Type of the weights; default: as published.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of one file of weights, such as 50GB.")] = "5GB",
) -> None:
    """Write a trained model as a Hugging Face directory; adapters are merged.

    It writes safetensors, config and tokenizer, and holds the weights in memory once. The directory appears when it is
    complete.

    Examples: `heterorl export --checkpoint learner/ --model-dir models/start --out trained`,
    `heterorl export --version 41 --config sampler.toml --out trained`
    """

    if (checkpoint is None) == (version is None):
        raise ConfigError("--checkpoint", "give either a checkpoint or a --version of a run")
    pulled: list[int] = []
    with ExitStack() as stack:
        source: Path | VersionSource
        if version is not None:
            model, source = stack.enter_context(_version_source(version, config, model_dir, out, pulled.append))
        elif model_dir is None or checkpoint is None:
            raise ConfigError(
                "--model-dir", "a checkpoint has no configuration or tokenizer", action="name the run's model_dir"
            )
        else:
            model, source = str(model_dir), checkpoint
        from heterorl.learner.export import export_model

        manifest = export_model(
            model_dir=model,
            source=source,
            out_dir=out,
            adapter_only=adapter,
            dtype=dtype,
            max_shard_size=max_shard_size,
        )
    of = f" of version {manifest.version}, step {manifest.step}," if manifest else ""
    of = of or "".join(f" of version {number}" for number in pulled)
    console_of().print(f"model{of} written to {out}", soft_wrap=True)


@contextmanager
def _version_source(
    version: int, config: Path | None, model_dir: Path | None, out: Path, note: Callable[[int], None]
) -> Iterator[tuple[str, VersionSource]]:
    """Start model and version of the run that a sampler's file names.
    `note` gets the version's number as it is pulled."""
    from tempfile import TemporaryDirectory

    from heterorl.evaluation.subject import pull_version, stated_contract
    from heterorl.learner.export import VersionSource

    silence_grpc()
    logs.configure(style="console", fields={"role": "export"})
    # A variant is rounded.
    overrides = ['variant=""', *([] if model_dir is None else [f"model_dir={quoted(str(model_dir))}"])]
    loaded: SamplerConfig = load_service("sampler", config, overrides)
    check_model_dir(loaded.model_dir)
    contract = stated_contract(loaded)
    if loaded.lora.is_on and loaded.lora.settings(Digest(contract.lora.base_digest)) != contract.lora:
        raise ConfigError("lora", "the run has other adapters", action="copy [lora] from a file of the run")
    place = next(parent for parent in out.resolve().parents if parent.is_dir())
    # A snapshot may be larger than the directory of temporary files.
    with TemporaryDirectory(prefix=".heterorl-export-", dir=place) as spool:

        def pull(layout: Layout) -> Arena:
            _say(f"pulling {'the newest version' if version < 0 else f'version {version}'} from {loaded.coordinator}")
            found = pull_version(loaded.coordinator, version, loaded, layout=layout, spool=Path(spool))
            _say(f"version {found.version} is verified")
            note(found.version)
            return found.arena

        yield loaded.model_dir, VersionSource(layout_id=contract.layout_id, lora=contract.lora, pull=pull)
