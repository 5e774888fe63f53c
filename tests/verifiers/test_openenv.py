"""Episodes of an OpenEnv server, here one that speaks its protocol as it is documented: /schema, and messages at /ws."""

import json
import threading
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError, EnvironmentFailed
from heterorl.common.tasks.environments.environment import Action
from heterorl.common.tasks.environments.episodes import Episodes
from heterorl.common.tasks.task import Message

pytestmark = pytest.mark.process
TEXT = {"guess": {"type": "string"}, "metadata": {"type": "object"}}
WHOLE = {"guess": {"type": "integer"}, "loud": {"type": "boolean"}, "metadata": {"type": "object"}}


class Server:
    """A game of one number, on a port of its own; `said` is what each session sent."""

    def __init__(self, properties):
        from websockets.sync.server import serve

        self._properties, self.said = properties, []
        self._server = serve(self._session, "127.0.0.1", 0, process_request=self._answer)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()

    def _answer(self, connection, request):
        if request.path == "/schema":
            schema = {"action": {"properties": self._properties}, "observation": {}, "state": {}}
            return connection.respond(200, json.dumps(schema))
        return None if request.path == "/ws" else connection.respond(404, "")

    def _session(self, socket):
        number = 0
        for text in socket:
            message = json.loads(text)
            self.said.append(message)
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                number = message["data"]["seed"] % 100
                reply = {"observation": {"text": "Guess."}, "reward": None, "done": False}
            else:
                reply = self._step(message["data"], number)
            kind = "error" if "code" in reply else "observation"
            socket.send(json.dumps({"type": kind, "data": reply}))

    def _step(self, action, number):
        guess = action["guess"]
        if guess == "break":
            return {"message": "it broke", "code": "EXECUTION_ERROR"}
        if not str(guess).isdigit():
            return {"message": f"{guess!r} is no number", "code": "VALIDATION_ERROR"}
        right = int(guess) == number
        hint = "right" if right else "higher" if int(guess) < number else "lower"
        shown = {"text": hint, "loud": True} if action.get("loud") else {"text": hint}
        return {"observation": shown, "reward": 1.0 if right else -0.25, "done": right}


@pytest.fixture
def opened(monkeypatch):
    """Makes environments of servers of the game, and ends both."""
    made = []
    # Nothing listens there.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")

    def make(properties=TEXT):
        server = Server(properties)
        made.append(server)
        limits = {"step_timeout_s": 60.0, "memory_bytes": 1 << 28, "max_observation_chars": 1000, "num_processes": 2}
        made.append(Episodes(f"openenv:{server.url}", directory=Path(), **limits))
        return made[-1], server

    yield make
    for each in reversed(made):
        each.close()


def said(observation):
    return [message.content for message in observation.messages]


def test_an_action_of_one_text_is_the_answer_and_rewards_add_up(opened):
    episodes, server = opened()
    assert not episodes.is_deterministic
    with episodes.open({}, seed=142) as episode:
        assert episode.first == (Message(role="user", content="Guess."),)
        assert said(episode.step(Action("<think>50?</think> 50 "))) == ["lower"]
        last = episode.step(Action("42"))
        assert (said(last), last.done) == (["right"], True)
        assert episode.score()[0].value == 0.75

    assert server.said == [
        {"type": "reset", "data": {"seed": 142}},
        {"type": "step", "data": {"guess": "50"}},
        {"type": "step", "data": {"guess": "42"}},
        {"type": "close"},
    ]


def test_an_action_of_several_fields_is_written_as_json(opened):
    episodes, server = opened(WHOLE)
    with episodes.open({}, seed=42) as episode:
        assert episode.first[0].content == "Guess.\n\nWrite a JSON object with guess, loud and nothing else."
        assert json.loads(said(episode.step(Action('{"guess": 7, "loud": true}')))[0]) == {
            "text": "higher",
            "loud": True,
        }
    assert {"type": "step", "data": {"guess": 7, "loud": True}} in server.said


def test_what_is_no_action_is_said_to_the_policy_and_costs_nothing(opened):
    episodes, _ = opened(WHOLE)
    with episodes.open({}, seed=42) as episode:
        for text, words in (
            ("7", "not a JSON object"),
            ("[" * 9999, "not a JSON object"),
            ('{"guess": "x"}', "'x' is no number"),
        ):
            (problem,) = said(episode.step(Action(text)))
            assert problem.startswith("No action was taken: ")
            assert words in problem
        assert episode.score()[0].value == 0.0


def test_an_error_of_the_server_or_its_end_ends_the_episode(opened):
    episodes, server = opened()
    with episodes.open({}, seed=42) as episode, pytest.raises(EnvironmentFailed, match="EXECUTION_ERROR: it broke"):
        episode.step(Action("break"))
    with episodes.open({}, seed=42):
        server.close()
    with pytest.raises(EnvironmentFailed):
        episodes.open({}, seed=42)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:1", "ftp://127.0.0.1"])
def test_where_no_server_answers_is_said_at_the_start(url):
    limits = {"step_timeout_s": 60.0, "memory_bytes": 1 << 28, "max_observation_chars": 1000, "num_processes": 2}
    with pytest.raises(ConfigError, match="no OpenEnv server|not a server address"):
        Episodes(f"openenv:{url}", directory=Path(), **limits)
