"""A bounded table of kept samples: of the newest prompts that were trained on, the best and the worst completion."""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.common.api import SamplesApi
from heterorl.common.errors import UnknownSample
from heterorl.common.types.sample import MAX_PAGE, Sample, SampleFilter, SampleKind, SamplePage, SampleRollout

MAX_TEXT = 4000
"""Characters of a prompt or a completion; the rest is cut."""
MAX_PAGES = 20
"""Pages that are looked through for samples that have texts."""
COLUMNS = ("version", "site", "prompt", "completion", "reward", "reward_parts", "tokens", "finish_reason")

Cell = str | float | int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Samples as they were when `version` was the newest; rows as COLUMNS names them."""

    version: int
    rows: tuple[tuple[Cell, ...], ...]


async def read_table(api: SamplesApi, *, version: int, most: int) -> TextTable | None:
    """The newest samples that were trained on, of at most `most` prompts; None where no texts are kept."""
    rows: list[tuple[Cell, ...]] = []
    left, page = most, SamplePage(limit=min(most, MAX_PAGE))
    for _ in range(MAX_PAGES):
        found = await api.list_samples(wanted=SampleFilter(kind=SampleKind.CONSUMED), page=page)
        for summary in found.samples:
            if not summary.has_texts or left == 0:
                continue
            try:
                rows += sample_rows(await api.get_sample(sample_id=summary.id))
            except UnknownSample:
                # It made room for a newer one meanwhile.
                continue
            left -= 1
        if left == 0 or found.next_page is None:
            break
        page = found.next_page
    return TextTable(version=version, rows=tuple(rows)) if rows else None


def sample_rows(sample: Sample) -> list[tuple[Cell, ...]]:
    """The best completion of a sample and the worst, lost members apart; one row where there is no difference."""
    ordered = sorted(sample.rollouts, key=lambda rollout: (rollout.is_lost, -rollout.reward))
    ordered = [rollout for rollout in ordered if not rollout.is_lost] or ordered[:1]
    chosen = [ordered[0], ordered[-1]] if ordered[-1].reward < ordered[0].reward else ordered[:1]
    return [
        (
            sample.summary.version,
            str(sample.summary.site),
            cut(sample.prompt),
            cut(written(rollout)),
            rollout.reward,
            ", ".join(f"{part.name} {part.value:g}" for part in rollout.reward_parts),
            rollout.num_drawn,
            rollout.finish_reason.value,
        )
        for rollout in chosen
    ]


def written(rollout: SampleRollout) -> str:
    """A completion's text; of several turns each below who wrote it."""
    turns = [f"[{part.writer}]\n{text}" for part, text in rollout.turn_texts]
    return "\n".join(turns) or rollout.completion


def cut(text: str) -> str:
    """The first MAX_TEXT characters, and how many there were."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"
