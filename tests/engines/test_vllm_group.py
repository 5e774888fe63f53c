"""Two vLLM processes behind one engine: one file of weights, a swap check each; one is killed, and a load starts it again."""

import psutil
import pytest

from heterorl.common.errors import EngineDied
from heterorl.common.generation.inference_engine import Request, generate_all
from heterorl.sampler.engines import start_vllm
from heterorl.sampler.sampler_config import VllmEngineConfig
from heterorl.sampler.vllm import shared_model as weights
from tests.support.engines import EOS, PROMPTS, Truth, disturbed, semantics, vllm_source, write_model

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow, pytest.mark.filterwarnings("default")]
LIMIT = 200
SAMPLING = semantics(max_new_tokens=LIMIT)


def children():
    """Processes of engines: beside them Python keeps one that tracks shared memory."""
    alive = [process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE]
    return {process.pid for process in alive if "resource_tracker" not in " ".join(process.cmdline())}


def request(key):
    return Request(key=key, prompt=PROMPTS[key % len(PROMPTS)], seed=key, num_completions=4)


def test_one_engine_is_killed_and_a_load_starts_it_again(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model_dir = write_model(tmp_path / "model")
    source = vllm_source(model_dir, tmp_path / "weights", max_new_tokens=LIMIT)
    base, truth, before = source.base(), Truth(model_dir), children()
    options = VllmEngineConfig(compute_dtype="fp32", batch_rows=16, kv_cache_bytes=32 << 20)
    group, close = start_vllm(source, [options] * 2, end_token_ids=(EOS,))
    try:
        written = []
        write = weights.write_weights
        monkeypatch.setattr(
            weights, "write_weights", lambda arena, path, names: written.append(1) or write(arena, path, names=names)
        )
        states = [disturbed(base, seed=seed) for seed in range(3)]
        for version in range(2):
            group.load(states[version], version)
        assert len(written) == 2
        assert list(source.weights.directory.iterdir()) == []
        engines = group._engines
        assert [engine.swap_check_difference < 1e-5 for engine in engines] == [True, True]
        groups = generate_all(group, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=4)
        assert truth.difference(states[1], groups, SAMPLING) < 1e-5

        for key in range(12):
            group.submit(request(key))
        assert all(group._in_flight)
        group.collect()
        pids = sorted(children() - before)
        assert len(pids) == 2
        psutil.Process(pids[0]).kill()
        with pytest.raises(EngineDied):
            generate_all(group, PROMPTS * 8, seeds=range(32), num_per_prompt=2)
        assert group.version == -1

        # The version again: a new process for the dead one; the other one goes on in its own.
        (running,) = [engine for engine in engines if engine.version == 1]
        process = running._process
        group.load(states[1], 1)
        group.load(states[2], 2)
        assert (running.version, running._process) == (2, process)
        assert [engine.swap_check_difference < 1e-5 for engine in engines] == [True, True]
        groups = generate_all(group, PROMPTS * 2, seeds=range(8), num_per_prompt=2)
        assert truth.difference(states[2], groups[:4], SAMPLING) < 1e-5
        assert truth.difference(states[2], groups[4:], SAMPLING) < 1e-5
    finally:
        close()
    assert not source.weights.directory.exists()
