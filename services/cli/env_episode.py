"""An episode of `heterorl env try`, played by a model or person.

It ends by the same rules as an episode of a sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from heterorl.cli.samples.sample_table import visible
from heterorl.common.errors import EngineError, EpisodeError, RewardError
from heterorl.common.tasks.environments.environment import Observation
from heterorl.common.tasks.environments.environment_task import EnvironmentSpec, environment_problem
from heterorl.common.tasks.environments.episodes import Episode
from heterorl.common.tasks.task import Message, Prompt, messages_of
from heterorl.common.types.common import Int32Array, amount
from heterorl.common.types.rollout import FinishReason, RewardPart, total_reward

if TYPE_CHECKING:
    from heterorl.common.generation.inference_engine import Engine
    from heterorl.common.model.model_loading import TokenLimits
    from heterorl.common.text.conversation import Conversation


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn and the environment's answer; typed turns have no token ids."""

    text: str
    policy_s: float
    is_cut: bool = False
    token_ids: Int32Array | None = None
    said: Observation = field(default_factory=lambda: Observation((), done=True))
    given_ids: Int32Array | None = None
    environment_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Played:
    """An episode that ended; `finish_reason` is None if a person ended it."""

    turns: list[Turn] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    parts: tuple[RewardPart, ...] = ()
    reward: float = 0.0


def play(spec: EnvironmentSpec, player: ModelPlayer | PersonPlayer, screen: Screen) -> Played:
    """Play and show one episode; raises ConfigError if the environment failed.

    A player's `next_turn` gives a turn, or None to end; `take_turn` hands it to the environment; `room` is the tokens
    that the longest next turn would leave.
    """
    played = Played()
    begun = time.monotonic()
    try:
        with spec.open() as episode:
            while (turn := player.next_turn()) is not None:
                played.turns.append(turn)
                screen.turn(len(played.turns), turn)
                asked = time.monotonic()
                player.take_turn(episode, turn)
                turn.environment_s = time.monotonic() - asked
                screen.said(turn)
                played.finish_reason = _end(spec, played, player, seconds=time.monotonic() - begun)
                if played.finish_reason is not None:
                    break
            played.parts = episode.score()
            played.reward = total_reward(played.parts)
    except (EpisodeError, RewardError) as error:
        where = f"turn {len(played.turns)}" if played.turns else "the start of the episode"
        raise environment_problem(where, error) from error
    return played


def _end(
    spec: EnvironmentSpec, played: Played, player: ModelPlayer | PersonPlayer, *, seconds: float
) -> FinishReason | None:
    turn = played.turns[-1]
    if turn.said.done:
        return FinishReason.LENGTH if turn.is_cut else FinishReason.EOS
    # A person's episode has no time limit.
    seconds = 0.0 if turn.token_ids is None else seconds
    return spec.limits.reached(num_turns=len(played.turns), seconds=seconds, room=player.room())


class ModelPlayer:
    """Turns that a model samples."""

    def __init__(
        self, engine: Engine, conversation: Conversation, prompt: Int32Array, *, room: TokenLimits, config: Any
    ) -> None:
        """`prompt` is token ids; reads [sampling] of the learner's configuration."""
        self._engine, self._conversation, self._room = engine, conversation, room
        self._prompt, self._parts = prompt, [prompt]
        self._max_new_tokens: int = config.sampling.max_new_tokens
        self._max_trajectory_tokens: int = config.sampling.max_trajectory_tokens

    def next_turn(self) -> Turn:
        """Sample a turn; equal weights and prompt give equal turns.

        Raises PromptTooLong if the model has no room for a turn, EngineError if the engine refused.
        """
        from heterorl.common.generation.inference_engine import generate_all

        begun, context = time.monotonic(), np.concatenate(self._parts)
        self._room.check(context, self._max_new_tokens)
        drawn = generate_all(self._engine, [context], seeds=[len(self._parts)], num_per_prompt=1)[0]
        if not drawn:
            raise EngineError("the engine refused the turn", action="read the warning above: it says why")
        ids, is_cut = drawn[0].token_ids, drawn[0].finish_reason is FinishReason.LENGTH
        self._parts.append(ids)
        text = self._conversation.prompter.decode(ids)
        return Turn(text=text, policy_s=time.monotonic() - begun, is_cut=is_cut, token_ids=ids)

    def take_turn(self, episode: Episode, turn: Turn) -> None:
        assert turn.token_ids is not None, "it was drawn"
        turn.said = self._conversation.answer(episode, turn.token_ids)
        if not turn.said.done:
            turn.given_ids = self._conversation.given(turn.said, turn.token_ids)
            self._parts.append(turn.given_ids)

    def room(self) -> int:
        num_tokens = sum(part.size for part in self._parts)
        most = self._prompt.size + self._max_trajectory_tokens
        return min(most, self._room.positions or most) - num_tokens - self._max_new_tokens


class PersonPlayer:
    """Turns that a person types.

    A person types a tool call as a policy writes one: a JSON object, with or without the tags of `hermes`.
    """

    def __init__(self, ask: Callable[[], str | None], *, has_tools: bool) -> None:
        """`ask` waits for a line; None is the end of the input."""
        self._ask, self._has_tools = ask, has_tools

    def next_turn(self) -> Turn | None:
        begun = time.monotonic()
        text = self._ask()
        return None if text is None else Turn(text=text, policy_s=time.monotonic() - begun)

    def take_turn(self, episode: Episode, turn: Turn) -> None:
        from heterorl.common.text.conversation import answer_to

        parser: Any = ("hermes" if "<tool_call>" in turn.text else "json") if self._has_tools else None
        turn.said = answer_to(turn.text, episode=episode, parser=parser, is_cut=False)

    def room(self) -> int:
        return 0


_ENDS = {
    FinishReason.EOS: "the environment ended it",
    FinishReason.LENGTH: "the environment ended it, and its last turn was cut at sampling.max_new_tokens",
    FinishReason.TURNS: "it had task.max_turns",
    FinishReason.SECONDS: "it had task.trajectory_s",
    FinishReason.CONTEXT: "no room for another turn in sampling.max_trajectory_tokens or the model",
    None: "you ended it",
}


def _tool_line(written: Mapping[str, Any]) -> str:
    parameters, description = written.get("parameters"), written.get("description")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    words = description.partition("\n")[0] if isinstance(description, str) else ""
    return f"{written['name']}({', '.join(map(str, properties or ()))}): {words}".removesuffix(": ")


class Screen:
    """Prints an episode turn by turn."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, prompt: Prompt, spec: EnvironmentSpec, *, num_tokens: int | None) -> None:
        tokens = "" if num_tokens is None else f", {amount(num_tokens, 'token')}"
        self._write(f"{spec.episodes.name}, prompt {prompt.index}, seed {spec.seed}{tokens}")
        for tool in spec.tools:
            self._write(f"tool {_tool_line(tool['function'])}")
        for message in messages_of(prompt):
            self._say(message.role, message.content)

    def turn(self, number: int, turn: Turn) -> None:
        """Print a sampled turn; a typed one is on the screen already."""
        if turn.token_ids is not None:
            cut = ", cut at sampling.max_new_tokens" if turn.is_cut else ""
            words = f"policy, turn {number}: {amount(turn.token_ids.size, 'token')}{cut}, {turn.policy_s:.2f} s"
            self._say(words, turn.text)

    def said(self, turn: Turn) -> None:
        for message in turn.said.messages:
            self._say(f"{message.role} {message.name}".rstrip(), message.content)
        given = "" if turn.given_ids is None else f"{amount(turn.given_ids.size, 'token')} given, "
        if turn.token_ids is not None:
            self._write(f"[{given}environment {turn.environment_s:.3f} s]")

    def end(self, played: Played) -> None:
        reason = "" if played.finish_reason is None else f" ({played.finish_reason.value})"
        self._write(f"\nend after {amount(len(played.turns), 'turn')}: {_ENDS[played.finish_reason]}{reason}")
        parts = [f"{p.name} {p.value:g}" + ("" if p.weight == 1 else f" x {p.weight:g}") for p in played.parts]
        total, summed = f"reward {played.reward:g}", " + ".join(parts)
        self._write(total if summed == total else f"{total} = {summed}")
        if any(turn.token_ids is not None for turn in played.turns):
            self._write(
                f"tokens: {_size(turn.token_ids for turn in played.turns)} drawn, "
                f"{_size(turn.given_ids for turn in played.turns)} given; seconds: "
                f"{sum(turn.policy_s for turn in played.turns):.2f} of the model, "
                f"{sum(turn.environment_s for turn in played.turns):.3f} of the environment"
            )

    def _say(self, role: str, text: str) -> None:
        self._write(f"\n{role}")
        self._write("\n".join(f"  {line}" for line in text.splitlines()) or "  (nothing)")

    def _write(self, text: str) -> None:
        # A policy or an environment wrote it: control characters must not reach the terminal.
        self._console.print(visible(text), soft_wrap=True)


def as_json(prompt: Prompt, spec: EnvironmentSpec, played: Played, *, ids: Int32Array | None) -> dict[str, Any]:
    """The trajectory as JSON; the prompt's `ids` are None by hand."""
    return {
        "environment": spec.episodes.name,
        "prompt": {"index": prompt.index, "seed": spec.seed, "messages": _written(messages_of(prompt)), **_ids(ids)},
        "turns": [
            {
                "text": turn.text, "is_cut": turn.is_cut, "seconds": round(turn.policy_s, 3), **_ids(turn.token_ids),
                "given": {
                    "messages": _written(turn.said.messages), "seconds": round(turn.environment_s, 3),
                    **_ids(turn.given_ids),
                },
            }
            for turn in played.turns
        ],
        "finish_reason": None if played.finish_reason is None else played.finish_reason.value,
        "reward": played.reward,
        "reward_parts": [{"name": p.name, "value": p.value, "weight": p.weight} for p in played.parts],
    }  # fmt: skip


def _written(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [
        {"role": each.role, "content": each.content, **({"name": each.name} if each.name else {})} for each in messages
    ]


def _ids(ids: Int32Array | None) -> dict[str, Any]:
    return {} if ids is None else {"token_ids": ids.tolist()}


def _size(parts: Any) -> int:
    return sum(part.size for part in parts if part is not None)
