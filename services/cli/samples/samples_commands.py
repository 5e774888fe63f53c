"""The command `heterorl samples`: list, show and export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from heterorl.cli.connection import Link, console_of, linked
from heterorl.common.errors import ConfigError
from heterorl.common.types.common import amount
from heterorl.common.types.sample import REASONS, SampleFilter, SampleKind, SamplePage, rollout_json

if TYPE_CHECKING:
    from heterorl.common.rpc.client import CoordinatorClient

ResultT = TypeVar("ResultT")
SHOWN = 20


samples = typer.Typer(help="Read completions of a run: list, show, export.", no_args_is_help=True)

Kind = Literal["consumed", "rejected", "dropped", "evaluation"]
SiteOption = Annotated[str, typer.Option(help="Only this site.")]
KindOption = Annotated[
    Kind | None,
    typer.Option(
        help="`consumed`: trained on. `rejected`: failed a check. `dropped`: not trained on for another reason. "
        "`evaluation`: held out."
    ),
]
WhyOption = Annotated[
    str, typer.Option(help="Only samples kept for this reason, such as reward_mismatch or stale_at_lease.")
]
VersionOption = Annotated[str, typer.Option(help="Only version N, or versions A:B.")]
MinOption = Annotated[float | None, typer.Option(help="Only if the best completion has at least this reward.")]
MaxOption = Annotated[float | None, typer.Option(help="Only if the worst completion has at most this reward.")]
CutOption = Annotated[
    bool | None,
    typer.Option("--truncated/--whole", help="Only with, or only without, a completion cut at the length limit."),
]
TokenizerOption = Annotated[
    str, typer.Option(help="Directory or hub id of a tokenizer, for groups without text from the learner.")
]
TokensOption = Annotated[bool, typer.Option("--tokens", help="Include token ids, log-probs and log-ratios.")]


@samples.command("list")
@linked()
def list_(
    link: Link,
    json_: Annotated[bool, typer.Option("--json", help="One JSON line for each completion, with whole texts.")] = False,
    site: SiteOption = "",
    kind: KindOption = None,
    why: WhyOption = "",
    version: VersionOption = "",
    min_reward: MinOption = None,
    max_reward: MaxOption = None,
    truncated: CutOption = None,
    limit: Annotated[int, typer.Option(help="Maximum number of samples; 0 is all.", min=0)] = SHOWN,
    before: Annotated[int, typer.Option(help="Only smaller ids, for the next page.", min=0)] = 0,
    tokens: TokensOption = False,
    tokenizer: TokenizerOption = "",
) -> None:
    """List kept samples, newest first.

    A sample is a prompt with its completions. The command needs an operator's certificate.

    The column `lost` counts lost members; `heterorl view` filters by it. `--why lost_members` finds groups that were
    dropped for them.

    Example: `heterorl samples list run.example:50051 --kind rejected`
    """
    from heterorl.cli.samples.sample_reader import decoder, read_samples, read_summaries
    from heterorl.cli.samples.sample_table import foot, samples_table

    _check_json(json_, {"--tokens": tokens, "--tokenizer": tokenizer})
    wanted = _filter(site, kind, why, version, min_reward, max_reward, truncated)
    page = SamplePage(before=before)
    decode = decoder(tokenizer)

    async def print_objects(run: CoordinatorClient) -> None:
        async for sample in read_samples(run, wanted, page, most=limit):
            read = decode(sample)
            for number in range(len(read.rollouts)):
                typer.echo(json.dumps(rollout_json(read, number, with_tokens=tokens), allow_nan=False))

    async def print_table(run: CoordinatorClient) -> None:
        lines = [line async for some in read_summaries(run, wanted, page, most=limit) for line in some]
        # Totals of the ring, for the last line.
        found = await run.list_samples(wanted=SampleFilter(), page=SamplePage(limit=1))
        console = console_of()
        if lines:
            console.print(samples_table(lines))
        older = lines[-1].id if limit and len(lines) == limit else 0
        console.print(foot(found, shown=len(lines), before=older), soft_wrap=True)

    link.ask(print_objects if json_ else print_table)


@samples.command("show")
@linked()
def show(
    number: Annotated[int, typer.Argument(metavar="ID", help="Id of the sample, from the list.", min=1)],
    link: Link,
    rollout: Annotated[int | None, typer.Option(help="Only this completion, counted from 0.", min=0)] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON line for each completion.")] = False,
    tokens: TokensOption = False,
    tokenizer: TokenizerOption = "",
) -> None:
    """Show one whole sample, with tokens coloured by log-ratio.

    A token is red if it is clearly less likely to the learner than to the sampler, green if clearly more likely.
    """
    from heterorl.cli.samples.sample_reader import decoder
    from heterorl.cli.samples.sample_table import sample_page

    _check_json(json_, {"--tokens": tokens})
    decode = decoder(tokenizer)
    sample = decode(link.ask(lambda run: run.get_sample(sample_id=number)))
    if rollout is not None and rollout >= len(sample.rollouts):
        raise ConfigError("--rollout", f"sample {number} has completions 0 to {len(sample.rollouts) - 1}")
    if json_:
        for index in range(len(sample.rollouts)) if rollout is None else (rollout,):
            typer.echo(json.dumps(rollout_json(sample, index, with_tokens=tokens), allow_nan=False))
    else:
        console_of().print(*sample_page(sample, only=rollout))


@samples.command("export")
@linked()
def export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: OUT.jsonl or OUT.parquet.")],
    link: Link,
    site: SiteOption = "",
    kind: KindOption = None,
    why: WhyOption = "",
    version: VersionOption = "",
    min_reward: MinOption = None,
    max_reward: MaxOption = None,
    truncated: CutOption = None,
    tokens: TokensOption = False,
    tokenizer: TokenizerOption = "",
) -> None:
    """Write kept samples to a file, oldest first.

    Each completion is a row. Parquet needs the extra `parquet`.

    Example: `heterorl samples export run.parquet run.example:50051 --min-reward 1`
    """
    from heterorl.cli.samples.sample_reader import check_target, decoder, exporting, read_samples

    check_target(out)
    wanted = _filter(site, kind, why, version, min_reward, max_reward, truncated)
    decode = decoder(tokenizer)

    async def write(run: CoordinatorClient) -> int:
        with exporting(out, with_tokens=tokens) as file, console_of(stderr=True).status("no completion yet") as shown:
            async for sample in read_samples(run, wanted, SamplePage(is_oldest_first=True)):
                file.add(decode(sample))
                shown.update(f"{amount(file.num_rows, 'completion')} so far")
        return file.num_rows

    rows = link.ask(write)
    typer.echo(f"{amount(rows, 'completion')} written to {out}")


def _check_json(json_: bool, given: dict[str, Any]) -> None:

    for option, value in given.items():
        if value and not json_:
            raise ConfigError(option, "needs --json", action="add it")


def _filter(
    site: str,
    kind: Kind | None,
    why: str,
    version: str,
    min_reward: float | None,
    max_reward: float | None,
    truncated: bool | None,
) -> SampleFilter:

    if why and why not in REASONS:
        raise ConfigError("--why", f"{why!r} is not a reason", action=f"one of {', '.join(REASONS)}")
    match = re.fullmatch(r"(\d{0,15})(:?)(\d{0,15})", version)
    if match is None or version == ":":
        raise ConfigError(
            "--version", f"{version!r} is not N or A:B", action="give one version, or first and last as in 3:7"
        )
    first, colon, last = match.groups()
    if first and last and int(first) > int(last):
        raise ConfigError("--version", f"{version!r} ends before it begins", action=f"give {last}:{first}")
    return SampleFilter(
        site=site,
        kind=None if kind is None else SampleKind(kind),
        kept_because=why,
        first_version=int(first) if first else None,
        last_version=int(last) if last else int(first) if first and not colon else None,
        min_reward=min_reward,
        max_reward=max_reward,
        is_truncated=truncated,
    )
