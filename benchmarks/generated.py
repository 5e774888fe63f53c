"""Groups of assignments, drawn by the sampler's own code in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import Group, WorkAssignment
from heterorl.sampler.rollout.group_builder import GroupBuilder


def generated(
    builder: GroupBuilder, engine: HfEngine, work: Sequence[WorkAssignment], *, state_root: Digest, first: int = 1
) -> list[Group]:
    """A group of each assignment, numbered from `first`, with the engine's version."""
    drafts, refused = builder.begin(work, version=engine.version, state_root=state_root)
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
