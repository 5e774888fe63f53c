"""Environments of verifiers in worker processes: turns, rewards, tools, limits, errors, hangs; what is refused at once."""

import os
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from heterorl.common.errors import ToolLost
from heterorl.common.tasks.environments import verifiers
from heterorl.common.tasks.environments.environment import Action, Observation, ToolCall
from heterorl.common.tasks.environments.episodes import Episodes
from tests.verifiers.environments import GUESS, ODD, taskset

pytestmark = [
    # Of verifiers and its packages, which run in this process.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
NUMBERS = [2, 8, 7]
"""The first ones of the game."""


class Here:
    """An environment in this process, where verifiers is imported once."""

    def __init__(self, name, directory):
        self.make, self.facts = verifiers.load(name, str(directory))
        first = self.make()
        self.played = first._played
        first.close()

    @contextmanager
    def open(self, number):
        episode = self.make()
        try:
            episode.first = episode.reset({"task": number}, seed=1)
            yield episode
        finally:
            episode.close()


def end(played):
    """End what all episodes share: this process goes on."""
    played.begin(played._serving.__aexit__(None, None, None)).result()
    played._loop.call_soon_threadsafe(played._loop.stop)
    played._thread.join()
    played._loop.run_until_complete(played._loop.shutdown_default_executor())
    played._loop.close()


@pytest.fixture(scope="module", autouse=True)
def own_path():
    """An environment loaded in this process adds its directory to PYTHONPATH, which later tests must not inherit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        yield


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Loads an environment in this process, by name."""
    directory = tmp_path_factory.mktemp("environments")
    (directory / "guess_number.py").write_text(GUESS)
    (directory / "odd_sums.py").write_text(ODD)
    (directory / "few.toml").write_text('[env.taskset]\nid = "guess-number"\n[env.agent]\nmax_turns = 2\n')
    made = {}
    started = subprocess.Popen

    def load(name):
        made[name] = made.get(name) or Here(name, directory)
        return made[name]

    load.directory = directory
    yield load
    for each in made.values():
        end(each.played)
    subprocess.Popen = started


def said(observation):
    return [(message.role, message.content) for message in observation.messages]


def test_a_game_of_several_turns_has_the_rewards_of_its_rubric(here):
    game = here("guess-number")
    assert (game.facts["is_deterministic"], game.facts["num_rows"], game.facts["learns_tools"]) == (True, 40, True)
    for _ in range(2):
        with game.open(0) as episode:
            assert said(Observation(episode.first)) == [("user", "Guess number 0, from 1 to 9.")]
            assert episode.shown_tools == ()
            assert said(episode.step(Action("<think>hm</think>9"))) == [("user", "lower")]
            assert said(episode.step(Action("1"))) == [("user", "higher")]
            assert episode.step(Action(str(NUMBERS[0]))) is None

            assert episode.score() == {"found": 1.0, "quick": 0.5 / 3}


def test_a_limit_scores_what_was_reached_and_an_episode_may_be_left(here):
    with here("guess-number").open(1) as episode:
        assert said(episode.step(Action("9"))) == [("user", "lower")]
        assert episode.score() == {"found": 0.0, "quick": 0.5}
    with here("guess-number").open(2) as episode:
        assert "number 2" in episode.first[0].content


def test_a_file_has_the_table_of_verifiers(here):
    few = here("few.toml")
    assert few.facts["digest"] != here("guess-number").facts["digest"]
    with few.open(0) as episode:
        assert said(episode.step(Action("1"))) == [("user", "higher")]
        assert episode.step(Action("1")) is None, "the file allows two turns"
        assert episode.score() == {"found": 0.0, "quick": 0.25}


def test_tools_of_a_toolset_are_shown_and_called(here):
    odd = here("odd_sums")
    assert odd.facts["num_rows"] is None
    with odd.open(0) as episode:
        assert said(Observation(episode.first)) == [("system", "Add."), ("user", "2 + 3?")]
        (tool,) = episode.shown_tools
        name = tool["function"]["name"]
        assert tool["function"]["description"] == "Add two numbers."
        (result,) = episode.step(Action("", (ToolCall(name, {"a": 2, "b": 3}),))).messages
        assert (result.role, result.content, result.name) == ("tool", "5", name)
        (result,) = episode.step(Action("", (ToolCall(name, {"a": "x"}),))).messages
        assert "validation error" in result.content
        assert episode.step(Action("It is 5.")) is None
        assert episode.score() == {"fine": 1.0}


def test_an_error_names_the_authors_line(here):
    line = next(number for number, text in enumerate(ODD.splitlines(), 1) if "secret" in text)
    with (
        here("odd_sums").open(1) as episode,
        pytest.raises(RuntimeError, match=rf"/odd_sums.py, line {line}: .*KeyError: 'secret'"),
    ):
        episode.step(Action("5"))
    with pytest.raises(ValueError, match="task 4 has an image; only texts are played"), here("odd_sums").open(4):
        pass


def test_a_worker_plays_and_a_hang_is_killed_with_the_servers_of_its_tools(here):
    limits = {"step_timeout_s": 60.0, "memory_bytes": 1 << 30, "max_observation_chars": 1000, "num_processes": 1}
    odd = Episodes("verifiers:odd_sums", directory=here.directory, **limits)
    try:
        assert (odd.has_rows, odd.num_rows, odd.is_deterministic, odd.max_live) == (True, None, False, 1)
        with odd.open({"task": 3}, seed=1) as episode:
            assert [tool["function"]["description"] for tool in odd.tools] == ["Add two numbers."]
            assert episode.step(Action("5")).done
            assert [(part.name, part.value) for part in episode.score()] == [("fine", 1.0)]
        with odd.open({"task": 2}, seed=1) as episode:
            (worker,) = [each for each in odd._pool.workers if each.process]
            servers = _children(worker.process.pid)
            assert servers, "the tool has a server"
            worker.timeout_s = 1.0
            with pytest.raises(ToolLost, match="no answer in 1 s"):
                episode.step(Action("5"))
        while any(_is_alive(pid) for pid in servers):
            os.sched_yield()
    finally:
        odd.close()


def _children(pid):
    """Processes that a process started, by the second field after their names."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            found += [int(entry.parent.name)] * (int(fields[1]) == pid)
    return found


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


JUDGED = "class Judged(vf.TaskConfig):\n    judge: vf.JudgeConfig = vf.JudgeConfig(base_url='{}', api_key_var='NO_KEY')\n" \
    "class Own(vf.TasksetConfig):\n    task: Judged = Judged()\n"  # fmt: skip
PAIR = "class Two(vf.EnvConfig):\n    one: vf.AgentConfig = vf.AgentConfig()\n    two: vf.AgentConfig = vf.AgentConfig()\n" \
    "class Pair(vf.Env[Two]):\n    async def run(self, task, agents):\n        pass\n"  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("no_such", None, "there is no module no_such in .*, nor such a package; `prime env install OWNER/no-such`"),
        ("a b", None, "no name of an environment"),
        ("none.toml", None, "none.toml cannot be read"),
        ("far.toml", '[env]\nid = "far-away"\n[env.taskset]\nid = "textarena"\n', "environment 'far-away' not found"),
        ("empty_set", taskset("yield from ()"), "its data set is empty: load of Some yields no task"),
        ("unexported", taskset(exported='["vf"]'), "exports no Taskset subclass"),
        ("no_all", "import verifiers.v1", "defines no `__all__`"),
        ("broken", "1 / 0", r"broken cannot be imported: ZeroDivisionError: .*broken.py, line 1"),
        ("judged", taskset(more=JUDGED.format("https://j.example/v1"), config="Own"), "asks the model .* over the network: set NO_KEY"),
        ("paired", taskset(more=PAIR, exported='["Some", "Pair"]'), "its agents one, two: one is trained"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_said_at_the_start(tmp_path, name, text, words, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    if text is not None:
        (tmp_path / (name if name.endswith(".toml") else f"{name}.py")).write_text(text)
    with pytest.raises(ValueError, match=words):
        verifiers.load(name, str(tmp_path))


def test_a_judge_on_this_machine_is_asked(here):
    (here.directory / "near_judge.py").write_text(taskset(more=JUDGED.format("http://127.0.0.1:9/v1"), config="Own"))

    assert here("near_judge").facts["num_rows"] == 1
