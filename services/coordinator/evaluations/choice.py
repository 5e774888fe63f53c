"""Which evaluation a site is given a part of: pure.

    the site's own version     at once, the newest first: it costs nothing but rows of its engine
    another version            where the site would fetch it, once the evaluation has stood still for a while

A new one of a set is not begun while an older one of it stands still that the site could go on with: where versions
come faster than evaluations end, each would be begun and none ended. One that nothing comes back from holds up none.

An evaluation whose sites died, or that every site has left behind with newer weights, is so finished by one that
fetches its version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.types.evaluation import EvaluationSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An evaluation that is not done. `idle_s` is how long nothing was handed out of it nor came back."""

    id: int
    version: int
    task_set: str
    is_begun: bool
    has_open: bool
    """Whether a prompt of it is with nobody; always before it is begun."""
    idle_s: float
    silent_s: float = 0.0
    """How long nothing came back of it; 0 before it is begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """A site that asks for a part."""

    policy_version: int
    sets: Mapping[str, EvaluationSet]
    can_pull: bool
    refused: Collection[int] = ()
    """Evaluations that it said it cannot do."""


def choose(
    jobs: Sequence[Job], asker: Asker, *, digests: Mapping[str, str], wait_s: float, silence_s: float
) -> tuple[Job | None, str]:
    """The evaluation that a site is given a part of, and why none.

    Args:
        jobs: all that are not done.
        asker: the site.
        digests: of the task of every set of which one is known.
        wait_s: how long an evaluation stands still before a site is asked to fetch its version.
        silence_s: how long nothing comes back of an evaluation before newer ones of its set are begun.
    """
    if not jobs:
        return None, "nothing is to be evaluated"
    has_set = [job for job in jobs if job.task_set in asker.sets]
    if not has_set:
        return None, f"the site has no set that is to be evaluated, such as {jobs[0].task_set}"
    right = [job for job in has_set if digests.get(job.task_set) in (None, asker.sets[job.task_set].task_digest)]
    if not right:
        return None, f"the task of set {has_set[0].task_set} is another one at this site than the run evaluates"
    left = [job for job in right if job.has_open and job.id not in asker.refused]
    held_up = {job.task_set for job in left if job.is_begun and job.idle_s >= wait_s and job.silent_s < silence_s}
    own = [job for job in left if job.version == asker.policy_version and (job.is_begun or job.task_set not in held_up)]
    if own:
        return min(own, key=lambda job: (not job.is_begun, job.id)), "of the version that the site has"
    others = [job for job in left if job.idle_s >= wait_s]
    if not asker.can_pull or not others:
        return None, "no part is to be had of the version that the site has"
    # What was begun is nearest to a number; of the rest the newest tells most.
    return min(others, key=lambda job: (not job.is_begun, -job.version, job.id)), "nobody else goes on with it"
