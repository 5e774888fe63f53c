"""Answers that are kept: asked once, old ones while nobody answers, none of a run that went back."""

import asyncio

import pytest

from heterorl.common.errors import Unreachable
from heterorl.relay.cached_weights import Answers


class Hands:
    """A clock that is moved by hand."""

    now = 0.0

    def monotonic(self):
        return self.now


class Coordinator:
    """Counts questions; answers when it is let."""

    def __init__(self):
        self.num_asked = 0
        self.is_down = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def heard(self, count):
        for _ in range(10):
            await asyncio.sleep(0)
        assert self.num_asked == count

    async def ask(self):
        self.num_asked += 1
        number = self.num_asked
        await self.gate.wait()
        if self.is_down:
            raise Unreachable("down")
        return f"answer {number}"


@pytest.fixture
def clock():
    return Hands()


@pytest.fixture
def answers(clock):
    return Answers(clock=clock, keep_s=10.0, max_bytes=20, size=len)


async def test_eight_who_ask_the_same_are_one_question(answers):
    asked = Coordinator()
    asked.gate.clear()
    waiting = [asyncio.ensure_future(answers.get("key", asked.ask)) for _ in range(8)]
    await asyncio.sleep(0)
    # Who asked first leaves first.
    waiting[0].cancel()
    asked.gate.set()

    assert await asyncio.gather(*waiting[1:]) == ["answer 1"] * 7
    assert asked.num_asked == 1


async def test_question_that_all_left_is_cancelled_and_asked_again_by_the_next(answers):
    asked = Coordinator()
    asked.gate.clear()
    ended = []

    async def ask():
        try:
            return await asked.ask()
        finally:
            ended.append(True)

    waiting = [asyncio.ensure_future(answers.get("key", ask)) for _ in range(2)]
    await asked.heard(1)
    waiting[0].cancel()
    await asked.heard(1)
    assert not ended
    waiting[1].cancel()
    await asyncio.wait(waiting)
    following = asyncio.ensure_future(answers.get("key", ask))
    await asked.heard(2)
    assert len(ended) == 1
    asked.gate.set()

    assert await following == "answer 2"


async def test_an_old_answer_is_asked_again_and_given_while_nobody_answers(answers, clock):
    asked = Coordinator()
    assert await answers.get("key", asked.ask) == "answer 1"
    clock.now = 11.0
    asked.is_down = True
    assert await answers.get("key", asked.ask) == "answer 1"
    asked.is_down = False
    assert await answers.get("key", asked.ask) == "answer 3"
    answers.expire()
    assert await answers.get("key", asked.ask) == "answer 4"


async def test_an_answer_that_was_under_way_when_a_head_came_is_old_at_once(answers):
    asked = Coordinator()
    asked.gate.clear()
    waiting = asyncio.ensure_future(answers.get("key", asked.ask))
    await asked.heard(1)
    answers.expire()
    asked.gate.set()
    assert await waiting == "answer 1"
    asked.is_down = True

    assert await answers.get("key", asked.ask) == "answer 1"
    assert asked.num_asked == 2


async def test_nothing_is_kept_of_a_run_that_went_back(answers):
    asked = Coordinator()
    await answers.get("key", asked.ask)
    asked.gate.clear()
    waiting = asyncio.ensure_future(answers.get("other", asked.ask))
    await asked.heard(2)
    answers.clear()
    asked.gate.set()
    await waiting
    asked.is_down = True

    for key in ("key", "other"):
        with pytest.raises(Unreachable):
            await answers.get(key, asked.ask)


async def test_what_was_unused_for_longest_makes_room(answers):
    asked = Coordinator()
    for key in ("a", "b", "a", "c"):
        await answers.get(key, asked.ask)
    await answers.get("a", asked.ask)
    assert asked.num_asked == 3
    await answers.get("b", asked.ask)
    assert asked.num_asked == 4
