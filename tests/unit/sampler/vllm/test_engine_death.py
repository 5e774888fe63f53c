"""A vLLM process that died is noticed by several at once; what was under way is given up all the same."""

import threading

import pytest

from heterorl.common.errors import EngineDied
from heterorl.sampler.vllm.vllm_engine import VllmEngine


def engine_with(num_open):
    """An engine whose process is gone: nothing else of it is needed to tell so."""
    engine = VllmEngine.__new__(VllmEngine)
    engine._news, engine._process = threading.Condition(), None
    engine.version, engine.is_whole, engine._is_loading = 3, True, False
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


def test_a_death_with_nothing_under_way_is_nobodys():
    engine = engine_with(num_open=0)
    engine._fail(EngineDied("killed"))

    assert engine.collect() == []
    assert engine.version == -1
