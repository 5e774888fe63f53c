"""Environments that need no process: what a sampler asks of them, and failures where a test puts them."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np

from heterorl.common.tasks.environments.environment_task import EpisodeLimits
from heterorl.common.types.rollout import RewardPart
from tests.support.run import CONTRACT

SIZE = CONTRACT.group_size
TURNS = dataclasses.replace(CONTRACT, min_members=SIZE // 2, max_turns=3, max_trajectory_tokens=60)


class Games:
    """Implements what a sampler needs of environments: each episode goes on for `length` turns, then scores them.

    Answers to turns from number `held_at` on wait for `go`; the episode `otherwise` gives other ids.
    """

    def __init__(self, *, length=2, max_turns=3, trajectory_s=600.0, is_deterministic=True, held_at=1):
        self.length, self.is_deterministic, self.held_at, self.otherwise = length, is_deterministic, held_at, None
        self.limits = EpisodeLimits(max_turns=max_turns, trajectory_s=trajectory_s)
        self.failures = {}
        self.opened, self.closed = [], 0
        self.go = threading.Event()
        self.go.set()
        self.spec = self.episodes = self

    def at(self, index):
        return self

    def of(self, prompt):
        return self

    def encode(self, prompt):
        return np.array([2, 3], np.int32)

    def open(self):
        episode = SimpleNamespace(number=len(self.opened), turns=[], close=self._close)
        episode.score = lambda: self._score(episode)
        self.opened.append(episode)
        return episode

    def step(self, episode, turn):
        if len(episode.turns) + 1 >= self.held_at:
            self.go.wait()
        episode.turns.append(turn.tolist())
        if (error := self.failures.get(("step", episode.number, len(episode.turns)))) is not None:
            raise error
        given = [9, 9] if episode.number == self.otherwise else [7, 8]
        return None if len(episode.turns) == self.length else np.array(given, np.int32)

    def _score(self, episode):
        if (error := self.failures.get(("score", episode.number))) is not None:
            raise error
        return (RewardPart(name="turns", value=float(len(episode.turns))),)

    def _close(self):
        self.closed += 1


async def collected(world, monkeypatch, count=1):
    groups = []
    made = world.sampler.generation.outbox_writer

    real = made.add

    def add(found):
        groups.append(found)
        real(found)

    monkeypatch.setattr(made, "add", add)
    await world.until(lambda: len(groups) >= count)
    await world.until_acknowledged(count)
    status = await world.core.get_status()
    assert not sum(status.ledger.dropped.values()), status.ledger
    return groups
