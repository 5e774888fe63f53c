"""Checks of trajectories of several turns: detection rate of each forgery, false rejects of honest ones.

Small models imitated demonstrations of two games (`benchmarks.curves.games`). Honest trajectories come from the
transformers engine with seeded sampling and the sampler's own code, in float32 and in bfloat16. A forgery changes one
trajectory of a group. The code of coordinator and learner judges each group, with the default tolerances, in float32.

    python -m benchmarks.verify_turns --out benchmarks/results/verify_turns.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import platform
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.curves import games
from benchmarks.curves.warm_start import warm_start
from benchmarks.generated import assignments, played, seeded_engine
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.model import tensors
from heterorl.common.model.contract import build_contract
from heterorl.common.model.logprobs import group_key
from heterorl.common.process.clock import SystemClock
from heterorl.common.tasks.environments.episodes import EPISODES_A_PROCESS
from heterorl.common.tasks.task import Task
from heterorl.common.tasks.task_config import build_task
from heterorl.common.text.conversation import Conversations
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import NO_LORA, Contract, Digest, SiteId
from heterorl.common.types.rollout import GIVEN, FinishReason, Group, Rollout, Span, parts_of, turns_of
from heterorl.common.weights.arena import Arena
from heterorl.common.wire.sealed_groups import columns_of, group_message, seal
from heterorl.coordinator.groups.schedule import seed_of
from heterorl.coordinator.groups.validation import content_problem
from heterorl.learner.checks.findings import VerificationConfig, judge_logprobs, judge_margins, judge_replays
from heterorl.learner.checks.replay import Replayer
from heterorl.learner.checks.reward_checks import judge_rewards
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.rollout.group_builder import GroupBuilder

CONFIG = VerificationConfig()
CHECKS = ("coordinator", "episode", "log-probs", "draws")
GAMES = ("guess", "calculator")
SEED = 7
GROUP_SIZE = 8
AT_ONCE = 32
MAX_PROMPT_TOKENS = 256
MAX_TRAJECTORY_TOKENS = 160
Pieces = list[tuple[np.ndarray[Any, np.dtype[np.int32]], bool]]
"""Token ids and whether the policy drew them, turn by turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A sampler's parts, and the learner's replayer with the same weights."""

    game: Any
    model_dir: str
    task: Task
    prompter: Prompter
    conversations: Conversations
    config: LearnerConfig
    contract: Contract
    replayer: Replayer
    state_root: Digest

    def generate(self, engine: HfEngine, numbers: Sequence[int], *, other: int = 0) -> list[Group]:
        """Groups of these assignments; `other` changes the draws of later turns."""
        builder = GroupBuilder(
            task=self.task,
            prompter=self.prompter,
            site=SiteId("bench"),
            incarnation="bench",
            group_size=GROUP_SIZE,
            clock=SystemClock(),
            is_seeded=True,
            max_new_tokens=self.contract.sampling.max_new_tokens,
            max_trajectory_tokens=self.contract.max_trajectory_tokens,
            conversations=self.conversations,
        )
        groups: list[Group] = []
        work = assignments(numbers, num_prompts=self.task.num_prompts, seed=SEED, draws=SEED)
        for start in range(0, len(work), AT_ONCE):
            part = work[start : start + AT_ONCE]
            groups += asyncio.run(
                played(builder, engine, part, state_root=self.state_root, first=1 + start, other=other)
            )
        return groups

    def judge(self, group: Group) -> tuple[list[str], bool]:
        """The checks that the group fails, and whether it is dropped without blame."""
        found = []
        columns = columns_of(group_message(seal(group).data))
        if content_problem(columns, self.contract, max_prompt_tokens=MAX_PROMPT_TOKENS):
            found.append("coordinator")
        finding = judge_rewards(
            group,
            task=self.task,
            prompter=self.prompter,
            tolerance=CONFIG.reward_tolerance,
            conversations=self.conversations,
        )
        if finding.reason is not None:
            found.append("episode")
        key = group_key(seed=seed_of(group.assignment, seed=SEED), prompt_index=group.prompt_index)
        none = np.zeros(0, np.float32)
        stated = [rollout.sampler_logprobs if rollout.is_trainable else none for rollout in group.rollouts]
        replays = self.replayer.replay(group, key=key)
        if not judge_replays(stated, replays, CONFIG).is_sound:
            replays = self.replayer.replay(group, key=key, is_rounded=True)
        if not judge_logprobs(stated, replays, CONFIG).is_sound:
            found.append("log-probs")
        if not judge_margins(replays, CONFIG).is_sound:
            found.append("draws")
        return found, not found and not finding.is_sound

    def with_member(self, group: Group, number: int, rollout: Rollout) -> Group:
        """The group with one other rollout, whose log-probs are the model's."""
        rollouts = [*group.rollouts]
        rollouts[number] = rollout
        changed = dataclasses.replace(group, rollouts=tuple(rollouts))
        replay = self.replayer.replay(changed, key=None)[number]
        rollouts[number] = dataclasses.replace(rollout, sampler_logprobs=np.minimum(replay.logprobs, 0.0))
        return dataclasses.replace(group, rollouts=tuple(rollouts))

    def answer(self, group: Group) -> str:
        """The text that ends the group's episode with a reward of 1."""
        spec = self.task.environment_of(self.task.prompt(group.prompt_index))
        assert spec is not None, "every prompt has an environment"
        episode = self.game()
        episode.reset({}, seed=spec.seed)
        return str(episode.number) if self.game is games.Guess else games.mul(*episode.factors)

    def engine(self, *, compute_dtype: str = "fp32") -> HfEngine:
        """An engine with the model's own weights as version 0."""
        sampling = self.config.sampling.semantics()
        return seeded_engine(
            model_dir=self.model_dir, prompter=self.prompter, sampling=sampling, compute_dtype=compute_dtype
        )


@contextlib.contextmanager
def open_site(name: str, directory: Path, *, warm_steps: int) -> Iterator[Site]:
    """A site of a game; its environment's processes end with the block."""
    game = games.GAMES[name]
    warm_start(game, directory, seed=0, max_steps=warm_steps, max_s=600.0)
    model_dir = str(directory)
    task_table = {
        "name": "seeds",
        "size": 100_000,
        "environment": f"games:{game.__name__}",
        "environment_path": str(Path(games.__file__).parent),
        "max_turns": game.max_turns,
        # Each trajectory keeps its place between turns.
        "environment_workers": -(-AT_ONCE * GROUP_SIZE // EPISODES_A_PROCESS),
        "step_timeout_s": 60.0,
        "tool_parser": "json",
    }
    config = LearnerConfig.model_validate(
        {
            "model_dir": model_dir,
            "group_size": GROUP_SIZE,
            "task": task_table,
            "use_chat_template": True,
            "sampling": {"max_new_tokens": game.max_new_tokens, "max_trajectory_tokens": MAX_TRAJECTORY_TOKENS},
        }
    )
    prompter = Prompter.of(config)
    task = build_task(config.task)
    try:
        replayer = Replayer(
            model_dir=model_dir,
            device="cpu",
            sampling=config.sampling.semantics(),
            lora=NO_LORA,
            published_dtype="bf16",
        )
        engine = seeded_engine(model_dir=model_dir, prompter=prompter, sampling=config.sampling.semantics())
        arena = Arena(engine.layout)
        tensors.store(engine.model, arena)
        replayer.load(arena, 0)
        yield Site(
            game=game,
            model_dir=model_dir,
            task=task,
            prompter=prompter,
            conversations=Conversations(task, prompter),
            config=config,
            contract=build_contract(
                config,
                text=prompter.digests,
                task=task,
                layout_id=arena.layout.layout_id,
                vocab_size=len(prompter.tokenizer),
                end_token_ids=prompter.end_token_ids,
            ),
            replayer=replayer,
            state_root=arena.state_root(),
        )
    finally:
        task.close()


@dataclass(kw_only=True)
class Forger:
    """Forgeries of one trajectory of a group; None where a group has no such one."""

    site: Site
    honest: Sequence[Group]
    again: Sequence[Group]
    """The same groups with other draws of later turns."""

    def __post_init__(self) -> None:
        self.chooser = random.Random(SEED)
        self.given = {
            piece.tobytes(): piece
            for group in self.honest
            for rollout in group.rollouts
            for piece, is_drawn in pieces_of(rollout)
            if not is_drawn
        }

    def rewards(self, group: Group) -> Group | None:
        """A reward of 1 that the episode did not give."""
        return self._changed(group, lambda one: one.reward == 0, _rewarded)

    def lost(self, group: Group) -> Group | None:
        """A reward of 0 hidden as a tool that was lost."""
        return self._changed(
            group,
            lambda one: one.reward == 0,
            lambda one: dataclasses.replace(one, finish_reason=FinishReason.TOOL_LOST, reward_parts=()),
        )

    def logprobs(self, group: Group) -> Group | None:
        """Log-probs of later turns shifted by -0.1, in all trajectories."""

        def change(one: Rollout) -> Rollout:
            start, end = turns_of(one)[0]
            shifted = one.sampler_logprobs.copy()
            shifted[end - start :] -= np.float32(0.1)
            return dataclasses.replace(one, sampler_logprobs=shifted)

        if all(len(turns_of(one)) < 2 for one in group.rollouts):
            return None
        return dataclasses.replace(group, rollouts=tuple(map(change, group.rollouts)))

    def answers(self, group: Group) -> Group | None:
        """Another answer of the environment, and true log-probs behind it."""

        def change(one: Rollout) -> Rollout:
            pieces = pieces_of(one)
            place = self.chooser.choice([number for number, (_, is_drawn) in enumerate(pieces) if not is_drawn])
            mine = pieces[place][0].tobytes()
            pieces[place] = self.given[self.chooser.choice([each for each in self.given if each != mine])], False
            return rebuilt(one, pieces)

        return self._changed(group, lambda one: len(turns_of(one)) > 1, change, is_true=True)

    def short(self, group: Group) -> Group | None:
        """A trajectory without its last turn."""
        return self._changed(
            group, lambda one: len(turns_of(one)) > 1, lambda one: rebuilt(one, pieces_of(one)[:-2]), is_true=True
        )

    def late(self, group: Group) -> Group | None:
        """The same, said to be out of time."""

        def change(one: Rollout) -> Rollout:
            return dataclasses.replace(rebuilt(one, pieces_of(one)[:-2]), finish_reason=FinishReason.SECONDS)

        return self._changed(group, lambda one: one.reward == 0 and len(turns_of(one)) > 1, change, is_true=True)

    def hidden(self, group: Group) -> Group | None:
        """A turn of the policy said to be the environment's."""

        def change(one: Rollout) -> Rollout:
            first, *others = pieces_of(one)
            (given, _), (turn, _), (more, _) = others[:3]
            return rebuilt(one, [first, (np.concatenate([given, turn, more]), False), *others[3:]])

        return self._changed(group, lambda one: len(turns_of(one)) > 2, change, is_true=True)

    def borrowed(self, group: Group) -> Group | None:
        """A trajectory of another prompt's episode, with its reward of 1."""
        won = [
            one
            for other in self.honest
            if other.prompt_index != group.prompt_index
            for one in other.rollouts
            if one.reward == 1 and len(turns_of(one)) > 1
        ]
        if not won:
            return None
        return self._changed(group, lambda one: one.reward == 0, lambda _: self.chooser.choice(won), is_true=True)

    def doctored(self, group: Group) -> Group | None:
        """The right last turn in place of the drawn one, true log-probs and reward."""
        turn = [*self.site.prompter.tokens(self.site.answer(group)).tolist(), self.site.prompter.eos_token_id]

        def change(one: Rollout) -> Rollout:
            pieces = [*pieces_of(one)[:-1], (np.array(turn, np.int32), True)]
            return dataclasses.replace(_rewarded(rebuilt(one, pieces)), finish_reason=FinishReason.EOS)

        return self._changed(group, lambda one: one.reward == 0 and len(turns_of(one)) > 1, change, is_true=True)

    def picked(self, group: Group) -> Group | None:
        """A trajectory whose later turns were drawn again, with their own log-probs."""
        mine = next(each for each in self.again if each.assignment == group.assignment)
        for number, (one, other) in enumerate(zip(group.rollouts, mine.rollouts, strict=True)):
            if not np.array_equal(one.token_ids, other.token_ids):
                rollouts = [*group.rollouts]
                rollouts[number] = other
                return dataclasses.replace(group, rollouts=tuple(rollouts))
        return None

    def _changed(
        self,
        group: Group,
        fits: Callable[[Rollout], bool],
        change: Callable[[Rollout], Rollout],
        *,
        is_true: bool = False,
    ) -> Group | None:
        for number, one in enumerate(group.rollouts):
            if one.is_trainable and fits(one):
                if is_true:
                    return self.site.with_member(group, number, change(one))
                rollouts = [*group.rollouts]
                rollouts[number] = change(one)
                return dataclasses.replace(group, rollouts=tuple(rollouts))
        return None


def _rewarded(rollout: Rollout) -> Rollout:
    parts = tuple(dataclasses.replace(part, value=1.0) for part in rollout.reward_parts)
    return dataclasses.replace(rollout, reward=1.0, reward_parts=parts)


def pieces_of(rollout: Rollout) -> Pieces:
    """Turns and given tokens, in order."""
    return [(rollout.token_ids[part.start : part.end], part.is_drawn) for part in parts_of(rollout.spans)]


def rebuilt(rollout: Rollout, pieces: Pieces) -> Rollout:
    """The rollout of these pieces; its log-probs are 0."""
    ends = np.cumsum([ids.size for ids, _ in pieces]).tolist()
    spans = tuple(
        Span(version=0 if is_drawn else GIVEN, start=start, end=end)
        for (_, is_drawn), start, end in zip(pieces, [0, *ends[:-1]], ends, strict=True)
    )
    count = sum(ids.size for ids, is_drawn in pieces if is_drawn)
    return dataclasses.replace(
        rollout,
        token_ids=np.concatenate([ids for ids, _ in pieces]),
        spans=spans,
        sampler_logprobs=np.zeros(count, np.float32),
    )


FORGERIES = {
    "another answer of the environment": Forger.answers,
    "a reward of 1": Forger.rewards,
    "without the last turn": Forger.short,
    "without the last turn, said to be out of time": Forger.late,
    "a drawn turn said to be given": Forger.hidden,
    "the trajectory of another episode": Forger.borrowed,
    "a wrong trajectory said to be lost": Forger.lost,
    "log-probs of later turns shifted by -0.1, in all eight": Forger.logprobs,
    "the right last turn, true log-probs": Forger.doctored,
    "later turns drawn again, true log-probs": Forger.picked,
}


def row_of(site: Site, groups: Sequence[Group]) -> dict[str, Any]:
    """Groups, and what became of them."""
    verdicts = [site.judge(group) for group in groups]
    by = Counter(check for found, _ in verdicts for check in found)
    return {
        "groups": len(groups),
        "trajectories": sum(len(group.rollouts) for group in groups),
        "turns": sum(len(turns_of(rollout)) for group in groups for rollout in group.rollouts),
        "rejected": sum(bool(found) for found, _ in verdicts),
        "dropped": sum(is_dropped for _, is_dropped in verdicts),
        "by": {check: by[check] for check in CHECKS},
    }


def run(site: Site, *, num_honest_turns: int, num_forged: int) -> dict[str, Any]:
    """The rows of one game, by what is sent."""
    rows: dict[str, Any] = {}
    exact, honest, number = site.engine(), list[Group](), 0
    for name, engine in (("float32", exact), ("bfloat16", site.engine(compute_dtype="bf16"))):
        groups, num_turns = list[Group](), 0
        while num_turns < num_honest_turns:
            more = site.generate(engine, range(number, number + AT_ONCE))
            number += AT_ONCE
            num_turns += sum(len(turns_of(rollout)) for group in more for rollout in group.rollouts)
            groups += more
        rows[f"honest, {name}"] = row_of(site, groups)
        honest = honest or groups
    some = honest[: 2 * num_forged]
    again = site.generate(exact, [group.assignment for group in some], other=1)
    forger = Forger(site=site, honest=some, again=again)
    for name, forge in FORGERIES.items():
        forged = [changed for group in some if (changed := forge(forger, group)) is not None]
        rows[name] = row_of(site, forged[:num_forged])
    return rows


def total(games_rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the games."""
    found: dict[str, Any] = {}
    for name in games_rows[0]:
        rows = [rows[name] for rows in games_rows]
        found[name] = {key: sum(row[key] for row in rows) for key in rows[0] if key != "by"}
        found[name]["by"] = {check: sum(row["by"][check] for row in rows) for check in CHECKS}
    return found


def main() -> None:
    """Warm both models up, measure, write and print the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--honest", type=int, default=10_000, help="honest turns of each game and precision")
    parser.add_argument("--forged", type=int, default=500, help="trajectories of each forgery and game")
    parser.add_argument("--warm-steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    found = {}
    for name in GAMES:
        with (
            tempfile.TemporaryDirectory() as directory,
            open_site(name, Path(directory), warm_steps=options.warm_steps) as site,
        ):
            found[name] = run(site, num_honest_turns=options.honest, num_forged=options.forged)
    rows = total(list(found.values()))
    record = {
        "tolerances": {
            "logprob_tolerance": CONFIG.logprob_tolerance,
            "group_logprob_tolerance": CONFIG.group_logprob_tolerance,
            "margin_tolerance": CONFIG.margin_tolerance,
            "margin_share": CONFIG.margin_share,
            "margin_limit": CONFIG.margin_limit,
        },
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
        "cases": rows,
        "games": found,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
