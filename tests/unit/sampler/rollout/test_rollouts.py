"""Groups from assignments: real engine and tokenizer, a task whose answers the test knows."""

import dataclasses

import numpy as np
import pytest

from heterorl.common.errors import RewardError
from heterorl.common.generation.hf import HfEngine
from heterorl.common.model.prompts import Prompter
from heterorl.common.model.tensors import store
from heterorl.common.process.clock import SystemClock
from heterorl.common.tasks.registry import TaskConfig, build_task
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest, LogprobMode, SamplingSemantics, SiteId
from heterorl.common.types.rollout import FinishReason, GroupId, RewardPart, WorkAssignment  # fmt: skip
from heterorl.common.weights.arena import Arena
from heterorl.demo.tiny_model import EOS, write_tiny_model
from heterorl.sampler.rollout.maker import RolloutMaker

ROOT = Digest("ab" * 32)
BROKEN = 13


class LengthTask:
    """Rewards length in two parts; its verifier breaks on prompt 13."""

    digest = Digest("00" * 32)
    num_prompts = num_evaluation_prompts = 100

    def __init__(self):
        self.seen = []

    def prompt(self, index):
        return Prompt(index=index, text=f"{index}+1=", answer="")

    evaluation_prompt = prompt

    def score(self, prompt, completion):
        self.seen.append((prompt.index, completion))
        if prompt.index == BROKEN and len(self.seen) % 2 == 0:
            raise RewardError("the verifier broke")
        return (RewardPart(name="length", value=len(completion) / 8), RewardPart(name="bonus", value=0.25))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=1)
    prompter = Prompter(str(model_dir), use_chat_template=False)
    engine = HfEngine(
        model_dir=str(model_dir), published_dtype="fp32", compute_dtype="fp32", device="cpu", batch_rows=64,
        eos_token_id=prompter.eos_token_id,
        sampling=SamplingSemantics(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, logprob_mode=LogprobMode.PROCESSED
        ),
    )  # fmt: skip
    arena = Arena(engine.layout)
    store(engine.model, arena)
    engine.load(arena, 5)
    return engine, prompter


def maker_of(parts):
    engine, prompter = parts
    return RolloutMaker(
        engine=engine, task=LengthTask(), prompter=prompter, site=SiteId("eu-1"), incarnation="abcd", group_size=4,
        clock=SystemClock(),
    )  # fmt: skip


def work(*indices):
    return [WorkAssignment(id=100 + index, prompt_index=index, seed=1000 + index, lease_s=60.0) for index in indices]


def test_each_assignment_gives_one_group_that_says_where_it_comes_from(parts):
    maker = maker_of(parts)

    batch = maker.make(work(3, 7), state_roots={5: ROOT}, first_sequence=41)

    assert batch.failed == ()
    assert [group.id for group in batch.groups] == [
        GroupId(site=SiteId("eu-1"), incarnation="abcd", sequence=sequence) for sequence in (41, 42)
    ]
    assert [(group.assignment, group.prompt_index) for group in batch.groups] == [(103, 3), (107, 7)]
    assert [maker.prompter.decode(group.prompt_token_ids) for group in batch.groups] == ["3+1=", "7+1="]
    assert all(group.state_root == ROOT and group.oldest_version == 5 for group in batch.groups)
    assert all(len(group.rollouts) == 4 for group in batch.groups)
    assert batch.num_tokens == sum(row.token_ids.size for group in batch.groups for row in group.rollouts)


def test_scored_text_is_the_completion_without_its_end_and_the_reward_is_the_sum_of_its_parts(parts):
    maker = maker_of(parts)

    batch = maker.make(work(*range(8)), state_roots={5: ROOT}, first_sequence=1)

    rows = [(group.prompt_index, row) for group in batch.groups for row in group.rollouts]
    assert {row.finish_reason for _, row in rows} == {FinishReason.EOS, FinishReason.LENGTH}
    assert [index for index, _ in maker.task.seen] == [index for index, _ in rows]
    for (_, text), (_, row) in zip(maker.task.seen, rows, strict=True):
        assert EOS not in text
        assert [(part.name, part.value) for part in row.reward_parts] == [("length", len(text) / 8), ("bonus", 0.25)]
        assert row.reward == len(text) / 8 + 0.25
        assert row.spans[0].start == 0
        assert row.spans[-1].end == row.token_ids.size == row.sampler_logprobs.size


def test_broken_verifier_gives_no_group_and_leaves_no_hole_in_the_sequences(parts):
    # T13: a reward error is not a zero reward.
    batch = maker_of(parts).make(work(3, BROKEN, 7), state_roots={5: ROOT}, first_sequence=9)

    assert batch.failed == (100 + BROKEN,)
    assert [(group.id.sequence, group.prompt_index) for group in batch.groups] == [(9, 3), (10, 7)]


def test_a_reward_that_hangs_costs_its_own_group_only(parts, tmp_path, caplog):
    # Hangs on every completion of one prompt, crashes on those of another.
    (tmp_path / "mine.py").write_text(
        "import os, time\n"
        "def score(prompt, completion, answer):\n"
        "    if prompt == HANGS:\n        time.sleep(1000)\n"
        "    if prompt == CRASHES:\n        os._exit(1)\n"
        "    return float(len(completion))\n"
    )
    plain = build_task(TaskConfig(digits=1))
    source = (tmp_path / "mine.py").read_text()
    for name, index in (("HANGS", 2), ("CRASHES", 4)):
        source = source.replace(name, repr(plain.prompt(index).text))
    (tmp_path / "mine.py").write_text(source)
    task = build_task(TaskConfig(digits=1, reward="mine:score", reward_path=str(tmp_path), reward_timeout_s=2.0))
    maker = dataclasses.replace(maker_of(parts), task=task)

    batch = maker.make(work(1, 2, 3, 4, 5), state_roots={5: ROOT}, first_sequence=1)

    assert batch.failed == (102, 104)
    assert [group.prompt_index for group in batch.groups] == [1, 3, 5]
    assert "assignment 102 gives no group: the reward function failed on prompt 2: no answer in 2 s" in caplog.text
    for number in range(3):
        maker.make(work(4, 4, 4, 4), state_roots={5: ROOT}, first_sequence=10 * number)
    assert "NO REWARD for 8 groups in a row" in caplog.text


def test_group_is_the_same_whatever_shares_its_batch(parts):
    alone = maker_of(parts).make(work(7), state_roots={5: ROOT}, first_sequence=1).groups[0]
    among = maker_of(parts).make(work(1, 2, 7, 4), state_roots={5: ROOT}, first_sequence=1).groups[2]

    for left, right in zip(alone.rollouts, among.rollouts, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        # Shapes of the matrix products differ, so float32 rounds otherwise.
        np.testing.assert_allclose(left.sampler_logprobs, right.sampler_logprobs, atol=1e-5)
