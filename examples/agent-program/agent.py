"""An agent that looks for a number by the OpenAI SDK: `pip install openai`; it knows nothing of heterorl."""

import random
import re

from openai import BadRequestError, OpenAI

is_deterministic = True  # the row, the seed and the answers decide everything

RULES = "I have chosen a number from 1 to 20. Find it: write one number, and I answer higher or lower."


def run(task, base_url, api_key):
    """Play one game; the reward grows with how soon the number is found."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    number = random.Random(task["seed"]).randint(1, 20)
    messages = [{"role": "user", "content": RULES}]
    nearest = 20
    for tries in range(1, 21):
        try:
            reply = client.chat.completions.create(model="policy", messages=messages)
        except BadRequestError as error:
            if error.code != "budget_exhausted":
                raise
            break  # task.max_turns: what was reached counts
        answer = reply.choices[0].message.content or ""
        found = re.search(r"\d+", answer)
        guess = int(found[0][:4]) if found else 0
        if guess == number:
            return 1.0 / tries + 1.0
        nearest = min(nearest, abs(guess - number))
        hint = "higher" if guess < number else "lower"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": hint}]
    return 0.5 * (1 - nearest / 20)
