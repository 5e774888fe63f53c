"""Several engines behind one: requests go where least is under way, and what one loses is lost on all."""

import threading
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, EngineDied, EngineError, StaleWeights
from heterorl.common.generation.inference_engine import Finished, Request, generate_all, in_order
from heterorl.sampler.engines import EngineGroup
from tests.support.engines import PROMPTS, Truth, disturbed, hf_engine, semantics, write_model

SAMPLING = semantics()


class Told:
    """An engine that ends what it is told to, and dies when it is told to."""

    layout, name, dtype = None, "told", "fp32"

    def __init__(self, *, max_running=4):
        self.max_running, self.version = max_running, -1
        self.news = threading.Condition()
        self.requests: dict[int, Request] = {}
        self.ended: deque = deque()
        self.failure = None
        self.load_failure = None
        self.scores = [np.zeros(2, np.float32)]
        self.loads = []

    def submit(self, request):
        with self.news:
            if self.version < 0:
                raise EngineError("no version")
            if request.seed < 0:
                raise ConfigError("engine.max_model_len", "no room")
            self.requests[request.key] = request

    def end(self, request_number, member=0):
        """End a member of the request that was submitted as number so many of those under way."""
        with self.news:
            key = list(self.requests)[request_number]
            self.ended.append(Finished(key=key, member=member, completion=None))
            self.news.notify_all()

    def die(self):
        with self.news:
            self.failure, self.version = EngineDied("killed"), -1
            self.news.notify_all()

    def cancel(self):
        with self.news:
            self.requests.clear()
            self.ended.clear()
            self.news.notify_all()

    def collect(self):
        with self.news:
            self.news.wait_for(lambda: self.ended or self.failure or not self.requests)
            if self.failure:
                failure, self.failure = self.failure, None
                raise failure
            ended = list(self.ended)
            self.ended.clear()
            return ended

    def load(self, arena, version):
        self.loads.append(version)
        if self.load_failure:
            self.version, failure = -1, self.load_failure
            self.load_failure = None
            raise failure
        self.version = version

    def score(self, texts):
        if isinstance(self.scores, EngineError):
            raise self.scores
        return self.scores


@pytest.fixture
def engines():
    return [Told() for _ in range(3)]


@pytest.fixture
def group(engines):
    group = EngineGroup(engines)
    group.load(None, 0)
    yield group
    group.close()


def request(key, num=2, **changes):
    return Request(**{"key": key, "prompt": PROMPTS[0], "seed": 1, "num_completions": num, **changes})


def test_requests_go_where_least_is_under_way(group, engines):
    for key, num in enumerate([4, 2, 1, 1, 1]):
        group.submit(request(key, num))

    # By rows: 4, then 2, then 1 + 1, then the fifth to whoever had 2.
    assert [sum(one.num_completions for one in engine.requests.values()) for engine in engines] == [4, 3, 2]
    assert group.max_running == 12


def test_room_of_unequal_engines_is_shared_by_their_sizes():
    engines = [Told(max_running=8), Told(max_running=2)]
    group = EngineGroup(engines)
    group.load(None, 0)
    for key in range(5):
        group.submit(request(key, 2))

    assert [len(engine.requests) for engine in engines] == [4, 1]
    group.close()


def test_what_ends_comes_under_its_own_key(group, engines):
    for key in (70, 80, 90):
        group.submit(request(key))
    engines[1].end(0, member=1)
    assert [(one.key, one.member) for one in group.collect()] == [(80, 1)]
    engines[2].end(0)
    assert [(one.key, one.member) for one in group.collect()] == [(90, 0)]


@pytest.mark.parametrize("number", range(3))
def test_what_one_engine_loses_is_lost_on_all_until_a_load(group, engines, number, caplog):
    for key in range(6):
        group.submit(request(key))
    engines[number].die()

    with pytest.raises(EngineDied, match="killed"):
        group.collect()

    assert f"engine {number} of 3 failed, and all lose their requests: killed" in caplog.text
    assert (group.version, [engine.requests for engine in engines]) == (-1, [{}] * 3)
    assert group.collect() == []
    group.load(None, 0)
    assert (group.version, [engine.loads for engine in engines]) == (0, [[0, 0]] * 3)
    group.submit(request(7))
    engines[0].end(0)
    assert [one.key for one in group.collect()] == [7]


@pytest.mark.parametrize("failure", [StaleWeights(1, difference=1.0, tolerance=0.1), OSError("no space left")])
def test_a_swap_that_fails_in_one_engine_is_the_groups(group, engines, failure):
    group.submit(request(0))
    engines[1].load_failure = failure

    with pytest.raises(type(failure)):
        group.load(None, 1)

    assert group.version == -1
    # Said once.
    with pytest.raises(EngineError, match="a swap failed"):
        group.collect()
    assert group.collect() == []
    group.load(None, 1)
    assert (group.version, [engine.version for engine in engines]) == (1, [1] * 3)


def test_a_refused_request_is_in_no_engine(group, engines):
    with pytest.raises(ConfigError, match="no room"):
        group.submit(request(1, seed=-1))

    assert group.collect() == []


def test_cancel_wakes_who_waits_and_late_ends_are_nobodys(group, engines):
    group.submit(request(0))
    woken = []
    thread = threading.Thread(target=lambda: woken.append(group.collect()))
    thread.start()
    while not group._news._waiters:
        pass
    group.cancel()
    thread.join()

    assert woken == [[]]
    group.submit(request(0))
    engines[0].end(0)
    assert len(group.collect()) == 1


def test_a_defect_ends_the_loop_as_it_would_with_one_engine(group, engines):
    engines[0].collect = lambda: 1 / 0
    group.submit(request(0))

    with pytest.raises(ZeroDivisionError):
        group.collect()


def test_one_wrong_engine_is_the_groups_word(group, engines):
    right, wrong = [np.array([-0.5, -1.0], np.float32)], [np.array([-2.5, -4.0], np.float32)]
    for engine, scores in zip(engines, (right, wrong, right), strict=True):
        engine.scores = scores
    assert group.score([]) is wrong

    engines[2].scores = EngineDied("killed")
    with pytest.raises(EngineDied):
        group.score([])


def test_an_engine_that_cannot_score_says_nothing(group, engines):
    for engine in engines:
        engine.scores = []
    assert group.score([]) == []


def test_what_a_load_makes_is_made_once(engines):
    made = []

    @contextmanager
    def staged(arena):
        made.append(arena)
        yield
        assert [engine.version for engine in engines] == [5] * 3

    group = EngineGroup(engines, staged=staged)
    group.load("weights", 5)

    assert made == ["weights"]
    group.close()


def test_engines_of_one_process_draw_as_one_alone(tmp_path):
    model_dir = write_model(tmp_path / "model")
    engines = [hf_engine(model_dir, engine={"batch_rows": 8}) for _ in range(2)]
    group, truth = EngineGroup(engines), Truth(model_dir)
    state = disturbed(engines[0].base(), seed=4)
    group.load(state, 3)

    seeds = [11, 12, 13, 14]
    groups = generate_all(group, PROMPTS, seeds=seeds, num_per_prompt=4)

    assert truth.difference(state, groups, SAMPLING) < 1e-5
    expected = generate_all(engines[0], PROMPTS, seeds=seeds, num_per_prompt=4)
    assert [row.token_ids.tolist() for one in groups for row in one] == [
        row.token_ids.tolist() for one in expected for row in one
    ]
    assert {span.version for one in groups for row in one for span in row.spans} == {3}
    requests = [Request(key=key, prompt=PROMPTS[key % 4], seed=key, num_completions=4) for key in range(8)]
    for one in requests:
        group.submit(one)
    finished = []
    while ended := group.collect():
        finished += ended
    assert len(in_order(finished, requests)) == 8
    group.close()


def test_a_death_that_is_told_twice_is_still_told_to_who_collects():
    engine = Told()
    group = EngineGroup([engine])
    group.load(None, 0)
    group.submit(request(0))
    engine.load_failure = EngineDied("killed")
    for _ in range(2):
        with pytest.raises(EngineDied):
            group.load(None, 0)
        engine.load_failure = EngineDied("killed again")

    with pytest.raises(EngineError, match="a swap failed"):
        group.collect()
    group.close()
