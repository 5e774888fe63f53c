"""Who is answered over HTTP, and with which headers; real sockets."""

import http.client
import socket
import stat
import tempfile
from http import HTTPStatus
from types import SimpleNamespace

import pytest

from heterorl.common.errors import ConfigError
from heterorl.view import pages
from heterorl.view.pages import redirect_file
from heterorl.view.view_server import HEADERS, Answer, ViewServer, has_key, is_own_host, take_key
from tests.support.limits import WAIT_S

KEY = "k3y"


@pytest.fixture
def server():
    def respond(path, query):
        if path == "/fault":
            raise RuntimeError("a fault of ours")
        return Answer(body=f"{path}?{query}".encode())

    running = ViewServer(respond, port=0, key=KEY)
    running.start()
    yield running
    running.close()


def ask(server, path="/", *, method="GET", host=None, key=KEY, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT_S)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name in [f"127.0.0.1:{server.server_port}"] if host is None else host:
            connection.putheader("Host", name)
        if key:
            connection.putheader("Cookie", f"other=1; heterorl-view-{server.server_port}={key}")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_person_with_the_key_is_answered(server):
    status, headers, body = ask(server, "/sample/3?text=a%20b")

    assert (status, body) == (200, b"/sample/3?text=a%20b")
    assert dict(HEADERS).items() <= headers.items()


@pytest.mark.parametrize(
    "host", [["evil.example"], ["127.0.0.1.evil.example"], ["evil.example:80"], [], ["127.0.0.1", "evil.example"], [""],
             ["localhost@evil.example"], ["127.0.0.2"], ["localhost."]],
)  # fmt: skip
def test_another_name_is_refused_even_with_the_key(server, host):
    status, headers, body = ask(server, "/", host=host)

    assert status == 421
    assert b"/?" not in body
    assert dict(HEADERS).items() <= headers.items()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:65535", "[::1]:8000"])
def test_names_of_this_machine_are_taken_with_the_port_of_a_tunnel(host):
    assert is_own_host([host])


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", "%E9"])
def test_nobody_is_answered_without_the_key(server, key):
    for path in ("/", "/state.json", "/static/view.js", f"/?key={key}wrong"):
        assert ask(server, path, key=key)[0] == 403


def test_the_key_goes_from_the_url_into_a_cookie(server):
    status, headers, body = ask(server, f"/sample/3?text=a+b&key={KEY}", key="")

    assert (status, body) == (303, b"")
    assert headers["Location"] == "/sample/3?text=a+b"
    assert headers["Set-Cookie"] == f"heterorl-view-{server.server_port}={KEY}; HttpOnly; SameSite=Lax; Path=/"
    assert server.url.endswith(f"/?key={KEY}")


@pytest.mark.parametrize("path", ["//evil.example/x", "///evil.example"])
def test_the_way_leads_to_no_other_host(server, path):
    status, headers, _ = ask(server, f"{path}?key={KEY}")

    assert status in (303, 400)
    assert not headers.get("Location", "/").startswith("//")


def test_head_has_no_body_and_nothing_is_written(server):
    status, headers, body = ask(server, "/abc", method="HEAD")

    assert (status, headers["Content-Length"], body) == (200, "5", b"")
    for method in ("POST", "PUT", "DELETE"):
        status, headers, _ = ask(server, "/", method=method)
        assert status == HTTPStatus.NOT_IMPLEMENTED
        assert dict(HEADERS).items() <= headers.items()


def test_only_this_machine_can_connect(server):
    assert server.server_address[0] == "127.0.0.1"


def test_a_fault_of_ours_ends_one_request(server, caplog):
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(server, "/fault")

    assert ask(server, "/")[0] == 200
    assert "a fault of ours" in caplog.text


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--port: .* already in use"):
        ViewServer(lambda path, query: Answer(body=b""), port=taken.getsockname()[1], key=KEY)


def test_cookies_of_another_page_are_not_this_ones():
    assert has_key("a=b; heterorl-view-1=k", port=1, key="k")
    assert not has_key("heterorl-view-2=k", port=1, key="k")
    assert not has_key("", port=1, key="k")


def test_a_query_of_too_many_fields_has_no_key():
    assert take_key("&".join(["a=1"] * 200 + ["key=k"]), key="k") is None


def test_a_browser_is_led_to_the_page_by_a_file_of_this_user_alone():
    with redirect_file("http://127.0.0.1:8000/?key=a-b_c&x=1") as path:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert 'content="0;url=http://127.0.0.1:8000/?key=a-b_c&amp;x=1"' in path.read_text()
        assert "key" not in path.as_uri()
    assert not path.parent.exists()


def test_the_index_is_below_tmpdir_and_deleted_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = []
    source = SimpleNamespace(name="x", start=lambda: said.append("start"), close=lambda: said.append("close"))

    with pages.served(lambda index: source):
        (directory,) = tmp_path.iterdir()
        assert directory.name.startswith("heterorl-view-")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert list(directory.iterdir())

    assert list(tmp_path.iterdir()) == []
    assert said == ["start", "close"]
