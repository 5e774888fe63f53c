"""An episode's endpoint: one turn for each request, also when it is repeated, streamed, given up or refused."""

import contextlib
import http.client
import json
import queue
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from heterorl.common.tasks.environments import openai_endpoint
from heterorl.common.tasks.environments.environment import Action, ToolCall
from heterorl.common.tasks.environments.openai_endpoint import (
    MAX_BODY_BYTES,
    MOST_STRANGERS,
    STRANGER_S,
    Endpoint,
    over,
)

BODY = {"model": "gpt", "messages": [{"role": "user", "content": "Guess."}]}
CHAT = "/v1/chat/completions"


class Program:
    """What a program sends, in threads; `requests` is what the environment is told."""

    def __init__(self, threads, keepalive_s=60.0):
        self.requests = queue.SimpleQueue()
        self.endpoint = Endpoint(self.requests.put, keepalive_s=keepalive_s)
        self.endpoint.start()
        self.threads = threads
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"}
        self.client = httpx2.Client(
            base_url=self.endpoint.base_url, headers=headers, timeout=None, trust_env=False
        )  # fmt: skip

    def post(self, body=BODY, **fields):
        return self.threads.submit(self.client.post, "/chat/completions", json={**body, **fields})

    def told(self):
        return [message.content for message in self.requests.get()]

    def connection(self):
        return http.client.HTTPConnection("127.0.0.1", self.client.base_url.port)


@pytest.fixture
def begun():
    with ThreadPoolExecutor(8) as threads, contextlib.ExitStack() as made:

        def begin(**options):
            program = Program(threads, **options)
            made.callback(program.client.close)
            made.callback(program.endpoint.close)
            return program

        yield begin


def problem(reply):
    return reply.json()["error"]["message"]


def test_only_this_machine_can_connect(begun):
    assert begun().endpoint._server.server_address[0] == "127.0.0.1"


def test_a_request_waits_for_the_turn_and_gets_it(begun):
    program = begun()
    first = program.post()
    assert program.told() == ["Guess."]
    program.endpoint.answer(Action("<think>high</think>50"))
    reply = first.result().json()

    assert reply["object"] == "chat.completion"
    assert reply["model"] == "gpt"
    (choice,) = reply["choices"]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "50"}, "stop")

    more = program.post(messages=[*BODY["messages"], choice["message"], {"role": "user", "content": "lower"}])
    assert program.told() == ["lower"]
    program.endpoint.answer(Action("49", is_cut=True))
    assert more.result().json()["choices"][0]["finish_reason"] == "length"


def answered(program):
    """The program, after a turn: an equal request gets its answer at once."""
    turn = program.post()
    program.told()
    program.endpoint.answer(Action("50"))
    turn.result()
    return program


def status(connection, program):
    """Of an equal request on a connection, which stays open."""
    connection.request("POST", CHAT, json.dumps(BODY), {"Authorization": f"Bearer {program.endpoint.api_key}"})
    with connection.getresponse() as reply:
        return reply.read() and reply.status


def test_connections_without_the_key_are_few_and_the_oldest_gives_place(begun):
    program = answered(begun())
    with contextlib.ExitStack() as opened:
        own, another = (opened.enter_context(contextlib.closing(program.connection())) for _ in range(2))
        assert status(own, program) == 200
        strangers = [
            opened.enter_context(socket.create_connection(("127.0.0.1", program.client.base_url.port), timeout=20.0))
            for _ in range(2 * MOST_STRANGERS)
        ]

        assert [each.recv(1) for each in strangers[:MOST_STRANGERS]] == [b""] * MOST_STRANGERS
        assert [status(each, program) for each in (own, another)] == [200, 200]
        # The other one took the place of one of them until it showed the key.
        assert len(program.endpoint._server._strangers) == MOST_STRANGERS - 1


def test_a_connection_waits_for_ever_only_with_the_key(begun, monkeypatch):
    assert openai_endpoint._Handler.timeout == STRANGER_S
    monkeypatch.setattr(openai_endpoint._Handler, "timeout", 1.0)
    program = answered(begun())
    with contextlib.closing(program.connection()) as own:
        assert status(own, program) == 200
        for words in (b"", f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bea".encode()):
            with socket.create_connection(("127.0.0.1", program.client.base_url.port), timeout=20.0) as stranger:
                stranger.sendall(words)
                assert stranger.recv(1) == b""

        assert status(own, program) == 200


@pytest.mark.parametrize("head", ["HTTP/1.0", "HTTP/1.1\r\nConnection: close"])
def test_a_connection_ends_with_the_answer_where_the_program_asks_for_it(begun, head):
    program = begun()
    body, key = json.dumps(BODY).encode(), program.endpoint.api_key
    words = f"POST {CHAT} {head}\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", program.client.base_url.port), timeout=20.0) as connection:
        connection.sendall(words.encode() + body)
        program.requests.get()
        program.endpoint.answer(Action("50"))
        received = b""
        while piece := connection.recv(65536):
            received += piece

    assert json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "50"


def test_the_same_request_again_is_no_second_turn(begun):
    program = begun()
    first, second = program.post(), program.post()
    assert program.told() == ["Guess."]
    program.endpoint.answer(Action("50"))
    late = program.post()

    assert len({json.dumps(each.result().json()["choices"]) for each in (first, second, late)}) == 1
    assert program.requests.empty()


def test_a_retry_may_differ_in_what_is_ignored(begun):
    program = begun()
    first, second = program.post(stream=True), program.post(temperature=0.1, user="x")
    assert program.told() == ["Guess."]
    program.endpoint.answer(Action("50"))
    late = program.post(seed=7)

    assert '"content": "50"' in first.result().text
    assert {each.result().json()["choices"][0]["message"]["content"] for each in (second, late)} == {"50"}
    assert program.requests.empty()


def test_a_program_may_keep_a_connection_of_each_turn_open(begun):
    program = begun()
    headers = {"Authorization": f"Bearer {program.endpoint.api_key}"}
    messages = []
    with contextlib.ExitStack() as kept:
        for number in range(70):
            connection = kept.enter_context(contextlib.closing(program.connection()))
            messages.append({"role": "user", "content": f"Guess {number}."})
            connection.request("POST", CHAT, json.dumps({**BODY, "messages": messages}), headers)
            assert program.told() == [f"Guess {number}."]
            program.endpoint.answer(Action(str(number)))
            messages.append(json.loads(connection.getresponse().read())["choices"][0]["message"])

    assert messages[-1]["content"] == "69"


def test_another_request_beside_one_that_is_under_way_is_refused(begun):
    program = begun()
    first = program.post()
    program.told()
    beside = program.post(messages=[{"role": "user", "content": "Title?"}]).result()
    assert beside.status_code == 400
    assert "one turn at a time" in problem(beside)

    program.endpoint.answer(Action("50"))
    assert first.result().status_code == 200
    assert program.requests.empty()


def test_a_connection_that_breaks_leaves_one_turn_which_a_retry_gets(begun):
    program = begun()
    connection = program.connection()
    headers = {"Authorization": f"Bearer {program.endpoint.api_key}", "Content-Type": "application/json"}
    connection.request("POST", CHAT, json.dumps(BODY), headers)
    assert program.told() == ["Guess."]
    connection.close()
    retry = program.post()
    program.endpoint.answer(Action("50"))

    assert retry.result().json()["choices"][0]["message"]["content"] == "50"
    assert program.requests.empty()


def test_a_stream_lives_until_the_turn_has_ended(begun):
    program = begun(keepalive_s=0.01)
    with program.client.stream("POST", "/chat/completions", json={**BODY, "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith(":")
        assert program.told() == ["Guess."]
        program.endpoint.answer(Action("", (ToolCall("add", {"a": 1}),)))
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    assert reply.headers["content-type"] == "text/event-stream"
    assert data.pop() == "[DONE]"
    first, last = (json.loads(each)["choices"][0] for each in data)
    assert first["delta"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert last["finish_reason"] == "tool_calls"


def test_a_stream_of_a_refused_turn_ends_with_the_error(begun):
    program = begun(keepalive_s=0.01)
    with program.client.stream("POST", "/chat/completions", json={**BODY, "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith(":")
        program.endpoint.refuse_rest(over())
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    assert [each["error"]["code"] for each in data] == ["budget_exhausted"]


def test_an_episode_that_is_over_refuses_what_is_under_way_and_what_comes(begun):
    program = begun()
    first = program.post()
    program.told()
    program.endpoint.refuse_rest(over())
    replies = [first.result(), program.post().result(), program.post(user="x").result()]

    assert [reply.status_code for reply in replies] == [400, 400, 400]
    assert {reply.json()["error"]["code"] for reply in replies} == {"budget_exhausted"}
    assert program.requests.empty()


def test_a_closed_endpoint_answers_by_a_server_error_and_then_nobody(begun):
    program = begun()
    first = program.post()
    program.told()
    program.endpoint.close()

    assert first.result().status_code == 500
    with pytest.raises(httpx2.ConnectError):
        program.post().result()


@pytest.mark.parametrize("key", ["Bearer wrong", "", "Bearer \xe9"])
def test_nobody_without_the_key_is_answered(begun, key):
    program = begun()
    for method, path in (("POST", CHAT), ("GET", "/v1/models")):
        connection = program.connection()
        connection.request(method, path, json.dumps(BODY), {"Authorization": key} if key else {})
        assert connection.getresponse().status == 401
        connection.close()
    assert program.requests.empty()


@pytest.mark.parametrize(
    ("size", "status"), [(str(MAX_BODY_BYTES + 1), 413), ("9" * 30, 413), ("-1", 411), ("x", 411), (None, 411)]
)
def test_the_bytes_of_a_request_are_bounded_before_it_is_read(begun, size, status):
    program = begun()
    connection = program.connection()
    connection.putrequest("POST", CHAT)
    connection.putheader("Authorization", f"Bearer {program.endpoint.api_key}")
    if size is None:
        connection.putheader("Transfer-Encoding", "chunked")
    else:
        connection.putheader("Content-Length", size)
    connection.endheaders()

    assert connection.getresponse().status == status
    connection.close()


def test_doubled_slashes_are_one(begun):
    program = begun()
    reply = program.threads.submit(
        program.client.post, str(program.client.base_url).removesuffix("v1/") + "v1//chat//completions", json=BODY
    )
    assert program.told() == ["Guess."]
    program.endpoint.answer(Action("50"))

    assert reply.result().status_code == 200


def test_what_is_no_json_and_what_is_not_served_are_refused(begun):
    program = begun()
    for content in (b"{", b"[" * 100_000, b"\xff"):
        reply = program.client.post("/chat/completions", content=content)
        assert (reply.status_code, "not JSON" in problem(reply)) == (400, True)
    reply = program.client.post("/responses", json={})
    assert reply.status_code == 404
    assert CHAT in problem(reply)
    assert program.client.get("/models").json()["data"][0]["id"] == "policy"
    assert program.client.get("/files").status_code == 404
    assert program.client.post("/chat/completions", json={**BODY, "n": 2}).status_code == 400
    assert program.requests.empty()
