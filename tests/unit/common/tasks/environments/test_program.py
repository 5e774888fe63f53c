"""An agent program in a worker process: its requests are turns, its end is the episode's."""

import os
import signal
import sys
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError, EnvironmentFailed, ToolLost
from heterorl.common.tasks.environments.environment import Action, ToolCall
from heterorl.common.tasks.environments.environment_task import EnvironmentTask, EpisodeLimits, seeds_task
from heterorl.common.tasks.environments.episodes import Episodes
from heterorl.common.tasks.task import Message

pytestmark = pytest.mark.process

AGENT = """
import json, os, signal, subprocess, sys, time, urllib.error, urllib.request

def ask(base_url, api_key, messages, **fields):
    body = json.dumps({"model": "any", "messages": messages, "temperature": 0, **fields}).encode()
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

def guess(row, base_url, api_key):
    number, messages = int(row["answer"]), [user("Guess my number.")]
    for tries in range(1, 100):
        message = ask(base_url, api_key, messages)
        said = int(message["content"])
        if said == number:
            print("found it", end="")
            return 1 / tries
        messages += [message, user("higher" if said < number else "lower")]

def graded(row, base_url, api_key):
    try:
        return guess(row, base_url, api_key)
    except urllib.error.HTTPError as error:
        assert error.code == 400 and json.load(error)["error"]["code"] == "budget_exhausted"
        return {"reached": 0.25, "whole": 0}

async def adds(row, base_url, api_key):
    tool = {"type": "function", "function": {"name": row.get("tool", "add"), "parameters": {"type": "object"}}}
    message = ask(base_url, api_key, [user("1 + 2?")], tools=[tool])
    (call,) = message["tool_calls"]
    total = str(sum(json.loads(call["function"]["arguments"]).values()))
    result = {"role": "tool", "tool_call_id": call["id"], "content": total}
    last = ask(base_url, api_key, [user("1 + 2?"), message, result], tools=[tool])
    return float(last["content"] == total)

def odd(row, base_url, api_key):
    if row["do"] == "nothing":
        return 1.0
    message = ask(base_url, api_key, [user(row.get("first", str(os.getpid())))])
    word = row["do"]
    if word == "hang":
        signal.pause()
    if word == "raise":
        raise KeyError("secret of the program")
    if word == "start":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        ask(base_url, api_key, [user(row["first"]), message, user(str(child.pid))])
    if word in ("detach", "orphan"):
        # As a browser or a terminal does: a session of its own, and with "orphan" no living parent.
        waits = "import signal; signal.pause()"
        code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {waits!r}]).pid, flush=True)"
        code += "; " + ("" if word == "orphan" else waits)
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
        pid = child.stdout.readline().decode().strip()
        ask(base_url, api_key, [user(row["first"]), message, user(pid)])
        if row.get("stays"):
            signal.pause()
    if word == "exit":
        print(message["content"], flush=True)
        os._exit(0)
    if word == "forge":
        for each in os.listdir("/proc/self/fd"):
            place = "/proc/self/fd/" + each
            if os.path.exists(place) and "memfd:reward" in os.readlink(place):
                with open(place, "w") as file:
                    file.write("0.59999")
    if word == "numpy":
        import numpy as np

        message = ask(base_url, api_key, [user(row["first"]), message, user(str(np.random.randint(1 << 30)))])
        return np.float32(0.5)
    return {"text": "x", "none": None, "true": True, "nan": float("nan")}.get(word, 0.5)

def parts(row, base_url, api_key):
    import atexit
    atexit.register(print, "bye")
    assert os.environ["OPENAI_API_KEY"] == "the judge's"
    assert "HETERORL_REWARD" not in os.environ
    ask(base_url, api_key, [user("?")])
    return {"solved": True, "speed": 0.5}

def truth():
    print(ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], [user("?")])["content"])

def says(row, base_url, api_key):
    ask(base_url, api_key, [user("?")])
    print("ConnectionError: the cache is away", file=sys.stderr)
    print("FATAL ERROR: heap out of memory", file=sys.stderr)
    sys.exit("v8::Node")

def fills(row, base_url, api_key):
    ask(base_url, api_key, [user("?")])
    bytearray(1 << 31)

def reserves(row, base_url, api_key):
    import mmap
    # As Node does: addresses without memory.
    mmap.mmap(-1, 1 << 36, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    ask(base_url, api_key, [user("?")])
    return 1.0

def shows(row, base_url, api_key):
    ask(base_url, api_key, [user(json.dumps(row["cells"], allow_nan=False))])
    return 1.0

def differs(row, base_url, api_key):
    ask(base_url, api_key, [user(str(os.getpid()))])
    return 1.0
"""
SAME = """
is_deterministic = True

def run(row, base_url, api_key):
    return 1.0
"""
COMMAND = """
import json, os, sys
from agent import ask, guess
row = json.loads(sys.stdin.readline())
print("the seed is", os.environ["HETERORL_SEED"])
reward = guess(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
print()
print(json.dumps({"reward": reward}))
"""


STREAM = """
import os, sys
from agent import ask, user
print(ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], [user("?")])["content"], end="")
with open(os.environ["HETERORL_REWARD"], "w") as file:
    file.write("0.25")
"""


@pytest.fixture
def opened(tmp_path):
    """Makes environments of a directory with the programs above, and ends them."""
    for name, text in (("agent.py", AGENT), ("same.py", SAME), ("command.py", COMMAND), ("stream.py", STREAM)):
        (tmp_path / name).write_text(text)
    made = []

    def make(name="agent.py:guess", **changes):
        limits = {"step_timeout_s": 60.0, "memory_bytes": 1 << 30, "max_observation_chars": 1000, "num_processes": 2}
        made.append(Episodes(f"program:{name}", directory=tmp_path, **{**limits, **changes}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def task_of(episodes):
    limits = EpisodeLimits(max_turns=4, trajectory_s=60.0)
    return EnvironmentTask(seeds_task(size=4, evaluation_size=2, seed=1), episodes, limits, seed=1)


def said(observation):
    return [message.content for message in observation.messages]


def values(episode):
    return {part.name: part.value for part in episode.score()}


def test_a_row_is_json_for_every_language(opened):
    row = {"prompt": "1", "cells": {"a": [float("nan"), 1.5], "b": float("-inf")}}
    with opened("agent.py:shows").open(row, 1) as episode:
        assert [message.content for message in episode.first] == ['{"a": [null, 1.5], "b": null}']


def until_gone(pid):
    """Wait until a process has ended; the kernel takes a moment for one that is killed."""
    while is_alive(pid):
        os.sched_yield()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("name", ["agent.py:guess", f"{sys.executable} command.py"])
def test_a_function_and_a_command_play_one_episode_each(opened, name):
    episodes = opened(name)
    assert (episodes.is_deterministic, episodes.max_live, episodes.keeps_prompts) == (False, 2, False)
    for _ in range(2):
        with episodes.open({"answer": "42"}, seed=7) as episode:
            assert episode.first == (Message(role="user", content="Guess my number."),)
            assert said(episode.step(Action("<think>50?</think>50"))) == ["lower"]
            last = episode.step(Action("42"))

            assert (last.messages, last.done) == ((), True)
            assert values(episode) == {"reward": 1 / 2}
    assert len([worker for worker in episodes._pool.workers if worker.process]) == 1, "its worker serves other episodes"


def test_a_program_without_its_package_names_what_to_install(opened, tmp_path):
    (tmp_path / "needs.py").write_text("from nosuchpackage.parts import run\n\ndef play(row): return 1\n")

    with pytest.raises(EnvironmentFailed, match="install nosuchpackage into the environment of heterorl"):
        opened("needs.py:play").open({}, seed=1)


def test_a_limit_is_told_to_the_program_which_may_grade_what_it_reached(opened):
    for name, expected in (("graded", {"reached": 0.25, "whole": 0}), ("guess", {"reward": 0.0})):
        with opened(f"agent.py:{name}").open({"answer": "42"}, seed=1) as episode:
            assert said(episode.step(Action("50"))) == ["lower"]

            assert values(episode) == expected


def test_tools_of_the_first_request_are_shown_and_results_have_names(opened):
    episodes = opened("agent.py:adds")
    assert episodes.tools == ()
    with episodes.open({}, seed=1) as episode:
        assert [tool["function"]["name"] for tool in episodes.tools] == ["add"]
        observation = episode.step(Action("", (ToolCall("add", {"a": 1, "b": 2}),)))
        assert observation.messages == (Message(role="tool", content="3", name="add"),)
        assert episode.step(Action("3")).done
        assert values(episode) == {"reward": 1.0}
    with pytest.raises(EnvironmentFailed, match="shows other tools"):
        episodes.open({"tool": "subtract"}, seed=1)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("text", "is what the function returned, and no reward"),
        ("none", "no reward"),
        ("nan", "not finite"),
        ("exit", "the program ended before its function returned"),
    ],
)
def test_what_is_no_reward_is_an_error(opened, do, words):
    with opened("agent.py:odd").open({"do": do, "first": "x"}, seed=1) as episode:
        assert episode.step(Action("1000")).done
        with pytest.raises(EnvironmentFailed, match=words):
            episode.score()


def test_numpy_is_seeded_and_its_numbers_and_truths_are_rewards(opened):
    episodes = opened("agent.py:odd")
    drawn = []
    for seed in (1, 1, 1 << 40):
        with episodes.open({"do": "numpy", "first": "x"}, seed=seed) as episode:
            drawn += said(episode.step(Action("y")))
            assert episode.step(Action("z")).done
            assert values(episode) == {"reward": 0.5}
    assert drawn[0] == drawn[1] != drawn[2]
    for do, reward in (("true", 1.0), ("forge", 0.5)):
        with episodes.open({"do": do, "first": "x"}, seed=1) as episode:
            assert episode.step(Action("y")).done
            assert values(episode) == {"reward": reward}


def test_a_reward_in_the_named_file_is_no_text_of_the_policy(opened, monkeypatch):
    with opened(f"{sys.executable} stream.py").open({}, seed=1) as episode:
        assert episode.step(Action("my guess is\n42")).done
        assert values(episode) == {"reward": 0.25}
    monkeypatch.setenv("OPENAI_API_KEY", "the judge's")
    with opened(f"{sys.executable} -c 'from agent import truth; truth()' --url http://a.py:80").open(
        {}, seed=1
    ) as episode:
        assert episode.step(Action("true")).done
        with pytest.raises(EnvironmentFailed, match="'true' is its last line, and no reward"):
            episode.score()
    with opened("./agent.py:parts").open({}, seed=1) as episode:
        assert episode.step(Action("x")).done
        assert values(episode) == {"solved": 1.0, "speed": 0.5}


def test_a_program_is_bounded_by_its_data_and_not_by_its_addresses(opened):
    with opened("agent.py:reserves").open({}, seed=1) as episode:
        assert episode.step(Action("x")).done
    with (
        opened("agent.py:fills").open({}, seed=1) as episode,
        pytest.raises(EnvironmentFailed, match="MemoryError: raise task.environment_memory_bytes"),
    ):
        episode.step(Action("x"))
    words = "ConnectionError: the cache is away ... v8::Node: raise task.environment_memory_bytes"
    with opened("agent.py:says").open({}, seed=1) as episode, pytest.raises(EnvironmentFailed, match=words):
        episode.step(Action("x"))


def test_an_error_of_the_program_ends_the_episode_in_its_words(opened):
    episodes = opened("agent.py:odd")
    with pytest.raises(EnvironmentFailed, match="before its first request"):
        episodes.open({"do": "nothing"}, seed=1)
    with (
        episodes.open({"do": "raise", "first": "x"}, seed=1) as episode,
        pytest.raises(EnvironmentFailed, match="code 1; KeyError: 'secret of the program'"),
    ):
        episode.step(Action("y"))
    with episodes.open({"do": "hang"}, seed=1) as episode:
        os.kill(int(episode.first[0].content), signal.SIGTERM)
        with pytest.raises(EnvironmentFailed, match="ended by SIGTERM"):
            episode.step(Action("y"))


def test_nothing_that_an_episode_started_lives_longer(opened):
    episodes = opened("agent.py:odd")
    with episodes.open({"do": "start", "first": "x"}, seed=1) as episode:
        (child,) = said(episode.step(Action("y")))
        assert is_alive(child)
    until_gone(child)
    with episodes.open({"do": "hang"}, seed=1) as episode:
        program = episode.first[0].content
        assert is_alive(program)
    until_gone(program)
    assert episodes._pool.workers[-1].is_running or episodes._pool.workers[0].is_running, "its worker goes on"


@pytest.mark.parametrize("word", ["detach", "orphan"])
def test_a_process_of_another_session_ends_with_its_episode(opened, word):
    episodes = opened("agent.py:odd")
    with episodes.open({"do": word, "first": "x"}, seed=1) as episode:
        (child,) = said(episode.step(Action("y")))
        assert is_alive(child)
        # The program ends, and its children hold its pipes.
        assert episode.step(Action("z")).done
        assert values(episode) == {"reward": 0.5}
    until_gone(child)
    with episodes.open({"do": word, "first": "x", "stays": True}, seed=1) as episode:
        (child,) = said(episode.step(Action("y")))
        for worker in episodes._pool.workers:
            worker.timeout_s = 0.1
        with pytest.raises(ToolLost):
            episode.step(Action("z"))
    until_gone(child)


def test_a_program_that_hangs_is_killed_with_its_worker(opened):
    episodes = opened("agent.py:odd")
    with episodes.open({"do": "hang"}, seed=1) as episode:
        for worker in episodes._pool.workers:
            worker.timeout_s = 0.1
        with pytest.raises(ToolLost, match=r"no answer in 0\.1 s"):
            episode.step(Action("y"))
    until_gone(episode.first[0].content)


def test_a_file_may_say_that_it_is_deterministic_and_its_bytes_count(opened, tmp_path):
    assert opened("same.py:run").is_deterministic
    function, command = (opened(name).files_digest for name in ("agent.py:guess", "python command.py"))
    assert opened("agent.py:guess").files_digest == function
    for name in ("agent.py", "command.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# another one\n")
    assert opened("agent.py:guess").files_digest != function
    assert opened("python command.py").files_digest != command


@pytest.mark.parametrize("name", ["agent.py:guess", "python command.py"])
def test_an_edited_program_begins_no_episode_before_a_restart(opened, tmp_path, name):
    episodes = opened(name)
    file = tmp_path / name.removeprefix("python ").partition(":")[0]
    with episodes.open({"answer": "5"}, seed=1):
        old = file.read_text()
        file.write_text(old + "# another one\n")

    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match="its files changed since the start: .* restart this process"):
            episodes.open({"answer": "5"}, seed=1)
    assert opened(name).open({"answer": "5"}, seed=1)
    file.write_text(old)
    with episodes.open({"answer": "5"}, seed=1) as episode:
        assert said(episode.step(Action("6"))) == ["lower"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("agent.py:gues", "no function gues"),
        ("other.py:run", "cannot be read"),
        ("'", "quotation"),
        (" ", "is empty"),
        ("agent.py", "name a function, as agent.py:run"),
        ("agent.py:A.run", "name a function, as agent.py:run"),
    ],
)
def test_what_is_no_program_is_said_at_the_start(opened, name, words):
    with pytest.raises(ConfigError, match=words):
        opened(name)


def test_a_task_shows_the_tools_of_its_first_prompt(opened):
    task = task_of(opened("agent.py:adds"))
    spec = task.environment_of(task.prompt(1))
    assert [tool["function"]["name"] for tool in spec.tools] == ["add"]
    assert task.prompt(1).text == "1 + 2?"
    with spec.open() as episode:
        assert episode.first == spec.first


def test_an_episode_that_begins_otherwise_than_its_prompt_is_an_error(opened):
    task = task_of(opened("agent.py:differs"))
    with pytest.raises(EnvironmentFailed, match="returned other first messages"):
        task.environment_of(task.prompt(0)).open()


def test_a_refused_task_names_the_program(opened):
    with pytest.raises(ConfigError, match="an episode of prompt 0"):
        task_of(opened("same.py:run"))
