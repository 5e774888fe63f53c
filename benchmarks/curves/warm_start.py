"""A tiny chat model that has imitated demonstrations of a game, so that its reward is above 0 and below 1.

Demonstrations are the trajectories of a run: the prompt and the given tokens are the template's, and the loss counts
the policy's tokens only.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model.model_loading import load_pretrained
from heterorl.common.tasks.environments.environment import Action, Observation, ToolCall
from heterorl.common.tasks.environments.tools import schema_of
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.text.prompter import Prompter
from heterorl.common.text.tool_calls import parse_action

END, PAD = "<|end|>", "<|pad|>"
_MARKS = (PAD, END, "<|system|>", "<|user|>", "<|tool|>", "<|assistant|>")
_CHARACTERS = ("\n", *map(chr, range(32, 127)))
TEMPLATE = (
    "{% for tool in tools or [] %}<|system|>{{ tool.function.name }}<|end|>{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_IGNORED = -100
NUM_DEMONSTRATIONS = 8192
"""Most of them; more steps repeat them."""


def build_tokenizer(words: Sequence[str]) -> Any:
    """One token a character, except for `words` and the marks of the template."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate(dict.fromkeys([*_MARKS, *words, *_CHARACTERS]))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    longest = sorted(words, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest), r"[\s\S]"])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD, unk_token=PAD)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def words_of(game: Any) -> tuple[str, ...]:
    """Texts that are one token: the game's words, and lines with which each episode begins."""
    first, second = (game().reset({}, seed=seed).splitlines() for seed in (0, 1))
    return (*game.words, *(line for line in first if len(line) > 1 and line in second))


class Demonstration(NamedTuple):
    """Token ids of a trajectory, and whether the policy drew each."""

    token_ids: list[int]
    is_drawn: list[bool]


class Demonstrator:
    """Plays a game by its own `demonstrate`, in the tokens of a run."""

    def __init__(self, game: Any, prompter: Prompter) -> None:
        self._game, self._prompter = game, prompter
        self._tools = [schema_of(tool) for tool in getattr(game, "tools", ())]
        self._given: dict[tuple[tuple[Message, ...], bool], list[int]] = {}

    def play(self, chooser: random.Random) -> Demonstration:
        """One episode."""
        episode = self._game()
        ids = self.prompt(episode.reset({}, seed=chooser.getrandbits(32)))
        drawn = [False] * len(ids)
        for number in range(1, self._game.max_turns + 1):
            text = episode.demonstrate(chooser)
            turn = [*self._prompter.tokens(text).tolist(), self._prompter.eos_token_id]
            ids, drawn = ids + turn, drawn + [True] * len(turn)
            said = self.answer(episode, text)
            if said is None or number == self._game.max_turns:
                break
            given = self.given(said.messages)
            ids, drawn = ids + given, drawn + [False] * len(given)
        return Demonstration(ids, drawn)

    def prompt(self, text: str) -> list[int]:
        """Tokens of an episode's first message."""
        ids: list[int] = self._prompter.encode_prompt(Prompt(index=0, text=text, answer=""), tools=self._tools).tolist()
        return ids

    def answer(self, episode: Any, text: str) -> Observation | None:
        """The game's answer to a turn."""
        if not self._tools:
            answer: Observation | None = episode.step(Action(text))
            return answer
        read = parse_action(text, parser="json")
        answer = episode.step(Action(read.text, tuple(ToolCall(*call) for call in read.calls)))
        return answer

    def given(self, messages: tuple[Message, ...], *, is_cut: bool = False) -> list[int]:
        """Tokens of an answer; `is_cut`: the turn before it has no end token."""
        key = messages, is_cut
        if key not in self._given:
            self._given[key] = self._prompter.given(messages, is_cut=is_cut).tolist()
        return self._given[key]


def batch_of(rows: Sequence[Demonstration], *, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets of rows side by side; given and padding tokens are no targets."""
    longest = max(len(row.token_ids) for row in rows)
    ids = torch.full((len(rows), longest), pad_id)
    targets = torch.full((len(rows), longest - 1), _IGNORED)
    for number, row in enumerate(rows):
        size = len(row.token_ids)
        ids[number, :size] = torch.tensor(row.token_ids)
        own = torch.where(torch.tensor(row.is_drawn), ids[number, :size], _IGNORED)
        targets[number, : size - 1] = own[1:]
    return ids, targets


def warm_start(
    game: Any, directory: Path, *, seed: int, max_steps: int, max_s: float, batch_size: int = 64, lr: float = 2e-3
) -> dict[str, float]:
    """Write a model that imitates the demonstrations, for `max_steps` steps or `max_s` seconds; returns its numbers."""
    begun = time.monotonic()
    write_tiny_model(directory, seed=seed, tokenizer=build_tokenizer(words_of(game)))
    prompter = Prompter(str(directory), use_chat_template=True)
    model = load_pretrained(str(directory), dtype=torch.float32)
    demonstrator, chooser = Demonstrator(game, prompter), random.Random(seed)
    rows = [demonstrator.play(chooser) for _ in range(min(NUM_DEMONSTRATIONS, max_steps * batch_size))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    pad_id, nats, step = int(prompter.tokenizer.pad_token_id), 0.0, 0
    while step < max_steps and time.monotonic() - begun < max_s:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 50, 2.0 * (1.0 - (step - 1) / max_steps))
        ids, targets = batch_of(chooser.choices(rows, k=batch_size), pad_id=pad_id)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        nats = float(loss.detach()) if step == 1 else 0.95 * nats + 0.05 * float(loss.detach())
    model.save_pretrained(directory)
    return {"steps": step, "nats_per_token": round(nats, 4), "seconds": round(time.monotonic() - begun, 1)}
