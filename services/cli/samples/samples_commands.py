"""The command `heterorl samples`: a list, one sample, a file of many."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperGroup

from heterorl.cli.connection import Link, console_of, linked

if TYPE_CHECKING:
    from heterorl.common.rpc.client import CoordinatorClient
    from heterorl.common.types.sample import SampleFilter

ResultT = TypeVar("ResultT")
SHOWN = 20


class _ListByDefault(TyperGroup):
    """`heterorl samples HOST` is `heterorl samples list HOST`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command in front where none is."""
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


samples = typer.Typer(
    help="Completions of a run, to be read: `samples HOST`, `samples show ID HOST`, `samples export OUT HOST`.",
    cls=_ListByDefault,
)

Kind = Literal["consumed", "rejected", "dropped", "evaluation"]
SiteOption = Annotated[str, typer.Option(help="Only of this site.")]
KindOption = Annotated[
    Kind | None,
    typer.Option(
        help="`consumed`: trained on; `rejected`: failed a check; `dropped`: for another reason; or `evaluation`."
    ),
]
WhyOption = Annotated[str, typer.Option(help="Only kept for this reason, such as reward_mismatch or stale_at_lease.")]
VersionOption = Annotated[str, typer.Option(help="Only of version N, or of versions A:B.")]
MinOption = Annotated[float | None, typer.Option(help="The best completion has at least this reward.")]
MaxOption = Annotated[float | None, typer.Option(help="The worst completion has at most this reward.")]
CutOption = Annotated[
    bool | None, typer.Option("--truncated/--whole", help="With, or without, a completion cut at the length limit.")
]
TokenizerOption = Annotated[
    str, typer.Option(help="Directory or hub id: makes text of groups that the learner sent no text of.")
]
TokensOption = Annotated[bool, typer.Option("--tokens", help="With token ids, log-probs and log-ratios.")]


@samples.command("list")
@linked()
def list_(
    link: Link,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON object a completion, one a line, whole texts.")
    ] = False,
    site: SiteOption = "",
    kind: KindOption = None,
    why: WhyOption = "",
    version: VersionOption = "",
    min_reward: MinOption = None,
    max_reward: MaxOption = None,
    truncated: CutOption = None,
    limit: Annotated[int, typer.Option(help="Most samples; 0 is all.", min=0)] = SHOWN,
    before: Annotated[int, typer.Option(help="Only ids below: the next page.", min=0)] = 0,
    tokens: TokensOption = False,
    tokenizer: TokenizerOption = "",
) -> None:
    """List kept samples, the newest first: each is a prompt with its completions. Needs an operator's certificate."""
    from heterorl.cli.samples.sample_reader import decoder, read_samples, read_summaries
    from heterorl.cli.samples.sample_table import foot, samples_table
    from heterorl.common.types.sample import SampleFilter, SamplePage, rollout_json

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
        # What is kept in all, which a page without lines says too.
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
    number: Annotated[int, typer.Argument(metavar="ID", help="Number of the sample, as in the list.", min=1)],
    link: Link,
    rollout: Annotated[int | None, typer.Option(help="This completion alone, from 0.", min=0)] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object a completion.")] = False,
    tokens: TokensOption = False,
    tokenizer: TokenizerOption = "",
) -> None:
    """Show one sample whole. Tokens are red where the learner finds them less likely than the sampler did, or green."""
    from heterorl.cli.samples.sample_reader import decoder
    from heterorl.cli.samples.sample_table import sample_page
    from heterorl.common.errors import ConfigError
    from heterorl.common.types.sample import rollout_json

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
    """Write kept samples to a file, the oldest first: one row a completion. Parquet needs heterorl[parquet]."""
    from heterorl.cli.samples.sample_reader import check_target, decoder, exporting, read_samples
    from heterorl.common.types.sample import SamplePage

    check_target(out)
    wanted = _filter(site, kind, why, version, min_reward, max_reward, truncated)
    decode = decoder(tokenizer)

    async def write(run: CoordinatorClient) -> int:
        with exporting(out, with_tokens=tokens) as file:
            async for sample in read_samples(run, wanted, SamplePage(is_oldest_first=True)):
                file.add(decode(sample))
        return file.num_rows

    rows = link.ask(write)
    typer.echo(f"{rows} completions written to {out}")


def _filter(
    site: str,
    kind: Kind | None,
    why: str,
    version: str,
    min_reward: float | None,
    max_reward: float | None,
    truncated: bool | None,
) -> SampleFilter:
    from heterorl.common.errors import ConfigError
    from heterorl.common.types.sample import SampleFilter, SampleKind

    match = re.fullmatch(r"(\d{0,15})(:?)(\d{0,15})", version)
    if match is None or version == ":":
        raise ConfigError("--version", f"{version!r} is neither N nor A:B")
    first, colon, last = match.groups()
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
