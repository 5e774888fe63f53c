"""Programs that speak by the SDK of OpenAI: the example, tools, streams, errors, retries."""

import random
from pathlib import Path

import pytest

from heterorl.common.tasks.environments.environment import Action, ToolCall
from heterorl.common.tasks.environments.episodes import Episodes

pytestmark = pytest.mark.process
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent-program"
AGENT = """
import json
from openai import APIError, APITimeoutError, AsyncOpenAI, BadRequestError, OpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "1 + 2?"}]

async def adds(row, base_url, api_key):
    client, messages = AsyncOpenAI(base_url=base_url, api_key=api_key), list(ASKED)
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], temperature=0)
        message = reply.choices[0].message
        if reply.choices[0].finish_reason == "stop":
            return float(message.content == "3")
        messages.append(message)
        for call in message.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})

def streams(row, base_url, api_key):
    options = {"include_usage": True}
    client = OpenAI(base_url=base_url, api_key=api_key)
    stream = client.chat.completions.create(model="policy", messages=ASKED, stream=True, stream_options=options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    return float(text == "It is 3.")

def refused(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    assert [model.id for model in client.models.list()] == ["policy"]
    for fields in ({"n": 2}, {"logit_bias": {"1": 1}}, {"logprobs": True}, {"stop": "x"}):
        try:
            client.chat.completions.create(model="policy", messages=ASKED, **fields)
        except BadRequestError as error:
            assert [error.param] == list(fields), error
    client.chat.completions.create(model="policy", messages=ASKED)
    try:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 2?"}])
    except BadRequestError as error:
        assert "cannot be rewritten" in error.message
        return 1.0

def repeats(row, base_url, api_key):
    # The first tries are given up before the turn has ended.
    impatient = OpenAI(base_url=base_url, api_key=api_key, timeout=0.01, max_retries=1)
    try:
        impatient.chat.completions.create(model="policy", messages=ASKED)
    except APITimeoutError:
        pass
    patient = OpenAI(base_url=base_url, api_key=api_key)
    reply = patient.chat.completions.create(model="policy", messages=ASKED)
    return float(reply.choices[0].message.content == "3")
"""


@pytest.fixture
def opened(tmp_path):
    """Makes environments of the programs above, or of the example, and ends them."""
    (tmp_path / "agent.py").write_text(AGENT)
    made = []

    def make(name, directory=tmp_path):
        limits = {"step_timeout_s": 60.0, "memory_bytes": 1 << 30, "max_observation_chars": 1000, "num_processes": 1}
        made.append(Episodes(f"program:{name}", directory=directory, **limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


def reward(episode):
    return episode.score()[0].value


def test_the_example_plays_its_game_and_is_deterministic(opened):
    episodes = opened("agent.py:run", EXAMPLE)
    number = random.Random(5).randint(1, 20)
    assert episodes.is_deterministic
    with episodes.open({"seed": 5}, seed=1) as episode:
        assert "from 1 to 20" in episode.first[0].content
        (hint,) = episode.step(Action("nothing")).messages
        assert hint.content == "higher"
        assert episode.step(Action(f"<think>so</think>It is {number}.")).done
        assert reward(episode) == 1.5
    with episodes.open({"seed": 5}, seed=1) as episode:
        episode.step(Action(str(number - 1)))
        assert reward(episode) == 0.5 * (1 - 1 / 20)


def test_tools_go_through_the_sdk_and_back(opened):
    with opened("agent.py:adds").open({}, seed=1) as episode:
        (result,) = episode.step(Action("Adding.", (ToolCall("add", {"a": 1, "b": 2}),))).messages
        assert (result.role, result.name, result.content) == ("tool", "add", "3")
        assert episode.step(Action("3")).done
        assert reward(episode) == 1.0


@pytest.mark.parametrize(("name", "text"), [("streams", "It is 3."), ("refused", "3"), ("repeats", "3")])
def test_a_program_of_one_turn_gets_it(opened, name, text):
    with opened(f"agent.py:{name}").open({}, seed=1) as episode:
        assert episode.step(Action(text)).done
        assert reward(episode) == 1.0
