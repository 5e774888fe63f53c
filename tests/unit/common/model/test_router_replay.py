"""Experts are recorded and taken again: shapes, hostile records, the gradient through the gate weights."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from heterorl.common.errors import ConfigError
from heterorl.common.model.router_replay import (
    RoutedTokens,
    RouterRecorder,
    RouterReplay,
    RoutingShape,
    routers_of,
    routing_shape,
)
from tests.support.training import tiny_model

MOE = {"family": "Qwen3Moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
       "norm_topk_prob": True}  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def _routed(shape, experts_NLK, is_recorded_N=None):
    ids = torch.from_numpy(shape.encode(experts_NLK))
    return RoutedTokens(
        ids_NC=ids, is_recorded_N=torch.ones(len(ids), dtype=torch.bool) if is_recorded_N is None else is_recorded_N
    )


@pytest.mark.parametrize(("num_experts", "token_bytes"), [(256, 6), (257, 12)])
def test_record_is_a_byte_for_each_expert_and_two_where_there_are_many(num_experts, token_bytes):
    shape = RoutingShape(num_layers=3, top_k=2, num_experts=num_experts)
    experts = torch.randint(0, num_experts, (5, 3, 2))
    record = shape.encode(experts)
    assert shape.token_bytes == token_bytes
    assert record.shape == (5, token_bytes)
    assert np.array_equal(shape.decode(record.tobytes()), experts.numpy())


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (b"\0\1\0\1" * 2, "8 bytes for 3 tokens"),
        (b"\0\1\0\1" * 4, "16 bytes for 3 tokens"),
        (b"\0\1\0\1" * 2 + b"\0\1\0\6", "expert 6 of a model that has 6"),
        (b"\0\1\0\1" * 2 + b"\0\1\3\3", "twice"),
    ],
)
def test_hostile_record_has_a_problem(record, words):
    shape = RoutingShape(num_layers=2, top_k=2, num_experts=6)
    assert words in shape.problem(record, 3)
    assert shape.problem(b"", 3) == ""
    assert shape.problem(b"\0\1\5\1" * 3, 3) == ""


@pytest.mark.parametrize(
    "settings",
    [
        MOE,
        {**MOE, "norm_topk_prob": False},
        {**MOE, "family": "Qwen2Moe", "shared_expert_intermediate_size": 16},
        {"family": "Mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
        {"family": "Olmoe", "num_experts": 6, "num_experts_per_tok": 2},
    ],
    ids=["qwen3", "not-normalised", "qwen2", "mixtral", "olmoe"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_experts_taken_by_equal_weights_change_nothing(settings, dtype):
    model, other = tiny_model(**settings, dtype=dtype), tiny_model(**settings, dtype=dtype)
    recorder, replay = RouterRecorder(model), RouterReplay(other)
    with torch.no_grad():
        with recorder.recording() as layers:
            expected = model(input_ids=IDS).logits
        record = recorder.record(layers, num_rows=1)[0]
        model(input_ids=IDS)
        assert len(layers) == recorder.shape.num_layers, "nothing is recorded afterwards"
        replay.use(RoutedTokens(ids_NC=torch.from_numpy(record), is_recorded_N=torch.ones(8, dtype=torch.bool)))
        assert torch.equal(other(input_ids=IDS).logits, expected)


def test_routers_that_tie_follow_the_record():
    """All logits are equal: what the top-k takes is an accident, and another expert is another function."""
    model = tiny_model(**MOE)
    for router in routers_of(model):
        torch.nn.init.zeros_(router.weight)
    replay = RouterReplay(model)
    seen = []
    with torch.no_grad():
        for pair in ([0, 1], [4, 5]):
            replay.use(_routed(replay.shape, torch.tensor(pair).expand(8, 2, 2)))
            seen.append(model(input_ids=IDS).logits)
        replay.use(_routed(replay.shape, torch.tensor([4, 5]).expand(8, 2, 2), torch.zeros(8, dtype=torch.bool)))
        unrecorded = model(input_ids=IDS).logits
        replay.use(None)
        assert torch.equal(model(input_ids=IDS).logits, unrecorded)
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_gradient_is_that_of_the_formula_in_float64(norm_topk_prob):
    """sum_e g_e expert_e(x), g = softmax(W x)_e of the recorded experts, over their sum where the model divides."""
    model = tiny_model(**{**MOE, "norm_topk_prob": norm_topk_prob}, dtype=torch.float64)
    # Grouped products of experts know no float64.
    model.config._experts_implementation = "eager"
    replay = RouterReplay(model)
    block = model.model.layers[0].mlp
    torch.manual_seed(1)
    x_ND = torch.randn(5, 32, dtype=torch.float64)
    experts_NK = torch.tensor([[0, 3], [5, 1], [2, 4], [1, 0], [3, 2]])
    replay.use(_routed(replay.shape, experts_NK[:, None].expand(5, 2, 2)))
    direction = torch.randn(5, 32, dtype=torch.float64)
    (block(x_ND[None])[0] * direction).sum().backward()
    actual = block.gate.weight.grad.clone()
    block.gate.weight.grad = None

    probabilities = torch.softmax(x_ND @ block.gate.weight.T, -1).gather(1, experts_NK)
    gates = probabilities / probabilities.sum(-1, keepdim=True) if norm_topk_prob else probabilities
    total = torch.zeros(())
    for token, chosen in enumerate(experts_NK.tolist()):
        for place, expert in enumerate(chosen):
            gate, up = (block.experts.gate_up_proj[expert] @ x_ND[token]).chunk(2)
            out = block.experts.down_proj[expert] @ (functional.silu(gate) * up)
            total = total + gates[token, place] * (out * direction[token]).sum()
    total.backward()
    # transformers computes the gate weights of its own router in float32; these are in float64.
    assert torch.allclose(actual, block.gate.weight.grad, rtol=1e-9, atol=1e-12)
    assert actual.abs().max() > 1e-3


def test_model_without_routers_or_with_other_gate_weights_is_refused():
    with pytest.raises(ConfigError, match="no routers"):
        routing_shape(tiny_model())
    model = tiny_model(**MOE)
    replay = RouterReplay(model)
    # What the model does and what it says it does differ.
    routers_of(model)[1].forward = lambda x: (x @ x.new_ones(32, 6), x.new_ones(8, 2), torch.zeros(8, 2).long())
    replay.use(_routed(replay.shape, torch.tensor([0, 1]).expand(8, 2, 2)))
    with pytest.raises(ConfigError, match="no softmax"):
        model(input_ids=IDS)
