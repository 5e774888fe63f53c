"""Routers that answer as none of ours do are refused; what has no record keeps the router's own answer, bit for bit."""

import threading

import pytest
import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model.router_replay import RoutedTokens, RouterRecorder, RouterReplay, routing_shape

LOGITS = torch.linspace(-1, 1, 3 * 6).reshape(3, 6)


class StubTopKRouter(nn.Module):
    """A router whose gate weights are `off` by a little, as rounded ones are."""

    def __init__(self, *, top_k=2, num_experts=6, off=0.0, answer=None):
        super().__init__()
        self.top_k, self.num_experts, self.off, self.answer = top_k, num_experts, off, answer

    def forward(self, logits):
        weights, experts = torch.softmax(logits, -1).topk(self.top_k)
        own = logits, weights / weights.sum(-1, keepdim=True) + self.off, experts
        return self.answer(*own) if self.answer else own


@pytest.mark.parametrize(
    ("routers", "words"),
    [
        ([StubTopKRouter(), StubTopKRouter(num_experts=8)], "several kinds of routers"),
        ([nn.Linear(2, 2)], "no routers"),
        ([StubTopKRouter(num_experts=(1 << 15) + 1)], "32769 experts; 32768 can be recorded"),
    ],
)
def test_models_that_cannot_be_recorded_are_refused(routers, words):
    for watch in (routing_shape, RouterRecorder, RouterReplay):
        with pytest.raises(ConfigError, match=words):
            watch(nn.ModuleList(routers))


@pytest.mark.parametrize(
    "answer",
    [
        lambda logits, weights, experts: (weights, experts),
        lambda logits, weights, experts: (logits, experts, weights),
        lambda logits, weights, experts: (logits, weights, experts[:, :1]),
        lambda logits, weights, experts: logits,
    ],
)
def test_router_that_answers_otherwise_is_refused_when_it_is_asked(answer):
    model = nn.ModuleList([StubTopKRouter(answer=answer)])
    recorder = RouterRecorder(model)

    with recorder.recording(), pytest.raises(ConfigError, match="does not answer logits, gate weights and experts"):
        model[0](LOGITS)


def test_token_without_a_record_keeps_its_experts_and_its_weights():
    model = nn.ModuleList([StubTopKRouter(off=0.01)])
    _, weights, experts = model[0](LOGITS)
    replay = RouterReplay(model)

    ids = torch.tensor([[0, 1], [0, 1], [0, 1]], dtype=torch.uint8)
    replay.use(RoutedTokens(ids_NC=ids, is_recorded_N=torch.tensor([False, True, False])))
    _, replayed, chosen = model[0](LOGITS)

    assert chosen.tolist() == [experts[0].tolist(), [0, 1], experts[2].tolist()]
    assert torch.equal(replayed[[0, 2]], weights[[0, 2]])
    assert not torch.allclose(replayed[1], weights[1])


def test_records_of_another_shape_are_refused():
    replay = RouterReplay(nn.ModuleList([StubTopKRouter()]))

    with pytest.raises(ValueError, match=r"records of 3 bytes a token; the model's are 2"):
        replay.use(RoutedTokens(ids_NC=torch.zeros(3, 3, dtype=torch.uint8), is_recorded_N=torch.ones(3).bool()))


def test_each_thread_notes_its_own_passes_and_a_pass_of_fewer_routers_is_seen():
    model = nn.ModuleList([StubTopKRouter(), StubTopKRouter()])
    recorder = RouterRecorder(model)

    with recorder.recording() as noted:
        model[0](LOGITS)
        other = threading.Thread(target=lambda: model[1](-LOGITS))
        other.start()
        other.join()
        assert len(noted) == 1
        with pytest.raises(RuntimeError, match="1 routers were asked in a pass, the model has 2"):
            recorder.record(noted, num_rows=1)
        model[1](LOGITS)
    assert recorder.record(noted, num_rows=1).shape == (1, 3, 4)
    model[0](LOGITS)
    assert len(noted) == 2
