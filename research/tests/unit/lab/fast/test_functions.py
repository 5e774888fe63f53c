"""Backward passes that are written by hand, against numerical differences in float64."""

import pytest
import torch

from heterorl_research.lab.fast import functions


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


def test_products_of_uneven_runs_with_and_without_residual():
    counts = [3, 0, 2]
    x, weight, residual = values(5, 4), values(3, 6, 4, seed=1), values(5, 6, seed=2)

    assert torch.autograd.gradcheck(
        lambda *given: functions.linear(*given[:2], counts, given[2]), (x, weight, residual)
    )
    assert torch.autograd.gradcheck(lambda *given: functions.linear(*given, counts), (x, weight))
    expected = torch.cat([x[:3] @ weight[0].T, x[3:] @ weight[2].T])
    assert torch.allclose(functions.linear(x, weight, counts), expected)


def test_norm_and_gate():
    assert torch.autograd.gradcheck(lambda x: functions.normalised(x, 1e-3), values(4, 6))
    assert torch.autograd.gradcheck(functions.gated, values(4, 6))


def test_turned_heads():
    turns = values(5, 2, 1, 4, seed=1), values(5, 2, 1, 4, seed=2)
    assert torch.autograd.gradcheck(lambda *given: functions.rotated(*given, 1e-3), (values(5, 3, 2, 4), *turns))


def test_attention_over_slots_that_share_rows():
    places = torch.tensor([[0, 3, 3], [1, 2, 0]])
    taken = torch.tensor([4, 0, 1])
    mask = torch.zeros(3, 3, dtype=torch.float64).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    table = values(4, 3 * 2 * 5)
    assert torch.autograd.gradcheck(lambda given: functions.attention(given, places, taken, mask, 2), table)

    query, key, value = (part.view(2, 3, 2, 5).transpose(1, 2) for part in table[places].chunk(3, -1))
    by_torch = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
    expected = by_torch.transpose(1, 2).reshape(6, 10)[taken]
    assert torch.allclose(functions.attention(table, places, taken, mask, 2), expected)


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 4, 1]])
def test_a_run_does_not_depend_on_the_others_rows(counts):
    x, weight = torch.randn(6, 16), torch.randn(3, 8, 16)
    alone = functions.linear(x[: counts[0]], weight[:1], counts[:1])

    assert torch.equal(functions.linear(x, weight, counts)[: counts[0]], alone)
