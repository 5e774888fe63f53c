"""What of a completion is its answer, and that every reward of heterorl's own goes by it."""

import pytest

from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.rewards.answer_match import MatchedTask
from heterorl.common.tasks.source_config import SourceConfig
from heterorl.common.tasks.task import Prompt


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        ("<think>5</think>7", "7"),
        ("5, so </think>7", "7"),
        ("<think>5", ""),
        ("7<think>5", "7"),
        ("a <think>5</think>b <think>6</think>c", "a b c"),
        ("<think>5 <think>6</think>7", "7"),
        ("<think>5<think>6</think>5</think>7", "7"),
        ("6</think>5</think>7", "7"),
        ("", ""),
        ("a < b </ think >", "a < b </ think >"),
    ],
)
def test_thoughts_are_not_the_answer(completion, answer):
    assert answer_of(completion) == answer
    assert answer_of(answer) == answer


def test_an_exact_match_leaves_thoughts_out():
    matcher = MatchedTask(SourceConfig())
    prompt = Prompt(index=0, text="3+4=", answer="7")

    assert matcher.score(prompt, "<think>It is 6.</think>\n7")[0].value == 1.0
    assert matcher.score(prompt, "<think>7")[0].value == 0.0
    assert matcher.score(prompt, "<think>7</think>6")[0].value == 0.0
    several = Prompt(index=1, text="Which city?", answer='["", "Paris"]')
    assert [matcher.score(several, said)[0].value for said in ("", "Paris")] == [0.0, 1.0]


@pytest.mark.process
@pytest.mark.timeout(120)
def test_mathematics_leave_thoughts_out():
    matcher = MatchedTask(SourceConfig(match="math_verify", reward_timeout_s=20.0))
    prompt = Prompt(index=0, text="3+4=", answer="7")
    try:
        assert matcher.score(prompt, "it is 6</think>The answer is $7$.")[0].value == 1.0
        assert matcher.score(prompt, "<think>\\boxed{7}</think>")[0].value == 0.0
        assert matcher.score(prompt, "<think>\\boxed{7}")[0].value == 0.0
    finally:
        matcher.close()
