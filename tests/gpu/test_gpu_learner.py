"""The learner on a GPU takes the CPU's steps, in bounded memory."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from heterorl.common.model.logprobs import GPU_CHUNK_LOGITS, token_logprobs
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.training import SAMPLING, random_groups, tiny_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _steps(model_dir, **changes):
    """Reports of four steps, and the weights after them as published in fp32."""
    values = {"lr": 1e-3, "warmup_steps": 4, "micro_batch_tokens": 64, "published_dtype": "fp32", **changes}
    backend = TorchBackend(
        model_dir=model_dir, config=TorchBackendConfig(**values), loss=GepoConfig(), sampling=SAMPLING
    )
    reports = [backend.train_step(random_groups(seed=step), head_version=step, step=step) for step in range(4)]
    arena = Arena(backend.layout)
    backend.store(arena)
    return reports, np.concatenate([arena.view(name).view(np.float32).ravel() for name in arena.layout.offsets])


def _assert_close(actual, expected, *, tolerance):
    for one, other in zip(actual[0], expected[0], strict=True):
        assert one.is_applied
        assert one.loss == pytest.approx(other.loss, abs=tolerance)
        assert one.grad_norm == pytest.approx(other.grad_norm, abs=10 * tolerance, rel=10 * tolerance)
    # AdamW's first steps have the size lr whatever they see, so what is near 0 may go either way.
    assert np.abs(actual[1] - expected[1]).max() <= max(tolerance, 2 * 4 * 1e-3 * (tolerance > 1e-4))


@pytest.mark.parametrize("changes", [{}, {"batching": "packed"}, {"gradient_checkpointing": True}])
def test_steps_equal_those_of_the_cpu(model_dir, device, changes):
    _assert_close(_steps(model_dir, device=device, **changes), _steps(model_dir), tolerance=1e-4)


def test_bf16_steps_stay_near(model_dir, device):
    # bf16 keeps 8 bits: log-probs differ by about 1 %.
    _assert_close(_steps(model_dir, device=device, compute_dtype="bf16"), _steps(model_dir), tolerance=0.015)


def test_compiled_steps_equal_those_of_the_cpu(model_dir, cuda):
    _assert_close(_steps(model_dir, device=cuda, compile=True), _steps(model_dir), tolerance=1e-4)


@pytest.mark.parametrize("number", [0, 1])
def test_ligers_steps_equal_those_of_the_cpu(model_dir, cuda, number):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    if number >= torch.cuda.device_count():
        pytest.skip("one GPU")
    # In a process of its own: Liger changes classes of transformers, and models on the CPU cannot compute with those.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(_steps, model_dir, device=f"{cuda}:{number}", liger=True).result()

    _assert_close(found, _steps(model_dir), tolerance=1e-3)


def test_log_probs_hold_the_logits_of_one_chunk(cuda):
    num_tokens, hidden, vocab = 32_768, 1024, 131_072
    hidden_NH = torch.randn(num_tokens, hidden, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    weight_VH = torch.randn(vocab, hidden, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    targets_N = torch.randint(0, vocab, (num_tokens,), device=cuda)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, started = torch.cuda.memory_allocated(), time.perf_counter()

    logprobs_N, _ = token_logprobs(hidden_NH, weight_VH, targets_N, temperature=1.0)
    logprobs_N.sum().backward()

    torch.cuda.synchronize()
    took = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() - before
    print(f"\nlog-probs and gradients: {num_tokens / took:,.0f} tokens/s, {peak / 2**30:.2f} GiB beside the inputs")
    # Gradients of both inputs in fp32 at most, and eight copies of a chunk's logits; all logits would be 16 GiB.
    assert peak <= 4 * (hidden_NH.numel() + weight_VH.numel()) * 2 + 8 * 4 * GPU_CHUNK_LOGITS


def test_throughput_of_steps(model_dir, device):
    started = time.perf_counter()
    reports, _ = _steps(model_dir, device=device, micro_batch_tokens=16_384)
    took = time.perf_counter() - started

    num_tokens = sum(report.num_tokens for report in reports)
    print(f"\nfour steps of a tiny model on {device}: {num_tokens / took:,.0f} tokens/s, loading included")
    assert num_tokens > 0
