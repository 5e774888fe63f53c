"""What a token is, and when it counts."""

import base64
import contextlib
import dataclasses
import hashlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from heterorl.certs.enrolment import (
    PREFIX,
    Enrolment,
    JoinRefused,
    Kept,
    Refused,
    Token,
    check_token,
    parse_token,
    secret_digest,
)
from heterorl.certs.enrolment_server import network_of
from heterorl.cli.certs import parse_duration
from heterorl.cli.main import app
from heterorl.common.errors import ConfigError

URI = "spiffe://run/site/eu-1/role/sampler"
TOKEN = Token(id=b"i" * 8, secret=b"s" * 32, pin=b"p" * 32, uri=URI, address="ca.example:50052")
KEPT = Kept(secret_digest=secret_digest(TOKEN.secret), uri=URI, expires=100.0, days=90)
USED = dataclasses.replace(KEPT, key="mine", serial=7)


@given(st.binary(min_size=8, max_size=8), st.binary(min_size=32, max_size=32), st.sampled_from(["", "h:1", "[::1]:2"]))
def test_token_survives_its_text(number, secret, address):
    token = dataclasses.replace(TOKEN, id=number, secret=secret, address=address)

    assert parse_token(token.text()) == token
    # As terminals and mails break it.
    assert parse_token(f" {token.text()[:40]}\n{token.text()[40:]}\n") == token


@given(st.data())
def test_every_changed_character_is_noticed(data):
    text = TOKEN.text()
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("abcXYZ019-_").filter(lambda c: c != text[place]))
    changed = text[:place] + other + text[place + 1 :]

    try:
        parsed = parse_token(changed)
    except ConfigError:
        return
    # The last character's low bits stand for nothing.
    assert place == len(text) - 1
    assert parsed == TOKEN


@pytest.mark.parametrize(
    "text", ["", "hrl1.", "hrl2.AAAA", TOKEN.text()[:-6], TOKEN.text() + "A", "hrl1.!!!", "hrl1.\u00e9"]
)
def test_what_is_no_token_is_named_as_such(text):
    with pytest.raises(ConfigError, match="--token"):
        parse_token(text)


@given(st.one_of(st.text(), st.binary().map(lambda data: "hrl1." + base64.urlsafe_b64encode(data).decode())))
def test_whatever_is_typed_is_a_token_or_an_error_of_ours(text):
    with contextlib.suppress(ConfigError):
        parse_token(text)


@given(st.binary(max_size=200))
def test_fields_of_any_bytes_with_the_right_sum_are_a_token_or_an_error_of_ours(body):
    # A sum is no secret: who makes a token can make any.
    text = PREFIX + base64.urlsafe_b64encode(body + hashlib.sha256(body).digest()[:4]).decode().rstrip("=")
    with contextlib.suppress(ConfigError):
        parse_token(text)


def test_token_of_no_node_is_refused():
    with pytest.raises(ConfigError, match="names no node"):
        parse_token(dataclasses.replace(TOKEN, uri="spiffe://run/../x").text())


@pytest.mark.parametrize(
    ("kept", "changes", "refused"),
    [
        (KEPT, {}, None),
        (KEPT, {"now": 99.9}, None),
        (KEPT, {"now": 100.0}, Refused.EXPIRED),
        (None, {}, Refused.TOKEN),
        (KEPT, {"secret": b"x" * 32}, Refused.TOKEN),
        # Who does not know the secret does not learn that the token was used or has expired.
        (USED, {"secret": b"x" * 32, "now": 200.0}, Refused.TOKEN),
        (KEPT, {"uri": "spiffe://run/site/eu-2/role/sampler"}, Refused.IDENTITY),
        (KEPT, {"uri": "spiffe://run/site/eu-1/role/learner"}, Refused.IDENTITY),
        (USED, {}, Refused.USED),
        (USED, {"key": "mine"}, None),
        # An answer that was lost may be asked for late.
        (USED, {"key": "mine", "now": 200.0}, None),
    ],
)
def test_when_a_token_counts(kept, changes, refused):
    values = {"secret": TOKEN.secret, "uri": URI, "key": "other", "now": 0.0, **changes}
    if refused is None:
        assert check_token(kept, **values) is kept
        return
    with pytest.raises(JoinRefused) as error:
        check_token(kept, **values)
    assert error.value.reason is refused


def test_network_of_a_peer():
    assert network_of("10.0.0.1") == network_of("::ffff:10.0.0.1") == "10.0.0.1"
    # One machine has a whole /64.
    assert network_of("2001:db8::1") == network_of("2001:db8::2%eth0") != network_of("2001:db8:0:1::1")


def test_durations():
    assert [parse_duration(text) for text in ("30s", "5m", "1h", "2d")] == [30.0, 300.0, 3600.0, 172800.0]
    for text in ("", "1", "h", "0h", "-1h", "1w", "1.5h"):
        with pytest.raises(ConfigError, match="--expires"):
            parse_duration(text)


@pytest.mark.parametrize(("options", "life_s"), [((), 3600.0), (("--expires", "2d"), 172800.0)])
def test_a_token_is_valid_for_an_hour_unless_it_is_told_otherwise(options, life_s, monkeypatch):
    asked = {}
    monkeypatch.setattr(Enrolment, "__init__", lambda self, directory: None)
    monkeypatch.setattr(Enrolment, "create", lambda self, **values: asked.update(values) or TOKEN)
    before = time.time()

    result = CliRunner().invoke(app, ["certs", "token", "create", "--site", "eu-1", *options])

    assert result.output.strip() == TOKEN.text()
    assert before + life_s <= asked["expires"] <= time.time() + life_s
