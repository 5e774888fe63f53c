"""Rewards of groups: the first failure gives up the rest, and a row of failures is said loudly."""

import json
import logging

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, DependencyMissing, RewardError
from heterorl.common.tasks.task import FailureStreak, Prompt
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import try_answers, try_reward
from heterorl.common.types.rollout import RewardPart
from tests.support.plain_task import PlainTask


class Scored(PlainTask):
    """A task whose rewards a function gives."""

    def __init__(self, reward, num_workers=1):
        self._reward = reward
        self.num_workers = num_workers
        self.asked = []

    def prompt(self, index):
        return Prompt(index=index, text="p", answer="reference")

    def score(self, prompt, completion):
        self.asked.append(completion)
        return (RewardPart(name="r", value=self._reward(completion)),)


def fails_on(bad):
    def reward(completion):
        if completion == bad:
            raise RewardError("no answer in 1 s")
        return float(len(completion))

    return reward


@pytest.mark.parametrize("num_workers", [1, 3])
def test_scores_are_in_order_and_the_first_failure_gives_up_the_group(num_workers):
    task = Scored(fails_on("bad"), num_workers)

    assert [parts[0].value for parts in task.score_all(task.prompt(0), ["a", "bbb", "cc"])] == [1.0, 3.0, 2.0]
    with pytest.raises(RewardError):
        list(task.score_all(task.prompt(0), ["a", "bad", "c"]))
    assert num_workers > 1 or task.asked[-1] == "bad"


def test_a_row_of_failures_is_loud_at_the_eighth_and_ever_more_rarely(caplog):
    caplog.set_level(logging.ERROR)
    row = FailureStreak()
    for _ in range(7):
        row.failed(RewardError("no answer"))
    row.passed()
    for _ in range(40):
        row.failed(RewardError("no answer in 5 s"))

    assert [int(record.getMessage().split()[3]) for record in caplog.records] == [8, 16, 32]
    assert row.problem.startswith("NO REWARD for 40 groups in a row")
    assert "NO REWARD for 8 groups in a row, none of them can be trained on: no answer in 5 s" in caplog.text
    assert "task.reward_timeout_s" in caplog.text
    row.passed()
    assert not row.problem
    for _ in range(9):
        row.failed(RewardError("no answer"))
    assert row.problem
    assert len(caplog.records) == 3, "a shorter row within a minute adds no line"


class Tokens:
    """A prompter whose tokens are code points."""

    def tokens(self, completion):
        return np.array([ord(letter) for letter in completion], np.int32)

    def decode(self, ids):
        return "".join(chr(value) for value in ids)


def test_one_reward_is_tried_by_the_way_of_completions():
    task = Scored(fails_on("bad"))

    assert try_reward(task, Tokens()) == 9.0
    assert task.asked == ["reference", "reference", "Yes"], "twice, to find rewards by chance; and a wrong answer"
    with pytest.raises(
        ConfigError,
        match="^task: the reference answer of prompt 0 gets no reward here: no answer.*task.reward_timeout_s",
    ):
        try_reward(Scored(fails_on("reference")), None)


def test_a_wrong_answer_without_reward_and_a_right_one_with_0_are_told(caplog):
    told = []
    assert try_reward(Scored(fails_on("Yes")), None, say=told.append) == 9.0
    assert told == ["the reference answer of prompt 0 gets a reward of 9"]
    (words,) = [record.getMessage() for record in caplog.records]
    assert words.startswith("task: the answer 'Yes' to prompt 0 gets no reward: no answer in 1 s; such completions are")

    caplog.clear()
    assert try_reward(Scored(lambda completion: 0.0), None) == 0.0
    (words,) = [record.getMessage() for record in caplog.records]
    assert words.startswith("task: the reference answer of prompt 0 gets a reward of 0; correct")


def mathematical(tmp_path, answers):
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": each}) + "\n" for n, each in enumerate(answers)))
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "held out", "answer": "1"}\n')
    held_out = str(tmp_path / "held-out.jsonl")
    return build_task(TaskConfig(name=f"jsonl:{path}", evaluation_path=held_out, match="math_verify"))


@pytest.mark.process
@pytest.mark.timeout(120)
def test_answers_that_cannot_be_read_are_told_at_the_start_and_keep_their_numbers(tmp_path, caplog):
    task = mathematical(tmp_path, ["x is 5", "1", "3 +* 4", "2", "3", "5 6", "4", "$", "5"])
    try:
        try_answers(task)
        (words,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        beginning = "task.match: 4 of 9 rows that were tried cannot be scored: prompt 0 ('x is 5': the right answer"
        assert words.startswith(beginning)
        assert words.count("prompt ") == 3
        assert task.num_prompts == 9
        assert try_reward(task, None) == 1.0, "the first answer that can be read"
    finally:
        task.close()


def test_a_start_reads_a_thousand_answers_spread_over_the_task():
    class Read(PlainTask):
        num_prompts, asked = 2_000_000, []

        def prompt(self, index):
            return Prompt(index=index, text="p", answer="1")

        def answer_problem(self, prompt):
            self.asked.append(prompt.index)
            return

    task = Read()
    try_answers(task)

    assert task.asked == [*range(0, 2_000_000, 2000)]
    assert len(task.asked) == 1000


@pytest.mark.process
@pytest.mark.timeout(120)
def test_reward_that_reads_few_of_the_answers_is_not_begun(tmp_path):
    task = mathematical(tmp_path, ["x is 5", "1", "3 +* 4", "5 6"])
    try:
        with pytest.raises(ConfigError, match=r"task.match: 3 of 4 rows.*prompt 0 \('x is 5'.*match = \"exact\""):
            try_answers(task)
    finally:
        task.close()


@pytest.mark.process
@pytest.mark.timeout(120)
def test_answers_that_cannot_be_read_are_told_under_the_key_of_their_reward(tmp_path):
    rows = {"train": ["1", "2", "3", "4"], "held-out": ["assert f()"]}
    for name, answers in rows.items():
        lines = [
            json.dumps({"prompt": f"{name} {n}", "answer": [int(each)] if each.isdigit() else [each]})
            for n, each in enumerate(answers)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    source = {
        "name": f"jsonl:{tmp_path / 'train.jsonl'}", "evaluation_path": str(tmp_path / "held-out.jsonl"),
        "rewards": [{"kind": "code", "name": "tests"}],
    }  # fmt: skip
    other = {"label": "sums", "name": "arithmetic", "digits": 1, "weight": 0.01}
    for table, key in (
        (source, r"task.rewards\[0\]"),
        (
            {"name": "mixture", "sources": [{"label": "code", **source}, other]},
            r"task.sources, code: task.rewards\[0\]",
        ),
    ):
        task = build_task(TaskConfig(**table))
        try:
            words = rf"^{key}: \d+ of \d+ rows that were tried cannot be scored: .*docs/rewards.md lists their forms"
            with pytest.raises(ConfigError, match=words) as raised:
                try_answers(task)
            assert "match" not in str(raised.value)
        finally:
            task.close()


@pytest.mark.process
def test_a_missing_verifier_is_told_before_the_first_group(tmp_path, monkeypatch):
    # The worker's environment is ours: there the package is hidden by one that is not it.
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    said = r"math-verify is not installed \(in a clone of heterorl: pip install '\.\[tasks\]'\)"
    with pytest.raises(DependencyMissing, match=said):
        try_reward(build_task(TaskConfig(name=f"jsonl:{tmp_path}/train.jsonl", match="math_verify")), None)
