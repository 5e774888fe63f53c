"""What is found among samples: filters, places, parts of text, and what happens when room ends."""

import dataclasses

import pytest

from heterorl.common.types.common import SiteId
from heterorl.common.types.sample import Sample
from heterorl.view import sample_index
from heterorl.view import sample_query as search
from heterorl.view.sample_index import IndexFailed, SampleIndex
from heterorl.view.sample_query import Query
from tests.support.samples import make_sample, make_turns

COUNT = 60


@pytest.fixture
def index(tmp_path):
    made = SampleIndex(tmp_path, limit_bytes=1 << 30)
    yield made
    made.close()


def made_samples():
    return [make_turns(n) if n % 20 == 10 else make_sample(n) for n in range(1, COUNT + 1)]


@pytest.fixture
def samples(index):
    made = made_samples()
    index.add_samples(made)
    return made


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """An index that no test changes, and its samples."""
    index, made = SampleIndex(tmp_path_factory.mktemp("full"), limit_bytes=1 << 30), made_samples()
    index.add_samples(made)
    yield index, made
    index.close()


def ids(found):
    return [summary.id for summary in found.summaries]


def by_hand(samples, query):
    """The slow way: every condition on every sample."""

    def fits(sample):
        line = sample.summary
        texts = [sample.prompt, *(rollout.completion for rollout in sample.rollouts)]
        kept = [rollout for rollout in sample.rollouts if not rollout.is_lost]
        dropped = line.kept_because not in ("consumed", "evaluation")
        return (
            (not query.site or line.site == query.site)
            and (not query.fate or (dropped if query.fate == "dropped" else line.kept_because == query.fate))
            and (query.version_from is None or line.version >= query.version_from)
            and (query.version_to is None or line.version <= query.version_to)
            and (query.reward_from is None or any(r.reward >= query.reward_from for r in kept))
            and (query.reward_to is None or any(r.reward <= query.reward_to for r in kept))
            and (query.truncated is None or (line.num_truncated > 0) is query.truncated)
            and (query.lost is None or any(r.is_lost for r in sample.rollouts) is query.lost)
            and (not query.text or any(query.text.casefold() in text.casefold() for text in texts))
        )

    return [sample.summary.id for sample in reversed(samples) if fits(sample)]


@pytest.mark.parametrize("text", ["needle", "NEEDLE behind", "ed", "\0needle", "before\0", "\0"])
def test_what_stands_behind_a_nul_is_found(index, text):
    sample = make_sample(1)
    told = dataclasses.replace(sample.rollouts[0], completion="before\0needle behind")
    index.add_samples([dataclasses.replace(sample, rollouts=(told,)), make_sample(2)])

    assert ids(index.find(Query(text=text), limit=5))[-1:] == [1]


@pytest.mark.parametrize(
    "query",
    [
        Query(),
        Query(site="eu-1"),
        Query(fate="consumed"),
        Query(fate="dropped"),
        Query(fate="evaluation"),
        Query(fate="reward_mismatch"),
        Query(version_from=52, version_to=54),
        Query(reward_from=0.95),
        Query(reward_to=0.02),
        Query(truncated=True),
        Query(truncated=False),
        Query(lost=True),
        Query(lost=False, truncated=True),
        Query(reward_from=5.0),
        Query(text="the carry"),
        Query(text="THE CARRY"),
        Query(text="\\boxed{1"),
        Query(text='"quoted" OR x'),
        Query(text="42"),
        Query(text="%"),
        Query(text="Alternatively, add", truncated=True, site="us-east-2", fate="consumed"),
        Query(text="nothing says this"),
    ],
    ids=str,
)
def test_a_query_finds_what_a_look_at_each_sample_finds(full, query):
    index, samples = full
    found = index.find(query, limit=COUNT)

    assert ids(found) == by_hand(samples, query)
    assert (found.count, found.is_more) == (len(found.summaries), False)
    assert (found.has_newer, found.has_older) == (False, False)


@pytest.mark.parametrize("query", [Query(), Query(text="answer"), Query(fate="consumed", text="e")])
def test_pages_meet_in_both_directions(full, query):
    index, samples = full
    whole = by_hand(samples, query)

    down, place = [], query
    while True:
        found = index.find(place, limit=7)
        down += ids(found)
        if not found.has_older:
            break
        place = query.at(before=down[-1])
    up, place = [], query.at(after=0 + min(whole) - 1 or -1)
    while True:
        found = index.find(place, limit=7)
        up = ids(found) + up
        if not found.has_newer:
            break
        place = query.at(after=up[0])

    assert down == whole
    assert up == whole


@pytest.mark.parametrize("number", [5, 10])
def test_a_sample_comes_back_as_it_was(full, number):
    index, samples = full
    found, kept = index.get(number), samples[number - 1]

    assert found.summary == kept.summary
    assert found.prompt == kept.prompt
    for got, want in zip(found.rollouts, kept.rollouts, strict=True):
        for name in ("completion", "reward", "reward_parts", "finish_reason", "spans"):
            assert getattr(got, name) == getattr(want, name)
        for name in ("token_ids", "sampler_logprobs", "log_ratios", "token_ends"):
            assert getattr(got, name).tolist() == getattr(want, name).tolist()
    assert index.get(COUNT + 1) is None


def test_lines_are_found_before_their_texts_and_read_once(index, samples):
    line = dataclasses.replace(make_sample(99).summary, site=SiteId("far"))

    index.add_summaries([line, samples[0].summary])

    assert index.unread(10) == (99,)
    assert index.get(99) == line
    assert ids(index.find(Query(site="far"), limit=5)) == [99]
    index.add_samples([Sample(summary=line, prompt="p", rollouts=make_sample(99).rollouts)])
    assert index.unread(10) == ()


def test_texts_that_come_later_are_read_then(index):
    sample = make_sample(3)
    bare = dataclasses.replace(sample.summary, has_texts=False)
    index.add_samples(
        [Sample(summary=bare, rollouts=tuple(dataclasses.replace(r, completion="") for r in sample.rollouts))]
    )
    assert index.first_without_texts(newest=10) == 3
    assert ids(index.find(Query(text="answer"), limit=5)) == []

    index.add_summaries([sample.summary])
    assert index.unread(10) == (3,)
    index.add_samples([sample])

    assert index.first_without_texts(newest=10) is None
    assert ids(index.find(Query(text="answer"), limit=5)) == [3]


def test_what_is_forgotten_is_found_no_more(index, samples):
    index.forget(COUNT)

    assert index.get(COUNT) is None
    assert COUNT not in ids(index.find(Query(text="answer"), limit=COUNT))
    assert index.held().num_samples == COUNT - 1


def test_a_sample_forgotten_during_a_search_is_still_in_its_answer(index, samples, monkeypatch):
    def looked(*arguments, **options):
        hits = search.look_up(*arguments, **options)
        index.forget(COUNT)
        return hits

    monkeypatch.setattr(sample_index, "look_up", looked)

    assert ids(index.find(Query(), limit=2)) == [COUNT, COUNT - 1]
    assert ids(index.find(Query(), limit=2)) == [COUNT - 1, COUNT - 2]


def test_the_oldest_make_room(tmp_path):
    index = SampleIndex(tmp_path, limit_bytes=40_000)

    for n in range(1, COUNT + 1):
        index.add_samples([make_sample(n)])

    held = index.held()
    assert 0 < held.num_samples < COUNT
    assert held.num_forgotten == COUNT - held.num_samples
    assert ids(index.find(Query(), limit=COUNT)) == list(range(COUNT, COUNT - held.num_samples, -1))
    assert set(ids(index.find(Query(text="answer"), limit=COUNT))) <= set(
        range(COUNT - held.num_samples + 1, COUNT + 1)
    )
    index.close()


def test_room_counts_bytes_and_not_characters(tmp_path):
    index = SampleIndex(tmp_path, limit_bytes=40_000)

    index.add_samples([make_sample(1, prompt="\u6570" * 15_000)])

    assert index.held().num_forgotten == 1
    index.close()


def test_samples_that_the_disk_did_not_take_count_for_nothing(tmp_path):
    index = SampleIndex(tmp_path, limit_bytes=40_000)
    index.add_samples([make_sample(1)])
    (pages,) = index._writer.execute("PRAGMA page_count").fetchone()
    index._writer.execute(f"PRAGMA max_page_count={pages + 10}")
    for _ in range(40):
        with pytest.raises(IndexFailed, match="full"):
            index.add_samples([make_sample(n) for n in range(2, COUNT)])

    held = index.held()
    assert (held.num_samples, held.num_read, held.num_forgotten) == (1, 1, 0)
    index._writer.execute(f"PRAGMA max_page_count={1 << 20}")
    index.add_samples([make_sample(2)])
    assert ids(index.find(Query(), limit=5)) == [2, 1]
    index.close()


def test_hits_of_a_search_are_counted_up_to_a_number(full, monkeypatch):
    index, samples = full
    monkeypatch.setattr(search, "COUNTED", 5)
    monkeypatch.setattr(sample_index, "COUNTED", 5)
    query = Query(text="answer")

    found = [index.find(place, limit=COUNT) for place in (query, query.at(before=9), Query())]

    assert [(each.count, each.is_more) for each in found] == [(5, True), (5, True), (COUNT, False)]
    assert ids(found[0]) == by_hand(samples, query)


def test_texts_with_anything_in_them_are_kept_and_found(index):
    strange = (
        'a"b\x00c\x1ed',
        "\ud800 half",
        "\u202ereversed",
        "\U0001f600\U0001f600\U0001f600",
        "STRASSE stra\u00dfe",
    )
    index.add_samples([make_sample(n + 1, prompt=text, completions=(text,)) for n, text in enumerate(strange)])

    assert ids(index.find(Query(text='a"b'), limit=9)) == [1]
    assert ids(index.find(Query(text="? half"), limit=9)) == [2]
    assert ids(index.find(Query(text="\U0001f600\U0001f600\U0001f600"), limit=9)) == [4]
    assert ids(index.find(Query(text="STRASSE STRASSE"), limit=9)) == [5]
    assert index.get(2).rollouts[0].completion == "\ud800 half"
