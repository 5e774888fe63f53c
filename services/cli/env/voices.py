"""Voices of an episode: a model draws turns as a sampler would; a person types them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from heterorl.cli.env.play import Turn
from heterorl.common.errors import EngineError
from heterorl.common.tasks.environments.episodes import Episode
from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import FinishReason

if TYPE_CHECKING:
    from heterorl.common.generation.engine import Engine
    from heterorl.common.model.positions import Room
    from heterorl.common.text.conversation import Conversation


class Model:
    """A model's turns; implements Voice."""

    def __init__(
        self, engine: Engine, conversation: Conversation, prompt: Int32Array, *, room: Room, config: Any
    ) -> None:
        """Join them.

        Args:
            engine: draws.
            conversation: the environment of the prompt.
            prompt: token ids.
            room: of the model.
            config: the learner's, with its `sampling`.
        """
        self._engine, self._conversation, self._room = engine, conversation, room
        self._prompt, self._parts = prompt, [prompt]
        self._max_new_tokens = config.sampling.max_new_tokens
        self._max_trajectory_tokens = config.sampling.max_trajectory_tokens

    def speak(self) -> Turn:
        """Draw one, always the same one of the same weights and prompt.

        Raises:
            PromptTooLong: the model has no room for another turn.
            EngineError: nothing was drawn.
        """
        from heterorl.common.generation.engine import generate_all

        begun, context = time.monotonic(), np.concatenate(self._parts)
        self._room.check(context, self._max_new_tokens)
        drawn = generate_all(self._engine, [context], seeds=[len(self._parts)], num_per_prompt=1)[0]
        if not drawn:
            raise EngineError("the engine refused the turn")
        ids, is_cut = drawn[0].token_ids, drawn[0].finish_reason is FinishReason.LENGTH
        self._parts.append(ids)
        text = self._conversation.prompter.decode(ids)
        return Turn(text=text, policy_s=time.monotonic() - begun, is_cut=is_cut, token_ids=ids)

    def hear(self, episode: Episode, turn: Turn) -> None:
        """Keep the ids that are given too."""
        assert turn.token_ids is not None, "it was drawn"
        turn.said = self._conversation.answer(episode, turn.token_ids)
        if not turn.said.done:
            turn.given_ids = self._conversation.given(turn.said, turn.token_ids)
            self._parts.append(turn.given_ids)

    def limit(self) -> FinishReason | None:
        """Whether a turn of the longest length still has its place in the trajectory."""
        num_tokens = sum(part.size for part in self._parts) - self._prompt.size
        return FinishReason.CONTEXT if num_tokens + self._max_new_tokens > self._max_trajectory_tokens else None


class Person:
    """Typed turns; implements Voice.

    A call of a tool is typed as a policy writes one: an object of JSON, with or without the tags of `hermes`.
    """

    def __init__(self, ask: Callable[[], str | None], *, has_tools: bool) -> None:
        """Join them.

        Args:
            ask: waits for a line; None is the end of the input.
            has_tools: whether the environment has tools.
        """
        self._ask, self._has_tools = ask, has_tools

    def speak(self) -> Turn | None:
        """Ask for a line."""
        begun = time.monotonic()
        text = self._ask()
        return None if text is None else Turn(text=text, policy_s=time.monotonic() - begun)

    def hear(self, episode: Episode, turn: Turn) -> None:
        """Show the environment what was typed."""
        from heterorl.common.text.conversation import answer_to

        parser: Any = ("hermes" if "<tool_call>" in turn.text else "json") if self._has_tools else None
        turn.said = answer_to(turn.text, episode=episode, parser=parser, is_cut=False)

    def limit(self) -> FinishReason | None:
        """A person may always go on."""
        return None
