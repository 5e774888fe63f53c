"""What a URL asks of the list: bounds, defaults, and the way back to a URL."""

from urllib.parse import urlsplit

import pytest

from heterorl.view.sample_query import MAX_TEXT, BadQuery, Query, parse_query

WHOLE = Query(
    text="x < 3 & y%", site="eu-1", fate="reward_mismatch", version_from=0, version_to=9, reward_from=-0.5, reward_to=1.0,
    truncated=False, lost=True, before=7,
)  # fmt: skip


@pytest.mark.parametrize(
    "query", [Query(), WHOLE, Query(truncated=True, lost=False, after=3), Query(text="\u4f60\u597d")]
)
def test_a_query_survives_its_url(query):
    assert parse_query(urlsplit(query.url("/sample/3")).query) == query


def test_nothing_is_written_of_what_excludes_nothing():
    assert Query().url() == "/"
    assert Query(reward_to=0.0).url() == "/?reward_to=0.0"


def test_fields_that_are_empty_or_unknown_say_nothing():
    assert parse_query("text=&site=&version_from=&reward_to=+&truncated=&utm=1") == Query()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("version_from=x", "version_from"),
        ("version_to=-1", "version_to"),
        ("before=99999999999999999999", "before"),
        ("before=9223372036854775808", "before"),
        ("version_from=\u0663", "version_from"),
        ("reward_from=nan", "reward_from"),
        ("reward_to=1e999", "reward_to"),
        ("fate=lost", "fate"),
        ("truncated=maybe", "truncated"),
        ("lost=maybe", "lost"),
        ("text=" + "a" * (MAX_TEXT + 1), "text"),
        ("site=" + "a" * 501, "site"),
        ("&".join(f"f{i}=1" for i in range(30)), "URL"),
    ],
)
def test_what_cannot_be_asked_is_named(text, name):
    with pytest.raises(BadQuery) as caught:
        parse_query(text)

    assert str(caught.value).startswith(f"{name}: ")
    assert caught.value.action


def test_halves_of_pairs_become_question_marks():
    assert parse_query("text=%ED%A0%80ab").text.encode("utf-8")
