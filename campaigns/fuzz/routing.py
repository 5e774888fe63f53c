"""Fuzz target: a peer's expert record, compared with a plain reading of the format, then replayed by routers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from campaigns.fuzz.mutate import mutated
from heterorl.common.errors import InvalidRequest
from heterorl.common.model.router_replay import RoutedTokens, RouterReplay, RoutingShape

SHAPES = [
    RoutingShape(num_layers=1, top_k=1, num_experts=2),
    RoutingShape(num_layers=3, top_k=2, num_experts=8),
    RoutingShape(num_layers=2, top_k=4, num_experts=256),
    RoutingShape(num_layers=2, top_k=2, num_experts=257),
    RoutingShape(num_layers=1, top_k=8, num_experts=4000),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A record with a stated number of tokens."""

    shape: RoutingShape
    num_tokens: int
    record: bytes


class _TopKRouter(nn.Module):
    """Answers as transformers gives them."""

    def __init__(self, shape: RoutingShape) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.norm_topk_prob = shape.top_k, shape.num_experts, True

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, experts = torch.softmax(logits, -1).topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), experts


class RoutingTarget:
    """RoutingShape.problem and RouterReplay: refuse exactly the broken records, and replay the others unchanged."""

    def __init__(self) -> None:
        self._routers = {shape: nn.ModuleList(_TopKRouter(shape) for _ in range(shape.num_layers)) for shape in SHAPES}
        self._replays = {shape: RouterReplay(routers) for shape, routers in self._routers.items()}

    def case(self, draw: random.Random) -> Case:
        """An honest record; in half of the cases damaged, or with another shape or number of tokens."""
        shape, num_tokens = draw.choice(SHAPES), draw.randint(1, 6)
        own = draw.choice(SHAPES) if draw.random() < 0.1 else shape
        experts = [draw.sample(range(own.num_experts), own.top_k) for _ in range(num_tokens * own.num_layers)]
        record = b"".join(expert.to_bytes(own.dtype.itemsize, "little") for layer in experts for expert in layer)
        if draw.random() < 0.4:
            record = mutated(record, draw, other=record)
        if draw.random() < 0.1:
            num_tokens += draw.choice((-1, 1))
        return Case(shape, num_tokens, record)

    def run(self, case: Case) -> None:
        """Judge it twice; routers choose exactly what an accepted record states."""
        problem, layers = case.shape.problem(case.record, case.num_tokens), _read(case)
        assert bool(problem) is (layers is None), f"{problem or 'taken'}, and a plain reading says otherwise"
        if layers is None:
            raise InvalidRequest(problem)
        if not case.record:
            return
        shape = case.shape
        ids = torch.frombuffer(bytearray(case.record), dtype=torch.uint8).reshape(case.num_tokens, shape.token_bytes)
        self._replays[shape].use(RoutedTokens(ids_NC=ids, is_recorded_N=torch.ones(case.num_tokens, dtype=torch.bool)))
        logits = torch.linspace(-1, 1, case.num_tokens * shape.num_experts).reshape(case.num_tokens, -1)
        for number, router in enumerate(self._routers[shape]):
            answer: Any = router(logits)
            assert answer[2].tolist() == [token[number] for token in layers], "other experts than the record's"
            assert torch.allclose(answer[1].sum(-1), torch.ones(case.num_tokens)), "gate weights of no sum 1"


def _read(case: Case) -> list[list[Sequence[int]]] | None:
    """Experts of each token and layer, read plainly; None for a broken record."""
    shape, width = case.shape, 1 if case.shape.num_experts <= 256 else 2
    if not case.record:
        return []
    if len(case.record) != case.num_tokens * shape.num_layers * shape.top_k * width:
        return None
    ids = [int.from_bytes(case.record[at : at + width], "little") for at in range(0, len(case.record), width)]
    rows = [ids[at : at + shape.top_k] for at in range(0, len(ids), shape.top_k)]
    if any(expert >= shape.num_experts for row in rows for expert in row) or any(
        len({*row}) < len(row) for row in rows
    ):
        return None
    return [list(rows[at : at + shape.num_layers]) for at in range(0, len(rows), shape.num_layers)]
