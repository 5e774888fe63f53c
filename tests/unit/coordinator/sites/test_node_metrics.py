"""Pushed metrics at the coordinator: the newest of each node, for a while, of so many nodes."""

import threading
from collections import OrderedDict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from heterorl.common.errors import InvalidRequest, QuotaExceeded
from heterorl.common.process.pushed_metrics import LIMITS
from heterorl.common.types.common import Series
from heterorl.coordinator.sites import node_metrics as reported_module
from heterorl.coordinator.sites.node_metrics import BETWEEN_S, KEPT_S, VARIETY, VARIETY_S, NodeMetrics
from tests.support.clock import ManualClock


def counted(value, labels=""):
    return [Series(name="heterorl_tokens_total", labels=(labels,), values=(value,))]


def shown(reported):
    families = text_string_to_metric_families(reported.page().decode())
    return {tuple(sample.labels.items()): sample.value for family in families for sample in family.samples}


A = (("run", "r"), ("service", "sampler"), ("instance", "a"), ("site", "a"))
L = (("run", "r"), ("service", "learner"), ("instance", "a"))


async def test_newest_push_of_each_node_is_shown_until_it_is_old():
    clock = ManualClock()
    reported = NodeMetrics(run_id="r", most_nodes=8, clock=clock)
    assert reported.page() == b""
    assert await reported.put("sampler", "a", counted(1.0))
    assert await reported.put("learner", "a", counted(2.0))
    clock.advance(KEPT_S / 2)
    assert await reported.put("sampler", "a", counted(3.0))
    assert shown(reported) == {A: 3.0, L: 2.0}

    clock.advance(KEPT_S / 2 + 1.0)
    assert shown(reported) == {A: 3.0}


async def test_nodes_beyond_the_room_wait_until_another_is_gone():
    clock = ManualClock()
    reported = NodeMetrics(run_id="r", most_nodes=1, clock=clock)
    assert await reported.put("sampler", "a", counted(1.0))
    assert not await reported.put("sampler", "b", counted(1.0))
    clock.advance(BETWEEN_S)
    assert await reported.put("sampler", "a", counted(2.0)), "who is known stays"

    clock.advance(KEPT_S + 1.0)
    assert await reported.put("sampler", "b", counted(4.0))
    assert list(shown(reported).values()) == [4.0]


async def test_push_of_a_known_node_looks_at_no_others():
    class Counted(OrderedDict):
        num_seen = 0

        def values(self):
            for node in super().values():
                Counted.num_seen += 1
                yield node

        def items(self):
            return zip(self, self.values(), strict=True)

    clock = ManualClock()
    reported = NodeMetrics(run_id="r", most_nodes=500, clock=clock)
    for number in range(200):
        await reported.put("sampler", f"s{number}", counted(1.0))
    reported._nodes = Counted(reported._nodes)
    clock.advance(BETWEEN_S)

    assert await reported.put("sampler", "s7", counted(2.0))
    assert Counted.num_seen == 1
    clock.advance(VARIETY_S)
    # All others are forgotten.
    assert await reported.put("sampler", "s7", counted(3.0))
    assert list(reported._nodes) == [("sampler", "s7")]


async def test_refused_push_leaves_the_earlier_one():
    clock = ManualClock()
    reported = NodeMetrics(run_id="r", most_nodes=8, clock=clock)
    await reported.put("sampler", "a", counted(1.0))
    clock.advance(BETWEEN_S)
    with pytest.raises(InvalidRequest):
        await reported.put("sampler", "a", counted(2.0, 'site="b"'))
    assert shown(reported) == {A: 1.0}


async def test_node_that_pushes_all_the_time_is_told_to_wait_and_the_others_are_not():
    clock = ManualClock()
    reported = NodeMetrics(run_id="r", most_nodes=8, clock=clock)
    # What was refused took its time too.
    with pytest.raises(InvalidRequest):
        await reported.put("sampler", "a", counted(1.0, 'site="b"'))
    with pytest.raises(QuotaExceeded) as refused:
        await reported.put("sampler", "a", counted(1.0))
    assert refused.value.retry_after_s == BETWEEN_S
    assert await reported.put("sampler", "b", counted(2.0))

    clock.advance(BETWEEN_S)
    assert await reported.put("sampler", "a", counted(1.0))
    assert sorted(shown(reported).values()) == [1.0, 2.0]


def calls(first, number, method="{}"):
    labels = tuple(f'code="OK",method="{method.format(n)}",side="client"' for n in range(first, first + number))
    return [Series(name="heterorl_rpc_seconds_count", labels=labels, values=(1.0,) * number)]


async def test_node_that_states_ever_new_numbers_is_refused_until_an_hour_is_over():
    clock, most = ManualClock(), LIMITS["sampler"].lines
    reported = NodeMetrics(run_id="r", most_nodes=8, clock=clock)
    for turn in range(VARIETY):
        # Nor does it help to be away until nothing is shown.
        clock.advance(KEPT_S + 1.0)
        assert await reported.put("sampler", "a", calls(turn * most, most))
    clock.advance(KEPT_S + 1.0)
    with pytest.raises(InvalidRequest, match="different ones within an hour"):
        await reported.put("sampler", "a", calls(VARIETY * most, 1))
    clock.advance(BETWEEN_S)
    assert await reported.put("sampler", "a", calls(0, most)), "what it stated before it may state"

    clock.advance(VARIETY_S)
    assert await reported.put("sampler", "a", calls(VARIETY * most, 1))


# Each of them ends a line for str.splitlines, and none does on the page.
@pytest.mark.parametrize("mark", "\x0b\x0c\r\x1c\x1d\x1e\x85\u2028\u2029", ids=ascii)
async def test_numbers_count_as_different_whatever_separators_their_labels_have(mark):
    clock, most = ManualClock(), LIMITS["sampler"].lines
    reported = NodeMetrics(run_id="r", most_nodes=8, clock=clock)
    for turn in range(VARIETY):
        clock.advance(BETWEEN_S)
        assert await reported.put("sampler", "a", calls(turn * most, most, f" {{}}{mark}"))
    clock.advance(BETWEEN_S)
    with pytest.raises(InvalidRequest, match="different ones within an hour"):
        await reported.put("sampler", "a", calls(VARIETY * most, 1, f" {{}}{mark}"))


async def test_names_that_nobody_has_take_no_memory():
    clock = ManualClock()
    reported = NodeMetrics(run_id="r", most_nodes=1, clock=clock)
    kept = []
    for number in range(6):
        kept.append(await reported.put("sampler", f"s{number}", counted(1.0)))
        clock.advance(KEPT_S + 1.0)

    assert kept == [True] * 4 + [False] * 2


async def test_lines_are_made_beside_the_event_loop(monkeypatch):
    threads = []
    made = reported_module._made
    monkeypatch.setattr(
        reported_module, "_made", lambda *all_: threads.append(threading.current_thread()) or made(*all_)
    )

    await NodeMetrics(run_id="r", most_nodes=1, clock=ManualClock()).put("sampler", "a", counted(1.0))
    assert threads[0] is not threading.current_thread()
