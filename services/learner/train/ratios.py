"""Log-ratios of single drawn tokens, of the rollouts whose text people will read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from heterorl.common.types.common import Float32Array
from heterorl.common.types.rollout import QueuedGroup
from heterorl.learner.train.report import MicroBatchSample

LogRatios = Mapping[tuple[int, int], Float32Array]
"""By the position of a group in the step and of a rollout in the group: log p - log q of each drawn token, nats."""


def wanted_log_ratios(samples: Iterable[MicroBatchSample], groups: Sequence[QueuedGroup]) -> LogRatios:
    """Those of groups whose note is wanted; a loss that leaves a group out of the step leaves it out here too."""
    wanted = {number for number, queued in enumerate(groups) if queued.wants_note}
    found: dict[tuple[int, int], Float32Array] = {}
    if not wanted:
        return found
    for sample in samples:
        lengths = sample.sequences.lengths_B.long().tolist()
        places = sample.places_B.tolist()
        if len(places) != len(lengths):
            continue
        for (group, rollout), ratios in zip(places, sample.log_ratios_N.split(lengths), strict=True):
            if group in wanted:
                # A copy: a view would keep all tokens of the micro-batch.
                found[group, rollout] = ratios.numpy().copy()
    return found
