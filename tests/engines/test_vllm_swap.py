"""vLLM's own reload leaves weights old on the CPU; ours does not, and the check of a swap finds a wrong one."""

import threading

import numpy as np
import pytest

from heterorl.common.errors import EngineDied, EngineError, StaleWeights
from heterorl.common.generation.inference_engine import Request, generate_all
from heterorl.common.types.rollout import Span
from heterorl.sampler.vllm import shared_model as weights
from heterorl.sampler.vllm import vllm_engine as vllm_engine_module
from tests.support.engines import PROMPTS, Truth, disturbed, semantics, vllm_engine, write_model

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow, pytest.mark.filterwarnings("default")]
SAMPLING = semantics()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An engine over tied weights, its first weights and the truth; of another architecture than the conformance's."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        directory = tmp_path_factory.mktemp("engine")
        model_dir = write_model(directory / "model", family="Llama")
        engine = vllm_engine(model_dir, directory / "weights")
        yield engine, engine.base(), Truth(model_dir)
        engine.close()


def generate(engine):
    return generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=2)


def test_swaps_are_seen_go_wrong_and_are_put_right(made, monkeypatch):
    engine, base, truth = made
    weights_dir = engine.source.weights.directory
    assert weights_dir.stat().st_mode & 0o077 == 0

    # In place and right: the difference is far below what is allowed.
    state = disturbed(base, seed=1)
    engine.load(state, 1)
    assert engine.swap_check_difference < 1e-5
    assert truth.difference(state, generate(engine), SAMPLING) < 1e-5
    assert list(weights_dir.iterdir()) == []

    # The trap: vLLM's own reload of a checkpoint returns without an error and computes something else.
    state = disturbed(base, seed=2)
    checkpoint = weights_dir / "checkpoint"
    checkpoint.mkdir()
    weights.write_weights(state, checkpoint / "model.safetensors", names=engine.source.weights.names)
    engine._alive().call("reload_weights", None, str(checkpoint))
    assert truth.difference(state, generate(engine), SAMPLING) > 1e-2

    # Sabotage: one tensor of the next swap is the old one. The engine refuses to generate.
    state = disturbed(base, seed=3)
    spoiled = state.copy()
    spoiled.view("model.layers.1.self_attn.o_proj.weight")[:] = base.view("model.layers.1.self_attn.o_proj.weight")
    write = weights.write_weights
    with monkeypatch.context() as patched:
        patched.setattr(weights, "write_weights", lambda arena, path, names: write(spoiled, path, names=names))
        with pytest.raises(StaleWeights, match="version 3"):
            engine.load(state, 3)
    assert engine.version == -1
    with pytest.raises(EngineError, match="generates nothing"):
        generate(engine)

    # Repeated, the swap starts a new process from the whole version.
    old = engine._process
    engine.load(state, 3)
    assert engine._process is not old
    groups = generate(engine)
    assert truth.difference(state, groups, SAMPLING) < 1e-5
    assert all(row.spans == (Span(version=3, start=0, end=len(row.token_ids)),) for g in groups for row in g)

    # The new process swaps in place as the first one did; a file without a tensor is refused before anything is drawn.
    state = disturbed(base, seed=4)
    engine.load(state, 4)
    assert truth.difference(state, generate(engine), SAMPLING) < 1e-5
    with monkeypatch.context() as patched:
        patched.setattr(weights, "write_weights", lambda arena, path, names: write(arena, path, names=names[:-1]))
        with pytest.raises(EngineDied, match="no weights for"):
            engine.load(state, 5)
    assert engine.version == -1
    assert list(weights_dir.glob("*.safetensors")) == []


def test_prompts_half_read_at_a_swap_are_read_again(tmp_path, monkeypatch):
    """vLLM reads a prompt in chunks of its token budget; a swap may come between two of them."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM's CPU build cannot read a seeded prompt in chunks.
    drawing = vllm_engine_module.drawing
    monkeypatch.setattr(
        vllm_engine_module,
        "drawing",
        lambda *given, **named: {key: value for key, value in drawing(*given, **named).items() if key != "seed"},
    )
    model_dir = write_model(tmp_path / "model", family="Llama", max_position_embeddings=4096)
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16}
    engine = vllm_engine(model_dir, tmp_path / "weights", engine={"batch_rows": 4, "extra": chunks})
    begun = threading.Event()
    try:
        base, truth = engine.base(), Truth(model_dir)
        engine.load(disturbed(base, seed=1), 1)
        prompt = np.random.default_rng(0).integers(2, 13, 3800).astype(np.int32)
        process = engine._alive()
        answer = process._answer

        async def noted(*given):
            begun.set()
            return await answer(*given)

        process._answer = noted
        engine.submit(Request(key=7, prompt=prompt, seed=1, num_completions=1))
        assert begun.wait(60)
        state = disturbed(base, seed=2)
        engine.load(state, 2)
        (one,) = engine.collect()

        assert [span.version for span in one.completion.spans] == [2]
        assert np.abs(one.completion.logprobs - truth.logprobs(state, prompt, one.completion, SAMPLING)).max() < 1e-4
    finally:
        engine.close()


def test_prompts_beyond_a_token_budget_are_read_on_a_cpu(made):
    engine, base, _ = made
    state = disturbed(base, seed=5)
    engine.load(state, 5)
    budget = engine._alive()._engine.vllm_config.scheduler_config.max_num_batched_tokens
    prompts = [np.random.default_rng(seed).integers(2, 13, 120).astype(np.int32) for seed in range(budget // 120 + 2)]

    assert len(generate_all(engine, prompts, seeds=range(len(prompts)), num_per_prompt=1)) == len(prompts)


def test_swap_in_flight_that_goes_wrong_drops_the_batch_at_once(made, monkeypatch):
    engine, base, truth = made
    state = disturbed(base, seed=6)
    engine.load(state, 6)
    ended = []

    def batch():
        with pytest.raises(EngineError, match="a swap failed"):
            generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=500)
        ended.append(engine.version)

    thread = threading.Thread(target=batch)
    spoiled = disturbed(base, seed=7)
    spoiled.view("model.layers.1.self_attn.o_proj.weight")[:] = base.view("model.layers.1.self_attn.o_proj.weight")
    write = weights.write_weights
    with monkeypatch.context() as patched:
        patched.setattr(weights, "write_weights", lambda arena, path, names: write(spoiled, path, names=names))
        thread.start()
        while not engine._alive()._running:
            pass
        with pytest.raises(StaleWeights, match="version 7"):
            engine.load(disturbed(base, seed=7), 7)
    thread.join()

    assert ended == [-1]
    assert engine._alive()._running == set()
    engine.load(state, 7)
    assert truth.difference(state, generate(engine), SAMPLING) < 1e-5
