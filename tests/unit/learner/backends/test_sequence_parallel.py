"""What slices of a micro-batch give together is what whole rows give, in value and gradient; ranks are threads here."""

import contextlib
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl.learner.backends import sequence_parallel
from heterorl.learner.backends.sequence_parallel import (
    SlicedAttention,
    SlicedEngine,
    check_model,
    columns_for_heads,
    cut,
    heads_for_columns,
    install,
    slice_passes,
    whole_of_parts,
)
from heterorl.learner.train.backend_config import DeepSpeedBackendConfig, Fsdp2BackendConfig, TorchBackendConfig
from heterorl.learner.train.batch import TrainingSequence, collate
from tests.support.limits import WAIT_S
from tests.support.training import tiny_model

pytestmark = pytest.mark.timeout(60)
WIDTH = 12


class _Table:
    """Where threads lay down what they send."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.rows = [None] * size

    def all(self, index, values):
        self.rows[index] = values.detach().clone()
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        return rows


class _ThreadGroup:
    def __init__(self, table, index):
        self._table, self.size, self.index = table, table.size, index

    def exchange(self, parts):
        return torch.stack([row[self.index] for row in self._table.all(self.index, parts)])

    def gather(self, values):
        return self._table.all(self.index, values)


def _on_each(size, work):
    """`work(group)` of every rank at once."""
    table, results, errors = _Table(size), [None] * size, []

    def run(index):
        try:
            results[index] = work(_ThreadGroup(table, index))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _states(num_heads, *, seed, rows=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, num_heads, WIDTH, 4, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_exchange_gives_all_columns_of_own_heads_and_takes_them_back(size):
    whole = _states(4, seed=0)

    def work(group):
        own = whole.chunk(size, dim=2)[group.index].clone().requires_grad_()
        heads = heads_for_columns(own, group)
        back = columns_for_heads(heads * 2.0, group)
        back.backward(own.detach() * 3.0)
        return heads.detach(), back.detach(), own.grad

    for index, (heads, back, gradient) in enumerate(_on_each(size, work)):
        own = whole.chunk(size, dim=2)[index]
        assert heads.equal(whole.chunk(size, dim=1)[index])
        assert back.equal(own * 2.0)
        assert gradient.equal(own * 6.0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("borders", [[0, WIDTH], [0, 5, 6, WIDTH]], ids=["one", "packed"])
@pytest.mark.parametrize("size", [2, 4])
def test_sliced_attention_is_attention_of_whole_rows(monkeypatch, size, borders, window, kv_heads):
    rows = 2 if len(borders) == 2 else 1
    states = [
        _states(heads, seed=seed, rows=rows).requires_grad_() for seed, heads in enumerate((4, kv_heads, kv_heads))
    ]
    slope = torch.randn(rows, WIDTH, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    at = torch.arange(WIDTH)
    segment = torch.bucketize(at, torch.tensor(borders[1:-1]), right=True)
    mask = (at[:, None] >= at) & (segment[:, None] == segment)
    if window:
        mask &= at[:, None] - at < window
    query, key, value = states
    copies = 4 // kv_heads
    scores = query @ key.repeat_interleave(copies, 1).mT * 0.3
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = (weights @ value.repeat_interleave(copies, 1)).transpose(1, 2)
    expected.backward(slope)

    def fused(*states, attn_mask, enable_gqa, **options):
        # On a GPU torch has no fused kernel for both.
        assert attn_mask is None or not enable_gqa
        return attend(*states, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)

    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)

    def work(group):
        attention = SlicedAttention(group)
        attention.segments = tuple(itertools.pairwise(borders))
        own = [part.detach().chunk(size, dim=2)[group.index].clone().requires_grad_() for part in states]
        result, _ = attention(SimpleNamespace(), *own, None, scaling=0.3, sliding_window=window, dropout=0.0)
        result.backward(slope.chunk(size, dim=1)[group.index])
        return result.detach(), *(part.grad for part in own)

    by_tensor = zip(*_on_each(size, work), strict=True)
    result, *gradients = (torch.cat(parts, dim) for parts, dim in zip(by_tensor, (1, 2, 2, 2), strict=True))

    torch.testing.assert_close(result, expected.detach())
    for gradient, part in zip(gradients, states, strict=True):
        torch.testing.assert_close(gradient, part.grad)


def test_each_rank_has_all_values_and_gets_the_gradient_of_its_own():
    places = (torch.tensor([3, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 2, 4]))
    values = torch.arange(5.0, dtype=torch.float64)

    def work(group):
        own = values[places[group.index]].clone().requires_grad_()
        whole = whole_of_parts(own, places, group)
        whole.square().sum().backward()
        return whole.detach(), own.grad

    for index, (whole, gradient) in enumerate(_on_each(3, work)):
        assert whole.equal(values)
        assert gradient.equal(2.0 * values[places[index]])


def _sequences(lengths):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 60, (length,), generator=generator).int().numpy() for length in lengths]
    return [TrainingSequence.scored(tokens[:3], tokens[3:]) for tokens in ids]


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_have_every_column_and_every_completion_token_once(batching, size):
    batch = collate(_sequences((11, 5, 8)), batching=batching)
    tensors = (batch.input_ids_RS, batch.position_ids_RS, batch.sources_N, batch.targets_N)
    rows, width = batch.input_ids_RS.shape

    slices = [cut(*tensors, size=size, index=index) for index in range(size)]

    assert torch.cat([part.input_ids_RC for part in slices], 1)[:, :width].equal(batch.input_ids_RS)
    assert torch.cat([part.position_ids_RC for part in slices], 1)[:, :width].equal(batch.position_ids_RS)
    ends = slices[0].segments
    assert [start for start, _ in ends] == ([0] if batching == "padded" else [0, 10, 14])
    assert ends[-1][1] == size * slices[0].input_ids_RC.shape[1]
    columns = torch.arange(rows * width).reshape(rows, width)
    for index, part in enumerate(slices):
        own = cut(columns, batch.position_ids_RS, batch.sources_N, batch.targets_N, size=size, index=index)
        # Columns number themselves, so what a slice's source points at is the source in whole rows.
        assert own.input_ids_RC.flatten()[part.sources_n].equal(batch.sources_N[part.places[index]])
        assert part.targets_n.equal(batch.targets_N[part.places[index]])
    assert torch.cat(slices[0].places).sort().values.equal(torch.arange(batch.sources_N.numel()))


def test_engine_gives_every_rank_the_values_of_all_slices():
    batch = collate(_sequences((11, 5)), batching="packed")
    tensors = (batch.input_ids_RS, batch.position_ids_RS, batch.sources_N, batch.targets_N)

    class Inner:
        def __call__(self, input_ids, position_ids, sources, targets):
            return targets * 1.0, position_ids.flatten()[sources] * 1.0

    def work(group):
        return SlicedEngine(Inner(), SlicedAttention(group), group)(*tensors)

    for logprobs, entropies in _on_each(2, work):
        assert logprobs.equal(batch.targets_N * 1.0)
        assert entropies.equal(batch.position_ids_RS.flatten()[batch.sources_N] * 1.0)


@pytest.mark.parametrize(
    ("size", "settings", "problem"),
    [
        (3, {}, "4 attention heads"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3}, "3 heads of keys and values"),
        (2, {"layer_types": ["chunked_attention"]}, "chunks"),
    ],
)
def test_what_slices_cannot_do_is_refused_by_the_key(size, settings, problem):
    table = {"num_attention_heads": 4, "num_key_value_heads": 2, **settings}
    config = SimpleNamespace(**table)
    config.get_text_config = lambda: config

    with pytest.raises(ConfigError, match=problem) as caught:
        check_model(SimpleNamespace(config=config), size=size)

    assert caught.value.key == "backend.sequence_parallel"


def test_attention_that_is_not_plain_is_refused():
    attention = SlicedAttention(_ThreadGroup(_Table(1), 0))
    attention.segments = ((0, WIDTH),)
    states = _states(4, seed=0)
    for options in ({"softcap": 5.0}, {"is_causal": False}, {"s_aux": states}):
        with pytest.raises(ConfigError, match="not plain causal attention"):
            attention(SimpleNamespace(), states, states, states, None, **options)
    with pytest.raises(ConfigError, match="not plain causal attention"):
        attention(SimpleNamespace(), states, states, states, torch.ones(WIDTH, WIDTH))


def test_plain_models_are_not_refused():
    check_model(tiny_model(), size=2)
    check_model(tiny_model(), size=4)


@pytest.mark.parametrize("build", [TorchBackendConfig, DeepSpeedBackendConfig])
def test_other_backends_refuse_slices(build):
    with pytest.raises(ValidationError, match="sequence_parallel needs backend fsdp2"):
        build(sequence_parallel=2)

    assert build(sequence_parallel=1).sequence_parallel == 1
    assert Fsdp2BackendConfig(sequence_parallel=2).sequence_parallel == 2


def test_other_attention_is_not_replaced_silently():
    model = tiny_model()
    model.set_attn_implementation("eager")

    with pytest.raises(ConfigError, match="fused kernels, not eager"):
        install(model, SlicedAttention(_ThreadGroup(_Table(1), 0)))


OFF_BY_UNITS = [0.25, 0.125] * 6 + [0.0]
OFF_BY_NATS = [0.0] * 8 + [2.9, 2.9, 1.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("is_low", "differences", "problem"),
    [
        (True, OFF_BY_UNITS, None),
        (True, OFF_BY_NATS, "over slices differ from log-probs of whole rows by"),
        (False, OFF_BY_UNITS, "over slices differ from log-probs of whole rows by 0.25"),
        # As attention that adds the mask, of which there is none.
        (False, None, "Qwen3ForCausalLM fails over slices: TypeError"),
    ],
)
def test_trial_over_slices_allows_for_rounding_alone(monkeypatch, is_low, differences, problem):
    monkeypatch.setattr(sequence_parallel, "SliceGroup", lambda *_, **__: _ThreadGroup(_Table(1), 0))
    passes = [0.0, None if differences is None else torch.tensor(differences)]
    expected = contextlib.nullcontext() if problem is None else pytest.raises(ConfigError, match=problem)

    with expected:
        slice_passes(
            lambda *_: (torch.zeros(13) + passes.pop(0), torch.zeros(13)), tiny_model(), size=1,
            ranks=SimpleNamespace(all_agree=lambda is_fine: is_fine), batching="padded", is_low=is_low,
            device=torch.device("cpu"),
        )  # fmt: skip
