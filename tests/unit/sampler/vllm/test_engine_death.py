"""A vLLM process that died is noticed by several at once and gives up what was under way; what needs no process."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import EngineDied, EngineError
from heterorl.common.generation.inference_engine import ScoredText
from heterorl.common.types.common import LogprobMode
from heterorl.sampler.vllm.vllm_engine import VllmEngine
from tests.support.engines import semantics


def engine_with(num_open):
    """An engine whose process is gone: nothing else of it is needed to tell so."""
    engine = VllmEngine.__new__(VllmEngine)
    engine._news, engine._process = threading.Condition(), None
    engine.version, engine.is_whole, engine._is_loading = 3, True, False
    engine.max_model_len, engine._is_left_out = 8, False
    engine._epoch, engine._num_open, engine._ended, engine._failure = 0, num_open, [], None
    return engine


def test_a_death_that_is_told_twice_is_still_told_to_who_collects():
    engine = engine_with(num_open=8)
    # By a request that was under way, then by a canary of the same moment.
    engine._take(0, 5, 0, EngineDied("killed"))
    engine._fail(EngineDied("killed"))

    with pytest.raises(EngineDied):
        engine.collect()
    assert engine.collect() == []


@pytest.mark.parametrize(("tokens", "finish_reason"), [([], "length"), ([1], "abort"), ([1], "error")])
def test_an_answer_that_is_no_completion_ends_the_wait_of_who_collects(tokens, finish_reason):
    engine = engine_with(num_open=2)
    engine._ends = (2,)
    logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
    output = SimpleNamespace(token_ids=tokens, logprobs=logprobs, weight_versions=[], finish_reason=finish_reason)

    engine._take(0, 5, 0, SimpleNamespace(outputs=[output]))

    with pytest.raises(EngineError, match="no completion"):
        engine.collect()
    assert engine.version == -1


def test_a_death_with_nothing_under_way_is_nobodys():
    engine = engine_with(num_open=0)
    engine._fail(EngineDied("killed"))

    assert engine.collect() == []
    assert engine.version == -1


def test_an_engine_whose_draws_have_a_temperature_stays_out_of_the_canary():
    class Asked(Exception):
        """The process would have been asked."""

    def alive():
        raise Asked

    engine = engine_with(num_open=0)
    engine._alive = alive
    text = ScoredText(prompt=np.array([1], np.int32), completion=np.array([2], np.int32))

    engine._sampling = semantics(temperature=0.5)
    assert engine.score([text]) == []
    for plain in (semantics(), semantics(temperature=0.5, logprob_mode=LogprobMode.RAW)):
        engine._sampling = plain
        with pytest.raises(Asked):
            engine.score([text])


@pytest.mark.parametrize("size", [7, 8, 20])
def test_an_engine_without_room_for_a_text_of_the_canary_stays_out_of_it(size, caplog):
    engine = engine_with(num_open=0)
    engine._sampling = semantics()
    short, long = (ScoredText(prompt=np.arange(1, each), completion=np.array([2])) for each in (2, size))
    engine._alive = lambda: SimpleNamespace(ask=lambda asked: [SimpleNamespace(prompt_logprobs=told)] * len(asked))
    told = [{2: SimpleNamespace(logprob=-1.0)}] * size

    if size < engine.max_model_len:
        assert engine.score([long]) == [-1.0]
        return
    for _ in range(2):
        assert engine.score([short, long]) == []
    assert caplog.text.count(f"has {size} tokens, engine.max_model_len is 8") == 1
    assert engine.version == 3
