"""Groups of assignments, drawn by the sampler's own code in one process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Request, generate_all
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Digest, SamplingSemantics
from heterorl.common.types.rollout import Group, WorkAssignment
from heterorl.coordinator.groups.schedule import prompt_of, seed_of
from heterorl.sampler.rollout.episode_runner import EpisodeRunner, Turn
from heterorl.sampler.rollout.group_builder import GroupBuilder


def seeded_engine(
    *, model_dir: str, prompter: Prompter, sampling: SamplingSemantics, compute_dtype: str = "fp32"
) -> HfEngine:
    """An engine whose draws can be repeated, with the model's own weights as version 0."""
    engine = HfEngine(
        model_dir=model_dir,
        published_dtype="bf16",
        compute_dtype=compute_dtype,
        device="cpu",
        sampling=sampling,
        batch_rows=256,
        end_token_ids=prompter.end_token_ids,
        is_seeded=True,
    )
    arena = engine.base()
    assert arena is not None, "nothing was loaded yet"
    engine.load(arena, 0)
    return engine


def assignments(numbers: Sequence[int], *, num_prompts: int, seed: int, draws: int) -> list[WorkAssignment]:
    """The assignments with these numbers, as the coordinator grants them; `draws` is the seed of their draws."""
    return [
        WorkAssignment(
            id=number,
            prompt_index=prompt_of(number, num_prompts=num_prompts, seed=seed),
            seed=seed_of(number, seed=draws),
            lease_s=0.0,
        )
        for number in numbers
    ]


def generated(
    builder: GroupBuilder, engine: HfEngine, work: Sequence[WorkAssignment], *, state_root: Digest, first: int = 1
) -> list[Group]:
    """A group of each assignment, numbered from `first`, with the engine's version."""
    drafts, refused = builder.begin(work)
    assert not refused, "a benchmark's prompts are all taken"
    made = generate_all(
        engine,
        [draft.prompt_token_ids for draft in drafts],
        seeds=[draft.seed for draft in drafts],
        num_per_prompt=builder.group_size,
    )
    groups = []
    for number, (draft, completions) in enumerate(zip(drafts, made, strict=True), start=first):
        draft.completions = dict(enumerate(completions))
        draft.scores = dict(enumerate(builder.score_all(draft.prompt, completions)))
        group = builder.group(draft, state_roots={engine.version: state_root})
        groups.append(dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=number)))
    return groups


async def played(
    builder: GroupBuilder,
    engine: HfEngine,
    work: Sequence[WorkAssignment],
    *,
    state_root: Digest,
    first: int = 1,
    other: int = 0,
) -> list[Group]:
    """The same of trajectories of several turns, each in its environment.

    An `other` number above 0 gives other draws of later turns, as of a site that picks.
    """
    drafts, refused = builder.begin(work)
    assert not refused, "a benchmark's prompts are all taken"
    assert builder.conversations is not None, "the task has an environment"
    for draft in drafts:
        draft.begun_at = builder.clock.monotonic()
    runner = EpisodeRunner(
        max_live=builder.conversations.max_live, max_new_tokens=builder.max_new_tokens,
        max_trajectory_tokens=builder.max_trajectory_tokens, clock=builder.clock,
    )  # fmt: skip
    made = generate_all(
        engine,
        [draft.prompt_token_ids for draft in drafts],
        seeds=[draft.seed for draft in drafts],
        num_per_prompt=builder.group_size,
    )
    playing = [
        runner.play(draft, member, completion)
        for draft, completions in zip(drafts, made, strict=True)
        for member, completion in enumerate(completions)
    ]
    while playing:
        turns: list[Turn] = []
        for came in await asyncio.gather(*playing):
            if isinstance(came, Turn):
                turns.append(came)
            else:
                came.draft.completions[came.member] = came.completion
                came.draft.scores[came.member] = came.parts
                came.draft.ended_at = builder.clock.monotonic()
        for key, turn in enumerate(turns):
            seed = turn.seed + other
            engine.submit(Request(key=key, prompt=turn.context, seed=seed, num_completions=1, first_member=turn.member))
        ended = {}
        while len(ended) < len(turns):
            ended |= {one.key: one.completion for one in engine.collect()}
        playing = [runner.play(turn.draft, turn.member, ended[key]) for key, turn in enumerate(turns)]
    runner.close()
    groups = [builder.group(draft, state_roots={engine.version: state_root}) for draft in drafts]
    return [
        dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=number))
        for number, group in enumerate(groups, start=first)
    ]
