"""Environments as authors of verifiers write them."""

GUESS = """
import random
import verifiers.v1 as vf

is_deterministic = True

class Number(vf.TaskData):
    number: int

class Guess(vf.Task[Number]):
    @vf.reward
    async def found(self, trace) -> float:
        return float(trace.last_reply == str(self.data.number))

    @vf.reward(weight=0.5)
    async def quick(self, trace) -> float:
        return 1 / trace.num_turns

class Numbers(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for idx, number in enumerate(random.Random(1).choices(range(1, 10), k=40)):
            yield Guess(Number(prompt=f"Guess number {idx}, from 1 to 9.", number=number))

class Game(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as game:
            said = await game.turn()
            while not said.terminated and said.last_reply != str(task.data.number):
                said = await game.turn("higher" if said.last_reply < str(task.data.number) else "lower")

__all__ = ["Game", "Numbers"]
"""
"""A game of several turns with two rewards, in 30 lines."""

ODD = """
import asyncio, time
import verifiers.v1 as vf

class Word(vf.TaskData):
    do: str

class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        "Add two numbers."
        return str(a + b)

class Odd(vf.Task[Word]):
    @vf.reward
    async def fine(self, trace) -> float:
        if self.data.do == "raise":
            raise KeyError("secret")
        if self.data.do == "hang":
            time.sleep(1000)
        return float("5" in trace.last_reply)

class Odds(vf.Taskset[Odd, vf.TasksetConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]

    def load(self):
        yield from (Odd(Word(prompt="2 + 3?", system_prompt="Add.", do=do)) for do in ("add", "raise", "hang", "add"))
        yield Odd(Word(prompt=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], do=""))
        while True:
            yield Odd(Word(prompt="1?", do="add"))

__all__ = ["Odds"]

if __name__ == "__main__":
    Adder.run()
"""
"""Tasks with a tool, without an end; some fail."""


def taskset(body="yield vf.Task(vf.TaskData(prompt='x'))", *, more="", config="vf.TasksetConfig", exported='["Some"]'):
    """Text of a module with a taskset."""
    return (
        f"import verifiers.v1 as vf\n{more}\nclass Some(vf.Taskset[vf.Task, {config}]):\n"
        f"    def load(self):\n        {body}\n__all__ = {exported}\n"
    )
