"""One run of a game by TRL's GRPOTrainer: online, in one process, with TRL's own loss and defaults.

Game, tokens, first weights, seeds of the episodes, groups, steps and held-out episodes are those of heterorl's runs.
TRL's `rollout_func` gets the episodes; transformers' `generate` draws the turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.curves.one_run import NUM_HELD_OUT, SAVE_S, Run
from benchmarks.curves.textarena_games import ALL_GAMES
from benchmarks.curves.warm_start import Demonstrator
from heterorl.common.evaluation.summary import estimate
from heterorl.common.model.model_loading import load_pretrained
from heterorl.common.tasks.environments.environment_task import seed_of
from heterorl.common.text.prompter import Prompter

NUM_PROMPTS = 20_000


@dataclass
class Played:
    """An episode in tokens."""

    episode: Any
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    """Drawn and given tokens behind the prompt."""
    is_drawn: list[int] = field(default_factory=list)
    num_turns: int = 0
    is_over: bool = False

    def add(self, ids: Sequence[int], *, is_drawn: bool) -> None:
        """Add tokens of a turn or of an answer."""
        self.ids += ids
        self.is_drawn += [int(is_drawn)] * len(ids)


class Player:
    """Plays many episodes side by side with a model's draws."""

    def __init__(self, game: Any, prompter: Prompter) -> None:
        self._game, self._prompter = game, prompter
        self._texts = Demonstrator(game, prompter)

    def play(self, model: Any, seeds: Sequence[int]) -> list[Played]:
        """One episode for each seed."""
        played = []
        for seed in seeds:
            episode = self._game()
            played.append(Played(episode, self._texts.prompt(episode.reset({}, seed=seed))))
        for _ in range(self._game.max_turns):
            live = [one for one in played if not one.is_over]
            if not live:
                break
            for one, ids in zip(live, self._draw(model, [one.prompt_ids + one.ids for one in live]), strict=True):
                self._take(one, ids)
        return played

    def _draw(self, model: Any, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each row's next turn, with its end token if it has one."""
        pad_id, width = int(self._prompter.tokenizer.pad_token_id), max(map(len, rows))
        ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.no_grad():
            drawn = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=self._game.max_new_tokens, do_sample=True,
                temperature=1.0, top_p=1.0, top_k=0, eos_token_id=list(self._prompter.end_token_ids),
                pad_token_id=pad_id,
            )[:, width:].tolist()  # fmt: skip
        return [self._until_end(row) for row in drawn]

    def _until_end(self, row: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(row) if token in self._prompter.end_token_ids]
        return row[: ends[0] + 1] if ends else row

    def _take(self, one: Played, ids: list[int]) -> None:
        one.add(ids, is_drawn=True)
        one.num_turns += 1
        said = self._texts.answer(one.episode, self._prompter.completion(np.array(ids, np.int32)))
        one.is_over = said is None or one.num_turns == self._game.max_turns
        if said is not None and not one.is_over:
            is_cut = ids[-1] not in self._prompter.end_token_ids
            one.add(self._texts.given(said.messages, is_cut=is_cut), is_drawn=False)


class TrlRun(Run):
    """A run whose trainer is TRL."""

    def curve(self) -> list[dict[str, Any]]:
        """Rows of the training so far."""
        return self.result["curve"]

    def train(self) -> None:
        """Evaluate, train, evaluate."""
        torch.manual_seed(self.spec.seed)
        self.model = load_pretrained(str(self.model_dir), dtype=torch.float32)
        self.prompter = Prompter(str(self.model_dir), use_chat_template=True)
        self.player = Player(ALL_GAMES[self.spec.environment], self.prompter)
        self._saved = time.time()
        self._evaluate_now(0)
        self.say("training")
        self._trainer().train()
        self.say("evaluation")
        self._evaluate_now(len(self.result["curve"]))

    def _evaluate_now(self, version: int) -> None:
        seeds = [seed_of(index, is_held_out=True, seed=self.spec.seed) for index in range(NUM_HELD_OUT)]
        rewards = [one.episode.score() for one in self.player.play(self.model, seeds)]
        found = estimate(rewards)
        assert found is not None, "there are held-out episodes"
        numbers = {"mean": found.mean, "low": found.low, "high": found.high}
        row = {"version": version, **{key: round(value, 4) for key, value in numbers.items()}}
        self.result["held_out"].append({**row, "num_samples": len(rewards), "num_errors": 0})

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: a prompt is a seed, repeated for each member of its group."""
        played = self.player.play(trainer.model, [int(prompt) for prompt in prompts])
        rewards = [one.episode.score() for one in played]
        self._note(played, rewards)
        return {
            "prompt_ids": [one.prompt_ids for one in played],
            "completion_ids": [one.ids for one in played],
            # Without vLLM, TRL computes them itself.
            "logprobs": None,
            "env_mask": [one.is_drawn for one in played],
            "episode_reward": rewards,
        }

    def _note(self, played: Sequence[Played], rewards: Sequence[float]) -> None:
        curve = self.result["curve"]
        row = {"step": len(curve) + 1, "reward": round(float(np.mean(rewards)), 4), "staleness": 0.0}
        row["turns"] = round(float(np.mean([one.num_turns for one in played])), 3)
        row["drawn_tokens"] = round(float(np.mean([sum(one.is_drawn) for one in played])), 2)
        curve.append(row)
        if time.time() > self._saved + SAVE_S:
            self._saved = time.time()
            self.save()

    def _trainer(self) -> Any:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        spec, limit_s = self.spec, self.spec.train_until

        class Limit(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - transformers'
                control.should_training_stop |= time.time() >= limit_s

        num_rows = spec.groups_per_step * spec.group_size
        settings = GRPOConfig(
            output_dir=str(self.directory / "trl"), seed=spec.seed, max_steps=spec.steps, learning_rate=spec.lr,
            lr_scheduler_type="constant", per_device_train_batch_size=num_rows, num_generations=spec.group_size,
            gradient_checkpointing=False, bf16=False, use_cpu=True, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        seeds = [str(seed_of(index, is_held_out=False, seed=spec.seed)) for index in range(NUM_PROMPTS)]
        return GRPOTrainer(
            model=self.model, args=settings, processing_class=self.prompter.tokenizer, callbacks=[Limit()],
            train_dataset=Dataset.from_dict({"prompt": seeds}), reward_funcs=[_reward], rollout_func=self.rollouts,
        )  # fmt: skip


def _reward(episode_reward: list[float | None], **_: Any) -> list[float | None]:
    return episode_reward
