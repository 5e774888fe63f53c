"""Episodes of an author's class in worker processes: what they say, and what an error costs."""

import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from email.message import Message as Headers
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import OpenerDirector

import pytest

from heterorl.common.errors import ConfigError, DependencyMissing, EnvironmentFailed, ServiceUnreachable, ToolLost
from heterorl.common.tasks.environments import openenv
from heterorl.common.tasks.environments.environment import Action, ToolCall
from heterorl.common.tasks.environments.environment_task import environment_problem
from heterorl.common.tasks.environments.episode_worker import FIRST_CHARS
from heterorl.common.tasks.environments.episodes import EPISODES_A_PROCESS, Episodes
from heterorl.common.tasks.rewards import worker_main
from heterorl.common.tasks.task import Message
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.rollout import MAX_PART_VALUE

pytestmark = pytest.mark.process

GUESS = """
class Guess:
    def reset(self, row, *, seed):
        self.number, self.tries = int(row["answer"]), 0
        return "Guess my number between 1 and 100. Write the number alone."

    def step(self, action):
        self.tries += 1
        guess = int(action.answer) if action.answer.strip().isdigit() else 0
        return None if guess == self.number else "higher" if guess < self.number else "lower"

    def score(self):
        return 1 / self.tries if self.tries else 0.0
"""
PLAY = """
import os, random, sys, time
import numpy as np
from heterorl.common.tasks.environments.environment import Environment, Observation
from heterorl.common.tasks.rewards import worker_main
from heterorl.common.tasks.task import Message

class Silent(Exception):
    def __str__(self):
        return self.text

class Play:
    def reset(self, row, *, seed):
        self.row, self.held = row, []
        if row.get("first") == "none":
            return None
        return row.get("first", f"{seed} {random.random()} {np.random.random()}")

    def step(self, action):
        word, _, rest = action.text.partition(" ")
        if word == "write":
            os.write(int(rest), b'{"used_s": 0}\\n')
        if word in ("hang", "write"):
            time.sleep(1000)
        while word == "loop":
            pass
        if word == "raise":
            raise KeyError(rest)
        if word == "hush":
            raise Silent
        if word == "exit":
            os._exit(3)
        if word == "leave":
            sys.exit("no lamp")
        if word == "take":
            self.held.append(bytearray(int(rest)))
        if word == "say":
            return "x" * int(rest)
        if word == "draw":
            return f"{random.random()} {np.random.random()} {sorted('abcdefghij', key=hash)}"
        if word == "odd":
            return {"list": ["x"], "none": Observation(()), "role": Observation((Message(role="assistant", content="x"),)),
                    "half": chr(0xD800), "object": Observation((7,))}[rest]
        return Observation((Message(role="tool", content=str(os.getpid()), name="pid"),
                            Message(role="user", content=f"{action.is_cut} {action.tool_calls}")), done=word == "end")

    def score(self):
        return self.row.get("score", 0.5)

    def close(self):
        if self.row.get("closes") == "badly":
            raise OSError("still open")

class Shared(Play):
    shares_process = True
    is_deterministic = False

class Tools(Play):
    def look(self, far: bool) -> str:
        "Look."
    tools = [look]

class Hoard(Play):
    held = []
    def reset(self, row, *, seed):
        super().reset(row, seed=seed)
        self.held = Hoard.held

class SharedHoard(Hoard):
    shares_process = True

class Half:
    def reset(self, row, *, seed):
        pass

class Heir(Environment):
    def reset(self, row, *, seed):
        pass
    step = reset

class Property(Play):
    @property
    def is_deterministic(self):
        return False

class Late(Play):
    def __init__(self):
        self.tools = [sorted]

class Equal(Play):
    def __init__(self):
        self.is_deterministic, self.tools = True, ["axe"]

class Later(Play):
    def reset(self, row, *, seed):
        return 7
    async def score(self):
        return 1.0

class Away(Play):
    def reset(self, row, *, seed):
        raise ConnectionRefusedError("nothing listens")

class Reader(Play):
    def reset(self, row, *, seed):
        return open("beside.txt").read()
"""


@pytest.fixture
def opened(tmp_path):
    """Makes environments of a directory with the modules above, and ends them."""
    (tmp_path / "guess.py").write_text(GUESS)
    (tmp_path / "play.py").write_text(PLAY)
    made = []

    def make(name="play:Play", **changes):
        limits = {"step_timeout_s": 60.0, "memory_bytes": 1 << 28, "max_observation_chars": 1000, "num_processes": 4}
        made.append(Episodes(name, directory=tmp_path, **{**limits, **changes}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def limit(episodes, **limits):
    """Other limits of the calls that come."""
    for worker in episodes._pool.workers:
        for name, value in limits.items():
            setattr(worker, name, value)


def said(observation):
    return [message.content for message in observation.messages]


def test_a_class_of_ten_lines_is_an_environment(opened):
    with opened("guess:Guess").open({"answer": "42"}, seed=1) as episode:
        assert episode.first == (
            Message(role="user", content="Guess my number between 1 and 100. Write the number alone."),
        )
        assert said(episode.step(Action("<think>50?</think>50"))) == ["lower"]
        assert said(episode.step(Action("41"))) == ["higher"]
        last = episode.step(Action("42"))

        assert (last.messages, last.done) == ((), True)
        (part,) = episode.score()
        assert (part.name, part.value) == ("reward", 1 / 3)
    assert opened("guess:Guess").is_deterministic


def test_an_action_arrives_whole_and_roles_and_names_come_back(opened):
    with opened().open({}, seed=1) as episode:
        observation = episode.step(Action("x", is_cut=True))
        first, second = observation.messages

        assert (first.role, first.name, second.role, second.content) == ("tool", "pid", "user", "True ()")
        assert not observation.done
        assert episode.step(Action("end")).done


def test_what_a_policy_writes_is_text_and_json_where_it_arrives(opened):
    episodes = opened()
    half = ToolCall("look" + chr(0xD800), {"at": [chr(0xDFFF)]})
    with episodes.open({}, seed=1) as episode:
        assert said(episode.step(Action("x" + chr(0xD800), (half,))))[1] == (
            "False (ToolCall(name='look?', arguments={'at': ['?']}),)"
        )
        deep = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(EnvironmentFailed, match="recursion"):
            episode.step(Action("x", (ToolCall("look", {"at": deep}),)))
        # Its end would overflow the stack of C.
        while deep:
            deep = deep.pop()
    with episodes.open({}, seed=1) as episode:
        assert episode.step(Action("x"))


def test_score_has_named_parts_also_before_any_turn(opened):
    with opened().open({"score": {"a": 1, "b": -0.5}}, seed=1) as episode:
        assert {part.name: part.value for part in episode.score()} == {"a": 1.0, "b": -0.5}


@pytest.mark.parametrize("score", [float("nan"), "1.0", {}, {"a\n": 1.0}, 2 * MAX_PART_VALUE, None])
def test_what_is_no_reward_ends_the_episode_and_is_no_zero(opened, score):
    with opened().open({"score": score}, seed=1) as episode:
        with pytest.raises(EnvironmentFailed, match="play:Play, score"):
            episode.score()
        with pytest.raises(EnvironmentFailed):
            episode.step(Action("x"))


def test_first_messages_are_a_text_messages_or_none(opened):
    episodes = opened()

    def first(value):
        with episodes.open({"first": value}, seed=1) as episode:
            return episode.first

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    assert first("none") is None
    assert first("Go.") == (Message(role="user", content="Go."),)
    assert first(messages) == (Message(role="system", content="Be brief."), Message(role="user", content="Go."))
    for bad in ([], [{"role": "user", "content": 7}], [*messages, {"role": "assistant", "content": "Gone."}], ["x"]):
        with pytest.raises(EnvironmentFailed, match="play:Play, open"):
            first(bad)
    assert first("Go.")


@pytest.mark.parametrize("word", ["list", "none", "role", "half", "object"])
def test_what_is_no_observation_ends_the_episode(opened, word):
    with opened().open({}, seed=1) as episode, pytest.raises(EnvironmentFailed, match="play:Play, step"):
        episode.step(Action(f"odd {word}"))


def test_an_error_names_the_authors_line_and_its_process_goes_on(opened):
    episodes = opened(num_processes=1)
    with episodes.open({}, seed=1) as episode:
        pid = said(episode.step(Action("x")))[0]
        with pytest.raises(EnvironmentFailed, match=r"play:Play, step: KeyError: 'lamp' \(.*play.py, line \d+\)"):
            episode.step(Action("raise lamp"))
        with pytest.raises(EnvironmentFailed, match="lamp"):
            episode.score()

    with episodes.open({}, seed=1) as episode:
        assert said(episode.step(Action("x")))[0] == pid


def test_an_error_without_a_readable_message_costs_no_sibling(opened):
    episodes = opened("play:Shared", num_processes=1)
    with episodes.open({}, seed=1) as episode, episodes.open({}, seed=1) as other:
        with pytest.raises(
            EnvironmentFailed, match=r"step: Silent: its message cannot be read \(.*play.py, line \d+\)"
        ):
            episode.step(Action("hush"))
        assert other.step(Action("x"))


def test_an_exit_of_python_costs_no_sibling(opened):
    episodes = opened("play:Shared", num_processes=1)
    with episodes.open({}, seed=1) as episode, episodes.open({}, seed=1) as other:
        with pytest.raises(EnvironmentFailed, match=r"step: SystemExit: no lamp \(.*play.py, line \d+\)"):
            episode.step(Action("leave"))
        assert other.step(Action("x"))


def test_an_answer_of_another_request_costs_the_process_of_its_episode(opened):
    episodes = opened(num_processes=1)
    with episodes.open({}, seed=1) as episode:
        process = episode._place.worker.process
        pipe = Path(f"/proc/self/fd/{process.stdout.fileno()}").readlink()
        (number,) = [path.name for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.readlink() == pipe]
        with pytest.raises(ToolLost, match="play:Play, step: its process answered another request"):
            episode.step(Action(f"write {number}"))

    with episodes.open({}, seed=1) as episode:
        assert episode.step(Action("x"))


def test_what_hangs_is_killed_and_its_siblings_go_on(opened):
    episodes = opened()
    one, other, third = (episodes.open({}, seed=1) for _ in range(3))
    pids = [int(said(episode.step(Action("x")))[0]) for episode in (one, other, third)]
    assert len(set(pids)) == 3

    limit(episodes, timeout_s=0.5)
    with pytest.raises(ToolLost, match=r"play:Play, step: no answer in 0.5 s"):
        one.step(Action("hang"))
    limit(episodes, timeout_s=600.0, cpu_s=0.2)
    with pytest.raises(ToolLost, match="no answer in 0.2 s of processor time"):
        other.step(Action("loop"))
    limit(episodes, cpu_s=60.0)

    assert int(said(third.step(Action("x")))[0]) == pids[2]
    assert third.score()[0].value == 0.5
    with pytest.raises(ToolLost):
        one.score()
    for episode in (one, other, third):
        episode.close()
    for pid in pids[:2]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with episodes.open({}, seed=1) as episode:
        assert int(said(episode.step(Action("x")))[0]) == pids[2]


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_process_that_ends_takes_its_own_episode_alone(opened, is_killed):
    episodes = opened()
    one, other = (episodes.open({}, seed=1) for _ in range(2))
    if is_killed:
        os.kill(int(said(one.step(Action("x")))[0]), signal.SIGKILL)
    with pytest.raises(ToolLost, match=r"SIGKILL|ended" if is_killed else "code 3"):
        one.step(Action("exit"))

    assert other.step(Action("x"))
    one.close()
    other.close()
    for _ in range(3):
        with episodes.open({}, seed=1) as episode:
            assert episode.step(Action("x"))


def test_a_process_that_died_between_two_episodes_is_started_again(opened):
    episodes = opened(num_processes=1)
    with episodes.open({}, seed=1) as episode:
        pid = int(said(episode.step(Action("x")))[0])
    process = episodes._pool.workers[0].process
    process.kill()
    process.wait()

    with episodes.open({}, seed=1) as episode:
        assert int(said(episode.step(Action("x")))[0]) != pid


@pytest.mark.parametrize("name", ["play:Play", "play:Shared"])
def test_an_episode_whose_process_died_starts_no_other_one(opened, name):
    episodes = opened(name)
    one, other = (episodes.open({}, seed=1) for _ in range(2))
    (worker,) = {one._place.worker, other._place.worker} if name == "play:Shared" else {one._place.worker}
    worker.process.kill()
    worker.process.wait()

    with pytest.raises(ToolLost, match="its process has ended"):
        one.step(Action("x"))
    one.close()
    if name == "play:Shared":
        other.close()
    assert not worker.is_running
    with episodes.open({}, seed=1) as later:
        assert later.step(Action("x"))


def test_an_observation_that_is_too_long_ends_the_episode(opened):
    episodes = opened()
    with episodes.open({}, seed=1) as episode:
        assert len(said(episode.step(Action("say 1000")))[0]) == 1000
        with pytest.raises(EnvironmentFailed, match=r"1001 characters; task.max_observation_chars is 1000"):
            episode.step(Action("say 1001"))
    with pytest.raises(EnvironmentFailed, match=f"first messages have at most {FIRST_CHARS}"):
        episodes.open({"first": "x" * (FIRST_CHARS + 1)}, seed=1)
    with episodes.open({"first": "\U0001f600" * FIRST_CHARS}, seed=1) as episode:
        assert len(episode.first[0].content) == FIRST_CHARS


def test_more_memory_than_allowed_is_an_error_and_no_full_machine(opened):
    with opened(memory_bytes=1 << 27).open({}, seed=1) as episode:
        assert episode.step(Action(f"take {1 << 25}"))
        with pytest.raises(EnvironmentFailed, match="MemoryError"):
            episode.step(Action(f"take {1 << 27}"))


@pytest.mark.parametrize("name", ["play:Hoard", "play:SharedHoard"])
def test_a_process_that_is_full_of_what_its_code_keeps_is_replaced(opened, name):
    episodes = opened(name, memory_bytes=1 << 27, num_processes=2)
    full = episodes.open({}, seed=1)
    assert full.step(Action(f"take {3 << 25}"))
    with pytest.raises(EnvironmentFailed, match="MemoryError"):
        full.step(Action(f"take {1 << 25}"))
    # It gets no other episode before it is replaced.
    with episodes.open({}, seed=1) as other:
        assert other.step(Action(f"take {1 << 25}"))
    full.close()

    for episode in [episodes.open({}, seed=1) for _ in range(2)]:
        assert episode.step(Action(f"take {1 << 25}"))
        episode.close()


def test_the_same_seed_and_actions_give_the_same_observations_in_any_process(opened):
    episodes = opened()

    def played(seed):
        with episodes.open({}, seed=seed) as episode:
            return [said_of(episode.first), *(said(episode.step(Action("draw"))) for _ in range(2))]

    def said_of(messages):
        return [message.content for message in messages]

    held = [episodes.open({}, seed=0) for _ in range(3)]
    # The free process, then another one that another episode has drawn in.
    first = played((1 << 40) + 7)
    with held.pop() as used:
        used.step(Action("draw"))
    second = played((1 << 40) + 7)

    assert first == second
    assert played(8) != first
    assert played(7) != first, "all bits of a seed count"
    assert random.Random((1 << 40) + 7).random() == float(first[0][0].split()[1])
    for episode in held:
        episode.close()


def test_each_episode_of_a_shared_process_draws_as_if_it_were_alone(opened):
    episodes, alone = opened("play:Shared", num_processes=1), opened()
    live = [episodes.open({}, seed=seed) for seed in (1, 2)]
    drawn = {1: [], 2: []}
    for _ in range(3):
        for seed, episode in zip(drawn, live, strict=True):
            drawn[seed] += said(episode.step(Action("draw")))
    for seed, own in drawn.items():
        with alone.open({}, seed=seed) as episode:
            assert own == [text for _ in range(3) for text in said(episode.step(Action("draw")))]
    for episode in live:
        episode.close()


def test_a_class_may_say_that_episodes_share_a_process(opened):
    episodes = opened("play:Shared", num_processes=2)
    live = [episodes.open({}, seed=1) for _ in range(EPISODES_A_PROCESS + 1)]
    pids = [said(episode.step(Action("x")))[0] for episode in live]

    assert not episodes.is_deterministic
    assert (len(set(pids[:-1])), len(set(pids))) == (1, 2)
    with pytest.raises(ToolLost):
        live[0].step(Action("exit"))
    # Those of its process are gone, also once it runs again, and the other's is there.
    later = episodes.open({}, seed=1)
    with pytest.raises(ToolLost):
        live[1].step(Action("x"))
    assert live[-1].step(Action("x"))
    assert later.step(Action("x"))
    for episode in [*live, later]:
        episode.close()
    # Both processes are free again.
    assert [episodes.open({}, seed=1) for _ in range(2 * EPISODES_A_PROCESS)]


def test_who_begins_beyond_the_processes_waits_for_one(opened):
    episodes = opened(num_processes=1)
    first = episodes.open({}, seed=1)
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(episodes.open, {}, 2)
        with episodes._pool._changed:
            while not episodes._pool._changed._waiters:
                episodes._pool._changed.wait(0.01)
        assert not second.done()
        first.close()
        with second.result() as episode:
            assert episode.step(Action("x"))


def test_who_finds_shared_processes_full_begins_once_one_episode_ends(opened):
    episodes = opened("play:Shared", num_processes=1)
    live = [episodes.open({}, seed=1) for _ in range(EPISODES_A_PROCESS)]
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(episodes.open, {}, 2)
        try:
            with pytest.raises(TimeoutError):
                later.result(0.2)
            live.pop().close()
            later.result(20.0).close()
        finally:
            for episode in live:
                episode.close()


def test_who_begins_in_a_process_that_ended_leaves_the_others_lost(opened):
    episodes = opened("play:Shared", num_processes=1)
    lost = [episodes.open({}, seed=1) for _ in range(2)]
    episodes._pool.workers[0].process.kill()
    episodes._pool.workers[0].process.wait()
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(episodes.open, {}, 1)
        try:
            with later.result(20.0) as episode:
                assert episode.step(Action("x"))
                with pytest.raises(ToolLost, match="its process has ended"):
                    lost[0].step(Action("x"))
                lost[0].close()
                assert episode.step(Action("x"))
        finally:
            for each in lost:
                each.close()


def test_an_episode_that_does_not_close_costs_its_process_alone(opened, caplog):
    episodes = opened(num_processes=1)
    with episodes.open({"closes": "badly"}, seed=1) as episode:
        pid = said(episode.step(Action("x")))[0]
    assert "still open" in caplog.text

    with episodes.open({}, seed=1) as episode:
        assert said(episode.step(Action("x")))[0] != pid
    episode.close()
    with pytest.raises(ValueError, match="closed"):
        episode.step(Action("x"))


@pytest.mark.parametrize("name", ["play:Play", "play:Shared"])
def test_closed_episodes_end_what_runs_and_begin_nothing(opened, name):
    episodes = opened(name, num_processes=1)
    episode = episodes.open({}, seed=1)
    episode.step(Action("x"))
    errors = []

    def wait():
        try:
            episode.step(Action("hang"))
        except ToolLost as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    episodes.close()
    waiting.join()

    assert len(errors) == 1
    with pytest.raises(ToolLost, match="no episode begins"):
        episodes.open({}, seed=1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("play:Nothing", "has no class Nothing"),
        ("play:Half", "Half has no step, score"),
        ("play:Heir", "Heir has no score"),
        ("play:Property", "is_deterministic is <property object.*: write is_deterministic = True or False"),
        ("nowhere:Play", "there is no module nowhere.*task.environment_path"),
        ("play", "none of package.module:Class, file.py, textarena:ID"),
        ("play:Pl ay", "none of"),
        ("nowhere.py", "there is no module nowhere"),
    ],
)
def test_what_is_no_environment_is_refused_at_the_start(opened, name, words):
    with pytest.raises(ConfigError, match=f"(?s)^task.environment: .*{words}"):
        opened(name)


@pytest.mark.parametrize(
    ("name", "extra"), [("textarena:GuessTheNumber-v0", "games"), ("openenv:http://127.0.0.1:1", "openenv")]
)
def test_without_its_package_the_extra_is_named(opened, name, extra):
    with pytest.raises(
        DependencyMissing, match=rf"not installed \(in a clone of heterorl: pip install '\.\[{extra}\]'\)"
    ):
        opened(name)


def test_what_a_class_states_too_late_is_refused(opened):
    with pytest.raises(EnvironmentFailed, match="__init__ sets tools: make it an attribute of the class"):
        opened("play:Late").open({}, seed=1)
    with opened("play:Equal").open({}, seed=1) as episode:
        assert episode.step(Action("x"))


def test_a_wrong_value_names_no_line_of_heterorl(opened):
    with pytest.raises(
        EnvironmentFailed, match=r"open: ValueError: reset returned 7, and neither a text nor messages$"
    ):
        opened("play:Later").open({}, seed=1)
    with opened().open({"score": None}, seed=1) as episode:
        with pytest.raises(EnvironmentFailed, match="score: ValueError: it returned None, and no number$"):
            episode.score()


def test_relative_files_are_those_of_the_environments_directory(opened, tmp_path, monkeypatch):
    (tmp_path / "beside.txt").write_text("a lamp")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    with opened("play:Reader").open({}, seed=1) as episode:
        assert episode.first[0].content == "a lamp"


def test_a_file_of_tools_may_say_that_it_is_not_deterministic(opened, tmp_path):
    tools = "def look() -> str:\n    'Look.'\n    return 'x'\n\ndef score(messages):\n    return 1.0\n"
    for name, line in (
        ("same.py", ""),
        ("other.py", "is_deterministic = False\n"),
        ("odd.py", "is_deterministic = 0\n"),
    ):
        (tmp_path / name).write_text(line + tools)

    assert [opened(name).is_deterministic for name in ("same.py", "other.py")] == [True, False]
    with pytest.raises(ConfigError, match="is_deterministic is 0: write"):
        opened("odd.py")


def test_a_class_shows_its_tools_and_digests_are_of_its_files(opened, tmp_path):
    first = opened("play:Tools")

    (tool,) = first.tools
    assert tool["function"]["name"] == "look"
    assert tool["function"]["parameters"]["properties"] == {"far": {"type": "boolean"}}
    assert opened("guess:Guess").files_digest != first.files_digest == opened().files_digest
    (tmp_path / "play.py").write_text(PLAY + "\n")
    assert opened().files_digest != first.files_digest


@pytest.mark.parametrize("beside", ["heterorl/words.py", ".venv/lib/packages/words.py"])
def test_digest_is_of_the_authors_files_alone(tmp_path, beside):
    """A node from a checkout, one with a wheel, and one whose Python lies below the author's directory agree."""
    module = "heterorl.words" if beside.startswith("heterorl") else "words"
    for name, text in {"play.py": f"import {module}\n", "heterorl/__init__.py": "", beside: ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    # As a worker does, which is no part of the package.
    script = """
import runpy, sys, sysconfig
place, files, packages = sys.argv[1:]
paths = {**sysconfig.get_paths(), "purelib": packages}
sysconfig.get_paths = lambda: paths
sys.path[:0] = [place, packages]
import play
print(runpy.run_path(files, run_name="worker_main")["reward_files"]("play")["num_files"])
"""
    command = [sys.executable, "-c", script, str(tmp_path), worker_main.__file__, str(tmp_path / ".venv/lib/packages")]
    # coverage starts in every child, and would import this folder's empty heterorl.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}

    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert found.stdout == "1\n"


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_verifiers_its_extra_is_named():
    limits = {"step_timeout_s": 5.0, "memory_bytes": 1 << 30, "max_observation_chars": 1000, "num_processes": 1}
    said = r"verifiers is not installed \(in a clone of heterorl: pip install '\.\[verifiers\]'\)"
    with pytest.raises(DependencyMissing, match=said):
        Episodes("verifiers:guess-number", directory=Path(), **limits)


@pytest.fixture
def websockets(tmp_path, monkeypatch):
    """A package of that name, whose sockets reach nothing."""
    path = tmp_path / "packages" / "websockets" / "sync" / "client.py"
    path.parent.mkdir(parents=True)
    path.write_text("def connect(*given, **options):\n    raise ConnectionRefusedError('nothing listens')\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "websockets"]:
        del sys.modules[name]


@pytest.mark.usefixtures("websockets")
def test_a_server_of_openenv_that_is_away_ends_a_start_so_that_a_service_manager_tries_again(opened):
    environment = "openenv:http://127.0.0.1:1"
    with pytest.raises(
        ServiceUnreachable, match=r"^task.environment: .*no OpenEnv server answers.*tries again"
    ) as away:
        opened(environment)
    sources = [{"label": "games", "name": "seeds", "environment": environment}]
    with pytest.raises(ServiceUnreachable, match="^task.sources, games: task.environment") as mixed:
        build_task(TaskConfig(name="mixture", sources=sources))

    assert (away.value.exit_code, mixed.value.exit_code) == (1, 1)


class Schema(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"action": {"properties": {"guess": {"type": "string"}}}}')


@pytest.mark.usefixtures("websockets")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_of_openenv_on_this_machine_is_asked_through_no_proxy(opened, monkeypatch, host):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if "[" in host else socket.AF_INET

    with Server((host.strip("[]"), 0), Schema) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            assert opened(f"openenv:http://{host}:{server.server_port}").files_digest
        finally:
            server.shutdown()


@pytest.mark.usefixtures("websockets")
@pytest.mark.parametrize(
    ("error", "is_outage"),
    [
        (URLError(ConnectionRefusedError("nothing listens")), True),
        (TimeoutError("timed out"), True),
        (HTTPError("http://host", 503, "busy", Headers(), None), True),
        (HTTPError("http://host", 404, "not here", Headers(), None), False),
        (URLError(ssl.SSLCertVerificationError("not signed")), False),
    ],
    ids=str,
)
def test_a_server_of_openenv_that_answers_wrongly_needs_its_operator(monkeypatch, error, is_outage):
    def fail(*given, **options):
        raise error

    monkeypatch.setattr(OpenerDirector, "open", fail)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    with pytest.raises(ConnectionError if is_outage else ValueError, match="^no OpenEnv server answers at http://host"):
        openenv.load("http://host", "")


def test_an_episode_that_reaches_no_server_may_reach_it_after_a_restart(opened):
    with pytest.raises(EnvironmentFailed) as failed:
        opened("play:Away").open({}, seed=1)
    with pytest.raises(EnvironmentFailed) as wrong:
        opened("play:Later").open({}, seed=1)

    codes = [environment_problem("an episode", each.value).exit_code for each in (failed, wrong)]
    assert codes == [1, 2]
