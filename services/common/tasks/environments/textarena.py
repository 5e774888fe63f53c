"""Single-player games of textarena as environments: `task.environment = "textarena:GuessTheNumber-v0"`.

The rules are the first message, and the game's final reward is the score. A game that a limit ended gets its completed
share if the game counts one, else 0.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from numbers import Real
from typing import Any

from heterorl.common.tasks.environments.environment import Action, Observation
from heterorl.common.tasks.task import Message

_RAW = "-raw"
"""Suffix of games without wrappers, which would repeat the whole conversation in each observation."""
_PARTIAL = "_get_percentage_completion"


def load(name: str, _directory: str) -> tuple[Callable[[], TextArenaGame], dict[str, Any]]:
    """Constructor of games by name, and facts about them.

    Raises:
        ImportError: textarena is not installed.
        ValueError: it has no such game, or one player cannot play it here.
    """
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = difflib.get_close_matches(name, [known for known in ENV_REGISTRY if not known.endswith(_RAW)], n=1)
        raise ValueError(f"textarena has no game {name}" + (f"; did you mean {near[0]}?" if near else ""))
    try:
        TextArenaGame(name).reset({}, seed=0)
    except Exception as error:
        problem = f"the game {name} cannot be played here by one player: {type(error).__name__}: {error}"
        raise ValueError(problem[:500]) from error
    # The version decides what the games write.
    return lambda: TextArenaGame(name), {"digest": version("textarena"), "shares_process": True}


class TextArenaGame:
    """One game; implements Environment."""

    def __init__(self, name: str) -> None:
        import textarena

        self._kinds = textarena.ObservationType
        self._game: Any = textarena.make(name)
        while isinstance(self._game, textarena.Wrapper):
            self._game = self._game.env

    def reset(self, row: Mapping[str, Any], *, seed: int) -> str:  # noqa: ARG002 - of the Protocol
        self._game.reset(num_players=1, seed=seed)
        return self._said()

    def step(self, action: Action) -> Observation:
        done, _ = self._game.step(action.answer)
        state = self._game.state
        said = self._said() or (str(state.game_info[0].get("reason") or "") if done else "")
        return Observation((Message(role="user", content=said),), done=bool(done))

    def score(self) -> float:
        rewards = self._game.state.rewards
        if rewards is not None:
            # Some games set the reason as the reward of an invalid move.
            return float(rewards[0]) if isinstance(rewards[0], Real) else 0.0
        partial = getattr(self._game, _PARTIAL, None)
        return float(partial()) if partial is not None else 0.0

    def _said(self) -> str:
        _, said = self._game.get_observation()
        return "\n".join(str(text) for _, text, kind in said if kind is not self._kinds.PLAYER_ACTION)
