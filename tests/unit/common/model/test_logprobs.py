"""Chunked log-probs: equal to the plain formula, and never as large."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heterorl.common.model.logprobs import logprobs_of, project, tempered, token_logprobs
from heterorl.common.types.common import LogprobMode, SamplingSemantics

F64 = torch.float64


def _case(num_tokens, hidden, vocab, *, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(num_tokens, hidden, dtype=dtype, generator=generator).requires_grad_()
    weight_VH = torch.randn(vocab, hidden, dtype=dtype, generator=generator).requires_grad_()
    return hidden_NH, weight_VH, torch.randint(0, vocab, (num_tokens,), generator=generator)


def _plain(hidden_NH, weight_VH, targets_N, temperature):
    logprobs_NV = torch.log_softmax(hidden_NH @ weight_VH.T / temperature, -1)
    entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropies_N


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_logits", [1, 70, 1 << 20])
def test_chunked_logprobs_equal_plain_ones_in_value_and_gradient(temperature, chunk_logits):
    hidden_NH, weight_VH, targets_N = _case(17, 8, 23)
    upstream_N = torch.linspace(-1.0, 2.0, 17, dtype=F64)

    expected, entropies = _plain(hidden_NH, weight_VH, targets_N, temperature)
    expected_gradients = torch.autograd.grad((expected * upstream_N).sum(), (hidden_NH, weight_VH))
    actual, actual_entropies = token_logprobs(
        hidden_NH, weight_VH, targets_N, temperature=temperature, chunk_logits=chunk_logits
    )
    gradients = torch.autograd.grad((actual * upstream_N).sum(), (hidden_NH, weight_VH))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(actual_entropies, entropies, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-12)


def test_products_under_autocast_are_in_its_type():
    hidden_NH, weight_VH, targets_N = _case(17, 8, 23, dtype=torch.float32)
    logits_NV = (hidden_NH.bfloat16() @ weight_VH.bfloat16().T).float()
    expected_N = torch.log_softmax(logits_NV, -1).gather(1, targets_N[:, None])[:, 0]

    with torch.autocast("cpu", torch.bfloat16):
        actual_N, _ = token_logprobs(hidden_NH, weight_VH, targets_N, temperature=1.0)
    actual_N.sum().backward()

    torch.testing.assert_close(actual_N, expected_N, rtol=0.0, atol=1e-6)
    assert hidden_NH.grad.dtype == weight_VH.grad.dtype == torch.float32


def test_gradient_equals_finite_differences():
    hidden_NH, weight_VH, targets_N = _case(5, 3, 7)

    def logprobs(hidden, weight):
        return token_logprobs(hidden, weight, targets_N, temperature=0.8, chunk_logits=14)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden_NH, weight_VH))


def test_entropy_carries_no_gradient():
    hidden_NH, weight_VH, targets_N = _case(3, 4, 5)

    _, entropies_N = token_logprobs(hidden_NH, weight_VH, targets_N, temperature=1.0)

    assert not entropies_N.requires_grad


def test_logprobs_of_frozen_embedding_give_gradient_to_hidden_states_alone():
    hidden_NH, weight_VH, targets_N = _case(3, 4, 5)

    token_logprobs(hidden_NH, weight_VH.detach(), targets_N, temperature=1.0)[0].sum().backward()

    assert hidden_NH.grad is not None
    assert weight_VH.grad is None


def test_logprobs_of_bf16_hidden_states_are_normalised_in_fp32():
    hidden_NH, weight_VH, targets_N = _case(64, 16, 1000, dtype=torch.bfloat16)

    actual, entropies_N = token_logprobs(hidden_NH, weight_VH, targets_N, temperature=1.0)
    logits = (hidden_NH @ weight_VH.T).float()

    assert actual.dtype == entropies_N.dtype == torch.float32
    expected = torch.log_softmax(logits, -1).gather(1, targets_N[:, None])[:, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_logprobs_are_finite_for_huge_logits():
    hidden_NH, weight_VH, targets_N = _case(9, 8, 11, dtype=torch.float32)

    logprobs_N, entropies_N = token_logprobs(1e4 * hidden_NH, weight_VH, targets_N, temperature=1.0)
    logprobs_N.sum().backward()

    assert logprobs_N.isfinite().all()
    assert entropies_N.isfinite().all()
    assert hidden_NH.grad.isfinite().all()


@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_gradient_of_a_bf16_embedding_does_not_depend_on_the_number_of_chunks(spread):
    """Hidden states around 1 add up in one direction, where a sum in bf16 takes no further addend."""
    tokens, hidden, vocab = 4096, 16, 64
    generator = torch.Generator().manual_seed(0)
    hidden_NH = (torch.randn(tokens, hidden, generator=generator) * spread + 1).bfloat16()
    start_VH = (torch.randn(vocab, hidden, generator=generator) * 0.3).bfloat16()
    targets_N = torch.zeros(tokens, dtype=torch.int64)

    def gradient(chunk_tokens, dtype):
        weight_VH = start_VH.to(dtype, copy=True).requires_grad_()
        logprobs_N, _ = token_logprobs(
            hidden_NH.to(dtype), weight_VH, targets_N, temperature=1.0, chunk_logits=chunk_tokens * vocab
        )
        logprobs_N.mean().backward()
        assert weight_VH.grad.dtype is dtype
        return weight_VH.grad.double()

    exact = gradient(tokens, F64)
    for chunk_tokens in (tokens, 64, 4):
        error = (gradient(chunk_tokens, torch.bfloat16) - exact).norm() / exact.norm()
        assert error < 0.004, chunk_tokens


class _LargestTensor(TorchDispatchMode):
    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def _largest(function):
    with _LargestTensor() as mode:
        function()
    return mode.num_elements


def test_no_tensor_of_tokens_times_vocabulary_exists_forward_or_backward():
    tokens, vocab, hidden = 512, 32_000, 16
    hidden_NH, weight_VH, targets_N = _case(tokens, hidden, vocab, dtype=torch.float32)

    def chunked():
        token_logprobs(hidden_NH, weight_VH, targets_N, temperature=0.7, chunk_logits=16 * vocab)[0].sum().backward()

    def plain():
        _plain(hidden_NH, weight_VH, targets_N, 0.7)[0].sum().backward()

    # 16 tokens of logits are as large as the embedding itself; the measure sees the plain formula's [512, 32000].
    assert _largest(chunked) == 16 * vocab
    assert _largest(plain) == tokens * vocab


def _sampling(mode, temperature):
    return SamplingSemantics(temperature=temperature, top_p=1.0, top_k=0, max_new_tokens=8, logprob_mode=mode)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_steps_of_the_projection_agree_with_all_of_it(temperature):
    hidden_NH, weight_VH, targets_N = _case(7, 8, 11, dtype=torch.float32)

    logits_NV = project(hidden_NH, weight_VH).detach()
    shown_NV = tempered(logits_NV, temperature)
    whole_N, _ = token_logprobs(hidden_NH, weight_VH, targets_N, temperature=temperature)

    assert torch.equal(logprobs_of(shown_NV, targets_N), whole_N)
    assert (shown_NV is logits_NV) == (temperature == 1.0)
    assert torch.equal(tempered(logits_NV.clone(), temperature, in_place=True), shown_NV)


def test_temperature_follows_the_meaning_of_sampler_logprobs():
    assert _sampling(LogprobMode.PROCESSED, 0.6).logprob_temperature == 0.6
    assert _sampling(LogprobMode.RAW, 0.6).logprob_temperature == 1.0


def test_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        _ = _sampling(LogprobMode.PROCESSED, 0.0).logprob_temperature
