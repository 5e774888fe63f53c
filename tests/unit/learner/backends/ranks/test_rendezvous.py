"""Ranks meet in rounds of processes that live, and none waits for what a dead one would have said."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import heterorl
from heterorl.common.errors import ConfigError
from heterorl.learner.backends.ranks import rank_group
from heterorl.learner.backends.ranks.collectives import RanksDiffer
from heterorl.learner.backends.ranks.rank_env import RankEnv, local_rank_env
from heterorl.learner.backends.ranks.rank_group import RanksApart, Rendezvous, enter_round, open_round


def _place(rank, world_size=3):
    return RankEnv(rank=rank, local_rank=0, world_size=world_size, local_world_size=0, host="127.0.0.1", port=1)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """What waits for ever by mistake gives up before the test's own time is over."""
    monkeypatch.setattr(rank_group, "CONNECT", rank_group.datetime.timedelta(seconds=50))


@pytest.fixture
def connect():
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", master.port, is_master=False)


@pytest.fixture
def run():
    with ThreadPoolExecutor(4) as executor:
        yield executor.submit


def _met(places, *, first=0):
    """A meeting of each place, in threads that begin one after another."""
    results = {}

    def meet(place):
        results[place.rank] = Rendezvous(place, timeout_s=7.0)

    threads = [threading.Thread(target=meet, args=(place,)) for place in [*places[first:], *places[:first]]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def places(tmp_path):
    return [local_rank_env(rank, num_ranks=2, file=tmp_path / "store") for rank in range(2)]


def test_ranks_of_a_new_round_never_hear_what_was_said_in_the_last(places):
    rounds = []
    for number in range(2):
        # The second time rank 1 is back first, while the store has all that the dead wrote.
        met = _met(places, first=number)
        met[0].say(f"run {number}")
        assert met[1].hear() == f"run {number}"
        rounds.append(met)

    rounds[1][1].note_end()
    rounds[1][0].end()
    assert rounds[1][1].hear() == ""
    assert [meeting.timeout_s for meeting in rounds[1].values()] == [7.0, 7.0]


def test_rank_that_a_dead_rank_0_welcomed_is_in_the_round_of_the_next(connect, run):
    store = connect()
    one = run(enter_round, connect(), _place(1))
    store.wait(["hello/1"])
    word = store.get("hello/1").decode()
    store.set("round", "dead")
    store.set(f"welcome/1/{word}", "dead")
    store.wait([f"dead/here/1/{word}"])

    again, two = run(open_round, connect(), _place(0), timeout_s=9.0), run(enter_round, connect(), _place(2))

    met = {answer.result().name for answer in (again, one, two)}
    assert len(met) == 1
    assert met != {"dead"}


def test_rank_that_is_started_again_while_another_is_missing_takes_its_own_place(connect, run):
    store = connect()
    zero = run(open_round, connect(), _place(0), timeout_s=9.0)
    store.set("hello/1", "dead")
    store.wait(["welcome/1/dead"])
    name = store.get("welcome/1/dead").decode()
    store.set(f"{name}/here/1/dead", '["its machine", "its release"]')

    again = run(enter_round, connect(), _place(1))
    # It is here, and the round is open until the last one is.
    store.wait(["hello/1"])
    while (word := store.get("hello/1").decode()) == "dead":
        pass
    store.wait([f"{name}/here/1/{word}"])
    assert not store.check([f"{name}/whole"])
    two = run(enter_round, connect(), _place(2))

    assert {answer.result().name for answer in (zero, again, two)} == {name}
    assert "its machine" not in zero.result().hosts


def test_rank_that_waits_for_a_word_is_told_that_rank_0_was_started_again(places):
    first = _met(places)
    again = threading.Thread(target=Rendezvous, args=(places[0],), daemon=True)
    again.start()

    with pytest.raises(RanksApart, match="rank 0 was started again"):
        first[1].hear()
    _met(places[1:])
    again.join()


def test_rank_waits_for_the_end_of_rank_0_no_longer_than_it_is_said_to(places, monkeypatch):
    met = _met(places)
    slept = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(rank_group, "time", clock)

    with pytest.raises(RanksDiffer, match=r"rank 1 in 0\.3 s"):
        met[1].hear(within_s=0.3)

    assert 0.3 < sum(slept) <= 0.3 + 2 * rank_group.POLL_S


def test_rank_that_nobody_welcomes_gives_up(connect, monkeypatch):
    monkeypatch.setattr(rank_group, "CONNECT", rank_group.datetime.timedelta(seconds=0.2))

    with pytest.raises(RuntimeError, match="nothing is heard of rank 0"):
        enter_round(connect(), _place(1))
    with pytest.raises(RuntimeError, match="nothing is heard of rank 1"):
        open_round(connect(), _place(0), timeout_s=9.0)


def _versions(monkeypatch, releases):
    """Each thread's heterorl has the release of its rank."""
    here = threading.local()

    class Release:
        @property
        def __version__(self):
            return releases[here.rank]

    monkeypatch.setattr(rank_group, "heterorl", Release())

    def meet(place):
        here.rank = place.rank
        with pytest.raises(ConfigError) as caught:
            Rendezvous(place, timeout_s=7.0)
        return str(caught.value)

    return meet


def test_another_release_of_one_rank_is_refused_on_all_before_a_configuration_is_said(tmp_path, monkeypatch, run):
    places = [local_rank_env(rank, num_ranks=3, file=tmp_path / "store") for rank in range(3)]
    meet = _versions(monkeypatch, ["0.2.0", "0.2.0", "0.1.0"])
    monkeypatch.setattr(Rendezvous, "say", lambda *_: pytest.fail("it may not be read"))

    told = [answer.result() for answer in [run(meet, place) for place in places]]

    assert all("backend.kind: heterorl 0.2.0 at rank 0, 0.1.0 at rank 2" in text for text in told)


def test_rank_0_that_has_other_releases_beside_it_waits_until_all_have_read_it(connect, run):
    """Its store may end with it, and what a rank finds then is no store."""
    zero = run(open_round, connect(), _place(0, 2), timeout_s=9.0)
    met = run(enter_round, connect(), _place(1, 2)).result()
    assert zero.result().releases == met.releases == (heterorl.__version__,) * 2

    waited = []

    class Store:
        def wait(self, keys, _):
            waited.append(keys)

    first = object.__new__(Rendezvous)
    first.rank_env, first._store = _place(0, 2), Store()
    with pytest.raises(ConfigError):
        first._check_releases(["0.2.0", "0.1.0"])
    assert waited == [["heard/1"]]


@pytest.mark.parametrize(("names", "counted"), [(("a", "b"), [1, 1]), (("a", "a"), [2, 2])])
def test_ranks_without_a_stated_number_of_a_machine_count_equal_names(tmp_path, monkeypatch, names, counted):
    hosts = iter(names)
    monkeypatch.setattr(rank_group.socket, "gethostname", lambda: next(hosts))
    places = [
        RankEnv(rank=rank, local_rank=0, world_size=2, local_world_size=0, file=tmp_path / "store") for rank in range(2)
    ]

    met = _met(places)

    assert [met[rank].rank_env.local_world_size for rank in range(2)] == counted
