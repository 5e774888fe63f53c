"""Pages as HTML: everything a model says is text, every place can be reached, and a wrong URL is told in words."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.types.common import SiteId
from heterorl.common.types.sample import Sample
from heterorl.view.pages import PAGE, Pages, number
from heterorl.view.sample_index import SampleIndex, SourceProgress
from tests.support.samples import TURNS, make_sample, make_turns

EVIL = "</pre></span><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;"


class FakeSource:
    name = "run.jsonl<b>"

    def __init__(self):
        self.progress = SourceProgress(is_done=True)
        self.found = {}

    def fetch(self, sample_id):
        found = self.found.get(sample_id)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def index(tmp_path):
    made = SampleIndex(tmp_path, limit_bytes=1 << 30)
    yield made
    made.close()


@pytest.fixture
def source():
    return FakeSource()


@pytest.fixture
def pages(index, source):
    return Pages(index, source)


def text(pages, path, query=""):
    answer = pages.respond(path, query)
    assert answer.status == 200, answer.body
    return answer.body.decode()


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_what_a_model_says_is_never_markup(pages, index):
    sample = make_sample(7, prompt=EVIL, completions=(EVIL, EVIL))
    line = dataclasses.replace(sample.summary, site=SiteId(EVIL), detail=EVIL)
    parts = tuple(dataclasses.replace(part, name=EVIL) for part in sample.rollouts[0].reward_parts)
    rollouts = tuple(dataclasses.replace(rollout, reward_parts=parts) for rollout in sample.rollouts)
    index.add_samples([dataclasses.replace(sample, summary=line, rollouts=rollouts)])

    for path, query in (
        ("/", ""),
        ("/", "text=onerror"),
        ("/sample/7", ""),
        ("/sample/7", "text=%3Cscript&site=%22%3E"),
    ):
        found = Elements(text(pages, path, query))
        scripts = [attrs for tag, attrs in found.tags if tag == "script"]
        assert scripts == [{"src": "/static/view.js", "defer": None}]
        assert [attrs for tag, attrs in found.tags if tag == "img" and attrs.get("src") == "x"] == []
        assert [
            attrs for _, attrs in found.tags if any(name.startswith("on") or name == "style" for name in attrs)
        ] == []
        assert "alert(1)" in "".join(found.words)


def test_nothing_is_loaded_from_elsewhere(pages, index):
    index.add_samples([make_sample(1)])

    for page in (text(pages, "/"), text(pages, "/sample/1")):
        links = [attrs.get("href") or attrs.get("src") for _, attrs in Elements(page).tags]
        assert [link for link in links if link and not link.startswith("/")] == []
    for name in ("view.css", "view.js"):
        assert re.findall(r"https?:|@import|url\(", pages.respond(f"/static/{name}", "").body.decode()) == []


def test_every_sample_is_reached_by_pages(pages, index):
    index.add_samples([make_sample(n) for n in range(1, 2 * PAGE + 11)])
    path, query, seen = "/", "", []

    while True:
        tags = Elements(text(pages, path, query)).tags
        seen += [int(attrs["data-id"]) for _, attrs in tags if "data-id" in attrs]
        older = [attrs["href"] for tag, attrs in tags if tag == "a" and attrs.get("rel") == "next"]
        if not older:
            break
        path, _, query = older[0].partition("?")

    assert seen == list(range(2 * PAGE + 10, 0, -1))


@pytest.mark.parametrize(
    ("num", "reward", "words"), [(4, 0.5, "all equal"), (1, 0.5, "one"), (4, None, "none"), (0, None, "none")]
)
def test_equal_rewards_are_not_told_by_a_number(pages, index, num, reward, words):
    sample = make_sample(1)
    summary = dataclasses.replace(
        sample.summary, num_rollouts=4, num_lost=4 - num, reward_min=reward, reward_mean=reward, reward_max=reward
    )
    index.add_samples([dataclasses.replace(sample, summary=summary)])

    assert f"<small>{words}</small>" in text(pages, "/")


def test_a_sample_has_its_neighbours_of_the_same_query(pages, index):
    index.add_samples([make_sample(n) for n in range(1, 31)])
    index.add_samples([make_sample(n, completions=("qz",)) for n in (5, 12, 19)])

    links = [attrs for _, attrs in Elements(text(pages, "/sample/14", "fate=dropped")).tags if "rel" in attrs]
    found = {attrs["rel"]: attrs["href"] for attrs in links if attrs["rel"] in ("next", "prev")}

    assert found == {"next": "/sample/7?fate=dropped", "prev": "/sample/21?fate=dropped"}
    page = text(pages, "/sample/12", "text=qz")
    links = {attrs["rel"]: attrs["href"] for tag, attrs in Elements(page).tags if tag == "a" and attrs.get("rel")}
    assert links == {"next": "/sample/5?text=qz", "prev": "/sample/19?text=qz"}


def test_tokens_hold_all_of_a_completion(pages, index):
    sample = make_sample(3)
    index.add_samples([sample])

    page = text(pages, "/sample/3")

    for rollout in sample.rollouts:
        assert page.count('data-n="') == sum(len(one.token_ids) for one in sample.rollouts)
        assert f'data-n="{rollout.token_ids[0]} {rollout.sampler_logprobs[0]:.4g}' in page


def test_turns_have_heads_and_given_tokens_no_colour(pages, index):
    index.add_samples([make_turns(3)])

    found = Elements(text(pages, "/sample/3"))

    heads = [attrs["data-writer"] for _, attrs in found.tags if "data-writer" in attrs]
    assert heads == [
        "version 40", "environment", "versions 40, 41", "environment", "version 41",
        "version 40", "environment", "version 40", "environment, in a new sequence that keeps 3 tokens", "version 41",
        "version 40", "environment",
    ]  # fmt: skip
    given = [attrs for _, attrs in found.tags if "given" in attrs.get("class", "").split()]
    want = sum(len(one.token_ids) - one.num_drawn for one in make_turns(3).rollouts)
    assert len(given) == want
    assert {(attrs["class"].split()[:2] == ["x", "x"], attrs["data-n"].split()[1]) for attrs in given} == {(True, "-")}
    # What heads say is in no text: a search and a copy have the model's words alone.
    said = "".join(found.words)
    assert all(words in said for _, _, turns in TURNS for _, words, *_ in turns)
    assert "environment" not in said


def test_lost_members_are_marked_and_have_no_reward(pages, index):
    index.add_samples([make_turns(3), make_sample(4)])

    page, found = text(pages, "/sample/3"), text(pages, "/", "lost=yes")

    assert re.findall(r'title="reward">([^<]*)<', page) == ["1", "0.5", "0", "-", "-"]
    assert re.findall(r">(lost: [^<]*)<", page) == ["lost: engine failed", "lost: tool lost"]
    assert "2 of 5 lost" in page
    given = [len(one.token_ids) - one.num_drawn for one in make_turns(3).rollouts]
    assert re.findall(r"(\d+) given", page) == [str(count) for count in given if count]
    assert re.findall(r'data-id="(\d+)"', found) == ["3"]
    assert "2 of 5 lost" in found
    assert " lost<" not in text(pages, "/", "lost=no")


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/x", "", 404), ("/sample/99", "", 404), ("/sample/x", "", 404), ("/sample/-1", "", 404),
        ("/sample/" + "9" * 30, "", 404), ("/static/../app.py", "", 404), ("/static/nothing.css", "", 404),
        ("/", "reward_from=x", 400), ("/", "&".join(["a=1"] * 50), 400),
    ],
)  # fmt: skip
def test_a_wrong_url_is_told_in_words(pages, path, query, status):
    answer = pages.respond(path, query)

    assert answer.status == status
    assert len(answer.body) > 10


def test_a_sample_that_was_not_read_yet_is_asked_for(pages, index, source):
    sample = make_sample(5)
    index.add_summaries([sample.summary])
    source.found[5] = sample
    assert "article" in text(pages, "/sample/5")

    source.found[5] = Unreachable("coord:1: gone", action="look later")
    page = text(pages, "/sample/5")
    assert "coord:1: gone (look later)" in page
    assert "<article" not in page


def test_a_sample_without_texts_shows_its_ids(pages, index):
    sample = make_sample(4)
    bare = dataclasses.replace(sample.summary, has_texts=False, prompt_preview="", completion_preview="")
    rollouts = tuple(dataclasses.replace(rollout, completion="") for rollout in sample.rollouts)
    index.add_samples([Sample(summary=bare, prompt_token_ids=sample.prompt_token_ids, rollouts=rollouts)])

    assert "No text: prompt" in text(pages, "/")
    page = text(pages, "/sample/4")
    assert f">{sample.rollouts[0].token_ids[0]} </span>" in page
    assert "0 1 2 3 4" in page


def test_the_state_is_json(pages, index, source):
    index.add_samples([make_sample(1)])
    source.progress = SourceProgress(total=9, is_live=True, problem="gone")

    answer = pages.respond("/state.json", "")

    assert json.loads(answer.body) == {
        "total": 9, "is_done": False, "is_live": True, "problem": "gone", "remark": "", "samples": 1, "read": 1, "newest": 1
    }  # fmt: skip


def test_an_empty_list_says_why(pages, index, source):
    source.progress = SourceProgress(is_live=True, is_done=True)
    assert "Nothing was kept yet" in text(pages, "/")
    source.progress = SourceProgress(is_live=True, is_done=True, remark="It keeps none.")
    assert "It keeps none." in text(pages, "/")
    source.progress = SourceProgress()
    assert "Reading run.jsonl&lt;b&gt;" in text(pages, "/")
    index.add_samples([make_sample(1)])
    assert "No sample is like that" in text(pages, "/", "text=nowhere")


@pytest.mark.parametrize(
    ("value", "words"), [(None, "-"), (float("nan"), "-"), (1.0, "1"), (0.12345, "0.123"), (-0.0, "-0"), (100.0, "100")]
)
def test_numbers_are_short(value, words):
    assert number(value) == words
