"""What a learner works with under one lease: made when it is granted, for its epoch alone; another lease has others."""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.learner.publish.checkpoint import CheckpointStore
from heterorl.learner.publish.journal import Journal
from heterorl.learner.publish.publish import Publisher
from heterorl.learner.run.rollback import Rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The parts that know an epoch, and the files that are theirs while the state directory is held."""

    store: CheckpointStore
    journal: Journal
    publisher: Publisher
    rollback: Rollback
