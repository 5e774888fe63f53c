"""A start of vLLM's process that a stop gives up; a sleeping process takes vLLM's place."""

import asyncio
import multiprocessing
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from heterorl.common.errors import EngineDied
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.process import notify
from heterorl.common.process.clock import SystemClock
from heterorl.sampler import engines, sampler_app
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.sampler.vllm import vllm_process
from heterorl.sampler.vllm.vllm_engine import VllmEngine
from heterorl.sampler.vllm.vllm_process import VllmProcess

pytestmark = pytest.mark.process
SPAWN = multiprocessing.get_context("spawn")


def sleeping(name):
    process = SPAWN.Process(target=time.sleep, args=(600.0,), name=name)
    process.start()
    return process


@pytest.fixture
def started(monkeypatch):
    """Processes of starts, and an event; a start fails when its process is gone, as vLLM's does."""
    processes, begun = [], threading.Event()

    async def start(arguments, is_stopped):
        processes.append(sleeping("EngineCore"))
        begun.set()
        # Blocks the loop's thread, as vLLM does.
        processes[-1].join(300.0)
        raise RuntimeError("Engine core initialization failed")

    package = SimpleNamespace(SamplingParams=None, inputs=SimpleNamespace(TokensPrompt=None))
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(vllm_process, "import_vllm", lambda: package)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(vllm_process, "_start", start)
    yield processes, begun
    for process in processes:
        process.kill()
        process.join()


def test_a_stop_ends_a_start_and_only_its_process(started):
    processes, begun = started
    others = [sleeping("EngineCore"), sleeping("reward")]
    is_stopped, errors = threading.Event(), []

    def begin():
        try:
            VllmProcess({}, max_running=4, is_stopped=is_stopped)
        except EngineDied as error:
            errors.append(error)

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    try:
        assert begun.wait(60.0)
        thread.join(2 * vllm_process.LOOK_S)
        assert processes[0].is_alive(), "without a stop it goes on"
        is_stopped.set()
        thread.join(20.0)

        assert [str(error) for error in errors] == ["vLLM's start was given up"]
        assert not processes[0].is_alive()
        assert all(each.is_alive() for each in others)
    finally:
        is_stopped.set()
        for each in others:
            each.kill()
            each.join()


def test_a_stopped_engine_gives_up_its_start_and_its_requests(started):
    engine = VllmEngine.__new__(VllmEngine)
    engine._news, engine._process, engine._is_stopped = threading.Condition(), None, threading.Event()
    engine._epoch, engine._arguments, engine.max_running = 0, {}, 4
    threading.Timer(0.2, engine.stop).start()

    with pytest.raises(EngineDied, match="given up"):
        engine._start("model")
    assert engine._epoch == 1


async def test_a_stop_during_the_first_start_ends_the_sampler_in_order(tmp_path, monkeypatch):
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    class Starting:
        def __init__(self, source, *, end_token_ids, settings, is_stopped):
            loop.call_soon_threadsafe(begun.set)
            assert is_stopped.wait(30.0)
            raise EngineDied("vLLM's start was given up")

    class Source:
        def __init__(self, **_):
            pass

        def close(self):
            pass

    monkeypatch.setattr(engines, "VllmEngine", Starting)
    monkeypatch.setattr(engines, "SharedModel", Source)
    model_dir = write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=1)
    config = SamplerConfig.model_validate(
        {
            "model_dir": str(model_dir), "state_dir": tmp_path / "site", "metrics_port": 0, "task": {"digits": 1},
            "sampling": {"max_new_tokens": 4}, "tls": {"insecure": True},
            "engine": {"kind": "vllm", "engines": 2, "memory_share": 0.4},
        }
    )  # fmt: skip
    process = notify.Process(
        stop=asyncio.Event(), notifier=notify.Notifier(), clock=SystemClock(), watch=notify.Watch()
    )
    running = asyncio.create_task(sampler_app._sample(config, process))
    await asyncio.wait([running, waiting := asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert waiting.done(), running

    process.stop.set()
    await asyncio.wait_for(running, 20.0)
