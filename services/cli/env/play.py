"""One episode, played by a voice, turn by turn; it ends as an episode of a sampler ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from heterorl.common.errors import EpisodeError, RewardError
from heterorl.common.tasks.environments.environment import Observation
from heterorl.common.tasks.environments.episodes import Episode
from heterorl.common.tasks.environments.task import EnvironmentSpec, environment_problem
from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import FinishReason, RewardPart, total_reward


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn, and what the environment said to it; a person's has no tokens."""

    text: str
    policy_s: float
    is_cut: bool = False
    token_ids: Int32Array | None = None
    said: Observation = field(default_factory=lambda: Observation((), done=True))
    given_ids: Int32Array | None = None
    environment_s: float = 0.0


class Voice(Protocol):
    """A model or a person, who takes the turns of the policy."""

    def speak(self) -> Turn | None:
        """The next turn; None ends the episode."""
        ...

    def hear(self, episode: Episode, turn: Turn) -> None:
        """Show the turn to the environment, and keep what is said to it.

        Raises:
            EpisodeError: the episode has ended without a reward.
            PromptRefused: the template does not write what is said.
        """
        ...

    def limit(self) -> FinishReason | None:
        """Why no other turn can follow; None where one can."""
        ...


@dataclass(slots=True, kw_only=True)
class Played:
    """An episode that ended; `finish_reason` is None where a person ended it."""

    turns: list[Turn] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    parts: tuple[RewardPart, ...] = ()
    reward: float = 0.0


def play(
    spec: EnvironmentSpec, voice: Voice, *, on_turn: Callable[[int, Turn], None], on_said: Callable[[Turn], None]
) -> Played:
    """Play one episode.

    Args:
        spec: the environment of a prompt.
        voice: gives the turns.
        on_turn: told the number of a turn, from 1 on, and the turn.
        on_said: told the turn again when it has its answer.

    Raises:
        ConfigError: the environment failed.
    """
    played = Played()
    begun = time.monotonic()
    try:
        with spec.open() as episode:
            while (turn := voice.speak()) is not None:
                played.turns.append(turn)
                on_turn(len(played.turns), turn)
                asked = time.monotonic()
                voice.hear(episode, turn)
                turn.environment_s = time.monotonic() - asked
                on_said(turn)
                played.finish_reason = _end(spec, played, voice, seconds=time.monotonic() - begun)
                if played.finish_reason is not None:
                    break
            played.parts = episode.score()
            played.reward = total_reward(played.parts)
    except (EpisodeError, RewardError) as error:
        where = f"turn {len(played.turns)}" if played.turns else "the start of the episode"
        raise environment_problem(where, error) from error
    return played


def _end(spec: EnvironmentSpec, played: Played, voice: Voice, *, seconds: float) -> FinishReason | None:
    turn = played.turns[-1]
    if turn.said.done:
        return FinishReason.LENGTH if turn.is_cut else FinishReason.EOS
    # A person has all the time.
    seconds = 0.0 if turn.token_ids is None else seconds
    return spec.limits.reached(num_turns=len(played.turns), seconds=seconds) or voice.limit()
