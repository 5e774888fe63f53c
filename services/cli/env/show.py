"""An episode for people, as it is played, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from heterorl.cli.env.play import Played, Turn
from heterorl.cli.samples.table import visible
from heterorl.common.tasks.environments.task import EnvironmentSpec
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import FinishReason

_ENDS = {
    FinishReason.EOS: "the environment ended it",
    FinishReason.LENGTH: "the environment ended it, and its last turn was cut at sampling.max_new_tokens",
    FinishReason.TURNS: "it had task.max_turns",
    FinishReason.SECONDS: "it had task.trajectory_s",
    FinishReason.CONTEXT: "no room for another turn in sampling.max_trajectory_tokens",
    None: "you ended it",
}


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """What the policy is asked."""
    return prompt.messages or (Message(role="user", content=prompt.text),)


class Screen:
    """Writes an episode as it is played."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, prompt: Prompt, spec: EnvironmentSpec, *, num_tokens: int | None) -> None:
        """Write what the policy reads at first."""
        tokens = "" if num_tokens is None else f", {num_tokens} tokens"
        self._write(f"{spec.episodes.name}, prompt {prompt.index}, seed {spec.seed}{tokens}")
        for tool in spec.tools:
            written = tool["function"]
            arguments = ", ".join(written["parameters"]["properties"])
            self._write(f"tool {written['name']}({arguments}): {written['description'].partition(chr(10))[0]}")
        for message in messages_of(prompt):
            self._say(message.role, message.content)

    def turn(self, number: int, turn: Turn) -> None:
        """Write a turn that was drawn; one that was typed stands there."""
        if turn.token_ids is not None:
            cut = ", cut at sampling.max_new_tokens" if turn.is_cut else ""
            words = f"policy, turn {number}: {turn.token_ids.size} tokens{cut}, {turn.policy_s:.2f} s"
            self._say(words, turn.text)

    def said(self, turn: Turn) -> None:
        """Write what the environment said."""
        for message in turn.said.messages:
            self._say(f"{message.role} {message.name}".rstrip(), message.content)
        given = "" if turn.given_ids is None else f"{turn.given_ids.size} tokens given, "
        if turn.token_ids is not None:
            self._write(f"[{given}environment {turn.environment_s:.3f} s]")

    def end(self, played: Played) -> None:
        """Write how it ended."""
        reason = "" if played.finish_reason is None else f" ({played.finish_reason.value})"
        turns = "1 turn" if len(played.turns) == 1 else f"{len(played.turns)} turns"
        self._write(f"\nend after {turns}: {_ENDS[played.finish_reason]}{reason}")
        parts = [f"{p.name} {p.value:g}" + ("" if p.weight == 1 else f" x {p.weight:g}") for p in played.parts]
        self._write(f"reward {played.reward:g} = {' + '.join(parts)}")
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
        # Of a policy or an environment: no character may steer the terminal.
        self._console.print(visible(text), soft_wrap=True)


def as_json(prompt: Prompt, spec: EnvironmentSpec, played: Played, *, ids: Int32Array | None) -> dict[str, Any]:
    """The trajectory; `ids` are those of the prompt, None where a person played."""
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
